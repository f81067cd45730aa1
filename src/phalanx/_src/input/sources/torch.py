# SPDX-License-Identifier: Apache-2.0
"""Datasets of PyTorch: `Dataset`, `IterableDataset`, `DataLoader` and tensors."""

from collections.abc import Mapping
from typing import Any

import jax

from phalanx._src.input.sources.base import AbstractSource, Batching, Facts
from phalanx._src.input.sources.batches import BatchStream, length_of, stream_of_records
from phalanx._src.input.sources.records import ArrayRecords, SequenceRecords


def convert(dataset: Any, batching: Batching, torch: Any) -> AbstractSource | None:
    """Returns a source that reads `dataset`, or None if it is not a dataset of PyTorch. See `adapt.Convert`."""
    size, drop, data = batching.batch_size, batching.drop_remainder, torch.utils.data
    if isinstance(dataset, data.DataLoader):
        batching.refuse_size(dataset)
        is_full = drop or bool(dataset.batch_size and dataset.drop_last)
        facts = Facts(num_batches=length_of(dataset), is_full=is_full)
        return BatchStream(lambda: iter(dataset), facts, drop_remainder=drop)
    # Before `Dataset`, whose subclass it is.
    if isinstance(dataset, data.IterableDataset):
        return stream_of_records(dataset, batching)
    # Without a batch size, `python.convert` refuses them with a HINT.
    if size is not None and _is_columns(dataset, torch.Tensor):
        return ArrayRecords(dataset, size, drop_remainder=drop)
    if not isinstance(dataset, data.Dataset):
        return None
    return SequenceRecords(dataset, batching.require_size(dataset), drop_remainder=drop)


def _is_columns(dataset: object, tensor: type) -> bool:
    """Whether `dataset` is a tensor with all rows, or a tuple or mapping of such tensors."""
    if isinstance(dataset, tensor):
        return True
    return isinstance(dataset, (tuple, Mapping)) and all(isinstance(x, tensor) for x in jax.tree.leaves(dataset))
