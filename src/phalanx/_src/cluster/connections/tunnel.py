# SPDX-License-Identifier: Apache-2.0
"""A way to another machine whose near end stays open when the far end is gone. Uses the standard library only.

JAX's client aborts its process as soon as its connection with the coordination service ends (jaxlib 0.10.2), and not only if the process needs
the service. Behind a tunnel it notices nothing before its heartbeats have failed for a while, so that the process has time to leave the group.
"""

import selectors
import socket
import threading
import time
from contextlib import suppress
from typing import final

from typing_extensions import override

from phalanx._src.cluster.connections.hosts import PRIVATE
from phalanx._src.cluster.connections.listener import connect, expect_answers
from phalanx._src.cluster.connections.ports import PrivateAddress, Socket, cut

_BYTES = 1 << 16
_CONNECT_S = 5.0
_TURN_S = 0.5


@final
class Tunnel(threading.Thread):
    """Forwards the connections that this process makes with a private address to another machine.

    Args:
      target: `host:port` on the other machine.

    Attributes:
      address: the private address, in the words of gRPC.

    Raises:
      OSError: this process cannot listen at a private address.
    """

    def __init__(self, target: str) -> None:
        super().__init__(name="phalanx-tunnel", daemon=True)
        self._target, self._place = target, PrivateAddress()
        self._is_closed = self._is_over = False
        self.address = self._place.address
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listener.bind(self.address.removeprefix(PRIVATE))
            self._listener.listen()
        except OSError:
            self._listener.close()
            self._place.close()
            raise
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._far_ends: dict[Socket, Socket | None] = {}
        """The connection with the other machine for each connection of this process. None if that machine is gone."""
        self.start()

    def close(self) -> None:
        """Admits no further connection. Those that exist stay until this process ends them."""
        self._is_closed = True
        self._place.close()

    def end(self) -> None:
        """Ends the connections of this process too, so that what waits for an answer of the other machine fails. May be called in any thread."""
        self._is_over = True
        self.close()
        # The thread of the tunnel may be busy with a machine that does not answer. It forgets these connections later.
        for near in list(self._far_ends):
            cut(near)

    @override
    def run(self) -> None:
        with self._listener, self._selector:
            while self._far_ends or not self._is_closed:
                # One at a time, because it may end another one.
                for key, _ in self._selector.select(_TURN_S)[:1]:
                    if key.data is None:
                        self._open()
                    else:
                        self._forward(*key.data)

    def _open(self) -> None:
        try:
            near, _ = self._listener.accept()
        except OSError:  # No file descriptor is left. It still waits in the next turn.
            time.sleep(_TURN_S)
            return
        self._far_ends[near] = None
        self._selector.register(near, selectors.EVENT_READ, (near, None))
        if self._is_over:  # `end` may not have known of it.
            cut(near)
            return
        # If nobody is there, the near end stays open all the same.
        with suppress(OSError):
            far = self._far_ends[near] = connect(self._target, _CONNECT_S)
            far.settimeout(None)
            expect_answers(far)
            self._selector.register(far, selectors.EVENT_READ, (far, near))

    def _forward(self, source: Socket, near: Socket | None) -> None:
        """Forwards what a connection has received.

        Args:
          source: the connection.
          near: the connection of this process, if `source` is the one with the other machine.
        """
        received = b""
        with suppress(OSError):
            received = source.recv(_BYTES)
        if near is None:
            far = self._far_ends[source]
            if not received:
                self._end(source)
                del self._far_ends[source]
                if far is not None:
                    self._end(far)
            elif far is not None:
                with suppress(OSError):  # Its end is noticed when it is read.
                    far.sendall(received)
        elif received:
            with suppress(OSError):
                near.sendall(received)
        else:
            self._end(source)
            self._far_ends[near] = None

    def _end(self, connection: Socket) -> None:
        self._selector.unregister(connection)
        cut(connection)
        connection.close()
