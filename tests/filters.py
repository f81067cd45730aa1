"""Whether the kernel takes filters of sockets from this user: some kernels take them from root only."""

import socket
import sys

from phalanx._src.cluster.connections import filters


def takes_filters():
    """Returns whether a filter can be attached here."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        try:
            filters._attach(server, ["127.0.0.1"])
        except OSError:
            return False
    return sys.platform == "linux"
