# SPDX-License-Identifier: Apache-2.0
"""The share of a batch of the replica that is traced, for the losses and metrics of Keras."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, final

import jax
import jax.numpy as jnp
import keras
from typing_extensions import override

from phalanx._src import compat
from phalanx._src.compat import Variable
from phalanx._src.tracing import averages, context
from phalanx._src.tracing.access import num_replicas
from phalanx._src.tracing.boundary import combine
from phalanx._src.tracing.entry import Entry
from phalanx.typing import PyTree


@final
class BatchShare(compat.AbstractBatchShare):
    """See the base.

    Args:
      scope: the scope of the trace.
    """

    def __init__(self, scope: compat.AbstractLiftScope) -> None:
        self._scope = scope

    @override
    def example_mask(self) -> jax.Array | None:
        replica = context.get_replica_context()
        return None if replica is None else replica.example_mask

    @override
    def sizes(self, tree: PyTree) -> Sequence[int]:
        rows = context.require_replica().rows
        places = next((len(x) for x in jax.tree.leaves(tree) if jnp.ndim(x)), 0)
        counts = [places] * num_replicas() if rows is None else rows.counts
        # Arrays of one row are traced otherwise than others, as they broadcast.
        return sorted({sum(counts), max(counts), min(counts)} - {0, 1}, reverse=True) or [2]

    @override
    @contextmanager
    def whole_batch(self, tree: PyTree) -> Iterator[PyTree]:
        leaves, form = jax.tree.flatten(tree)
        arrays, masks = context.require_replica().all_gather((leaves, list(map(compat.mask_of, leaves))), axis=0)
        whole = jax.tree.unflatten(form, map(compat.masked, arrays, masks))
        with context.enter(replace(context.current(), whole=True)):
            yield whole

    @override
    def total(self, value: jax.Array) -> jax.Array:
        total: jax.Array = context.require_replica().all_reduce("SUM", value)
        return total

    @override
    def part_of(self, total: jax.Array) -> jax.Array:
        return jnp.where(context.require_replica().replica_id_in_sync_group == 0, total, jnp.zeros_like(total))

    @override
    @contextmanager
    def across_replicas(self, variables: Sequence[Variable]) -> Iterator[None]:
        scope = compat.active_scope()
        # A plain scope of Keras, in a stateless step, has values that this one does not know.
        values = [] if scope is self._scope or scope is None else [scope.get_current_value(v) for v in variables]
        # As in `merge_call`: the values are those of all replicas, which are already running.
        with context.enter(context.Mode(context.get_strategy(), None, merging=True)):
            if not values:
                yield
                return
            totals = combine([Entry(v, x, x) for v, x in zip(variables, values, strict=True)], None)
            with keras.StatelessScope(state_mapping=list(zip(variables, totals, strict=True))):
                yield

    @override
    def share_of_loss(self, total: jax.Array, count: jax.Array | None) -> jax.Array:
        return averages.share_of_loss(context.require_replica(), total, count)

    @property
    @override
    def is_averaging(self) -> bool:
        self._scope.note_read()
        mode = context.current()
        return mode.averaging and mode.replica is not None

    @property
    @override
    def is_part(self) -> bool:
        return self.is_averaging and num_replicas() > 1 and not self.is_whole

    @property
    @override
    def is_whole(self) -> bool:
        self._scope.note_read()
        return context.current().whole

    @override
    def weight_of_mean(self, weight: jax.Array | None) -> jax.Array | float:
        return averages.weight_of_mean(context.require_replica(), weight)

    @override
    def moments(
        self, values: jax.Array, counts: jax.Array, axes: Sequence[int], *, everywhere: bool
    ) -> tuple[Any, Any]:
        return averages.moments(context.require_replica(), values, counts, axes, everywhere=everywhere)

    @override
    def check_loss(self, name: str, reduction: str) -> None:
        averages.check_loss(name, reduction, replicas=num_replicas())

    @override
    def weight_of_value(self) -> jax.Array | None:
        replica = context.require_replica()
        return None if replica.rows is None else jnp.asarray(replica.weight) * replica.num_replicas_in_sync
