# SPDX-License-Identifier: Apache-2.0
"""The messages between the launchers of an elastic group and its rendezvous."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from phalanx.cluster.membership import MEMBER, RENDEZVOUS

START_S = 300.0
"""Time that the launchers of all machines have to connect, and to come back after one was lost, in seconds."""


@dataclass(frozen=True)
class Report:
    """The state of the processes of one launcher, for the rendezvous.

    Args:
      running: numbers of those that run.
      hopeful: number of those that run, or will be started.
      has_finished: whether the program of one of them has come to its end.
    """

    running: tuple[int, ...] = ()
    hopeful: int = 0
    has_finished: bool = False


@dataclass(frozen=True)
class Standing:
    """The state of the training, for the launchers.

    Args:
      steps: the most steps that a process has reported.
      gone: the processes that were in the last generation, if all of them are gone. None if one trains, or no generation was formed.
      is_hopeless: whether there will never be enough processes again.
      has_finished: whether the program of a process has come to its end, so that no process joins any more.
      is_needed: whether processes of other machines still run, which need this rendezvous.
      has_begun: whether a generation was formed. A process that fails before that has an error in its program.
    """

    steps: int = -1
    gone: tuple[int, ...] | None = None
    is_hopeless: bool = False
    has_finished: bool = False
    is_needed: bool = False
    has_begun: bool = False


class AbstractRendezvous(Protocol):
    """The rendezvous of an elastic group, on this machine or on another one."""

    address: str

    def start(self) -> None:
        """Begins to work."""

    def end(self) -> None:
        """Ends it."""

    def report(self, report: Report) -> Standing:
        """Reports the processes of this machine, and returns the state of the training."""


def environment_of(address: str, number: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of a process, with which it finds the rendezvous instead of a fixed cluster."""
    rest = {name: value for name, value in environment.items() if name != "TF_CONFIG"}
    return {**rest, RENDEZVOUS: address, MEMBER: str(number)}
