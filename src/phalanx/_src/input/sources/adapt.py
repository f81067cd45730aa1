# SPDX-License-Identifier: Apache-2.0
"""Converts a user's dataset to a source."""

import sys
from collections.abc import Callable
from typing import Any

from phalanx._src.input.sources import grain, hugging_face, keras, python, tensorflow, torch
from phalanx._src.input.sources.base import AbstractRows, AbstractSource, Batching

Convert = Callable[[Any, Batching, Any], AbstractSource | None]
"""Maps a dataset, what the user asked for, and the imported library to a source; None if the dataset is of another library."""

# By the name of the module. A library is looked up in `sys.modules` and never imported: a dataset of a library can exist
# only if the user has imported that library.
_LIBRARIES: dict[str, Convert] = {
    "grain": grain.convert,
    "keras": keras.convert,
    # Before torch: if torch is installed, a Hugging Face `IterableDataset` is also a torch dataset.
    "datasets": hugging_face.convert,
    "torch": torch.convert,
    "tensorflow": tensorflow.convert,
}


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
    batching = Batching(batch_size, drop_remainder)
    if isinstance(dataset, AbstractRows):
        return dataset.batch(batching.require_size(dataset), drop_remainder=drop_remainder)
    if isinstance(dataset, AbstractSource):
        batching.refuse_size(dataset)
        return dataset
    for name, convert in _LIBRARIES.items():
        library = sys.modules.get(name)
        source = None if library is None else convert(dataset, batching, library)
        if source is not None:
            return source
    return python.convert(dataset, batching)
