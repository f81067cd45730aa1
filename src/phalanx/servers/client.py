# SPDX-License-Identifier: Apache-2.0
"""The parameter servers of one strategy: what is asked of them, and what happens if one is lost."""

import logging
import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, final

import numpy as np

from phalanx.errors import ContextError, PhalanxError, ServerLostError, StartupError
from phalanx.servers.calls import Calls, Lost, Peer, Reply, Silent
from phalanx.servers.ray import RayCluster, load_ray
from phalanx.servers.remote.plans import Pusher, UpdateProgram
from phalanx.servers.remote.server import ParameterServer

_log = logging.getLogger("phalanx")

_THREADS = 16
_START_S = 600.0
_MOST_RESTARTS = 3


@final
class Servers:
    """The parameter servers.

    Args:
      cluster: where they run.
      names_on: returns the names of the variables that only the servers with some numbers hold.
      max_staleness: the bound of the servers' clock.
      snapshot_every_s: how often the servers' state is copied; None for never.
      timeout_s: for how long a server may give no sign of life.

    Attributes:
      calls: what waits for answers.
      lock: is held while servers are restarted, and by whoever must not meet that.
      platforms: on what they compute.

    Raises:
      StartupError: a server ended while it started.
    """

    def __init__(
        self,
        cluster: RayCluster,
        names_on: Callable[[Collection[int]], list[str]],
        *,
        max_staleness: int | None,
        snapshot_every_s: float | None,
        timeout_s: float,
    ) -> None:
        self._ray, self._cluster, self._names_on = load_ray(), cluster, names_on
        # Of each worker one push may wait here.
        threads = _THREADS + cluster.workers
        self._start = lambda i: Peer(
            self._ray,
            cluster.actor(ParameterServer, "ps", i, i, max_staleness, threads=threads),
            f"parameter server {i}",
            timeout_s,
            _START_S,
        )
        self.lock, self.calls = threading.RLock(), Calls(self._ray)
        self._peers: list[Peer] | None = [self._start(i) for i in range(cluster.ps)]
        try:
            signs = self.calls.answers([p.ask("ping") for p in self.peers])
            self.calls.answers([p.ask("meet", self.actors) for p in self.peers])
        except Lost as e:
            raise not_started(e) from e
        self.platforms = tuple(sorted({sign.platform for sign in signs}))
        self._learned: dict[int, dict[int, UpdateProgram]] = {i: {} for i in range(cluster.ps)}
        self._snapshots = None if snapshot_every_s is None else _Snapshots(self, snapshot_every_s)

    def __len__(self) -> int:
        """How many there are."""
        return self._cluster.ps

    @property
    def peers(self) -> list[Peer]:
        """The parameter servers, as this process sees them.

        Raises:
          ContextError: the strategy was closed.
        """
        self.require_open()
        assert self._peers is not None
        return self._peers

    @property
    def actors(self) -> list[Any]:
        """The parameter servers, as Ray's actors, which other processes can call. Raises what `peers` raises."""
        return [peer.actor for peer in self.peers]

    def require_open(self) -> None:
        """Raises if the servers have ended.

        Raises:
          ContextError: the strategy was closed.
        """
        if self._peers is None:
            raise ContextError(
                "a variable, a step or a coordinator of a ParameterServerStrategy that was closed",
                "its workers and parameter servers have ended.",
                "strategy.close() after the last use; or variables that are saved before it",
            )

    def ask(self, method: str, *calls: tuple[Any, ...]) -> list[Any]:
        """Calls a method of servers, and returns what they answer. Raises what `answers` raises.

        Args:
          method: its name.
          calls: of each call the number of the server, and the arguments.
        """
        peers = self.peers
        return self.answers([peers[server].ask(method, *args) for server, *args in calls])

    def answers(self, replies: Sequence[Reply]) -> list[Any]:
        """Returns what servers answer.

        Raises:
          ServerLostError: one has died, or gives no sign of life.
        """
        while True:
            try:
                return self.calls.answers(replies, self.peers)
            except Lost as e:
                if not self.recover([]) and isinstance(e, Silent):
                    continue  # It goes on.
                raise ServerLostError(
                    f"an answer of {e.peer.name}",
                    f"it {e.found}, and was restarted from its last snapshot.",
                    "the same call once more",
                ) from e

    def tell(self, method: str, *args: Any) -> None:
        """Calls a method of all servers, and waits for them."""
        self.ask(method, *((i, *args) for i in range(len(self))))

    def forget(self, pusher: Pusher) -> None:
        """Lets the servers know that a worker is lost: what the first one has not applied until then counts nowhere."""
        ((_, *turns),) = self.ask("forget", (0, pusher))
        self.ask("forget", *((i, pusher, turn) for i, turn in enumerate(turns, start=1)))

    def learn(self, server: int, name: int, program: UpdateProgram) -> None:
        """Sends a server the program of an update, and each that takes its place."""
        self._learned[server][name] = program
        self.ask("learn", (server, name, program))

    def drop(self, server: int, key: int) -> None:
        """Tells a server to forget a value, if it is there; does not wait."""
        if self._peers is not None and self._ray.is_initialized():
            self._peers[server].ask("drop", [key])

    def take_snapshot(self) -> None:
        """Copies what the servers hold now, if snapshots are taken."""
        if self._snapshots is not None:
            self._snapshots.take()

    def recover(self, pushers: Sequence[Pusher]) -> bool:
        """Restarts servers that are lost from the last snapshot; returns whether there were any.

        Without a snapshot a server that is only silent is left as it is: it has the only copy of its variables.

        Args:
          pushers: the workers, none of whose pushes counts that was not applied.

        Raises:
          ServerLostError: there is no snapshot.
        """
        with self.lock:
            if not (lost := self._lost()):
                return False
            for _ in range(_MOST_RESTARTS):
                try:
                    self._restart(lost, pushers)
                except Lost:
                    # Those that were started again have no values yet.
                    lost |= self._lost()
                else:
                    return True
            raise ServerLostError(
                str(next(iter(lost.values()), "a parameter server")),
                f"servers were lost {_MOST_RESTARTS} times while they were restarted.",
                "more memory for the servers, or a machine that is less busy; now start again from the last checkpoint",
            )

    def _restart(self, lost: Mapping[int, Lost], pushers: Sequence[Pusher]) -> None:
        snapshot = None if self._snapshots is None else self._snapshots.last
        if snapshot is None:
            raise self._lost_for_good(lost)
        for i, why in lost.items():
            _log.warning("%s. Another is started in its place, from the last snapshot.", why)
            self._cluster.end(self.peers[i].actor)
            self.peers[i] = self._start(i)
        peers, answers = self.peers, self.calls.answers
        answers([peer.ask("ping") for peer in peers])
        answers([p.ask("forget", pusher) for i, p in enumerate(peers) if i not in lost for pusher in pushers])
        answers([peer.ask("meet", self.actors) for peer in peers])
        for i in lost:
            answers([peers[i].ask("put", snapshot[i])])
            answers([peers[i].ask("learn", name, program) for name, program in self._learned[i].items()])
            answers([peers[i].ask("forget", pusher) for pusher in pushers])
        applied = max(answers([peer.ask("num_applied") for peer in peers]))
        answers([peers[0].ask("align_all", applied)])

    def _lost_for_good(self, lost: Mapping[int, Lost]) -> ServerLostError:
        names = _listed(self._names_on(lost))
        silent = [why for why in lost.values() if isinstance(why, Silent)]
        if silent:
            peer, found = silent[0].peer, silent[0].found
            return ServerLostError(
                str(peer),
                f"it {found}, and it alone holds {names}.",
                "the same call once more, if the process is made to go on; worker_timeout_s=300 if it is only slow; "
                "snapshot_every_s=60 to have another one started in its place",
            )
        return ServerLostError(
            f"parameter server {', '.join(map(str, lost))}",
            f"it has died, and with it {names}.",
            "ParameterServerStrategy(snapshot_every_s=60) to have it restarted; now start again from the last checkpoint",
        )

    def close(self) -> None:
        """Forgets the servers, and ends the copying of their state."""
        self._peers = None
        if self._snapshots is not None:
            self._snapshots.close()

    def _lost(self) -> dict[int, Lost]:
        """Returns which servers are lost, and how."""
        lost: dict[int, Lost] = {}
        replies = [peer.ask("num_applied") for peer in self.peers]
        for i, reply in enumerate(replies):
            try:
                self.calls.answers([reply])
            except Lost as e:
                lost[i] = e
        return lost


class _Snapshots:
    """Copies what the servers hold, again and again, in a thread."""

    def __init__(self, servers: Servers, every_s: float) -> None:
        self.last: list[dict[int, np.ndarray]] = [{} for _ in servers.peers]
        self._servers, self._every_s = weakref.ref(servers), every_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._copy, name="phalanx-snapshots", daemon=True)
        self._thread.start()

    def take(self) -> None:
        """Copies it now."""
        servers = self._servers()
        if servers is not None:
            self.last = servers.ask("state", *((i,) for i in range(len(servers))))

    def close(self) -> None:
        """Ends it."""
        self._over.set()

    def _copy(self) -> None:
        while not self._over.wait(self._every_s):
            # Where a server is lost, or the strategy was closed, the copy before this one is the last.
            with suppress(PhalanxError, load_ray().exceptions.RayError):
                self.take()


def not_started(error: Lost) -> StartupError:
    """Returns the error of a worker or a server that ended before it could be asked for anything."""
    return StartupError(
        f"the start of {error.peer}",
        f"it {error.found}.",
        "more memory, or fewer workers and ps; and Phalanx, JAX and Ray of the same version on all machines",
    )


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:5])
    return f"{shown} and {len(names) - 5} other variables" if len(names) > 5 else shown
