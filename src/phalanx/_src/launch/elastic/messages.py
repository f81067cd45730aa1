# SPDX-License-Identifier: Apache-2.0
"""The messages between the launchers of an elastic group and its rendezvous."""

from collections.abc import Mapping, Sequence

from phalanx._src.cluster.connections.messages import Message
from phalanx._src.cluster.watch.membership import LEAST, MEMBER, MOST, RENDEZVOUS


class LauncherReport(Message):
    """The state of the processes of one launcher, for the rendezvous.

    Args:
      running: numbers of those that run.
      hopeful: number of those that run, or will be started.
      finished: numbers of those that have ended with exit code 0, and are not replaced.
    """

    running: tuple[int, ...] = ()
    hopeful: int = 0
    finished: tuple[int, ...] = ()


class Presence(Message):
    """The answer of a rendezvous to a launcher that only looks where one is.

    Args:
      generation: number of its last generation. 0 before the first.
      machine: index of its machine.
    """

    generation: int
    machine: int


class GroupTerms(Message):
    """The first message of the rendezvous to a launcher of another machine.

    Args:
      text: the numbers of workers and machines of the group, which all launchers must have been given.
    """

    text: str


class GroupStatus(Message):
    """The state of the training, for the launchers.

    Args:
      generation: number of the last generation. 0 before the first.
      steps: the most steps that a process has reported.
      members: numbers of the processes of the last generation, by rank. Empty before the first. A process that fails before that
        has an error in its program.
      gone: members of the last generation without a replacement, once all of them have ended. None while any member runs, and before
        the first generation.
      hopeless: why there will never be enough processes again. Empty as long as there may be.
      dropped: numbers of processes that have ended in the midst of a training run, whatever their exit code.
      has_finished: whether the program of a process has ended, so that no process joins any more.
      is_needed: whether processes of other machines still run, which need this rendezvous.
    """

    generation: int = 0
    steps: int = -1
    members: tuple[int, ...] = ()
    gone: tuple[int, ...] | None = None
    hopeless: str = ""
    dropped: tuple[int, ...] = ()
    has_finished: bool = False
    is_needed: bool = False


NO_MAJORITY = "the machines that are left are no majority"
"""How `GroupStatus.hopeless` begins if others may train without this machine."""
NO_STATUS = GroupStatus()
"""The state before a training run begins."""


class KillRequest(Message):
    """The process of this number keeps the others from continuing. The launcher of its machine ends it."""

    number: int
    why: str


def environment_of(
    addresses: Sequence[str], number: int, least: int, most: int, environment: Mapping[str, str]
) -> dict[str, str]:
    """Returns the environment of a process, with which it finds the rendezvous instead of a fixed cluster.

    Args:
      addresses: the addresses at which the rendezvous may be.
      number: number of the process.
      least: number of processes without which the group cannot continue.
      most: number of processes if none is missing.
      environment: the rest.
    """
    rest = {name: value for name, value in environment.items() if name != "TF_CONFIG"}
    return {**rest, RENDEZVOUS: ",".join(addresses), MEMBER: str(number), LEAST: str(least), MOST: str(most)}
