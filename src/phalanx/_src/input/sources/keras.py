# SPDX-License-Identifier: Apache-2.0
"""Datasets of Keras: `PyDataset`."""

import sys
from collections.abc import Sequence
from typing import Any

from phalanx._src.input.sources.base import INFINITE, AbstractSource, Batching, Facts
from phalanx._src.input.sources.batches import BatchSequence


def convert(dataset: Any, batching: Batching, keras: Any) -> AbstractSource | None:
    """Returns a source that reads `dataset`, or None if it is not a dataset of Keras. See `adapt.Convert`."""
    if not isinstance(dataset, keras.utils.PyDataset):
        return None
    batching.refuse_size(dataset)
    count, drop = dataset.num_batches, batching.drop_remainder
    facts = Facts(num_batches=INFINITE if count is None else count, is_full=drop)
    batches = _PyBatches(dataset, sys.maxsize if count is None else count)
    return BatchSequence(
        batches, facts, drop_remainder=drop, at_begin=dataset.on_epoch_begin, at_end=dataset.on_epoch_end
    )


class _PyBatches(Sequence[Any]):
    """A sequence view of a Keras `PyDataset`, which has no `len` if it is infinite."""

    def __init__(self, dataset: Any, count: int) -> None:
        self._dataset, self._count = dataset, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        return self._dataset[index]
