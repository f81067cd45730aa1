# SPDX-License-Identifier: Apache-2.0
"""Datasets without a library: arrays, lists, sequences, iterables, iterators and functions that return iterators."""

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from phalanx._src.input.sources.base import AbstractSource, Batching, Facts, stack_leaf
from phalanx._src.input.sources.batches import BatchSequence, BatchStream, length_of, opener, sizes, stream_of_records
from phalanx._src.input.sources.records import ArrayRecords, SequenceRecords
from phalanx._src.mesh.arrays import as_array, flattened, is_sparse
from phalanx._src.mesh.values import is_distributed
from phalanx.errors import InputError, shown
from phalanx.typing import PyTree


def convert(dataset: Any, batching: Batching) -> AbstractSource:
    """Returns a source that reads `dataset`.

    Args:
      dataset: any dataset.
      batching: what the user asked for.

    Raises:
      InputError: `dataset` is not a dataset, or it needs a batch size, or it is already batched.
    """
    if is_distributed(dataset):
        dataset = jnp.asarray(dataset)
    if isinstance(dataset, (str, bytes, bytearray, os.PathLike)):
        raise InputError(
            f"dataset={shown(dataset)}",
            "text or a path is not a dataset.",
            "phalanx.data.from_files(pattern, reader) for files",
        )
    if isinstance(dataset, type):
        raise InputError(
            f"dataset={dataset.__name__}", "a class is not a dataset.", f"pass an instance: {dataset.__name__}(...)"
        )
    return _batches(dataset, batching.drop_remainder) if batching.batch_size is None else _rows(dataset, batching)


def _rows(dataset: Any, batching: Batching) -> AbstractSource:
    """Returns the source of a dataset of single rows."""
    size, drop = batching.require_size(dataset), batching.drop_remainder
    if isinstance(dataset, Iterator) or (callable(dataset) and not isinstance(dataset, Iterable)):
        return stream_of_records(dataset, batching)
    if isinstance(dataset, list):
        _refuse_arrays(dataset, size)
    # A list of numbers, or of lists of them, is one array. A list of anything else has one record per item.
    is_column = isinstance(dataset, list) and isinstance(next(iter(dataset), None), (int, float, complex, list))
    is_array = isinstance(dataset, (np.ndarray, jax.Array)) or is_sparse(dataset) or as_array(dataset) is not None
    if is_column or is_array or isinstance(dataset, (tuple, Mapping)) or _is_tree(dataset):
        return ArrayRecords(_with_arrays(dataset), size, drop_remainder=drop)
    if hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
        return SequenceRecords(dataset, size, drop_remainder=drop)
    if isinstance(dataset, Iterable):
        return stream_of_records(dataset, batching)
    raise InputError(
        f"dataset={type(dataset).__name__}",
        "must be a pytree of arrays, or an iterable of rows.",
        "pass a pytree of arrays",
    )


def _refuse_arrays(dataset: list[Any], batch_size: int) -> None:
    if dataset and isinstance(dataset[0], (np.ndarray, jax.Array)) and np.ndim(dataset[0]):
        raise InputError(
            f"a list of {len(dataset)} arrays with batch_size={batch_size}",
            "is ambiguous, because each array could be one row or one column with all rows.",
            "np.stack(arrays) for rows, tuple(arrays) for columns",
        )


def _batches(dataset: Any, drop: bool) -> AbstractSource:
    """Returns the source of a dataset of global batches."""
    if isinstance(dataset, (tuple, Mapping)):
        raise InputError(
            f"a dataset that is a {type(dataset).__name__} of arrays",
            "without batch_size, a dataset must be an iterable of batches, not one pytree of all rows.",
            "pass batch_size=64 to experimental_distribute_dataset, or a list or generator of batches",
        )
    if isinstance(dataset, list):
        return BatchSequence(dataset, sizes(dataset), drop_remainder=drop)
    is_function = callable(dataset) and not isinstance(dataset, Iterable)
    # An array is iterable too, but yields single rows.
    if hasattr(dataset, "shape") or not (is_function or isinstance(dataset, Iterable)):
        raise InputError(
            f"dataset={type(dataset).__name__}",
            "is not an iterable of batches.",
            "experimental_distribute_dataset(rows, batch_size=64); distribute_datasets_from_function takes a function that returns batches",
        )
    facts = Facts(num_batches=length_of(dataset), is_full=drop)
    return BatchStream(opener(dataset), facts, drop_remainder=drop)


def _is_tree(dataset: object) -> bool:
    """Whether `dataset` is an instance of a registered pytree class, such as a dataclass, whose leaves are arrays."""
    if isinstance(dataset, Iterable) or callable(dataset):
        return False
    return all(isinstance(x, (np.ndarray, jax.Array)) for x in jax.tree.leaves(dataset))


def _with_arrays(tree: PyTree) -> PyTree:
    """Returns a pytree in which each list is replaced by one array."""
    leaves, structure = flattened(tree, lambda x: isinstance(x, list))
    return structure.unflatten(stack_leaf(x) if isinstance(x, list) else x for x in leaves)
