"""What tests of parameter servers share: processes of workers and servers, where they are, and clocks that they read."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import psutil

HERE = Path(__file__).parent


def pid_of(actor):
    """The process of an actor."""
    import ray  # Strategies import it in a way of their own, if they are the first.

    return ray.get(actor.__ray_call__.remote(lambda _: os.getpid()))


def servers_of(strategy):
    return [pid_of(server) for server in strategy.homes.servers.actors]


def workers_of(strategy):
    return [pid_of(actor) for actor in strategy.cluster.actors if actor not in strategy.homes.servers.actors]


def is_there(pid):
    """Whether a process runs, or is stopped; not whether one that has ended waits for its parent."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def family_of(pid):
    """A process and all that descend from it."""
    return [pid, *(c.pid for c in psutil.Process(pid).children(recursive=True))] if psutil.pid_exists(pid) else []


def listening(pids):
    """The addresses at which processes listen."""
    sockets = [c for pid in pids if is_there(pid) for c in psutil.Process(pid).net_connections("tcp")]
    return {c.laddr.ip.removeprefix("::ffff:") for c in sockets if c.status == psutil.CONN_LISTEN}


def wait_until(is_so, deadline_s=300.0):
    """Waits for something that must come true."""
    deadline = time.monotonic() + deadline_s
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def kill(pid):
    os.kill(pid, signal.SIGKILL)


def stop(peer, monkeypatch):
    """Stops a process for good, and shortens the time for which it may be silent. Returns its number."""
    pid = pid_of(peer.actor)
    os.kill(pid, signal.SIGSTOP)
    monkeypatch.setattr(peer, "_timeout_s", 0.5)
    return pid


def clock_of_a_worker():
    """A function that sets forward the clock by which a worker knows how long it has been busy, in the worker that calls it.

    It is not of this module, which workers cannot import.
    """

    def advance(seconds):
        import types

        from phalanx._src.parameter_server.processes import calls

        now = calls.time.monotonic
        calls.time = types.SimpleNamespace(monotonic=lambda: now() + seconds)

    return advance


def divide_long(shape, dtype):
    """A partitioner that divides what has more than four rows."""
    return [2 if shape[0] > 4 else 1, *(1 for _ in shape[1:])]


DIVIDED = {"workers": 1, "ps": 2, "variable_partitioner": divide_long}
"""One worker, so that steps follow each other as on one device, and two servers between which large variables are divided."""


@contextmanager
def process(*command, cwd=HERE, **environment):
    """A Python process, ended with all that descend from it; its errors go to a file. What is None leaves the environment."""
    from tests import forks  # Programs that import this module do not find it.

    with tempfile.TemporaryFile("w+") as log, tempfile.TemporaryDirectory() as logs_of_tpus:
        # Ray shows the logs of TPUs, which other programs may have left in the folder for temporary files.
        given = {"PHALANX_CPU_DEVICES": "1", "JAX_PLATFORMS": "cpu", "TPU_LOG_DIR": logs_of_tpus, **environment}
        given = {k: v for k, v in {**os.environ, "NPROC": None, "TF_CONFIG": None, **given}.items() if v is not None}
        pipe = subprocess.PIPE
        one = forks.Popen(
            [sys.executable, *map(str, command)], env=given, stdin=pipe, stdout=pipe, stderr=log, text=True, cwd=cwd
        )
        one.log = log
        try:
            yield one
        except BaseException:
            print(f"---- {one.args}, with exit code {one.poll()}\n{errors_of(one)[-8000:]}")
            raise
        finally:
            for pid in family_of(one.pid) if one.poll() is None else []:
                if is_there(pid):
                    kill(pid)
            one.wait()
            one.stdin.close()
            one.stdout.close()


def errors_of(one):
    """What a process has written to its standard error."""
    one.log.seek(0)
    return one.log.read()


def said(one):
    """What a process has said next; where it has ended, what it has said last."""
    line = one.stdout.readline()
    if not line.startswith(("{", '"')):
        try:
            rest, _ = one.communicate(timeout=300)
        except subprocess.TimeoutExpired:
            rest = "(and goes on)"
        raise AssertionError(f"it ended with {one.returncode}: {line}{rest}{errors_of(one)[-6000:]}")
    return json.loads(line)


def tell(one, word):
    """Says something to a process."""
    one.stdin.write(word + "\n")
    one.stdin.flush()
