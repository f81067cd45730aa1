# SPDX-License-Identifier: Apache-2.0
"""The membership of this process in an elastic group: one whose processes may come and go while it trains.

A *generation* is the group between two changes: a fixed list of processes with their ranks. `phalanx run --workers 2:4` holds a
rendezvous (`phalanx._src.launch.elastic.rendezvous`), with which every process keeps a connection. A process that is ready to train says so, and
waits for its generation. Uses the standard library only.
"""

import functools
import itertools
import json
import os
import queue
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, final

from typing_extensions import override

from phalanx._src.cluster.connections.listener import connect, expect_answers, handshake, send
from phalanx._src.cluster.connections.ports import HeldPort, cut
from phalanx._src.cluster.connections.secret import secret_of
from phalanx._src.cluster.spec import ClusterSpec, Task, tf_config
from phalanx.errors import StartupError

RENDEZVOUS, MEMBER, MOST = "PHALANX_RENDEZVOUS", "PHALANX_MEMBER", "PHALANX_MOST_WORKERS"
"""The environment variables with the address of the rendezvous, the number of this process in it, and the most processes of a group."""

JOB = "worker"
_CONNECT_S = 30.0
_PATIENCE_S = 0.5


@dataclass(frozen=True)
class Generation:
    """A group between two changes, as one of its processes sees it.

    Args:
      number: counts the generations of a training run, from 1.
      service: address of JAX's coordination service for this generation.
      addresses: addresses of the processes, by rank.
      rank: rank of this process.
      source: rank of the process whose variables the others take over, because it has made the most steps.
      is_even: whether all have made these steps, so that none has to take anything over.
      is_alike: whether all have the same variables.
    """

    number: int
    service: str
    addresses: tuple[str, ...]
    rank: int
    source: int = 0
    is_even: bool = True
    is_alike: bool = False

    @property
    def size(self) -> int:
        """The number of processes."""
        return len(self.addresses)

    def tf_config(self) -> str:
        """Returns the description of the generation for the environment variable TF_CONFIG."""
        return tf_config(ClusterSpec({JOB: list(self.addresses)}), Task(JOB, self.rank))


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
        self._saying = threading.Lock()
        self._generations: queue.SimpleQueue[Generation | str | None] = queue.SimpleQueue()
        self._begun, self._calls = itertools.count(), queue.SimpleQueue[int | None]()
        self.changed: Callable[[str], None] = lambda reason: None
        self.generation: Generation | None = None
        self.is_trying = self.is_leaving = self.is_between_steps = False
        secret = secret_of([address])
        try:
            self._connection = connect(address, _CONNECT_S)
        except OSError as e:
            raise _no_answer(address) from e
        with ExitStack() as stack:
            stack.enter_context(self._connection)
            refused = handshake(self._connection, secret, {"member": number}, _CONNECT_S)
            self._lines = stack.enter_context(self._connection.makefile("rb"))
            welcome = b"" if refused is not None else self._lines.readline()
            if not welcome:
                raise _no_answer(address)
            stack.pop_all()
        self.is_late: bool = json.loads(welcome)["is_late"]
        self._connection.settimeout(None)
        expect_answers(self._connection)
        self._port = HeldPort(self._connection.getsockname()[0])
        self.start()

    def meet(self, *, call: int, progress: Sequence[int], variables: str = "") -> Generation | None:
        """Waits for the next generation, and returns it. Returns None if the others have finished this training run.

        Args:
          call: number of training runs that this process began before, so that only processes in the same run meet.
          progress: progress of the variables that this process can send to others: the number of steps, then further increasing
            numbers. [-1] if it has no variables.
          variables: fingerprint of its variables. Empty if it has none yet.

        Raises:
          StartupError: the rendezvous has ended.
          SystemExit: this process is leaving.
        """
        self.generation = None
        address = self._port.address
        self._say({"ready": {"call": call, "progress": list(progress), "variables": variables, "address": address}})
        answer: Generation | str = self._next(self._generations)
        if isinstance(answer, str):
            self.is_late = True
            return None
        self.generation, self.is_late = answer, False
        os.environ["TF_CONFIG"] = answer.tf_config()
        return answer

    def begin(self) -> tuple[int, int]:
        """Reports that the program begins a training run. Returns its number, and that of the run that the others are in."""
        call = next(self._begun)
        self._say({"begins": call})
        return call, self._next(self._calls)

    def accuse(self, ranks: Sequence[int], why: str) -> None:
        """Asks the rendezvous to end processes of this generation that keep the others from continuing."""
        if self.generation is not None:
            self._say({"accuses": list(ranks), "generation": self.generation.number, "why": why})

    def close(self) -> None:
        """Leaves the rendezvous, so that the others do not wait for this process."""
        cut(self._connection)

    def _next(self, news: "queue.SimpleQueue[Any]") -> Any:
        while not self.is_leaving:
            try:
                # Python handles signals between two waits.
                item = news.get(timeout=_PATIENCE_S)
            except queue.Empty:
                continue
            if item is None:
                raise StartupError("the rendezvous", "phalanx run has exited.", "phalanx run --workers 2:4 train.py")
            return item
        raise SystemExit(128 + signal.SIGTERM)

    @override
    def run(self) -> None:
        with self._port, self._connection, self._lines, suppress(OSError):
            self._hear()
        self._generations.put(None)
        self._calls.put(None)

    def _hear(self) -> None:
        for line in self._lines:
            message = json.loads(line)
            if "generation" in message:
                message["addresses"] = tuple(message["addresses"])
                message["number"] = message.pop("generation")
                self._generations.put(Generation(**message))
            elif "missed" in message:
                self._generations.put(message["missed"])
            elif "change" in message:
                self.changed(message["change"])
            elif "call" in message:
                self._calls.put(message["call"])
            elif "ping" in message:
                self._say({"pong": True})

    def _say(self, message: Mapping[str, Any]) -> None:
        with self._saying:
            send(self._connection, message)


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


def is_first() -> bool:
    """Whether this process, which is in no generation yet, will be the chief of the first one."""
    member = own()
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
