# SPDX-License-Identifier: Apache-2.0
"""The messages between the watches of a group: one class each, which a line of JSON names."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from phalanx._src.cluster.watch.agreement import Difference, Signature
from phalanx._src.cluster.watch.pace import Sample


@dataclass(frozen=True)
class SignOfLife:
    """The sender is alive. A child process sends it, which knows nothing more. See `Pulse`."""


@dataclass(frozen=True)
class ProgressReport:
    """The progress of the sender. The fields are those of `Member`."""

    turn: int
    step: int
    is_inside: bool
    has_left: bool
    is_told: bool
    has_lost_step: bool


@dataclass(frozen=True)
class ComparisonRequest:
    """The sender waits until all processes have compared their programs. With None it no longer waits."""

    signature: Signature | None


@dataclass(frozen=True)
class FailureReport:
    """The sender is about to end, in the way that `end` describes."""

    end: str


@dataclass(frozen=True)
class PaceReport:
    """Measurements of the sender's steps, for rank 0."""

    samples: Sequence[Sample]


@dataclass(frozen=True)
class ComparisonAnswer:
    """Rank 0 has compared the programs. `difference` has the fields of a `Difference`, or is None."""

    difference: Sequence[Any] | None

    @property
    def found_difference(self) -> Difference | None:
        """The difference."""
        return Difference(*self.difference) if self.difference else None


@dataclass(frozen=True)
class SaveReport:
    """Rank 0 has written the file `name` after its operation `turn`."""

    turn: int
    name: str


@dataclass(frozen=True)
class VerdictReport:
    """Rank 0 has judged that the group cannot continue. The fields are those of `Verdict`."""

    text: str
    is_loss: bool
    hint: str


@dataclass(frozen=True)
class PointMessage:
    """A message of the `SyncPoint` of this name."""

    point: str
    content: Mapping[str, Any]


@dataclass(frozen=True)
class PairsMessage:
    """A message of `Pairs`."""

    content: Mapping[str, Any]


MemberMessage: TypeAlias = SignOfLife | ProgressReport | ComparisonRequest | FailureReport
"""A message of a process about itself."""
WatchMessage: TypeAlias = (
    MemberMessage | PaceReport | ComparisonAnswer | SaveReport | VerdictReport | PointMessage | PairsMessage
)

_KINDS: dict[str, type[WatchMessage]] = {
    kind.__name__: kind
    for kind in (
        ProgressReport,
        ComparisonRequest,
        FailureReport,
        PaceReport,
        ComparisonAnswer,
        SaveReport,
        VerdictReport,
        PointMessage,
        PairsMessage,
    )
}


def as_json(message: WatchMessage) -> dict[str, Any]:
    """Returns a message as JSON has it."""
    return {"kind": type(message).__name__, **vars(message)}


def from_json(message: Mapping[str, Any]) -> WatchMessage:
    """Returns the message that another process has sent. One that this version does not know is a sign of life."""
    # A process of another version must not end this watch.
    kind = _KINDS.get(message.get("kind", ""))
    return kind(**{name: value for name, value in message.items() if name != "kind"}) if kind else SignOfLife()
