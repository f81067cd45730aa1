# SPDX-License-Identifier: Apache-2.0
"""Places rows of the host on the devices of the replicas, as one global array per leaf.

All replicas have arrays of equal shapes. If they have different numbers of rows, the arrays have room for the most, and what is
real comes first.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from phalanx._src.input.feed import Step
from phalanx._src.input.landing import Landed, Landing, columns_of, write
from phalanx._src.input.shard import InputWorker
from phalanx._src.input.sources.base import Owner
from phalanx._src.input.sources.rows import read
from phalanx._src.mesh.arrays import as_number, copied, is_array, map_named
from phalanx._src.mesh.topology import Topology
from phalanx._src.mesh.values import ComponentSizes, PerReplica, flatten, is_distributed
from phalanx._src.runtime.settings import settings
from phalanx.errors import InvalidArgumentError, arguments
from phalanx.typing import PyTree


@dataclass(frozen=True)
class ValueContext:
    """The argument of the function passed to `experimental_distribute_values_from_function`. May be used in any context.

    Args:
      replica_id_in_sync_group: index of the replica that the value is for, from 0.
      num_replicas_in_sync: number of replicas.

    Raises:
      InvalidArgumentError: an argument is not an integer, or is too small.

    Source: tf.distribute.experimental.ValueContext.

    Example:
      >>> print(ValueContext(replica_id_in_sync_group=1, num_replicas_in_sync=2))
      ValueContext(replica 1 of 2)
    """

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1

    def __post_init__(self) -> None:
        arguments.integer("replica_id_in_sync_group", self.replica_id_in_sync_group, least=0)
        arguments.integer("num_replicas_in_sync", self.num_replicas_in_sync)

    def __str__(self) -> str:
        return f"ValueContext(replica {self.replica_id_in_sync_group} of {self.num_replicas_in_sync})"


class Placement:
    """Places the pieces of one dataset on the devices.

    Args:
      topology: devices of the replicas.
      worker: the worker that read the pieces.
      landing: lays out the rows of the replicas.
      fetches: whether to transfer to the devices. If not, the leaves are NumPy arrays in the same layout.
    """

    def __init__(self, topology: Topology, worker: InputWorker, landing: Landing, *, fetches: bool) -> None:
        self._topology, self._worker, self._landing, self._fetches = topology, worker, landing, fetches

    def place(self, steps: Sequence[Step], room: int | None) -> PyTree:
        """Places one batch, or a stack of batches.

        Args:
          steps: rows of this worker, per step. All steps have equal numbers of rows.
          room: number of steps that the stack has room for. None for the batch of one step.

        Returns:
          A pytree of `PerReplica`. A pytree of arrays if there is one replica, and the batch is not empty.
        """
        step, replicas = steps[0], self._worker.num_replicas
        # Workers that share each batch know the rows of the others without asking.
        counts = step.counts if len(step.counts) == replicas else self._worker.all_shares(step.rows)
        first = 0 if self._fetches else self._worker.index * self._worker.replicas
        rows, places = ComponentSizes.of_counts(counts, first), max(1, *counts)
        columns, tree = columns_of(step.piece)
        # One replica: return plain arrays, which are cheaper than `PerReplica`.
        if room is None and rows is None and replicas == 1 and not settings.wraps_one_replica:
            batch = tree.unflatten([leaf[:] if isinstance(leaf, Landed) else read(leaf) for (leaf, *_) in columns])
            return self._topology.put_replicated(batch) if self._fetches else batch
        local = step.piece.counts
        # The parts of a dataset function can each be used where they are.
        is_apart = len(step.piece.parts) > 1 and not any(isinstance(leaf, Landed) for leaf, *_ in columns)
        if room is None and rows is None and self._fetches and is_apart:
            return tree.unflatten([PerReplica(self._topology.join_per_replica(list(map(read, x)))) for x in columns])
        later = [columns_of(each.piece)[0] for each in steps[1:]] if room else ()
        leaves = [self._landing.stacked(each, local, places, room) for each in zip(columns, *later, strict=True)]
        rows = rows if room is None else rows and rows.of_steps(room)
        placed = self._topology.put_per_replica(leaves) if self._fetches else leaves
        return tree.unflatten([PerReplica(x, rows) for x in placed])


def components(value: Any) -> Any:
    """Returns the result of a `value_fn` as one replica's components of distributed values.

    Raises:
      InvalidArgumentError: a leaf is a distributed value.
      InputError: a leaf is a number or an array that JAX cannot hold.
    """
    for leaf in flatten(value)[0]:
        if is_distributed(leaf):
            raise InvalidArgumentError(
                "value_fn",
                f"it returned a {type(leaf).__name__}, but must return the value of a single replica.",
                "strategy.experimental_local_results(value)[context.replica_id_in_sync_group]",
            )
    return map_named(_kept, value, "value_fn's result", is_leaf=_is_none)


def distribute_values(values: Sequence[Any], topology: Topology) -> PyTree:
    """Returns a pytree of `PerReplica`.

    Args:
      values: one pytree per local replica. Arrays may differ in dim 0.
      topology: devices of the replicas.

    Raises:
      InvalidArgumentError: the structures differ, or the shapes beyond dim 0.
    """
    flat: list[tuple[list[Any], Any]] = [jax.tree.flatten(v, is_leaf=_is_none) for v in values]
    trees = [tree for _, tree in flat]
    if any(tree != trees[0] for tree in trees):
        raise InvalidArgumentError(
            "value_fn",
            f"it returned different structures: {trees[0]} and {next(t for t in trees if t != trees[0])}.",
            "return one structure for all replicas",
        )
    return trees[0].unflatten([_stack(parts, topology) for parts in zip(*(leaves for leaves, _ in flat), strict=True)])


def _is_none(value: object) -> bool:
    return value is None


def _kept(value: Any, name: str) -> Any:
    """Returns a leaf as it is now: the next call of the function may write into the same array."""
    number = as_number(value, name)
    return copied(value if number is None else number)


def _stack(parts: Sequence[Any], topology: Topology) -> PerReplica:
    if not all(is_array(p) or isinstance(p, (int, float, complex, np.bool_)) for p in parts):
        return PerReplica(tuple(parts))
    arrays = [p if isinstance(p, jax.Array) else np.asarray(p) for p in parts]
    shapes = {a.shape for a in arrays}
    if len({s[1:] for s in shapes}) > 1 or (() in shapes and len(shapes) > 1):
        raise InvalidArgumentError(
            "value_fn",
            f"it returned arrays of the shapes {sorted(shapes)}, which may differ in dim 0 only.",
            "return arrays of equal shapes",
        )
    counts = [len(a) if a.ndim else 1 for a in arrays]
    all_counts = topology.exchange(np.array(counts))
    is_equal = bool((all_counts == counts[0]).all())
    if is_equal and all(a.dtype == arrays[0].dtype for a in arrays):
        return PerReplica(topology.join_per_replica(arrays))
    if () in shapes:
        return PerReplica(topology.put_per_replica([np.stack(arrays)])[0])
    landing = Landing(Owner.CALLER, topology.pool)
    local = landing.empty(arrays, len(arrays), 1, int(all_counts.max()))[:, 0]
    write(local, arrays, counts)
    rows = None if is_equal else ComponentSizes(tuple((count,) for count in all_counts.ravel().tolist()))
    return PerReplica(topology.put_per_replica([local])[0], rows)
