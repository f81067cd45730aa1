# SPDX-License-Identifier: Apache-2.0
"""From rows on the host to one global array a leaf on the replicas' devices."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from phalanx.errors import InputError, InvalidArgumentError, arguments
from phalanx.input import shard
from phalanx.input.feed import Step
from phalanx.input.shard import Worker
from phalanx.input.sources.base import Facts, Piece
from phalanx.mesh.arrays import as_number, copied, is_array, is_shared_by_cpu, map_named
from phalanx.mesh.topology import Topology
from phalanx.mesh.values import PerReplica, RowMask, flatten, is_distributed


@dataclass(frozen=True)
class ValueContext:
    """What `experimental_distribute_values_from_function` tells its function.

    Args:
      replica_id_in_sync_group: which replica the value is for, from 0.
      num_replicas_in_sync: how many replicas there are.

    Raises:
      InvalidArgumentError: a number that is not one, or too small.
    """

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1

    def __post_init__(self) -> None:
        arguments.integer("replica_id_in_sync_group", self.replica_id_in_sync_group, least=0)
        arguments.integer("num_replicas_in_sync", self.num_replicas_in_sync)

    def __str__(self) -> str:
        return f"ValueContext(replica {self.replica_id_in_sync_group} of {self.num_replicas_in_sync})"


_MASKS_KEPT = 4


class Placement:
    """Puts the pieces of one dataset on the devices; in one layout, unless the dataset says otherwise.

    Args:
      topology: the replicas' devices.
      worker: whose rows they are.
      facts: what is known of the dataset.
      fetches: whether to put them on the devices; else they stay NumPy arrays in the same layout.
      agreed: whether the workers read different rows, so that any of them may run out first.
    """

    def __init__(self, topology: Topology, worker: Worker, facts: Facts, *, fetches: bool, agreed: bool) -> None:
        self._topology, self._worker, self._facts = topology, worker, facts
        self._fetches, self._agreed = fetches, agreed
        self._places = shard.places(facts.batch_size, worker.num_replicas) if facts.batch_size else 0
        self._masks: dict[Any, RowMask] = {}
        # Others are copied when they are read.
        self._may_share = facts.is_borrowed and facts.is_in_memory and topology.devices[0].platform == "cpu"

    def place(self, steps: Sequence[Step], room: int | None) -> Any:
        """Returns one batch: a pytree of `PerReplica`; of arrays where there is one replica and no batch is short.

        Args:
          steps: this worker's rows.
          room: None for the batch of one step; else for how many steps to make room.
        """
        if self._facts.one_layout:
            self._grow(steps)
        else:
            self._places = max(steps[0].widest, shard.places(steps[0].rows, self._worker.num_replicas), 1)
        places, replicas = self._places, self._worker.num_replicas
        is_full = all(step.rows == places * replicas for step in steps)
        parts = steps[0].piece.parts
        if room is None and is_full and replicas == 1 and not self._is_masked:
            return self._topology.put_replicated(jax.tree.map(self._own, parts[0])) if self._fetches else parts[0]
        mask = self._mask(steps, room) if self._is_masked or not is_full else None
        if room is None and is_full and _are_on_devices(parts):
            return jax.tree.map(lambda *xs: PerReplica(self._topology.join_per_replica(xs), mask), *parts)
        flat = [self._local(step.piece, places) for step in steps]
        leaves, tree = flat[0]
        if room is not None:
            leaves = [_stacked(arrays, room) for arrays in zip(*(each for each, _ in flat), strict=True)]
        return tree.unflatten([PerReplica(x, mask) for x in self._put(leaves)])

    def _grow(self, steps: Sequence[Step]) -> None:
        """Makes room for these batches: as every worker finds it, for they have to choose one layout."""
        for step in steps:
            if step.widest > self._places or step.rows > self._places * self._worker.num_replicas:
                self._places = max(step.widest, shard.places(step.rows, self._worker.num_replicas))
        self._places = self._places or 1

    @property
    def _is_masked(self) -> bool:
        """Whether all batches carry a mask: those that are full too, for then one program serves all."""
        if not self._facts.one_layout:
            return False
        full_size = self._places * self._worker.num_replicas
        return self._agreed or not self._facts.is_full or (self._facts.batch_size or full_size) != full_size

    def _mask(self, steps: Sequence[Step], room: int | None) -> RowMask:
        key = (room, self._places, *((step.rows, *step.piece.counts) for step in steps))
        known = self._masks.get(key)
        if known is not None:
            return known
        place = np.arange(self._places)
        masks = [place < np.asarray(step.piece.counts)[:, None] for step in steps]
        if room is None:
            made = RowMask(self._put(masks[:1])[0], steps[0].rows)
        else:
            rows = np.zeros(room, np.int32)
            rows[: len(steps)] = [step.rows for step in steps]
            made = RowMask(self._put([_stacked(masks, room)])[0], rows)
        if len(self._masks) < _MASKS_KEPT:  # Those of full batches come first, and again and again.
            self._masks[key] = made
        return made

    def _local(self, piece: Piece, places: int) -> tuple[list[Any], Any]:
        """Returns this worker's rows, the arrays `(replicas, places, ...)` and the nest that they make."""
        flat: list[tuple[list[Any], Any]] = [jax.tree.flatten(part) for part in piece.parts]
        leaves, tree = flat[0]
        if len(flat) > 1:
            return [_padded_stack(xs, places) for xs in zip(*(each for each, _ in flat), strict=True)], tree
        counts = piece.counts
        if sum(counts) == places * len(counts):
            shape = (len(counts), places)
            return [self._own(np.asarray(x).reshape(shape + x.shape[1:]), len(counts)) for x in leaves], tree
        index = shard.split(counts, places).index
        return [_taken(np.asarray(x), index) for x in leaves], tree

    def _own(self, array: Any, replicas: int = 1) -> Any:
        """Returns an array that only Phalanx can change: a CPU device uses the memory of some arrays in place of a copy."""
        if not self._may_share or not isinstance(array, np.ndarray):
            return array
        parts = array if replicas > 1 else [array]
        return copied(array) if any(map(is_shared_by_cpu, parts)) else array

    def _put(self, local: list[np.ndarray]) -> list[Any]:
        return self._topology.put_per_replica(local) if self._fetches else local


def _are_on_devices(parts: Sequence[Any]) -> bool:
    """Whether these are batches of several replicas, each on a device already."""
    return len(parts) > 1 and all(isinstance(x, jax.Array) for x in jax.tree.leaves(list(parts)))


def _taken(array: np.ndarray, index: np.ndarray) -> np.ndarray:
    return array[index] if len(array) else np.zeros((*index.shape, *array.shape[1:]), array.dtype)


def _padded_stack(parts: Sequence[Any], places: int) -> np.ndarray:
    """Stacks the batches of several replicas, which may have different numbers of rows."""
    arrays = [np.asarray(x) for x in parts]
    widest = max(arrays, key=len)
    out = np.zeros((len(arrays), places, *widest.shape[1:]), widest.dtype)
    for row, array in zip(out, arrays, strict=True):
        if array.shape[1:] != widest.shape[1:]:
            raise InputError(
                f"batches of shapes {sorted({a.shape for a in arrays})}",
                "the replicas' batches must agree beyond dim 0.",
                "pad the rows to one shape",
            )
        row[: len(array)] = array
        row[len(array) :] = widest[-1:]
    return out


def _stacked(arrays: Sequence[np.ndarray], steps: int) -> np.ndarray:
    """Stacks the arrays of several steps `(replicas, steps, ...)`, with room for `steps` of them."""
    shape = arrays[0].shape
    out = np.empty((shape[0], steps, *shape[1:]), arrays[0].dtype)
    for step, array in enumerate(arrays):
        out[:, step] = array
    out[:, len(arrays) :] = 0
    return out


def components(value: Any) -> Any:
    """Returns what a function returned as the components of one replica.

    Raises:
      InvalidArgumentError: there is a distributed value among them.
      InputError: a number or an array that JAX cannot hold.
    """
    for leaf in flatten(value)[0]:
        if is_distributed(leaf):
            raise InvalidArgumentError(
                "value_fn",
                f"it returned a {type(leaf).__name__}, but the component of a replica is one value.",
                "strategy.experimental_local_results(value)[context.replica_id_in_sync_group]",
            )
    return map_named(_number_or_object, value, "value_fn's result", is_leaf=_is_none)


def distribute_values(values: Sequence[Any], topology: Topology) -> Any:
    """Makes a pytree of `PerReplica` of one pytree a replica.

    Raises:
      InvalidArgumentError: the pytrees, or shapes beyond dim 0, differ.
    """
    flat: list[tuple[list[Any], Any]] = [jax.tree.flatten(v, is_leaf=_is_none) for v in values]
    trees = [tree for _, tree in flat]
    if any(tree != trees[0] for tree in trees):
        raise InvalidArgumentError(
            "value_fn",
            f"it returned the structures {trees[0]} and {next(t for t in trees if t != trees[0])}.",
            "one structure for all replicas",
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
            "value_fn", f"it returned arrays of shapes {sorted(shapes)}.", "shapes that agree beyond dim 0"
        )
    counts = np.array([len(a) if a.ndim else 1 for a in arrays])
    all_counts = topology.exchange(counts)
    if (all_counts == counts[0]).all():
        return PerReplica(topology.put_per_replica([np.stack(arrays)])[0])
    widest = int(all_counts.max())
    mask = np.arange(widest) < counts[:, None]
    data, placed = topology.put_per_replica([_padded_stack(arrays, widest), mask])
    return PerReplica(data, RowMask(placed, int(all_counts.sum())))
