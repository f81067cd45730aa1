# SPDX-License-Identifier: Apache-2.0
"""Places rows of the host on the devices of the replicas, as one global array per leaf.

All replicas have arrays of equal shapes. If they have different numbers of rows, the arrays have room for the most, and what is
real comes first.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from phalanx._src.input import shard
from phalanx._src.input.feed import Step
from phalanx._src.input.shard import InputWorker
from phalanx._src.input.sources.base import Facts, Piece
from phalanx._src.mesh.arrays import as_number, copied, is_array, is_shared_by_cpu, map_named
from phalanx._src.mesh.topology import Topology
from phalanx._src.mesh.values import ComponentSizes, PerReplica, flatten, is_distributed
from phalanx.errors import InputError, InvalidArgumentError, arguments
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


_wrapping: list[bool] = []
"""Not empty while the only replica of a strategy gets a `PerReplica`, too."""


@contextmanager
def always_per_replica() -> Iterator[None]:
    """Places batches in the context as `PerReplica` also for one replica, so that their rows can be told from other arrays."""
    _wrapping.append(True)
    try:
        yield
    finally:
        _wrapping.pop()


class Placement:
    """Places the pieces of one dataset on the devices.

    Args:
      topology: devices of the replicas.
      worker: the worker that read the pieces.
      facts: what is known about the dataset.
      fetches: whether to transfer to the devices. If not, the leaves are NumPy arrays in the same layout.
    """

    def __init__(self, topology: Topology, worker: InputWorker, facts: Facts, *, fetches: bool) -> None:
        self._topology, self._worker, self._fetches = topology, worker, fetches
        # JAX on CPU may use the memory of an aligned NumPy array instead of copying it: jax-ml/jax#37830. Arrays that are
        # not in memory were copied when they were read.
        self._may_share = facts.is_borrowed and facts.is_in_memory and topology.devices[0].platform == "cpu"

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
        parts = step.piece.parts
        # One replica: return plain arrays, which are cheaper than `PerReplica`.
        if room is None and rows is None and replicas == 1 and not _wrapping:
            return self._topology.put_replicated(jax.tree.map(self._own, parts[0])) if self._fetches else parts[0]
        # Batches of a dataset function may be on their devices already. Join them without a copy through the host.
        if room is None and rows is None and _are_on_devices(parts):
            return jax.tree.map(lambda *xs: PerReplica(self._topology.join_per_replica(xs)), *parts)
        flat = [self._local(step.piece, places) for step in steps]
        leaves, tree = flat[0]
        if room is not None:
            leaves = [_stacked(arrays, room) for arrays in zip(*(each for each, _ in flat), strict=True)]
            rows = rows and rows.of_steps(room)
        return tree.unflatten([PerReplica(x, rows) for x in self._put(leaves)])

    def _local(self, piece: Piece, places: int) -> tuple[list[Any], Any]:
        """Returns the rows of this worker as arrays (local_replicas, places, ...), and their tree structure."""
        flat: list[tuple[list[Any], Any]] = [jax.tree.flatten(part) for part in piece.parts]
        leaves, tree = flat[0]
        if len(flat) > 1:
            return [_padded_stack(xs, places) for xs in zip(*(each for each, _ in flat), strict=True)], tree
        counts = piece.counts
        # A full batch is reshaped without a copy, because the rows of a worker are in the order of its replicas.
        if sum(counts) == places * len(counts):
            shape = (len(counts), places)
            return [self._own(np.asarray(x).reshape(shape + x.shape[1:]), len(counts)) for x in leaves], tree
        index = shard.split(counts, places).index
        return [_taken(np.asarray(x), index) for x in leaves], tree

    def _own(self, array: Any, replicas: int = 1) -> Any:
        """Returns an array whose memory the user cannot write to, by copying it if JAX would share the memory."""
        if not self._may_share or not isinstance(array, np.ndarray):
            return array
        parts = array if replicas > 1 else [array]
        return copied(array) if any(map(is_shared_by_cpu, parts)) else array

    def _put(self, local: list[np.ndarray]) -> list[Any]:
        return self._topology.put_per_replica(local) if self._fetches else local


def _are_on_devices(parts: Sequence[Any]) -> bool:
    """Whether these are the batches of several replicas that are already on devices."""
    return len(parts) > 1 and all(isinstance(x, jax.Array) for x in jax.tree.leaves(list(parts)))


def _taken(array: np.ndarray, index: np.ndarray) -> np.ndarray:
    # A batch without rows has no row to pad with.
    return array[index] if len(array) else np.zeros((*index.shape, *array.shape[1:]), array.dtype)


def _padded_stack(parts: Sequence[Any], places: int) -> np.ndarray:
    """Stacks the batches of several replicas into (replicas, places, ...), and pads short ones with the last real row."""
    arrays = [np.asarray(x) for x in parts]
    widest = max(arrays, key=len)
    out = np.zeros((len(arrays), places, *widest.shape[1:]), widest.dtype)
    for row, array in zip(out, arrays, strict=True):
        if array.shape[1:] != widest.shape[1:]:
            raise InputError(
                f"batches of shapes {sorted({a.shape for a in arrays})}",
                "the batches of the replicas must have equal shapes, except for dim 0.",
                "pad the rows to one shape",
            )
        row[: len(array)] = array
        if len(widest):  # Otherwise there is no row to pad with.
            row[len(array) :] = widest[-1:]
    return out


def _stacked(arrays: Sequence[np.ndarray], steps: int) -> np.ndarray:
    """Stacks arrays (replicas, ...), one per step, into (replicas, steps, ...). Missing steps are zeros."""
    shape = arrays[0].shape
    out = np.empty((shape[0], steps, *shape[1:]), arrays[0].dtype)
    for step, array in enumerate(arrays):
        out[:, step] = array
    out[:, len(arrays) :] = 0
    return out


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
    return map_named(_number_or_object, value, "value_fn's result", is_leaf=_is_none)


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


def _is_none(value: Any) -> bool:
    return value is None


def _number_or_object(value: Any, name: str) -> Any:
    number = as_number(value, name)
    return value if number is None else number


def _stack(parts: Sequence[Any], topology: Topology) -> PerReplica:
    if not all(is_array(p) or isinstance(p, (int, float, complex, np.bool_)) for p in parts):
        return PerReplica(tuple(parts))
    arrays = [np.asarray(p) for p in parts]
    shapes = {a.shape for a in arrays}
    if len({s[1:] for s in shapes}) > 1 or (() in shapes and len(shapes) > 1):
        raise InvalidArgumentError(
            "value_fn",
            f"it returned arrays of the shapes {sorted(shapes)}, which may differ in dim 0 only.",
            "return arrays of equal shapes",
        )
    counts = np.array([len(a) if a.ndim else 1 for a in arrays])
    all_counts = topology.exchange(counts)
    if (all_counts == counts[0]).all():
        return PerReplica(topology.put_per_replica([np.stack(arrays)])[0])
    rows = ComponentSizes(tuple((count,) for count in all_counts.ravel().tolist()))
    return PerReplica(topology.put_per_replica([_padded_stack(arrays, max(rows.counts))])[0], rows)
