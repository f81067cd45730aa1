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
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar, final

from typing_extensions import override

from phalanx._src.cluster.connections.listener import ANSWER_S
from phalanx._src.cluster.connections.messages import SignOfLife
from phalanx._src.cluster.connections.ports import HeldPort
from phalanx._src.cluster.resolvers.base import start_timeout_s
from phalanx._src.cluster.watch import meeting
from phalanx._src.cluster.watch.contact import Contact
from phalanx.errors import StartupError

RENDEZVOUS, MEMBER = "PHALANX_RENDEZVOUS", "PHALANX_MEMBER"
"""The environment variables with the addresses at which the rendezvous may be, and the number of this process in it."""
LEAST, MOST = "PHALANX_LEAST_WORKERS", "PHALANX_MOST_WORKERS"
"""The environment variables with the smallest and the largest number of processes in a group."""
VARIABLES = (RENDEZVOUS, MEMBER, LEAST, MOST)

_PATIENCE_S = 0.5

T = TypeVar("T")


@final
class Membership(threading.Thread):
    """The connection of this process with the rendezvous, and a thread that listens to it.

    Args:
      addresses: the addresses at which the rendezvous may be. It is at one of them, and may move to another.
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

    def __init__(self, addresses: Sequence[str], number: int) -> None:
        super().__init__(name="phalanx-membership", daemon=True)
        self.number, self._contact = number, Contact(addresses, number)
        self._generations: queue.SimpleQueue[meeting.Generation | meeting.Dismissal] = queue.SimpleQueue()
        self._begun, self._calls = itertools.count(), queue.SimpleQueue[int]()
        # Before there is a watchdog, invitations have no effect. The rendezvous repeats them.
        self.changed: Callable[[str], None] = lambda reason: None
        self.generation: meeting.Generation | None = None
        self.is_late = self._contact.is_late
        self.is_trying = self.is_leaving = self.is_between_steps = False
        # The others reach this machine at the address from which it reached the rendezvous, whatever its name leads to.
        self._port = HeldPort(self._contact.host)
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
        question = meeting.Readiness(call, tuple(progress), self._port.address)
        self._contact.ask(question, replace(self._contact.state, call=call))
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
        self._contact.ask(meeting.RunStart(call), replace(self._contact.state, call=call, is_training=True))
        return call, self._next(self._calls)

    def finish(self) -> None:
        """Reports that the training run, or the program, has come to its end."""
        self._contact.say(meeting.RunEnd(), replace(self._contact.state, is_training=False))

    def accuse(self, ranks: Sequence[int], why: str) -> None:
        """Asks the rendezvous to end processes of this generation that keep the others from continuing."""
        if self.generation is not None:
            self._contact.say(meeting.Accusation(tuple(ranks), self.generation.number, why))

    def close(self) -> None:
        """Leaves the rendezvous, so that the others do not wait for this process."""
        self._contact.close()

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
        with self._port:
            # Another machine takes the place of a silent one after this time.
            for message in self._contact.messages(ANSWER_S + start_timeout_s(os.environ)):
                self._dispatch(message)

    def _dispatch(self, message: meeting.RendezvousMessage) -> None:
        match message:
            case meeting.Generation(number, _, _, rank):
                self._contact.answered(replace(self._contact.state, generation=number, rank=rank))
                self._generations.put(message)
            case meeting.Dismissal():
                self._contact.answered(replace(self._contact.state, generation=0))
                self._generations.put(message)
            case meeting.ChangeRequest(reason):
                self.changed(reason)
            case meeting.RunOfOthers(call):
                self._contact.answered(self._contact.state)
                self._calls.put(call)
            case meeting.Ping():
                self._contact.say(SignOfLife())


@functools.cache
def own() -> Membership | None:
    """Returns the membership of this process, which begins with the first call. None if its group is not elastic."""
    addresses, member = os.environ.get(RENDEZVOUS), os.environ.get(MEMBER)
    return Membership(addresses.split(","), int(member)) if addresses and member else None


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
