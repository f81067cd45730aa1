# SPDX-License-Identifier: Apache-2.0
"""Datasets of Grain: files of records, `MapDataset`, `IterDataset` and `DataLoader`."""

import sys
from typing import Any

from phalanx._src.input.sources.base import INFINITE, AbstractSource, Batching, Facts
from phalanx._src.input.sources.batches import BatchSequence, BatchStream
from phalanx._src.input.sources.files import Files
from phalanx._src.input.sources.records import SequenceRecords


def convert(dataset: Any, batching: Batching, grain: Any) -> AbstractSource | None:
    """Returns a source that reads `dataset`, or None if it is not a dataset of Grain. See `adapt.Convert`."""
    size, drop = batching.batch_size, batching.drop_remainder
    if isinstance(dataset, grain.sources.ArrayRecordDataSource):
        # Read file by file, so that workers can share the files.
        paths = [dataset.paths] if isinstance(dataset.paths, str) else list(map(str, dataset.paths))
        files = Files(paths, grain.sources.ArrayRecordDataSource, interleave=1)
        return files.batch(batching.require_size(dataset), drop_remainder=drop)
    if isinstance(dataset, grain.MapDataset):
        if size is not None:
            return SequenceRecords(dataset, size, drop_remainder=drop)  # As rows: their positions fit any batch size.
        # Grain's `repeat()` without a number has this length.
        count = INFINITE if len(dataset) == sys.maxsize else len(dataset)
        return BatchSequence(dataset, Facts(num_batches=count, is_full=drop), drop_remainder=drop)
    if isinstance(dataset, grain.IterDataset):
        # Grain makes the batches, so that a position of its iterator lies between two of them.
        dataset = dataset if size is None else dataset.batch(size, drop_remainder=drop)
    elif isinstance(dataset, grain.DataLoader):
        batching.refuse_size(dataset)
    else:
        return None
    return BatchStream(
        lambda: iter(dataset),
        Facts(batch_size=size, is_full=drop),
        drop_remainder=drop,
        get_state=lambda iterator: iterator.get_state(),
        set_state=lambda iterator, state: iterator.set_state(state),
    )
