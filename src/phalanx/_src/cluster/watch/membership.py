# SPDX-License-Identifier: Apache-2.0
"""The membership of this process in an elastic group: one whose processes may come and go while it trains.

A *generation* is the group between two changes: a fixed list of processes with their ranks. `phalanx run --workers 2:4` holds a
rendezvous (`phalanx._src.launch.elastic.rendezvous`), with which every process keeps a connection. A process that is ready to train says so, and
waits for its generation. Uses the standard library only.
"""

import functools
import itertools
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import TypeVar, final

from typing_extensions import override

from phalanx._src.cluster.connections.listener import Connection, connect, expect_answers, handshake
from phalanx._src.cluster.connections.messages import Message, SignOfLife
from phalanx._src.cluster.connections.ports import HeldPort, cut
from phalanx._src.cluster.connections.secret import secret_of
from phalanx._src.cluster.watch import meeting
from phalanx.errors import StartupError

RENDEZVOUS, MEMBER = "PHALANX_RENDEZVOUS", "PHALANX_MEMBER"
"""The environment variables with the address of the rendezvous, and the number of this process in it."""
LEAST, MOST = "PHALANX_LEAST_WORKERS", "PHALANX_MOST_WORKERS"
"""The environment variables with the smallest and the largest number of processes in a group."""
VARIABLES = (RENDEZVOUS, MEMBER, LEAST, MOST)

_CONNECT_S = 30.0
_PATIENCE_S = 0.5

T = TypeVar("T")


@final
class Membership(threading.Thread):
    """The connection of this process with the rendezvous, and a thread that listens to it.

    Args:
      address: address of the rendezvous.
      number: number of this process.

    Attributes:
      number: number of this process.
      is_late: whether the others had begun to train when this process started, and it has not joined them yet.
      generation: the present generation of this process. None before the first, and while it waits for the next.
      is_trying: whether this process may train alone for a moment although it is late.
      is_leaving: whether this process was told to end, so that it waits for no further generation.
      is_between_steps: whether the user's code runs between two steps of `phalanx.elastic.steps`.
      changed: called in the thread, with a reason, if all processes are to meet for another generation.

    Raises:
      StartupError: the rendezvous does not answer.
    """

    def __init__(self, address: str, number: int) -> None:
        super().__init__(name="phalanx-membership", daemon=True)
        self.number = number
        # The main thread, the watchdog's and this one send, and no message may begin inside another one.
        self._saying = threading.Lock()
        self._generations: queue.SimpleQueue[meeting.Generation | meeting.Dismissal] = queue.SimpleQueue()
        self._begun, self._calls = itertools.count(), queue.SimpleQueue[int]()
        # Before there is a watchdog, invitations have no effect. The rendezvous repeats them.
        self.changed: Callable[[str], None] = lambda reason: None
        self.generation: meeting.Generation | None = None
        self.is_trying = self.is_leaving = self.is_between_steps = False
        secret = secret_of([address])
        try:
            socket = connect(address, _CONNECT_S)
        except OSError as e:
            raise _no_answer(address) from e
        with ExitStack() as stack:
            stack.enter_context(socket)
            refused = handshake(socket, secret, {"member": number}, _CONNECT_S)
            self._connection = Connection(socket)
            self._messages: Iterator[meeting.RendezvousMessage] = self._connection.messages(meeting.TO_MEMBER)
            welcome = None if refused is not None else next(self._messages, None)
            if not isinstance(welcome, meeting.Welcome):
                raise _no_answer(address)
            stack.pop_all()
        self.is_late = welcome.is_late
        socket.settimeout(None)
        expect_answers(socket)
        # The others reach this machine at the address from which it reached the rendezvous, whatever its name leads to.
        self._port = HeldPort(socket.getsockname()[0])
        self.start()

    def meet(self, *, call: int, progress: Sequence[int]) -> meeting.Generation | None:
        """Waits for the next generation, and returns it. Returns None if the others have finished this training run.

        Args:
          call: number of training runs that this process began before, so that only processes in the same run meet.
          progress: progress of the variables that this process can send to others: the number of steps, then further increasing
            numbers. [-1] if it has no variables.

        Raises:
          StartupError: the rendezvous has ended.
          SystemExit: this process is leaving.
        """
        # Before the message: from then on, `accuse` must not name ranks of a generation that this process has left.
        self.generation = None
        self._say(meeting.Readiness(call, tuple(progress), self._port.address))
        answer = self._next(self._generations)
        if isinstance(answer, meeting.Dismissal):
            self.is_late = True
            return None
        self.generation, self.is_late = answer, False
        # Resolvers read it at each access, so they describe the present generation.
        os.environ["TF_CONFIG"] = answer.tf_config()
        return answer

    def begin(self) -> tuple[int, int]:
        """Reports that the program begins a training run. Returns its number, and that of the run that the others are in."""
        call = next(self._begun)
        self._say(meeting.RunStart(call))
        return call, self._next(self._calls)

    def finish(self) -> None:
        """Reports that the training run, or the program, has come to its end."""
        self._say(meeting.RunEnd())

    def accuse(self, ranks: Sequence[int], why: str) -> None:
        """Asks the rendezvous to end processes of this generation that keep the others from continuing."""
        if self.generation is not None:
            self._say(meeting.Accusation(tuple(ranks), self.generation.number, why))

    def close(self) -> None:
        """Leaves the rendezvous, so that the others do not wait for this process."""
        cut(self._connection.socket)

    def _next(self, answers: queue.SimpleQueue[T]) -> T:
        while not self.is_leaving:
            # Python handles signals between two waits.
            with suppress(queue.Empty):
                return answers.get(timeout=_PATIENCE_S)
            if not self.is_alive():
                raise StartupError("the rendezvous", "phalanx run has exited.", "phalanx run --workers 2:4 train.py")
        raise SystemExit(128 + signal.SIGTERM)

    @override
    def run(self) -> None:
        with self._port, self._connection.socket:
            for message in self._messages:
                self._dispatch(message)

    def _dispatch(self, message: meeting.RendezvousMessage) -> None:
        match message:
            case meeting.Generation() | meeting.Dismissal():
                self._generations.put(message)
            case meeting.ChangeRequest(reason):
                self.changed(reason)
            case meeting.RunOfOthers(call):
                self._calls.put(call)
            case meeting.Ping():
                self._say(SignOfLife())

    def _say(self, message: Message) -> None:
        with self._saying:
            self._connection.say(message)


@functools.cache
def own() -> Membership | None:
    """Returns the membership of this process, which begins with the first call. None if its group is not elastic."""
    address, member = os.environ.get(RENDEZVOUS), os.environ.get(MEMBER)
    return Membership(address, int(member)) if address and member else None


def is_elastic() -> bool:
    """Whether this process belongs to an elastic group."""
    return bool(os.environ.get(RENDEZVOUS) and os.environ.get(MEMBER))


def most_workers() -> int:
    """Returns the number of processes that the elastic group of this process has if none is missing."""
    return int(os.environ[MOST])


def sizes() -> range:
    """Returns the numbers of processes that the elastic group of this process may have."""
    return range(int(os.environ[LEAST]), most_workers() + 1)


def is_first() -> bool:
    """Whether this process, which is in no generation yet, will be the chief of the first one."""
    member = own()
    # The ranks of the first generation follow the numbers.
    return member is not None and not member.is_late and member.number == 0


def is_late() -> bool:
    """Whether this process has started after the others had begun to train, and has not joined them yet."""
    member = own()
    return member is not None and member.is_late


def may_train() -> bool:
    """Whether this process may make a training step: a late one would train alone, from the beginning."""
    member = own()
    return member is None or not member.is_late or member.is_trying


def outlives_losses() -> bool:
    """Whether the next step continues without a process that is lost now, so that what fails before it may be skipped."""
    member = own()
    return member is not None and member.is_between_steps


def _no_answer(address: str) -> StartupError:
    return StartupError(
        f"the rendezvous at {address}",
        "it rejected this process: phalanx run has exited, or another program uses the port.",
        f"unset {RENDEZVOUS}, or start the script by: phalanx run --workers 2:4 train.py",
    )
