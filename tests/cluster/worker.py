"""One worker of a cluster: python worker.py <file descriptor of a pipe> <index> <workers> <port>."""

import sys
import traceback
from multiprocessing.connection import Connection

import phalanx  # Before Keras, whose backend it chooses.


def main(descriptor: int, index: int, workers: int, port: int) -> None:
    """Does what the test asks for, until the pipe is closed."""
    import jax

    address = f"127.0.0.1:{port}"
    bind = {"coordinator_bind_address": address} if index == 0 else {}
    jax.distributed.initialize(address, workers, index, **bind)
    import tasks

    strategy = tasks.AllDevices()
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
    main(*map(int, sys.argv[1:]))
