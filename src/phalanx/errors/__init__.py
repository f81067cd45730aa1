# SPDX-License-Identifier: Apache-2.0
"""Everything that Phalanx raises, in one tree.

    PhalanxError
    ├── InvalidArgumentError (ValueError)     an argument that no context would accept
    │   ├── DeviceError                       a device that is unknown, absent or given twice
    │   ├── ReduceOpError                     an operation, dim or dtype that cannot be reduced
    │   └── InputError                        data that cannot be split into per-replica batches
    │       └── CardinalityError (TypeError)  the length of a dataset that has none
    ├── ClusterError (ValueError)             a cluster that is described wrongly
    │   ├── ClusterTypeError (TypeError)      a description, or a part of one, of the wrong type
    │   └── ClusterSourceError (RuntimeError) a place that does not tell, or not yet, what the cluster is
    ├── ContextError (RuntimeError)           the right call in the wrong context
    │   └── MixedStrategyError                two strategies where one is allowed
    ├── StartupError (RuntimeError)           too late, or unsafe, to set up this process
    ├── MissingDependencyError (ImportError)  an optional library that is not installed
    ├── VariableError (ValueError)            a variable that cannot do what was asked
    │   ├── AggregationError                  a write that the policy table refuses
    │   ├── NestedWriteError                  a write inside a jax.lax body or another inner trace
    │   └── VariableIndexError (IndexError)   an index that the variable does not have
    ├── TapeError (RuntimeError)              a gradient tape used where it cannot record
    ├── TraceError (RuntimeError)             a replica function that cannot become one program
    ├── OutOfRangeError (IndexError)          an iterator that has no further batch
    ├── StateLostError (RuntimeError)         a failed program took donated variables with it
    ├── PeerLostError (RuntimeError)          another process of the cluster has died
    ├── ServerLostError (RuntimeError)        a parameter server has died, and its variables with it
    ├── WorkerLostError (RuntimeError)        a worker that is lost again and again, or does not get on
    ├── CancelledError (RuntimeError)         a scheduled step that will not run to its end
    └── DivergenceError (AssertionError)      replicas that hold different values of one variable

Every message has three parts: what was asked, what was found or is allowed, and a line to write instead.

Warnings: `RecompilationWarning`, and `SlipWarning` for mistakes that cannot be refused.
"""

import warnings
from typing import Self

from phalanx.errors.frames import user_place


class PhalanxError(Exception):
    """Base of all errors of Phalanx.

    Args:
      asked: what the caller asked for, with the argument and its value.
      found: what was found, or what is allowed.
      hint: the line to write instead; empty where there is none.

    Example:
      >>> print(PhalanxError("n=0", "n must be at least 1.", "n=1"))
      n=0: n must be at least 1.
      HINT: n=1
    """

    def __init__(self, asked: str, found: str = "", hint: str = "") -> None:
        # Keras makes an error that passes through a layer anew, with its message as the one argument.
        self.asked, self.found, self.hint = asked, found, hint
        super().__init__(asked + (f": {found}" if found else "") + (f"\nHINT: {hint}" if hint else ""))

    def __reduce__(self) -> tuple[type[Self], tuple[str, str, str], dict[str, object]]:
        # With the notes that were added to it.
        return type(self), (self.asked, self.found, self.hint), vars(self)


def shown(value: object, length: int = 60) -> str:
    """Returns a value as messages show it: its repr, cut; its type where it has no repr, as of a deleted array."""
    try:
        text = repr(value)
    except Exception:
        text = f"<{type(value).__name__}>"
    return text if len(text) <= length else f"{text[: length - 3]}..."


class InvalidArgumentError(PhalanxError, ValueError):
    """An argument that no context would accept."""


class DeviceError(InvalidArgumentError):
    """A device that is unknown, absent or given twice."""


class ReduceOpError(InvalidArgumentError):
    """An operation, dim or dtype that cannot be reduced."""


class InputError(InvalidArgumentError):
    """Data that cannot be split into per-replica batches."""


class CardinalityError(InputError, TypeError):
    """The length of a dataset that has none."""


class ContextError(PhalanxError, RuntimeError):
    """The right call in the wrong context."""


class MixedStrategyError(ContextError):
    """Two strategies where one is allowed."""


class StartupError(PhalanxError, RuntimeError):
    """Too late, or unsafe, to set up this process."""


class MissingDependencyError(PhalanxError, ImportError):
    """An optional library that is not installed."""


class VariableError(PhalanxError, ValueError):
    """A variable that cannot do what was asked."""


class AggregationError(VariableError):
    """A write that the policy table refuses."""


class NestedWriteError(VariableError):
    """A write inside a jax.lax body or another inner trace."""


class VariableIndexError(VariableError, IndexError):
    """An index that the variable does not have."""


class TapeError(PhalanxError, RuntimeError):
    """A gradient tape used where it cannot record."""


class TraceError(PhalanxError, RuntimeError):
    """A replica function that cannot become one program."""


class OutOfRangeError(PhalanxError, IndexError):
    """An iterator that has no further batch."""


class StateLostError(PhalanxError, RuntimeError):
    """A failed program took donated variables with it."""


class PeerLostError(PhalanxError, RuntimeError):
    """Another process of the cluster has died."""


class ServerLostError(PhalanxError, RuntimeError):
    """A parameter server has died, and its variables with it."""


class WorkerLostError(PhalanxError, RuntimeError):
    """A worker that is lost again and again, or does not get on."""


class CancelledError(PhalanxError, RuntimeError):
    """A scheduled step that will not run to its end."""


class DivergenceError(PhalanxError, AssertionError):
    """Replicas that hold different values of one variable."""


class ClusterError(PhalanxError, ValueError):
    """A cluster that is described wrongly."""


class ClusterTypeError(ClusterError, TypeError):
    """A description of a cluster, or a part of one, of the wrong type."""


class ClusterSourceError(ClusterError, RuntimeError):
    """An environment or a service that does not tell, or not yet, what the cluster is."""


class RecompilationWarning(UserWarning):
    """A function that is compiled again and again."""


class SlipWarning(UserWarning):
    """A mistake that cannot be refused, because somebody may mean it."""


_slips: set[object] = set()


def warn_of_slip(found: str, hint: str) -> None:
    """Warns of a mistake that cannot be refused, once per line of the user's and process.

    Args:
      found: what looks like a mistake, and what it leads to, in full sentences.
      hint: the line to write instead.
    """
    place = user_place()
    if (found, place) in _slips:
        return
    _slips.add((found, place))
    message = f"{found}\nHINT: {hint}"
    if place is None:
        warnings.warn(message, SlipWarning, stacklevel=2)
    else:
        warnings.warn_explicit(message, SlipWarning, place.filename, place.lineno)
