# SPDX-License-Identifier: Apache-2.0
"""The client of the parameter servers of one strategy: calls to them, and recovery if one is lost."""

import logging
import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, Concatenate, ParamSpec, TypeVar, final

from phalanx._src.parameter_server.processes.calls import Calls, Gone, Lost, Peer, Reply, Silent
from phalanx._src.parameter_server.processes.ray import RayCluster, load_ray
from phalanx._src.parameter_server.remote.plans import Inventory, Pusher, State, UpdateProgram
from phalanx._src.parameter_server.remote.server import ParameterServer
from phalanx.errors import ContextError, PhalanxError, ServerLostError, StartupError

R = TypeVar("R")
P = ParamSpec("P")

_log = logging.getLogger("phalanx")

_THREADS = 16
"""Threads of a server, besides one per worker."""

_START_S = 600.0
_MOST_RESTARTS = 3


@final
class Servers:
    """The parameter servers of one strategy.

    Args:
      cluster: starts their processes.
      names_on: returns the names of the variables that only the given servers hold.
      max_staleness: bound of the staleness, in updates. None for no bound.
      snapshot_every_s: seconds between two snapshots of the state of the servers. None for no snapshots.
      timeout_s: seconds that a server may pass without a heartbeat.

    Attributes:
      calls: waits for results.
      lock: held while servers are restarted, and by code that must not run during a restart.
      platforms: JAX platforms of the servers.
      inventories: what the servers held when this process found them again, by server. Empty if it has started them.

    Raises:
      StartupError: a server died during startup.
      ServerLostError: a server that an earlier coordinator has left is silent.
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
        # A push of each worker may block one thread while it waits for its turn.
        threads = _THREADS + cluster.workers
        # Servers with other properties have other names, so they are not found again.
        names = [f"server {i} of {cluster.ps}, max_staleness={max_staleness}" for i in range(cluster.ps)]

        def start(index: int) -> Peer[ParameterServer]:
            args = (index, max_staleness)
            actor = cluster.actor(ParameterServer, "ps", index, *args, threads=threads, name=names[index])
            return peer(index, actor, _START_S)

        def peer(index: int, actor: Any, start_s: float) -> Peer[ParameterServer]:
            return Peer(self._ray, actor, f"parameter server {index}", timeout_s, start_s)

        self._start = start
        self.lock, self.calls = threading.RLock(), Calls(self._ray)
        self._peers: list[Peer[ParameterServer]] | None
        # Actors of an earlier start run already, so they get no time to start.
        self._peers = [peer(i, actor, timeout_s) for i, actor in enumerate(cluster.kept_actors(names))]
        self.inventories = self._take_over()
        if not self.inventories:
            self._peers = [self._start(i) for i in range(cluster.ps)]
        try:
            signs = self.calls.answers([p.ask(ParameterServer.ping) for p in self.peers])
            self.calls.answers([p.ask(ParameterServer.meet, self.actors) for p in self.peers])
        except Lost as e:
            raise not_started(e) from e
        self.platforms = tuple(sorted({sign.platform for sign in signs}))
        self._learned: dict[int, dict[int, UpdateProgram]] = {i: {} for i in range(cluster.ps)}
        self._snapshots = None if snapshot_every_s is None else _Snapshots(self, snapshot_every_s)

    def _take_over(self) -> list[Inventory]:
        """Returns the variables on the servers of a dead coordinator. Its workers cannot push to them any more.

        Ends the servers, and returns an empty list, if one of them has died.

        Raises:
          ServerLostError: a server is silent.
        """
        if not self.peers:
            return []
        try:
            answers = self.calls.answers([p.ask(ParameterServer.inventory) for p in self.peers])
            inventories = [answer for answer in answers if answer is not None]
            if inventories and len(inventories) == len(answers):
                pushers = {Pusher(*life) for inventory in inventories for life in inventory.lives.items()}
                for pusher in sorted(pushers):
                    self._forget(pusher, self.calls.answers)
                return inventories
            why = "the start of one of them was cut off"
        except Gone as e:
            why = str(e)
        except Silent as e:
            # The strategy ends all actors of the cluster when its creation fails. A later start may need these.
            self._cluster.actors.clear()
            raise ServerLostError(
                str(e.peer),
                f"it {e.found}, and it holds the only copy of its variables.",
                "resume the process and start the script again; worker_timeout_s=300 if it is only slow",
            ) from e
        _log.warning("The parameter servers of the last start end, and new ones start without their values: %s.", why)
        for peer in self.peers:
            self._cluster.end(peer.actor)
        return []

    def next_life(self, worker: int) -> int:
        """Returns the generation with which a worker begins: more than that of any worker of an earlier coordinator."""
        return max((inventory.lives.get(worker, -1) + 1 for inventory in self.inventories), default=0)

    def __len__(self) -> int:
        """The number of servers."""
        return self._cluster.ps

    @property
    def peers(self) -> list[Peer[ParameterServer]]:
        """The handles of the servers.

        Raises:
          ContextError: the strategy was closed.
        """
        self.require_open()
        assert self._peers is not None
        return self._peers

    @property
    def actors(self) -> list[Any]:
        """The Ray actors of the servers, which can be sent to other processes.

        Raises:
          ContextError: the strategy was closed.
        """
        return [peer.actor for peer in self.peers]

    def require_open(self) -> None:
        """Checks that the strategy is open.

        Raises:
          ContextError: the strategy was closed.
        """
        if self._peers is None:
            raise ContextError(
                "a variable, a step or a coordinator of a closed ParameterServerStrategy",
                "the workers and parameter servers of the strategy have ended.",
                "call strategy.close() after the last use, or save the variables before it",
            )

    def ask(self, method: Callable[Concatenate[ParameterServer, ...], R], *calls: tuple[Any, ...]) -> list[R]:
        """Calls a method of several servers, and waits for the results.

        Args:
          method: a method of `ParameterServer`.
          *calls: one tuple per call: the index of the server, and the arguments.

        Returns:
          The results, in the order of `calls`.

        Raises:
          ServerLostError: a server is lost.
        """
        peers = self.peers
        return self.answers([peers[server].ask(method, *args) for server, *args in calls])

    def answers(self, replies: Sequence[Reply[R]]) -> list[R]:
        """Waits for calls of servers and returns the results.

        Raises:
          ServerLostError: a server has died, or is silent and was replaced.
        """
        while True:
            try:
                return self.calls.answers(replies, self.peers)
            except Lost as e:
                if not self.recover([]) and isinstance(e, Silent):
                    continue  # The server was only slow: it answered `recover`.
                raise ServerLostError(
                    f"a call of {e.peer.name}",
                    f"it {e.found}, and was restarted from the last snapshot.",
                    "make the same call again",
                ) from e

    def tell(
        self, method: Callable[Concatenate[ParameterServer, P], object], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """Calls a method of all servers, and waits until all have returned."""
        self.answers([peer.ask(method, *args, **kwargs) for peer in self.peers])

    def forget(self, pusher: Pusher) -> None:
        """Tells the servers that a worker is lost. A push that the first server has not applied yet will not be applied."""
        self._forget(pusher, self.answers)

    def _forget(self, pusher: Pusher, answers: Callable[[Sequence[Reply[list[int]]]], list[list[int]]]) -> None:
        # The first server decides. Its answer contains the turns that the other servers must apply before they drop the rest.
        first, *followers = self.peers
        ((_, *turns),) = answers([first.ask(ParameterServer.forget, pusher)])
        answers([p.ask(ParameterServer.forget, pusher, turn) for p, turn in zip(followers, turns, strict=True)])

    def learn(self, server: int, name: int, program: UpdateProgram) -> None:
        """Sends a server the program of an update, and records it for a replacement of that server."""
        self._learned[server][name] = program
        self.ask(ParameterServer.learn, (server, name, program))

    def drop(self, server: int, key: int) -> None:
        """Tells a server to delete a value, without waiting. Does nothing after the strategy was closed."""
        # Finalizers of variables call this, perhaps after the strategy was closed or Ray has ended.
        if self._peers is not None and self._ray.is_initialized():
            self._peers[server].ask(ParameterServer.drop, [key])

    def take_snapshot(self) -> None:
        """Takes a snapshot now, if snapshots are enabled."""
        if self._snapshots is not None:
            self._snapshots.take()

    def recover(self, pushers: Sequence[Pusher]) -> bool:
        """Restarts lost servers from the last snapshot.

        Without a snapshot, a silent server is not killed, because it has the only copy of its variables.

        Args:
          pushers: the current workers. Their pushes that are not applied yet are dropped.

        Returns:
          Whether any server was lost.

        Raises:
          ServerLostError: there is no snapshot, or the restart failed repeatedly.
        """
        with self.lock:
            if not (lost := self._lost()):
                return False
            for _ in range(_MOST_RESTARTS):
                try:
                    self._restart(lost, pushers)
                except Lost:
                    # Restart the previous ones again too, because they may not have received their values.
                    lost |= self._lost()
                else:
                    return True
            raise ServerLostError(
                str(next(iter(lost.values()), "a parameter server")),
                f"servers were lost again {_MOST_RESTARTS} times during the restart.",
                "use more memory for the servers, or a less busy machine; then restart from the last checkpoint",
            )

    def _restart(self, lost: Mapping[int, Lost], pushers: Sequence[Pusher]) -> None:
        snapshot = None if self._snapshots is None else self._snapshots.last
        if snapshot is None:
            raise self._lost_for_good(lost)
        for i, why in lost.items():
            _log.warning("%s. A new server takes its place, with the values of the last snapshot.", why)
            self._cluster.end(self.peers[i].actor)
            self.peers[i] = self._start(i)
        peers, answers = self.peers, self.calls.answers
        # The order matters: all servers drop pending pushes before a new one gets values, and agree on the number of applied
        # updates last. Otherwise a push could be applied on some servers only.
        answers([peer.ask(ParameterServer.ping) for peer in peers])
        answers(
            [p.ask(ParameterServer.forget, pusher) for i, p in enumerate(peers) if i not in lost for pusher in pushers]
        )
        for i in lost:
            answers([peers[i].ask(ParameterServer.put, *snapshot[i])])
            answers([peers[i].ask(ParameterServer.learn, name, program) for name, program in self._learned[i].items()])
            answers([peers[i].ask(ParameterServer.forget, pusher) for pusher in pushers])
        # `meet` follows `put`, so that the next coordinator does not find a server without values.
        answers([peer.ask(ParameterServer.meet, self.actors) for peer in peers])
        applied = max(answers([peer.ask(ParameterServer.num_applied) for peer in peers]))
        answers([peers[0].ask(ParameterServer.align_all, applied)])

    def _lost_for_good(self, lost: Mapping[int, Lost]) -> ServerLostError:
        names = _listed(self._names_on(lost))
        silent = [why for why in lost.values() if isinstance(why, Silent)]
        if silent:
            peer, reason = silent[0].peer, silent[0].found
            return ServerLostError(
                str(peer),
                f"it {reason}, and it holds the only copy of {names}.",
                "resume the process and make the same call again; worker_timeout_s=300 if it is only slow; "
                "snapshot_every_s=60 to replace such a server",
            )
        return ServerLostError(
            f"parameter server {', '.join(map(str, lost))}",
            f"it has died, and {names} are lost with it.",
            "restart from the last checkpoint, with ParameterServerStrategy(snapshot_every_s=60) to restart servers",
        )

    def close(self) -> None:
        """Releases the servers and stops taking snapshots."""
        self._peers = None
        if self._snapshots is not None:
            self._snapshots.close()

    def _lost(self) -> dict[int, Lost]:
        """Returns the lost servers, by index, with the reason."""
        lost: dict[int, Lost] = {}
        replies = [peer.ask(ParameterServer.num_applied) for peer in self.peers]
        # One by one, because waiting for all together ends with the first that is lost.
        for i, reply in enumerate(replies):
            try:
                self.calls.answers([reply])
            except Lost as e:
                lost[i] = e
        return lost


class _Snapshots:
    """Copies the state of all servers periodically, in a daemon thread. `last` is the latest complete copy."""

    def __init__(self, servers: Servers, every_s: float) -> None:
        # Empty until the first snapshot, which `Homes` takes as soon as the servers hold a variable.
        self.last: list[State] = [({}, {}, {}) for _ in servers.peers]
        # Weak, so that the thread does not keep a dropped strategy alive.
        self._servers, self._every_s = weakref.ref(servers), every_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._copy, name="phalanx-snapshots", daemon=True)
        self._thread.start()

    def take(self) -> None:
        """Takes a snapshot now."""
        servers = self._servers()
        if servers is not None:
            self.last = servers.ask(ParameterServer.state, *((i,) for i in range(len(servers))))

    def close(self) -> None:
        """Ends the thread after the snapshot that it may be taking."""
        self._over.set()

    def _copy(self) -> None:
        while not self._over.wait(self._every_s):
            # If a server is lost or the strategy was closed, the previous snapshot stays the last one.
            with suppress(PhalanxError, load_ray().exceptions.RayError):
                self.take()


def not_started(error: Lost) -> StartupError:
    """Returns the error for a worker or server that was lost during startup."""
    return StartupError(
        f"the start of {error.peer}",
        f"it {error.found}.",
        "use more memory, or fewer workers and ps; install the same versions of Phalanx, JAX and Ray on all machines",
    )


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:5])
    return f"{shown} and {len(names) - 5} other variables" if len(names) > 5 else shown
