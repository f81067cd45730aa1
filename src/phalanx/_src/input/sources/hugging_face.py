# SPDX-License-Identifier: Apache-2.0
"""Datasets of Hugging Face: `datasets.Dataset` and `datasets.IterableDataset`."""

from typing import Any, final

import numpy as np
from typing_extensions import override

from phalanx._src.input.sources.base import AbstractSource, Batching, stack_leaf
from phalanx._src.input.sources.batches import stream_of_records
from phalanx._src.input.sources.records import AbstractRecords
from phalanx.typing import PyTree


def convert(dataset: Any, batching: Batching, datasets: Any) -> AbstractSource | None:
    """Returns a source that reads `dataset`, or None if it is not a dataset of Hugging Face. See `adapt.Convert`."""
    if isinstance(dataset, datasets.Dataset):
        return _SlicedRecords(dataset, batching.require_size(dataset), drop_remainder=batching.drop_remainder)
    if not isinstance(dataset, datasets.IterableDataset):
        return None
    # `stream_of_records` would name the function below instead of the dataset.
    batching.require_size(dataset)
    # A record is a dict, in which a list is one array. A pytree would make each of its elements a leaf.
    return stream_of_records(lambda: ({k: np.asarray(v) for k, v in row.items()} for row in dataset), batching)


@final
class _SlicedRecords(AbstractRecords):
    """The records of a Hugging Face `Dataset`, whose slices are dicts of columns.

    One slice per batch is much faster than one access per record.
    """

    def __init__(self, columns: Any, batch_size: int, *, drop_remainder: bool = False) -> None:
        self._columns = columns
        super().__init__(len(columns), batch_size, drop_remainder=drop_remainder)

    @override
    def records(self, start: int, stop: int) -> PyTree:
        return {name: stack_leaf(column) for name, column in self._columns[start:stop].items()}
