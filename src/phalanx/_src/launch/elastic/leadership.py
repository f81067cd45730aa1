# SPDX-License-Identifier: Apache-2.0
"""The machine of an elastic group that holds the rendezvous: the first one, until it is lost.

If its launcher ends or no longer answers, the launchers of the others look for the one that has taken its place. The first of them that finds
none takes it over, with the last state of the training that it knows. Two may do so at once, or a machine may return: so a rendezvous forms a
generation only if most machines of the last one are with it (see `Launchers.are_majority`), and one without them yields to another one.
"""

import functools
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import final

from typing_extensions import override

from phalanx._src.cluster.connections.listener import visit
from phalanx._src.cluster.connections.secret import secret_of
from phalanx._src.cluster.resolvers.base import start_timeout_s
from phalanx._src.launch.elastic.messages import NO_STATUS, GroupStatus, LauncherReport, Presence
from phalanx._src.launch.elastic.remote_rendezvous import RemoteRendezvous
from phalanx._src.launch.elastic.rendezvous import Rendezvous
from phalanx._src.launch.plan import ALONE, Machines
from phalanx.errors import StartupError

_LOOK_S = 0.5
"""Time between two looks for the rendezvous."""
_TURN_S = 5.0
"""How much longer each further machine looks for another rendezvous before it holds one itself."""
_VISIT_S = 2.0
_MOST_VISITS = 32


@final
class Leadership(threading.Thread):
    """The rendezvous of a group, on whichever machine it is.

    Args:
      least: see `Rendezvous`.
      environment: see `Rendezvous`.
      kill: see `Rendezvous`.
      say: receives reports.
      machines: the machines of the group.
      share: see `Rendezvous`.
      is_interrupted: whether a signal has ended the wait for the machine with the rendezvous.

    Attributes:
      addresses: the addresses at which the rendezvous may be.

    Raises:
      InvalidArgumentError: PHALANX_START_TIMEOUT_S is not a number of seconds.
      StartupError: the machine with the rendezvous does not answer, or has another secret or other terms; the wait for it was interrupted; or
        this machine holds it, and cannot listen at its address.
    """

    def __init__(
        self,
        least: int,
        environment: Mapping[str, str],
        kill: Callable[[int, str], None],
        say: Callable[[str], None],
        machines: Machines = ALONE,
        *,
        share: int = 1,
        is_interrupted: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(name="phalanx-leadership", daemon=True)
        self._machines, self._kill, self._say, self._is_interrupted = machines, kill, say, is_interrupted
        self._terms = f"--workers {least}:{share * machines.count} on {machines.count} machines"
        self._held = functools.partial(
            Rendezvous, least, environment, kill, say, machines, share=share, terms=self._terms
        )
        self._patience_s, self._secret = start_timeout_s(environment), secret_of(machines.addresses, environment)
        self._is_over, self._lock = threading.Event(), threading.Lock()
        self._report = LauncherReport()
        self._ended: dict[int, int] = {}
        """The generation in which the launcher of a machine that held the rendezvous has ended."""
        self._role = role = self._begin()
        self.addresses = (
            (role.address,) if isinstance(role, Rendezvous) and not machines.addresses else machines.addresses
        )

    @property
    def is_here(self) -> bool:
        """Whether this machine holds the rendezvous."""
        return isinstance(self._role, Rendezvous)

    @property
    def machine(self) -> int:
        """Index of the machine that holds the rendezvous."""
        return self._role.machine

    def report(self, report: LauncherReport) -> GroupStatus:
        """Takes a report of the launcher of this machine, and returns the state of the training."""
        with self._lock:
            self._report = report
            return self._role.report(report)

    def end(self) -> None:
        """Ends the rendezvous if it is here, or the connection with it."""
        self._is_over.set()
        self.join()
        self._role.end()

    @override
    def start(self) -> None:
        self._role.start()
        super().start()

    @override
    def run(self) -> None:
        while self._machines.count > 1 and not self._is_over.wait(_LOOK_S):
            match self._role:
                case RemoteRendezvous(is_lost=True) as lost:
                    self._follow(lost)
                case Rendezvous(has_majority=False) as weak:
                    self._yield(weak)

    def _begin(self) -> Rendezvous | RemoteRendezvous:
        """Finds the rendezvous, or holds it."""
        deadline_s = time.monotonic() + self._patience_s
        while True:
            for presence in self._look(is_strict=True):
                with suppress(OSError):
                    return self._joined(presence)
            if self._machines.index == self._machines.leader:
                return self._held()
            if time.monotonic() >= deadline_s or self._is_interrupted():
                address = self._machines.addresses[self._machines.leader]
                raise StartupError(
                    f"the rendezvous at {address}",
                    f"machine {self._machines.index} could not connect to it for {self._patience_s:g} s: {self._cause_at(address)}.",
                    "start phalanx run on the first machine too, and check whether this machine can reach its address",
                )
            time.sleep(min(_LOOK_S, max(0.0, deadline_s - time.monotonic())))

    def _follow(self, lost: RemoteRendezvous) -> None:
        """Looks for the rendezvous that takes the place of a lost one, and holds it if no other machine does."""
        since_s, least = time.monotonic(), lost.standing.generation
        if lost.has_ended:
            self._ended[lost.machine] = least
        # Those of earlier generations may have come back since.
        ended = {machine for machine, generation in self._ended.items() if generation == least}
        ahead = sum(machine not in (lost.machine, self._machines.index) for machine in range(self._machines.index))
        while not self._is_over.wait(_LOOK_S / 5):
            # Before the look, which takes its time if a machine does not answer, while another one takes over.
            is_turn = time.monotonic() - since_s >= ahead * _TURN_S
            for presence in self._look():
                # The machine may have come back, and know nothing of the others yet.
                if presence.generation >= least:
                    with suppress(OSError, StartupError):
                        self._take(self._joined(presence, lost.standing))
                        return
            if not is_turn:
                continue
            try:
                role = self._held(before=lost.standing, ended=ended)
            except StartupError as e:
                if time.monotonic() - since_s > self._patience_s:
                    lost.give_up(f"{e.asked}: {e.found}".rstrip("."))
                    return
                continue
            launcher = f"The launcher at {self._machines.addresses[lost.machine]}, which coordinated all machines,"
            # One that does not answer this machine may still train with others.
            self._say(
                f"{launcher} has ended. This machine takes its place."
                if lost.has_ended
                else f"{launcher} does not answer. This machine takes its place if enough of the others answer."
            )
            self._take(role)
            return

    def _yield(self, weak: Rendezvous) -> None:
        """Continues with the rendezvous of another machine, if that one knows more."""
        for presence in self._look():
            if presence.generation > weak.generation or (
                presence.generation == weak.generation and presence.machine < self._machines.index
            ):
                with suppress(OSError, StartupError):
                    role = self._joined(presence, weak.report(self._report))
                    weak.end(presence)
                    self._take(role)
                    return

    def _take(self, role: Rendezvous | RemoteRendezvous) -> None:
        with self._lock:
            role.report(self._report)
            role.start()
            self._role = role

    def _joined(self, presence: Presence, before: GroupStatus = NO_STATUS) -> RemoteRendezvous:
        """Returns the connection with the rendezvous of another machine.

        Args:
          presence: where it is.
          before: the last state of the training that this machine knows.
        """
        address = self._machines.addresses[presence.machine]
        connection = visit(
            address, self._secret, {"machine": self._machines.index, "generation": before.generation}, _VISIT_S
        )
        return RemoteRendezvous(presence.machine, address, connection, self._kill, self._terms, before=before)

    def _look(self, *, is_strict: bool = False) -> list[Presence]:
        """Returns where other machines hold a rendezvous, the one with the latest generation first.

        Args:
          is_strict: whether a machine with another secret is an error. Otherwise it counts as absent.

        Raises:
          StartupError: a machine has another secret.
        """
        absent: tuple[type[Exception], ...] = (OSError,) if is_strict else (OSError, StartupError)

        def presence_at(address: str) -> Presence | None:
            try:
                connection = visit(address, self._secret, {"looks": True}, _VISIT_S)
            except absent:
                return None
            with connection.socket:
                connection.socket.settimeout(_VISIT_S)
                answer = next(connection.messages((Presence,)), None)
            return answer if isinstance(answer, Presence) else None

        elsewhere = [address for i, address in enumerate(self._machines.addresses) if i != self._machines.index]
        if not elsewhere:
            return []
        with ThreadPoolExecutor(min(len(elsewhere), _MOST_VISITS)) as visits:
            presences = [presence for presence in visits.map(presence_at, elsewhere) if presence is not None]
        return sorted(presences, key=lambda each: (-each.generation, each.machine))

    def _cause_at(self, address: str) -> str:
        """Returns why nobody answers at an address."""
        try:
            visit(address, self._secret, {"looks": True}, _VISIT_S).close()
        except OSError as e:
            return f"{e.strerror or e}".rstrip(".")
        return "it has come just now"
