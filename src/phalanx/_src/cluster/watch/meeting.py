# SPDX-License-Identifier: Apache-2.0
"""A generation of an elastic group, and what its processes and the rendezvous tell each other about it."""

from collections.abc import Sequence
from typing import TypeAlias, get_args

from phalanx._src.cluster.connections.messages import Message, SignOfLife
from phalanx._src.cluster.spec import ClusterSpec, Task, tf_config

JOB = "worker"


class Generation(Message):
    """A group between two changes, as one of its processes sees it.

    Args:
      number: counts the generations of a training run, from 1.
      service: address of JAX's coordination service for this generation.
      addresses: addresses of the processes, by rank.
      rank: rank of this process.
    """

    number: int
    service: str
    addresses: tuple[str, ...]
    rank: int

    @property
    def size(self) -> int:
        """The number of processes."""
        return len(self.addresses)

    def tf_config(self) -> str:
        """Returns the description of the generation for the environment variable TF_CONFIG."""
        return tf_config(ClusterSpec({JOB: list(self.addresses)}), Task(JOB, self.rank))


class MemberState(Message):
    """The first message of a process to the rendezvous, which may have begun its work while the process trained.

    Args:
      generation: the last generation that the sender was in. 0 if it waits to join one.
      rank: its rank there.
      call: number of the training that its program is in.
      is_training: whether it is in the midst of that training.
    """

    generation: int = 0
    rank: int = 0
    call: int = 0
    is_training: bool = False


class Readiness(Message):
    """The sender waits for the next generation. The fields are the arguments of `Membership.meet`, and its address there."""

    call: int
    progress: tuple[int, ...]
    address: str


class RunStart(Message):
    """The program of the sender begins its training run of this number. The answer is `RunOfOthers`."""

    call: int


class RunEnd(Message):
    """The training run of the sender, or its program, has come to its end. A process that ends before that is replaced, whatever its exit code."""


class Accusation(Message):
    """Processes of a generation, by rank, keep the others from continuing."""

    ranks: tuple[int, ...]
    generation: int
    why: str


class Welcome(Message):
    """The first message of the rendezvous. A late process joins others that train already."""

    is_late: bool


class RunOfOthers(Message):
    """The number of the training run that the others are in."""

    call: int


class Dismissal(Message):
    """The others have finished the training run for which the receiver waits."""


class ChangeRequest(Message):
    """All processes of the generation are to meet for another one."""

    reason: str


class Ping(Message):
    """The receiver must show that it is alive."""


MemberMessage: TypeAlias = MemberState | Readiness | RunStart | RunEnd | Accusation | SignOfLife
"""A message of a process to the rendezvous."""
RendezvousMessage: TypeAlias = Welcome | Generation | RunOfOthers | Dismissal | ChangeRequest | Ping | SignOfLife
"""A message of the rendezvous to a process."""

TO_RENDEZVOUS: Sequence[type[MemberMessage]] = get_args(MemberMessage)
TO_MEMBER: Sequence[type[RendezvousMessage]] = get_args(RendezvousMessage)
