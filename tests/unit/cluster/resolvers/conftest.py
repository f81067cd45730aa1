"""A server on this machine, in the place of those of clouds and clusters."""

import http.server
import threading

import pytest


@pytest.fixture
def serve():
    """A function that serves what another one answers to a path and headers: a text, or None for an error. Returns the address."""
    running = []

    def start(answer):
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                text = answer(self.path, self.headers)
                self.send_response(404 if text is None else 200)
                self.send_header("Content-Type", "application/json")
                self.end_headers()
                self.wfile.write((text or "").encode())

            def log_message(self, *_):
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        running.append((server, thread))
        return f"127.0.0.1:{server.server_port}"

    yield start
    for server, thread in running:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def metadata(serve):
    """The address of a metadata server of Google, and its answers, which a test may change."""
    answers, path = {}, "/computeMetadata/v1/instance/"

    def answer(asked, headers):
        return answers.get(asked.removeprefix(path)) if headers["Metadata-Flavor"] == "Google" else None

    return serve(answer), answers
