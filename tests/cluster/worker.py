"""One worker of a cluster, which TF_CONFIG describes: python worker.py <file descriptor of a pipe> <module of tasks>."""

import importlib
import sys
import traceback
from multiprocessing.connection import Connection

import phalanx  # Before Keras, whose backend it chooses.


def main(descriptor: int, module: str) -> None:
    """Does what the test asks for, until the pipe is closed."""
    strategy = phalanx.MultiWorkerMirroredStrategy()
    tasks = importlib.import_module(module)
    pipe = Connection(descriptor)
    pipe.send(f"ready: {phalanx.__version__}")
    while True:
        try:
            task, kwargs = pipe.recv()
        except EOFError:
            return
        try:
            reply = getattr(tasks, task)(strategy, **kwargs)
        except Exception as e:
            traceback.print_exc()
            reply = f"{type(e).__name__}: {e}"
        pipe.send(reply)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
