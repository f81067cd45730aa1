# SPDX-License-Identifier: Apache-2.0
"""How a traced function reads and writes Keras variables.

A variable becomes an input of the trace when the function first uses it, and an output if the function writes it. So users need
not list the variables of a function.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import jax
import jax.numpy as jnp
import keras
from jax import lax
from typing_extensions import override

from phalanx._src import compat
from phalanx._src.collectives import primitives
from phalanx._src.collectives.dtypes import is_integer
from phalanx._src.compat import Variable
from phalanx._src.mesh.layout import REPLICA_AXIS
from phalanx._src.options import ReduceOp
from phalanx._src.tracing import context, equality
from phalanx._src.tracing.boundary import combine, combined, first_component, mean_of_integers
from phalanx._src.tracing.discovery import AbstractPass
from phalanx._src.tracing.entry import Entry, ShardEntry
from phalanx._src.tracing.inner_traces import InnerTraces
from phalanx._src.tracing.policy import Combine, Write, describe, refuse_write
from phalanx._src.tracing.structure import add_once
from phalanx.errors import VariableError
from phalanx.errors.frames import user_place


class VariableScope(compat.AbstractLiftScope):
    """Reads and writes the variables of a traced function.

    Args:
      current_pass: the pass that runs the function.
      mapped: whether the function runs under `shard_map`, for one of several replicas.

    Attributes:
      pass_: the pass that runs the function.
      mapped: whether the function runs under `shard_map`.
      entries: the variables that were used so far, by id.
      inner_traces: what JAX traces inside the function.
      free_writes: number of surrounding update contexts, in which any assignment is allowed.
      tapes: one function per gradient tape that records. It watches variables that are used for the first time.
    """

    def __init__(self, current_pass: AbstractPass, *, mapped: bool = False) -> None:
        super().__init__(collect_losses=True)
        self.pass_ = current_pass
        self.mapped = mapped
        self.entries: dict[int, Entry] = {}
        self.tapes: list[Callable[[Sequence[Entry]], None]] = []
        self._deferred: set[int] = set()
        self.inner_traces = InnerTraces()
        self.free_writes = 0
        self._averages: set[int] = set()

    @override
    def __enter__(self) -> Self:
        super().__enter__()
        self.inner_traces.__enter__()
        return self

    @override
    def __exit__(self, *exception: object) -> None:
        self.inner_traces.__exit__(*exception)
        super().__exit__(*exception)

    @override
    def note_read(self) -> None:
        self.inner_traces.note_read()

    def entry(self, variable: Variable) -> Entry:
        """Returns the entry of `variable`. The first use creates it."""
        entry = self.entries.get(id(variable))
        if entry is None:
            initial, dim = self.pass_.initial(variable), self.pass_.dim(variable)
            entry = (
                Entry(variable, initial, initial)
                if dim is None
                else ShardEntry(variable, initial, dim, self.pass_.trace)
            )
            self.entries[id(variable)] = entry
            for watch in self.tapes:  # Tapes that were entered before the variable was used.
                watch([entry])
        return entry

    def components(self, variable: Variable, num_replicas: int) -> jax.Array | None:
        """Returns the replicas' components of an on-read variable. None if its value determines them."""
        entry = self.entry(variable)
        # After a write, the components from the start of the function are stale.
        if num_replicas > 1 and entry.components is None and entry.policy.on_read and not entry.written:
            entry.components = self.pass_.components(variable, num_replicas)
        return entry.components

    def lookup(self, table: Variable, ids: jax.Array) -> jax.Array:
        """Returns rows of a table on parameter servers. The program fetches only the rows that it looks up."""
        self.note_read()
        self._require_current(table)
        positions = self.pass_.look_up(table, ids)
        return self.entry(table).value[positions]

    @override
    def get_current_value(self, variable: Variable) -> jax.Array:
        self.note_read()
        return self.value(variable)

    def value(self, variable: Variable) -> jax.Array:
        """Returns the value of `variable`. Unlike `get_current_value` it does not record a read.

        Control-flow bodies use it: they record one read when they start.
        """
        self._require_current(variable)
        entry = self.entry(variable)
        is_merging = self.mapped and context.in_cross_replica_context()
        outer = compat.outer_of(variable)
        if outer is not None and (is_merging or entry.value is None):
            return self.value(outer)
        # A merge function must see one value, although the replicas hold different ones.
        if is_merging and (entry.diverged or entry.policy.is_local):
            value: jax.Array = combine([entry], None)[0]
        else:
            value = combined(entry.policy.combine, entry.components) if entry.value is None else entry.value
        return value

    @override
    def add_update(self, update: tuple[Variable, Any]) -> None:
        variable, value = update
        entry = self._writable(variable)
        value = self._combined(entry, value, entry.value)
        # A moving average is sent to parameter servers as an increment, so that workers do not overwrite each other.
        if id(variable) in self._averages:
            entry.add(value, value - entry.value)
        else:
            entry.replace(value)
        # An assignment in a merge function makes the variable equal on all replicas again.
        if self.mapped and context.in_cross_replica_context():
            entry.diverged = False
        self._follow(entry)

    @override
    def add_delta(self, variable: Variable, delta: jax.Array, *, negative: bool = False) -> jax.Array:
        entry = self._writable(variable)
        delta = keras.ops.convert_to_tensor(delta, dtype=entry.value.dtype)
        if jnp.broadcast_shapes(delta.shape, entry.value.shape) != entry.value.shape:
            raise VariableError(
                f"an increment of shape {delta.shape} to {describe(variable)}",
                "the increment does not broadcast to the shape of the variable.",
                f"use an increment of shape {tuple(variable.shape)}",
            )
        delta = self._combined(entry, delta, jnp.zeros_like(delta))
        # Add or subtract directly, as hand-written code does. XLA removes the increment if the program does not return it.
        entry.add(*((entry.value - delta, -delta) if negative else (entry.value + delta, delta)))
        self._follow(entry)
        return entry.value

    def _follow(self, entry: Entry) -> None:
        """Makes replicas continue from a value that was assigned outside them, and not from the outer weights before."""
        outer = compat.outer_of(entry.variable)
        is_outside = not self.mapped or context.in_cross_replica_context()
        if outer is not None and is_outside and not self.free_writes and num_replicas() == 1:
            self.add_update((outer, entry.value))

    def commit(self, other: Entry) -> None:
        """Applies the change that a control-flow body, such as the one of `phalanx.scan`, made to a variable."""
        entry = self._writable(other.variable)
        if other.replaced:
            entry.replace(other.value)
        else:
            entry.add(other.value, _difference(other.value, entry.value))
        entry.diverged |= other.diverged

    @override
    def note_averages(self, variables: Sequence[Variable]) -> None:
        self._averages.update(map(id, variables))

    def _require_current(self, variable: Variable) -> None:
        """Raises if a deferred update will change `variable`, because its new value does not exist yet."""
        if id(variable) in self._deferred:
            raise VariableError(
                f"{describe(variable)} was used after optimizer.apply in the same step, at {user_place()}",
                "the strategy updates it only after the step, so its new value does not exist yet.",
                "use it before optimizer.apply, or in the next strategy.run",
            )

    @override
    @contextmanager
    def updating(self) -> Iterator[None]:
        self.free_writes += 1
        try:
            yield
        finally:
            self.free_writes -= 1

    def _writable(self, variable: Variable) -> Entry:
        """Returns the entry of `variable` for a write, and marks it as written."""
        self.inner_traces.require_outside(
            f"assign to {describe(variable)}",
            "phalanx.scan, phalanx.cond, phalanx.while_loop or phalanx.remat instead of the JAX function; jax.jit is not "
            "needed, because the step is compiled anyway",
        )
        self._require_current(variable)
        entry = self.entry(variable)
        if entry.value is None:
            entry.value = self.value(variable)
        entry.written = True
        self.inner_traces.values_change()
        return entry

    def _combined(self, entry: Entry, value: jax.Array, unchanged: jax.Array) -> jax.Array:
        """Returns a value, or an increment, as the policy table combines it over the replicas. `unchanged` is the one that changes nothing."""
        if self.mapped and context.in_cross_replica_context():
            # A merge function may have closed over a value that differs between replicas. The value of replica 0 is used, so
            # that the variable stays equal on all of them.
            value = value if self.free_writes else primitives.broadcast(value, lax.axis_size(REPLICA_AXIS))
            return first_component(entry.policy, value)
        count = 1 if self.free_writes else num_replicas()
        if count == 1:
            return value
        if entry.policy.write is Write.REFUSED:
            if (description := describe(entry.variable)) in self.pass_.refused:
                raise refuse_write(description)
            add_once(entry.variable, self.pass_.notes.equal)
            return equality.marked(value, description)
        if entry.policy.write is Write.AT_BOUNDARY:
            entry.diverged = True
            if context.current().whole and entry.policy.combine is Combine.SUM:
                # All replicas have computed this from the same rows, which count once.
                return jnp.where(lax.axis_index(REPLICA_AXIS) == 0, value, unchanged)
            rows = context.require_replica().rows if entry.policy.on_demand else None
            # A mean over no rows is none: a replica without real rows keeps its value.
            return value if rows is None else rows.with_rows(value, unchanged)
        if entry.policy.combine is Combine.FIRST or context.current().whole:
            return primitives.broadcast(value, count)
        replica = context.require_replica()
        if entry.policy.combine is Combine.SUM:
            total: jax.Array = replica.all_reduce(ReduceOp.SUM, value).astype(value.dtype)
            return total
        # The mean of `all_reduce` is a float32, in which a counter would stop at 2**24.
        if is_integer(value.dtype):
            mean = mean_of_integers(value, replica.rows)
        else:
            mean = replica.all_reduce(ReduceOp.MEAN, value)
        # A batch without a single real row changes nothing.
        return mean if replica.rows is None or replica.rows.total else unchanged

    @property
    @override
    def replicas_of_rows(self) -> int:
        return lax.axis_size(REPLICA_AXIS) if self.mapped and not context.in_cross_replica_context() else 1


def _difference(value: jax.Array, other: jax.Array) -> jax.Array | None:
    """Returns the increment from `other` to `value`. None for bools, which JAX does not subtract."""
    return None if value.dtype == jnp.bool_ else value - other


def num_replicas() -> int:
    """Returns the number of replicas over which a replica function communicates. 1 in cross-replica context."""
    mode = context.current()
    return 1 if mode.replica is None else mode.strategy.num_replicas_in_sync
