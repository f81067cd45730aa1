# SPDX-License-Identifier: Apache-2.0
"""A torch `DataLoader` over the same arrays. In an environment of its own."""

import time
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

from benchmarks import batches

_loaders: list[DataLoader[Any]] = []


def prepare(batch_bytes: int, workers: int, slices: bool) -> float:
    """Makes the loader, passes over it once, and returns the sum of the labels.

    Args:
      batch_bytes: the size of a batch.
      workers: how many processes read; 0 is this one.
      slices: whether a batch is one indexing of the tensors, which few programs ask for; else the rows are collated.
    """
    x, y = batches.arrays(batch_bytes, aligned=False)
    dataset, rows = TensorDataset(torch.from_numpy(x), torch.from_numpy(y)), batches.rows_of(batch_bytes)
    alive = {"num_workers": workers, "persistent_workers": workers > 0}
    if slices:
        sampler = BatchSampler(SequentialSampler(dataset), rows, drop_last=False)
        _loaders.append(DataLoader(dataset, sampler=sampler, batch_size=None, **alive))
    else:
        _loaders.append(DataLoader(dataset, batch_size=rows, **alive))
    return sum(float(y.sum()) for _, y in _loaders[0])


def seconds_a_pass(passes: int) -> float:
    """Times passes over all batches."""
    start = time.perf_counter()
    for _ in range(passes):
        for _ in _loaders[0]:
            pass
    return (time.perf_counter() - start) / passes
