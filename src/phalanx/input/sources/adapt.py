# SPDX-License-Identifier: Apache-2.0
"""Converts a user's dataset to a source.

Libraries such as Grain and torch are looked up in `sys.modules` and never imported: a dataset of a library can exist only if the
user has imported that library.
"""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import jax
import keras
import numpy as np

from phalanx.errors import InputError, shown
from phalanx.input.sources.base import INFINITE, UNKNOWN, AbstractSource, Facts, check_batch_size, stack_leaf
from phalanx.input.sources.batches import BatchSequence, BatchStream, OneShot, batched, sizes
from phalanx.input.sources.files import FileRecords, Files
from phalanx.input.sources.records import ArrayRecords, NumpyDataset, SequenceRecords, SlicedRecords
from phalanx.mesh.arrays import as_array, is_sparse
from phalanx.typing import PyTree


def source_of(dataset: Any, batch_size: int | None = None, *, drop_remainder: bool = False) -> AbstractSource:
    """Returns a source that reads `dataset`.

    Args:
      dataset: see `Strategy.experimental_distribute_dataset`.
      batch_size: global batch size in rows, for a dataset of single rows. None for a dataset of global batches.
      drop_remainder: whether to drop a short last batch.

    Raises:
      InputError: `dataset` is not a dataset, or it needs a batch size, or it is already batched.
      InvalidArgumentError: `batch_size` is not a positive integer.
    """
    if batch_size is not None:
        check_batch_size(batch_size)
    # Hugging Face comes before torch: if torch is installed, a Hugging Face `IterableDataset` is also a torch dataset.
    for kind in (_ours, _of_grain, _of_keras, _of_hugging_face, _of_torch, _of_tensorflow):
        source = kind(dataset, batch_size, drop_remainder)
        if source is not None:
            return source
    return _of_python(dataset, batch_size, drop_remainder)


def _ours(dataset: Any, batch_size: int | None, drop: bool) -> AbstractSource | None:
    if isinstance(dataset, (Files, NumpyDataset)):
        if batch_size is None:
            raise _no_batch_size(dataset)
        return (
            FileRecords(dataset, batch_size, drop_remainder=drop)
            if isinstance(dataset, Files)
            else dataset.batch(batch_size, drop_remainder=drop)
        )
    if isinstance(dataset, AbstractSource):
        _refuse_batch_size(dataset, batch_size)
        return dataset
    return None


def _of_grain(dataset: Any, batch_size: int | None, drop: bool) -> AbstractSource | None:
    grain = _imported("grain")
    if grain is None:
        return None
    if isinstance(dataset, grain.sources.ArrayRecordDataSource):
        if batch_size is None:
            raise _no_batch_size(dataset)
        paths = [dataset.paths] if isinstance(dataset.paths, str) else list(map(str, dataset.paths))
        files = Files(paths, grain.sources.ArrayRecordDataSource, 1)
        return FileRecords(files, batch_size, drop_remainder=drop)
    if isinstance(dataset, grain.MapDataset):
        if batch_size is not None:
            return SequenceRecords(dataset, batch_size, drop_remainder=drop)
        # Grain's `repeat()` without a number has this length.
        count = INFINITE if len(dataset) == sys.maxsize else len(dataset)
        return BatchSequence(dataset, Facts(num_batches=count, is_full=drop), drop_remainder=drop)
    if isinstance(dataset, grain.IterDataset):
        dataset = dataset if batch_size is None else dataset.batch(batch_size, drop_remainder=drop)
    elif isinstance(dataset, grain.DataLoader):
        _refuse_batch_size(dataset, batch_size)
    else:
        return None
    return BatchStream(
        lambda: iter(dataset),
        Facts(batch_size=batch_size, is_full=drop, is_borrowed=True),
        drop_remainder=drop,
        get_state=lambda iterator: iterator.get_state(),
        set_state=lambda iterator, state: iterator.set_state(state),
    )


def _of_keras(dataset: Any, batch_size: int | None, drop: bool) -> AbstractSource | None:
    if not isinstance(dataset, keras.utils.PyDataset):
        return None
    _refuse_batch_size(dataset, batch_size)
    count = dataset.num_batches
    facts = Facts(num_batches=INFINITE if count is None else count, is_full=drop)
    batches = _PyBatches(dataset, sys.maxsize if count is None else count)
    return BatchSequence(batches, facts, drop_remainder=drop, at_end=dataset.on_epoch_end)


def _of_torch(dataset: Any, batch_size: int | None, drop: bool) -> AbstractSource | None:
    torch = _imported("torch")
    if torch is None:
        return None
    data = torch.utils.data
    if isinstance(dataset, data.DataLoader):
        _refuse_batch_size(dataset, batch_size)
        return BatchStream(
            lambda: iter(dataset),
            Facts(
                num_batches=_length(dataset),
                is_full=drop or bool(dataset.batch_size and dataset.drop_last),
                is_borrowed=True,
            ),
            drop_remainder=drop,
        )
    if isinstance(dataset, data.IterableDataset):
        return _stream_of_records(lambda: iter(dataset), batch_size, drop)
    is_columns = isinstance(dataset, (tuple, Mapping)) and all(
        isinstance(x, torch.Tensor) for x in jax.tree.leaves(dataset)
    )
    if batch_size is not None and (isinstance(dataset, torch.Tensor) or is_columns):
        return ArrayRecords(dataset, batch_size, drop_remainder=drop)
    if not isinstance(dataset, data.Dataset):
        return None
    if batch_size is None:
        raise _no_batch_size(dataset)
    return SequenceRecords(dataset, batch_size, drop_remainder=drop)


def _of_tensorflow(dataset: Any, batch_size: int | None, drop: bool) -> AbstractSource | None:
    tf = _imported("tensorflow")
    if tf is None or not isinstance(dataset, tf.data.Dataset):
        return None
    if batch_size is not None:
        dataset = dataset.batch(batch_size, drop_remainder=drop)
    shapes = [spec.shape for spec in tf.nest.flatten(dataset.element_spec)]
    # A static first dim means `drop_remainder=True`, so no batch is short.
    static = bool(shapes) and all(shape.rank and shape[0] is not None for shape in shapes)
    count = int(dataset.cardinality())
    return BatchStream(
        dataset.as_numpy_iterator,
        Facts(batch_size=shapes[0][0] if static else batch_size, is_full=static or drop, num_batches=count),
        drop_remainder=drop,
    )


def _of_hugging_face(dataset: Any, batch_size: int | None, drop: bool) -> AbstractSource | None:
    datasets = _imported("datasets")
    if datasets is None or not isinstance(dataset, (datasets.Dataset, datasets.IterableDataset)):
        return None
    if batch_size is None:
        raise _no_batch_size(dataset)
    if isinstance(dataset, datasets.Dataset):
        return SlicedRecords(dataset, batch_size, drop_remainder=drop)
    # A record is a dict, in which a list is one array. A pytree would make each of its elements a leaf.
    return _stream_of_records(lambda: ({k: np.asarray(v) for k, v in row.items()} for row in dataset), batch_size, drop)


def _of_python(dataset: Any, batch_size: int | None, drop: bool) -> AbstractSource:
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
    return _batches(dataset, drop) if batch_size is None else _rows(dataset, batch_size, drop)


def _rows(dataset: Any, batch_size: int, drop: bool) -> AbstractSource:
    """Returns the source of a dataset of single rows."""
    if isinstance(dataset, Iterator) or (callable(dataset) and not isinstance(dataset, Iterable)):
        return _stream_of_records(dataset, batch_size, drop)
    if isinstance(dataset, list):
        _refuse_arrays(dataset, batch_size)
    is_column = isinstance(dataset, list) and isinstance(next(iter(dataset), None), (int, float, complex, list))
    is_array = isinstance(dataset, (np.ndarray, jax.Array)) or is_sparse(dataset) or as_array(dataset) is not None
    if is_column or is_array or isinstance(dataset, (tuple, Mapping)) or _is_tree(dataset):
        return ArrayRecords(_with_arrays(dataset), batch_size, drop_remainder=drop)
    if hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
        return SequenceRecords(dataset, batch_size, drop_remainder=drop)
    if isinstance(dataset, Iterable):
        return _stream_of_records(dataset, batch_size, drop)
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
    if hasattr(dataset, "shape") or not (is_function or isinstance(dataset, Iterable)):
        raise InputError(
            f"dataset={type(dataset).__name__}",
            "is not an iterable of batches.",
            "pass batch_size=64 for a pytree of arrays",
        )
    facts = Facts(num_batches=_length(dataset), is_full=drop)
    return BatchStream(_maker(dataset), facts, drop_remainder=drop, copies=True)


def _stream_of_records(dataset: Any, batch_size: int | None, drop: bool) -> AbstractSource:
    if batch_size is None:
        raise _no_batch_size(dataset)
    make = _maker(dataset)
    return BatchStream(
        lambda: batched(make(), batch_size),
        Facts(batch_size=batch_size, is_full=drop),
        drop_remainder=drop,
    )


def _maker(dataset: Any) -> Callable[[], Iterator[Any]]:
    """Returns a function that opens an iterator over `dataset` from its beginning."""
    if isinstance(dataset, Iterator):
        return OneShot(dataset)
    return lambda: iter(dataset if isinstance(dataset, Iterable) else dataset())


def _is_tree(dataset: Any) -> bool:
    """Whether `dataset` is an instance of a registered pytree class, such as a dataclass, whose leaves are arrays."""
    if isinstance(dataset, Iterable) or callable(dataset):
        return False
    leaves = jax.tree.leaves(dataset)
    return leaves != [dataset] and all(isinstance(x, (np.ndarray, jax.Array)) for x in leaves)


def _with_arrays(tree: PyTree) -> PyTree:
    """Returns a pytree in which each list is replaced by one array."""
    return jax.tree.map(
        lambda x: stack_leaf(x) if isinstance(x, list) else x, tree, is_leaf=lambda x: isinstance(x, list)
    )


def _length(dataset: Any) -> int:
    try:
        return len(dataset)
    except TypeError:
        return UNKNOWN


def _imported(name: str) -> ModuleType | Any:
    return sys.modules.get(name)


def _no_batch_size(dataset: Any) -> InputError:
    return InputError(
        f"dataset={type(dataset).__name__}",
        "a dataset of single rows needs a global batch size.",
        "pass batch_size=64",
    )


def _refuse_batch_size(dataset: object, batch_size: int | None) -> None:
    if batch_size is not None:
        raise InputError(
            f"batch_size={batch_size} for a {type(dataset).__name__}",
            "the dataset already yields batches, which are the global batches.",
            "leave out batch_size",
        )


class _PyBatches(Sequence[Any]):
    """A sequence view of a Keras `PyDataset`, which has no `len` if it is infinite."""

    def __init__(self, dataset: keras.utils.PyDataset, count: int) -> None:
        self._dataset, self._count = dataset, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        return self._dataset[index]
