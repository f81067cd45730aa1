# SPDX-License-Identifier: Apache-2.0
"""The policy table: what reading and assigning a Keras variable does under a strategy.

There is one variable type, `keras.Variable`. Its `synchronization` and `aggregation` select a row:

    synchronization   aggregation          write in a replica function     combined over the replicas
    auto, on_write    sum                  at once                         sum of the values (or increments)
    auto, on_write    mean                 at once                         mean of the values (or increments)
    auto, on_write    only_first_replica   at once                         the first replica's value
    auto, on_write    none, trainable      refused                         (an optimizer may write)
    auto, on_write    none, floating       each replica its own            mean, when the program ends
    auto, on_write    none, other dtype    each replica its own            the first's, when the program ends
    on_read           sum                  each replica its own            sum, when read outside
    on_read           mean                 each replica its own            mean, when read outside
    on_read           only_first_replica   each replica its own            the first's, when read outside
    on_read           none                 as auto with none

In cross-replica context an assignment stores the value as it is, and a read gives the combined value. In update context
(an optimizer at work, `extended.update`) every replica holds the same gradients and assignments are free. `assign_add` and
`assign_sub` combine the increments, so `assign_add(1)` under `sum` on two replicas adds two.
"""

import enum
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import jax.numpy as jnp

from phalanx.compat import Variable, raw_value
from phalanx.errors import AggregationError

T = TypeVar("T")


class Write(enum.Enum):
    """When a write in a replica function is combined over the replicas."""

    NOW = enum.auto()
    AT_BOUNDARY = enum.auto()
    REFUSED = enum.auto()


class Combine(enum.Enum):
    """How the replicas' values become one."""

    SUM = enum.auto()
    MEAN = enum.auto()
    FIRST = enum.auto()


@dataclass(frozen=True)
class Policy:
    """A row of the table.

    Args:
      write: when a write is combined.
      combine: how.
      on_read: whether each replica keeps its own component from program to program.
    """

    write: Write
    combine: Combine
    on_read: bool = False


_COMBINE = {"sum": Combine.SUM, "mean": Combine.MEAN, "only_first_replica": Combine.FIRST}


def policy_of(variable: Variable) -> Policy:
    """Returns the row of the table for `variable`.

    Raises:
      AggregationError: a mean of integers, or synchronization "none".
    """
    aggregation, floating = variable.aggregation, jnp.issubdtype(variable.dtype, jnp.floating)
    if aggregation == "mean" and not floating:
        raise AggregationError(
            f'{describe(variable)} with aggregation="mean"',
            f"the mean of {variable.dtype} values is no {variable.dtype}.",
            'aggregation="sum", or dtype="float32"',
        )
    if variable.synchronization == "none":
        raise AggregationError(
            f'{describe(variable)} with synchronization="none"',
            "a strategy keeps its replicas in step.",
            'synchronization="auto" or "on_read"',
        )
    if aggregation == "none":
        if variable.trainable and floating and variable.synchronization != "on_read":
            return Policy(Write.REFUSED, Combine.MEAN)
        return Policy(Write.AT_BOUNDARY, Combine.MEAN if floating else Combine.FIRST)
    if variable.synchronization == "on_read":
        return Policy(Write.AT_BOUNDARY, _COMBINE[aggregation], on_read=True)
    return Policy(Write.NOW, _COMBINE[aggregation])


def refuse_write(variable: Variable) -> AggregationError:
    """Returns the error for a write that the table refuses."""
    return AggregationError(
        f"assign to {describe(variable)} in replica context",
        'it is trainable and has aggregation="none", so the replicas would hold different weights.',
        'keras.Variable(..., aggregation="mean") (or "sum", "only_first_replica"), or assign in cross-replica context: '
        "phalanx.get_replica_context().merge_call(lambda strategy: variable.assign(value))",
    )


def describe(variable: Variable) -> str:
    """Names a variable in a message, for example `variable 'dense/kernel' (784, 512) float32`."""
    return f"variable {variable.path!r} {tuple(variable.shape)} {variable.dtype}"


class IdentityMap(Generic[T]):
    """A weak map keyed by the identity of a variable; Keras variables compare by value, so no dict can hold them.

    Example:
      >>> import keras
      >>> seen, v = IdentityMap(), keras.Variable(1.0)
      >>> seen[v] = "yes"
      >>> seen.get(v)
      'yes'
    """

    def __init__(self) -> None:
        self._items: dict[int, tuple[weakref.ref[Variable], T]] = {}

    def __setitem__(self, variable: Variable, item: T) -> None:
        key = id(variable)
        if key in self._items:
            self._items[key] = (self._items[key][0], item)
        else:
            self._items[key] = (weakref.ref(variable, lambda _: self._items.pop(key, None)), item)

    def get(self, variable: Variable) -> T | None:
        """Returns what is kept for `variable`, or None."""
        entry = self._items.get(id(variable))
        return entry[1] if entry else None

    def discard(self, variable: Variable) -> None:
        """Forgets `variable`."""
        self._items.pop(id(variable), None)


def initial_components(variable: Variable, value: Any, num_replicas: int) -> Any:
    """Returns what the replicas hold of an on-read variable whose combined value is `value`, `(num_replicas, ...)`."""
    if policy_of(variable).combine is not Combine.SUM:
        return jnp.stack([value] * num_replicas)
    return jnp.stack([value] + [jnp.zeros_like(value)] * (num_replicas - 1))


class Slot:
    """What the engine remembers of one variable between programs.

    Args:
      array: weakly, the array it stored or placed last; another one in the variable was assigned from outside.
      home: the devices on which it placed that array.
      owned: whether a program of ours made that array, so that it may be donated to the next one.
      components: the replicas' own values that belong to that array, `(num_replicas, ...)`, if the variable is on-read.
    """

    __slots__ = ("array", "components", "home", "owned")

    def __init__(self) -> None:
        self.array: Callable[[], Any] = lambda: None
        self.home: Any = None
        self.owned = False
        self.components: Any = None

    def store(self, array: Any, home: Any, components: Any = None, *, owned: bool) -> None:
        """Remembers that `array` is what the variable holds."""
        self.array, self.home, self.owned, self.components = weakref.ref(array), home, owned, components


_slots: IdentityMap[Slot] = IdentityMap()


def slot_of(variable: Variable) -> Slot:
    """Returns the slot of `variable`."""
    slot = _slots.get(variable)
    if slot is None:
        slot = _slots[variable] = Slot()
    return slot


def components_of(variable: Variable) -> Any:
    """Returns the replicas' own values of an on-read variable; None where it was assigned from outside since."""
    slot = slot_of(variable)
    return slot.components if slot.array() is raw_value(variable) else None
