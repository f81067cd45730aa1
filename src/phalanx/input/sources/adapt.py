# SPDX-License-Identifier: Apache-2.0
"""Which source a user's dataset is. Libraries are asked for only where the user has imported them."""

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


def source_of(dataset: Any, batch_size: int | None = None, *, drop_remainder: bool = False) -> AbstractSource:
    """Returns the source that a dataset is.

    Args:
      dataset: see `Strategy.experimental_distribute_dataset`.
      batch_size: the global batch size, for a dataset of single rows; None for one of global batches.
      drop_remainder: whether to leave out a short last batch.

    Raises:
      InputError: it is no dataset, or has no batch size, or has one already.
      InvalidArgumentError: `batch_size` is no positive integer.
    """
    if batch_size is not None:
        check_batch_size(batch_size)
    # Hugging Face's stream is one of torch too, where torch is installed.
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
    # Its plain records are dicts of lists, each of which is one array.
    return _stream_of_records(lambda: ({k: np.asarray(v) for k, v in row.items()} for row in dataset), batch_size, drop)


def _of_python(dataset: Any, batch_size: int | None, drop: bool) -> AbstractSource:
    if isinstance(dataset, (str, bytes, bytearray, os.PathLike)):
        raise InputError(
            f"dataset={shown(dataset)}", "it is text, or a path.", "phalanx.data.from_files(pattern, reader) for files"
        )
    if isinstance(dataset, type):
        raise InputError(
            f"dataset={dataset.__name__}", "it is a class, not a dataset.", f"an instance: {dataset.__name__}(...)"
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
        f"dataset={type(dataset).__name__}", "neither arrays nor something to iterate over.", "a pytree of arrays"
    )


def _refuse_arrays(dataset: list[Any], batch_size: int) -> None:
    if dataset and isinstance(dataset[0], (np.ndarray, jax.Array)) and np.ndim(dataset[0]):
        raise InputError(
            f"a list of {len(dataset)} arrays with batch_size={batch_size}",
            "each could be a row, or a column of all rows.",
            "np.stack(arrays) for rows, tuple(arrays) for columns",
        )


def _batches(dataset: Any, drop: bool) -> AbstractSource:
    """Returns the source of a dataset of global batches."""
    if isinstance(dataset, (tuple, Mapping)):
        raise InputError(
            f"a dataset that is a {type(dataset).__name__} of arrays",
            "it is one pytree of all rows, not an iterable of batches.",
            "batch_size=64, or a list or generator of batches",
        )
    if isinstance(dataset, list):
        return BatchSequence(dataset, sizes(dataset), drop_remainder=drop)
    is_function = callable(dataset) and not isinstance(dataset, Iterable)
    if hasattr(dataset, "shape") or not (is_function or isinstance(dataset, Iterable)):
        raise InputError(
            f"dataset={type(dataset).__name__}", "not an iterable of batches.", "batch_size=n for a pytree of arrays"
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
    """Returns what makes an iterator over `dataset` from its beginning."""
    if isinstance(dataset, Iterator):
        return OneShot(dataset)
    return lambda: iter(dataset if isinstance(dataset, Iterable) else dataset())


def _is_tree(dataset: Any) -> bool:
    """Whether it is a pytree of arrays of a kind of its own, such as a dataclass."""
    if isinstance(dataset, Iterable) or callable(dataset):
        return False
    leaves = jax.tree.leaves(dataset)
    return leaves != [dataset] and all(isinstance(x, (np.ndarray, jax.Array)) for x in leaves)


def _with_arrays(tree: Any) -> Any:
    """Returns a pytree with an array for each list in it."""
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
        f"dataset={type(dataset).__name__}", "it is a dataset of single rows.", "batch_size=64, the global batch size"
    )


def _refuse_batch_size(dataset: Any, batch_size: int | None) -> None:
    if batch_size is not None:
        raise InputError(
            f"batch_size={batch_size} for a {type(dataset).__name__}",
            "it makes batches already.",
            "leave out batch_size; the batches of the dataset are the global batches",
        )


class _PyBatches(Sequence[Any]):
    """A Keras `PyDataset` as a sequence."""

    def __init__(self, dataset: keras.utils.PyDataset, count: int) -> None:
        self._dataset, self._count = dataset, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        return self._dataset[index]
