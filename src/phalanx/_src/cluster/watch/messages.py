# SPDX-License-Identifier: Apache-2.0
"""The messages between the watches of a group."""

from collections.abc import Sequence
from typing import TypeAlias, get_args

from phalanx._src.cluster.connections.messages import Message, SignOfLife
from phalanx._src.cluster.watch.agreement import Difference, Signature
from phalanx._src.cluster.watch.pace import Sample
from phalanx._src.cluster.watch.pairs import PairsAnswer, PairsQuestion
from phalanx._src.cluster.watch.sync_point import PointMessage


class ProgressReport(Message):
    """The progress of the sender. The fields are those of `Member`."""

    turn: int
    step: int
    is_inside: bool
    has_left: bool
    is_told: bool
    has_lost_step: bool


class ComparisonRequest(Message):
    """The sender waits until all processes have compared their programs. With None it no longer waits."""

    signature: Signature | None


class FailureReport(Message):
    """The sender is about to end, in the way that `end` describes."""

    end: str


class PaceReport(Message):
    """Measurements of the sender's steps, for rank 0."""

    samples: list[Sample]


class ComparisonAnswer(Message):
    """Rank 0 has compared the programs."""

    difference: Difference | None


class SaveReport(Message):
    """Rank 0 has written the file `name` after its operation `turn`."""

    turn: int
    name: str


class VerdictReport(Message):
    """Rank 0 has judged that the group cannot continue. The fields are those of `Verdict`."""

    text: str
    is_loss: bool
    hint: str


class MessageAtPoint(Message):
    """A message of the `SyncPoint` of this name."""

    name: str
    content: PointMessage


MemberMessage: TypeAlias = SignOfLife | ProgressReport | ComparisonRequest | FailureReport
"""A message of a process about itself."""
WatchMessage: TypeAlias = (
    MemberMessage
    | PaceReport
    | ComparisonAnswer
    | SaveReport
    | VerdictReport
    | MessageAtPoint
    | PairsQuestion
    | PairsAnswer
)

WATCH_MESSAGES: Sequence[type[WatchMessage]] = get_args(WatchMessage)
