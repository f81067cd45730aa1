# SPDX-License-Identifier: Apache-2.0
"""The exception hierarchy of Phalanx.

    PhalanxError
    ├── InvalidArgumentError (ValueError)     an argument that is invalid in every context
    │   ├── DeviceError                       a device that is unknown, absent or listed twice
    │   ├── ReduceOpError                     an operation, dim or dtype that cannot be reduced
    │   ├── CallError (TypeError)             a function that cannot be called with the arguments that it gets
    │   └── InputError                        data that cannot be split into per-replica batches
    │       └── CardinalityError (TypeError)  the length of a dataset whose length is unknown
    ├── ClusterError (ValueError)             an invalid cluster description
    │   ├── ClusterTypeError (TypeError)      a cluster description, or a part of one, of the wrong type
    │   └── ClusterSourceError (RuntimeError) an environment or service that does not describe the cluster (yet)
    ├── ContextError (RuntimeError)           a valid call in the wrong context
    │   └── MixedStrategyError                two strategies where only one is allowed
    ├── StartupError (RuntimeError)           a process that can no longer be set up, or not safely
    ├── MissingDependencyError (ImportError)  an optional library that is not installed
    ├── VariableError (ValueError)            an operation that the variable does not support
    │   ├── AggregationError                  a write that the aggregation policy rejects
    │   ├── NestedWriteError                  a write inside a jax.lax body or another inner trace
    │   └── VariableIndexError (IndexError)   an index that the variable does not have
    ├── TapeError (RuntimeError)              a gradient tape that is used where it cannot record
    ├── TraceError (RuntimeError)             a replica function that cannot be traced into one program
    ├── OutOfRangeError (IndexError)          an iterator that has no more batches
    ├── StateLostError (RuntimeError)         a program that failed and destroyed its donated variables
    ├── PeerLostError (RuntimeError)          another process of the cluster that died
    ├── ServerLostError (RuntimeError)        a parameter server that died, and its variables with it
    ├── WorkerLostError (RuntimeError)        a worker that keeps failing, or makes no progress
    ├── CancelledError (RuntimeError)         a scheduled step that will not finish
    ├── CheckpointError (RuntimeError)        a checkpoint that cannot be written or read
    │   └── CheckpointMismatchError (AssertionError)  a checkpoint of other objects than those that it is restored into
    ├── SummaryError (RuntimeError)           summaries that cannot be written
    ├── NanLossDuringTrainingError (RuntimeError)  a loss that is NaN
    └── DivergenceError (AssertionError)      replicas or workers whose values differ, but must be equal

Every message has three parts: the request, the reason why it fails, and a hint that shows what to write instead.

There are two warnings: `RecompilationWarning`, and `SlipWarning` for probable mistakes that may be intended.
"""

import functools
import warnings
from collections.abc import Sequence
from typing import Self

from phalanx.errors.frames import Place, user_place
from phalanx.errors.names import suggest_names
from phalanx.errors.printable import printable

__all__ = [
    "AggregationError",
    "CallError",
    "CancelledError",
    "CardinalityError",
    "CheckpointError",
    "CheckpointMismatchError",
    "ClusterError",
    "ClusterSourceError",
    "ClusterTypeError",
    "ContextError",
    "DeviceError",
    "DivergenceError",
    "InputError",
    "InvalidArgumentError",
    "MissingDependencyError",
    "MixedStrategyError",
    "NanLossDuringTrainingError",
    "NestedWriteError",
    "OutOfRangeError",
    "PeerLostError",
    "PhalanxError",
    "RecompilationWarning",
    "ReduceOpError",
    "ServerLostError",
    "SlipWarning",
    "StartupError",
    "StateLostError",
    "SummaryError",
    "TapeError",
    "TraceError",
    "VariableError",
    "VariableIndexError",
    "WorkerLostError",
]


class PhalanxError(Exception):
    """Base class of all errors that Phalanx raises.

    Args:
      asked: what the caller requested: the argument and its value.
      found: why the request fails, or what is allowed.
      hint: what to write instead. Empty if there is no suggestion.

    Example:
      >>> print(PhalanxError("n=0", "n must be at least 1.", "n=1"))
      n=0: n must be at least 1.
      HINT: n=1
    """

    def __init__(self, asked: str, found: str = "", hint: str = "") -> None:
        # Keras re-creates errors that pass through a layer, with the message as the only argument.
        self.asked, self.found, self.hint = printable(asked), printable(found), printable(hint)
        reason, suggestion = f": {self.found}" if self.found else "", f"\nHINT: {self.hint}" if self.hint else ""
        super().__init__(self.asked + reason + suggestion)

    def __reduce__(self) -> tuple[type[Self], tuple[str, str, str], dict[str, object]]:
        # `vars(self)` carries the notes that were added with `add_note`.
        return type(self), (self.asked, self.found, self.hint), vars(self)


def shown(value: object, length: int = 60) -> str:
    """Returns the repr of a value for a message, truncated to `length`; its type name if `repr` fails, as for a deleted array."""
    try:
        text = repr(value)
    except Exception:
        text = f"<{type(value).__name__}>"
    return text if len(text) <= length else f"{text[: length - 3]}..."


def listed(names: Sequence[str], most: int = 8) -> str:
    """Returns names for a message: all, or the first `most` and the number of the others.

    Example:
      >>> listed(["rank 1", "rank 2", "rank 3"], most=2)
      'rank 1, rank 2 and 1 more'
    """
    if len(names) <= most:
        return ", ".join(names)
    return f"{', '.join(names[:most])} and {len(names) - most} more"


class InvalidArgumentError(PhalanxError, ValueError):
    """An argument is invalid in every context."""


class DeviceError(InvalidArgumentError):
    """A device is unknown, absent or listed twice."""


class ReduceOpError(InvalidArgumentError):
    """An operation, dim or dtype cannot be reduced."""


class CallError(InvalidArgumentError, TypeError):
    """A function cannot be called with the arguments that it gets."""


class InputError(InvalidArgumentError):
    """Data cannot be split into per-replica batches."""


class CardinalityError(InputError, TypeError):
    """The length of a dataset is unknown."""


class ContextError(PhalanxError, RuntimeError):
    """A valid call was made in the wrong context."""


class MixedStrategyError(ContextError):
    """Two strategies were mixed where only one is allowed."""


class StartupError(PhalanxError, RuntimeError):
    """This process can no longer be set up, or not safely."""


class MissingDependencyError(PhalanxError, ImportError):
    """An optional library is not installed."""


class VariableError(PhalanxError, ValueError):
    """A variable does not support the requested operation."""


class AggregationError(VariableError):
    """The aggregation policy rejects a write to a variable."""


class NestedWriteError(VariableError):
    """A variable was written inside a jax.lax body or another inner trace."""


class VariableIndexError(VariableError, IndexError):
    """An index is out of range for the variable."""


class TapeError(PhalanxError, RuntimeError):
    """A gradient tape was used where it cannot record."""


class TraceError(PhalanxError, RuntimeError):
    """A replica function cannot be traced into one program."""


class OutOfRangeError(PhalanxError, IndexError):
    """An iterator has no more batches."""


class StateLostError(PhalanxError, RuntimeError):
    """A program failed and destroyed its donated variables."""


class PeerLostError(PhalanxError, RuntimeError):
    """Another process of the cluster died."""


class ServerLostError(PhalanxError, RuntimeError):
    """A parameter server died, and its variables with it."""


class WorkerLostError(PhalanxError, RuntimeError):
    """A worker keeps failing, or makes no progress."""


class CancelledError(PhalanxError, RuntimeError):
    """A scheduled step will not finish."""


class CheckpointError(PhalanxError, RuntimeError):
    """A checkpoint cannot be written or read."""


class CheckpointMismatchError(CheckpointError, AssertionError):
    """A checkpoint contains other objects than those that it is restored into."""


class SummaryError(PhalanxError, RuntimeError):
    """Summaries cannot be written."""


class NanLossDuringTrainingError(PhalanxError, RuntimeError):
    """The loss of a training step is NaN."""


class DivergenceError(PhalanxError, AssertionError):
    """Replicas hold different values of the same variable, or workers train with different learning rates or callbacks."""


class ClusterError(PhalanxError, ValueError):
    """A cluster description is invalid."""


class ClusterTypeError(ClusterError, TypeError):
    """A cluster description, or a part of one, has the wrong type."""


class ClusterSourceError(ClusterError, RuntimeError):
    """An environment or a service does not describe the cluster, or does not yet."""


class RecompilationWarning(UserWarning):
    """A function is recompiled too often."""


class SlipWarning(UserWarning):
    """The code looks like a mistake but may be intended, so it is not an error."""


def warn_of_slip(found: str, hint: str, category: type[UserWarning] = SlipWarning) -> None:
    """Warns about a probable mistake, once per process and line of user code. The warning names that line.

    Args:
      found: what looks like a mistake, and its consequence, in full sentences.
      hint: what to write instead.
      category: the class of the warning.
    """
    message = printable(f"{found}\nHINT: {hint}")
    _warn_once(message, category, user_place())  # type: ignore[arg-type]


@functools.cache
def _warn_once(message: str, category: type[UserWarning], place: Place | None) -> None:
    if place is None:
        # 3 is the caller of `warn_of_slip`: the wrapper of `functools.cache` has no frame of Python.
        warnings.warn(message, category, stacklevel=3)
    else:
        # Without the registry of a module, because the cache of this function shows a warning once.
        warnings.warn_explicit(message, category, place.filename, place.lineno)


suggest_names(__name__)
