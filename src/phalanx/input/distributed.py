# SPDX-License-Identifier: Apache-2.0
"""Datasets and values, placed on the replicas."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import jax
import numpy as np

from phalanx import compat
from phalanx.errors import ContextError, InputError, InvalidArgumentError
from phalanx.input import shard
from phalanx.topology import Topology
from phalanx.values import PerReplica, RowMask


@dataclass(frozen=True)
class ValueContext:
    """What `experimental_distribute_values_from_function` tells its function.

    Args:
      replica_id_in_sync_group: which replica the value is for, from 0.
      num_replicas_in_sync: how many replicas there are.
    """

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1


@final
class DistributedDataset:
    """Batches, split over the replicas. `Strategy.experimental_distribute_dataset` makes it.

    Args:
      source: an iterable of batches, or with `batch_size` a pytree of arrays.
      topology: the replicas' devices; None leaves batches as they are.
      batch_size: the global batch size, for a pytree of arrays.
    """

    def __init__(self, source: Any, topology: Topology | None, *, batch_size: int | None = None) -> None:
        if isinstance(source, DistributedDataset):
            raise InputError(
                "experimental_distribute_dataset", "this dataset is distributed already.", "pass the original dataset"
            )
        if batch_size is None and isinstance(source, (tuple, dict)):
            raise InputError(
                f"a dataset that is a {type(source).__name__} of arrays",
                "it is one pytree of all rows, not an iterable of batches.",
                "batch_size=64, or a list or generator of batches",
            )
        self._source = source if batch_size is None else _Rows(source, batch_size)
        if not isinstance(self._source, Iterable) or hasattr(self._source, "shape"):
            raise InputError(
                f"dataset={type(source).__name__}", "not an iterable of batches.", "batch_size=n for a pytree of arrays"
            )
        self._topology = topology

    def __iter__(self) -> "DistributedIterator":
        return DistributedIterator(iter(self._source), self._topology)

    def __len__(self) -> int:
        return len(self._source)


@final
class DistributedIterator:
    """One pass over a `DistributedDataset`; the next batch is on its way to the devices while the last one is used."""

    def __init__(self, batches: Iterator[Any], topology: Topology | None) -> None:
        self._batches, self._topology = batches, topology
        self._ahead: list[Any] = []
        self._failure: BaseException | None = None
        self._started = False

    def __iter__(self) -> "DistributedIterator":
        return self

    def __next__(self) -> Any:
        """Returns the next batch: a pytree of `PerReplica`, or of arrays where there is one replica.

        Raises:
          StopIteration: there is none.
          ContextError: called while a step is traced.
          InputError: the batch cannot be split.
        """
        if compat.lift_scope() is not None:
            raise ContextError(
                "next(iterator) in a traced step",
                "the step would be compiled with this one batch in it.",
                "pass the batch to the step: step(next(iterator))",
            )
        if not self._started:
            self._started = True
            self._fetch()
        if not self._ahead:
            failure, self._failure = self._failure, None
            raise failure or StopIteration
        batch = self._ahead.pop()
        self._fetch()
        return batch

    def get_next(self) -> Any:
        """Returns the next batch, as `next(iterator)` does."""
        return next(self)

    def _fetch(self) -> None:
        if self._failure is not None:
            return
        try:
            self._ahead.append(place_batch(next(self._batches), self._topology))
        except Exception as e:  # It belongs to the batch it comes from: raised when that batch is asked for.
            self._failure = e


class _Rows:
    """Batches of consecutive rows of a pytree of arrays."""

    def __init__(self, arrays: Any, batch_size: int) -> None:
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise InvalidArgumentError(
                f"batch_size={batch_size!r}", "must be an integer of at least 1.", "batch_size=64"
            )
        self._arrays, self._batch_size = arrays, batch_size
        self._rows = num_rows(arrays)

    def __len__(self) -> int:
        return math.ceil(self._rows / self._batch_size)

    def __iter__(self) -> Iterator[Any]:
        for start in range(0, self._rows, self._batch_size):
            yield jax.tree.map(lambda x: x[start : start + self._batch_size], self._arrays)  # noqa: B023


def num_rows(batch: Any) -> int:
    """Returns the number of rows of a batch.

    Raises:
      InputError: it has no arrays, scalars, or arrays with different numbers of rows.
    """
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(batch)]
    if not shapes or () in shapes:
        raise InputError(
            f"a batch of shapes {shapes}",
            "every leaf must be an array (global_batch, ...).",
            "group the rows into batches first",
        )
    for leaf in jax.tree.leaves(batch):
        kind = np.asarray(leaf).dtype
        if kind.kind in "OSUMm":
            raise InputError(
                f"a batch of dtype {kind}", "only numbers and bools can be placed on devices.", "encode the text first"
            )
    counts = sorted({shape[0] for shape in shapes})
    if len(counts) > 1:
        raise InputError(
            f"a batch of shapes {shapes}", f"its leaves have {counts} rows.", "one number of rows for all leaves"
        )
    return int(counts[0])


def place_batch(batch: Any, topology: Topology | None) -> Any:
    """Splits one global batch over the replicas and puts it on their devices."""
    rows = num_rows(batch)
    if topology is None:
        return batch
    n = topology.num_replicas
    if n == 1:
        return jax.device_put(batch, topology.replicated)
    if rows and rows % n == 0:
        place = lambda x: _put(np.asarray(x).reshape(n, rows // n, *np.shape(x)[1:]), topology)  # noqa: E731
        return jax.tree.map(lambda x: PerReplica(place(x)), batch)
    layout = shard.split(rows, n)
    mask = RowMask(_put(layout.mask, topology), rows)
    pick = lambda x: np.asarray(x)[layout.index] if rows else np.zeros((n, 1, *np.shape(x)[1:]), x.dtype)  # noqa: E731
    return jax.tree.map(lambda x: PerReplica(_put(pick(x), topology), mask), batch)


def distribute_values(values: Sequence[Any], topology: Topology) -> Any:
    """Makes a pytree of `PerReplica` of one pytree a replica.

    Raises:
      InvalidArgumentError: the pytrees, or shapes beyond dim 0, differ.
    """
    is_leaf = lambda x: x is None  # noqa: E731
    flat: list[tuple[list[Any], Any]] = [jax.tree.flatten(v, is_leaf=is_leaf) for v in values]
    trees = [tree for _, tree in flat]
    if any(tree != trees[0] for tree in trees):
        raise InvalidArgumentError(
            "value_fn",
            f"it returned the structures {trees[0]} and {next(t for t in trees if t != trees[0])}.",
            "one structure for all replicas",
        )
    return trees[0].unflatten([_stack(parts, topology) for parts in zip(*(leaves for leaves, _ in flat), strict=True)])


def _stack(parts: Sequence[Any], topology: Topology) -> PerReplica:
    if not all(isinstance(p, (jax.Array, np.ndarray, np.generic, int, float, complex)) for p in parts):
        return PerReplica(tuple(parts))
    arrays = [np.asarray(p) for p in parts]
    shapes = {a.shape for a in arrays}
    if len(shapes) == 1:
        return PerReplica(_put(np.stack(arrays), topology))
    if len({s[1:] for s in shapes}) > 1 or () in shapes:
        raise InvalidArgumentError(
            "value_fn", f"it returned arrays of shapes {sorted(shapes)}.", "shapes that agree beyond dim 0"
        )
    longest = max(len(a) for a in arrays)
    mask = np.arange(longest)[None, :] < np.array([len(a) for a in arrays])[:, None]
    padded = [np.concatenate([a, np.zeros((longest - len(a), *a.shape[1:]), a.dtype)]) for a in arrays]
    return PerReplica(_put(np.stack(padded), topology), RowMask(_put(mask, topology), int(mask.sum())))


def _put(array: np.ndarray, topology: Topology) -> jax.Array:
    return jax.device_put(array, topology.per_replica)
