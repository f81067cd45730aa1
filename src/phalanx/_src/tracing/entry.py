# SPDX-License-Identifier: Apache-2.0
"""The states of variables while a function is traced."""

from dataclasses import dataclass

import jax
from typing_extensions import override

from phalanx._src.compat import Variable
from phalanx._src.tracing import update_sharding
from phalanx._src.tracing.policy import Policy, policy_of
from phalanx._src.typed_jax import set_current_trace


@dataclass
class Entry:
    """The state of one variable while a function is traced.

    Args:
      variable: the variable.
      initial: its value at the start of the function.
      value: its current value. None for an on-demand variable, whose value is the sum of `components`.
      written: whether the function has written it.
      diverged: whether the replicas hold different values, which the end of the program combines.
      components: in cross-replica context, the replicas' components of an on-read variable, (num_replicas, ...).
      increment: sum of the increments. None if there are none, or if a value was assigned.
      replaced: whether a value was assigned, so that the change is not an increment.
    """

    variable: Variable
    initial: jax.Array
    value: jax.Array
    written: bool = False
    diverged: bool = False
    components: jax.Array | None = None
    increment: jax.Array | None = None
    replaced: bool = False

    def add(self, value: jax.Array, increment: jax.Array | None) -> None:
        """Sets the value after an increment. Asynchronous training sends the increment, so that no worker's update is lost."""
        self.value, self.components = value, None
        # After an assignment, the change depends on more than increments, so it stays an assignment.
        if not self.replaced:
            before = self.increment
            self.increment = increment if before is None or increment is None else before + increment

    def replace(self, value: jax.Array, components: jax.Array | None = None) -> None:
        """Sets a value that does not depend on the old one, so there is no increment."""
        self.value, self.components, self.increment, self.replaced = value, components, None, True

    @property
    def policy(self) -> Policy:
        """The row of the policy table for this variable."""
        return policy_of(self.variable)

    @property
    def dim(self) -> int | None:
        """The dim along which the replicas hold shards of the variable. None if each of them holds the whole."""
        return None

    @property
    def held(self) -> jax.Array:
        """The value or the shard that this replica holds."""
        return self.value

    def holding(self, value: jax.Array) -> jax.Array:
        """Returns this replica's share of a value of the variable."""
        return value

    def shard(self, dim: int) -> jax.Array:
        """Returns this replica's shard of the current value."""
        return update_sharding.shard_of(self.value, dim)

    def put_shard(self, shard: jax.Array, dim: int) -> None:
        """Sets the value of which this is the replica's shard."""
        self.written = True
        self.replace(update_sharding.whole_of(shard, dim))


class ShardEntry(Entry):
    """The state of a slot of which each replica holds a shard. Its value is the whole, which only those gather that ask for it.

    Args:
      variable: the slot.
      shard: this replica's shard of its value at the start of the function.
      dim: the dim along which it is divided.
      trace: the trace that the shard belongs to.
    """

    def __init__(self, variable: Variable, shard: jax.Array, dim: int, trace: object) -> None:
        self.variable, self._dim, self._trace = variable, dim, trace
        self._first = self._shard = shard
        # What the replica function has assigned, which may differ between replicas until the end of the program combines it.
        self._assigned: jax.Array | None = None

    @property
    def initial(self) -> jax.Array:  # type: ignore[override]
        return self._gathered(self._first)

    @property  # type: ignore[override]
    def value(self) -> jax.Array:
        return self._gathered(self._shard) if self._assigned is None else self._assigned

    @value.setter
    def value(self, value: jax.Array) -> None:
        self._assigned = value

    def _gathered(self, shard: jax.Array) -> jax.Array:
        # Not all replicas may enter the `lax` body that reads it, but all of them must gather.
        with set_current_trace(self._trace):
            return update_sharding.whole_of(shard, self._dim)

    @property
    @override
    def dim(self) -> int | None:
        return self._dim

    @property
    @override
    def held(self) -> jax.Array:
        return self._shard if self._assigned is None else self.holding(self._assigned)

    @override
    def holding(self, value: jax.Array) -> jax.Array:
        return update_sharding.shard_of(value, self._dim)

    @override
    def shard(self, dim: int) -> jax.Array:
        return self.held

    @override
    def put_shard(self, shard: jax.Array, dim: int) -> None:
        self._shard, self._assigned, self.written = shard, None, True
