"""Batches in memory that is written again, and what a step sees of them. The property tests of one and of two processes use it."""

from typing import Any

import keras
import numpy as np
from hypothesis import strategies as st

import phalanx
from phalanx._src.mesh import arrays
from phalanx.keras.data import EpochData

WRONG = -1.0


def memory(shape, offset):
    """Returns memory of the user. A CPU device shares it if `offset` is 0, and copies it later otherwise."""
    size = int(np.prod(shape))
    return arrays.empty((size + offset,), np.float32)[offset:].reshape(shape)


class Source:
    """Batches of rows that hold their own numbers, in memory that is written again.

    Args:
      sizes: rows of each batch.
      width: length of a row.
      shared: number of buffers of the features and of the labels, which are used in turn.
      offset: see `memory`.
    """

    def __init__(self, sizes, width, shared, offset):
        self.sizes, most = sizes, max(sizes)
        self.x = [memory((most, width), offset) for _ in range(shared[0])]
        self.y = [memory((most, 1), offset) for _ in range(shared[1])]

    def __len__(self):
        return len(self.sizes)

    def __getitem__(self, index):
        """Writes a batch into its buffers, and makes all other rows wrong."""
        count, first = self.sizes[index], sum(self.sizes[:index])
        rows = np.arange(first, first + count, dtype="float32")[:, None]
        batch = []
        for buffers in (self.x, self.y):
            buffer = buffers[index % len(buffers)]
            buffer[:] = WRONG
            buffer[:count] = rows
            batch.append(buffer[:count])
        return tuple(batch)

    def __iter__(self):
        for index in range(len(self)):
            yield self[index]
        self.write()

    def write(self):
        """Writes to all buffers, as a caller may do that got back the control."""
        for buffer in (*self.x, *self.y):
            buffer[:] = WRONG


class PyBatches(keras.utils.PyDataset):
    def __init__(self, source):
        super().__init__()
        self.source = source

    def __len__(self):
        return len(self.source)

    def __getitem__(self, index):
        return self.source[index]


def own_arrays(source):
    """Returns arrays with all rows, and what a caller does who writes to them between two batches."""
    total, offset = sum(source.sizes), 1 - int(arrays.address(source.x[0]) % arrays.ALIGNMENT == 0)
    x, y = memory((total, source.x[0].shape[1]), offset), memory((total, 1), offset)
    x[:] = y[:] = np.arange(total, dtype="float32")[:, None]

    def write():
        x[:], y[:] = x + 1000, y + 1000

    return (x, y), write


def own_batches(source):
    (x, y), write = own_arrays(source)
    ends = np.cumsum(source.sizes)
    return [(x[end - n : end], y[end - n : end]) for n, end in zip(source.sizes, ends, strict=True)], write


def distributed(data, strategy, ahead, steps, batch_size=None):
    options = phalanx.InputOptions(experimental_per_replica_buffer_size=ahead)
    dataset = strategy.experimental_distribute_dataset(data, batch_size=batch_size, options=options)
    yield from ((batch, None) for batch in (dataset if steps is None else dataset.batches(steps=steps)))


def in_fit(data, strategy, steps, **options):
    """The batches that `fit` trains on. Code of the user runs between two of them."""
    group = steps or 1
    epoch = EpochData(strategy, data, steps=None, group=group, **options).epoch()
    for _, parts in epoch:
        # A stack has room for all steps of a group, whether there are so many or not.
        yield from parts


def from_function(source, strategy, ahead, steps):
    options = phalanx.InputOptions(experimental_per_replica_buffer_size=ahead)
    dataset = strategy.distribute_datasets_from_function(lambda context: lambda: iter(source), options)
    yield from ((batch, None) for batch in (dataset if steps is None else dataset.batches(steps=steps)))


def opened(kind, source, strategy, ahead, steps):
    """Returns an iterator over batches, and a function that writes wherever their caller may write between two of them."""
    size = max(source.sizes)
    if kind == "generator":
        return distributed(lambda: iter(source), strategy, ahead, steps), lambda: None
    if kind == "PyDataset":
        return distributed(PyBatches(source), strategy, ahead, steps), lambda: None
    if kind == "generator in fit":
        return in_fit((batch for batch in source), strategy, steps), lambda: None
    if kind == "PyDataset in fit":
        return in_fit(PyBatches(source), strategy, steps, shuffle=False), lambda: None
    if kind == "function":
        return from_function(source, strategy, ahead, steps), lambda: None
    if kind == "batches":
        data, write = own_batches(source)
        return distributed(data, strategy, ahead, steps), write
    data, write = own_arrays(source)
    if kind == "arrays in fit":
        return in_fit(data[0], strategy, steps, y=data[1], batch_size=size, shuffle=False), write
    if kind == "shuffled in fit":
        return in_fit(data[0], strategy, steps, y=data[1], batch_size=size, shuffle=True), write
    return distributed(data, strategy, ahead, steps, batch_size=size), write


KINDS = [
    "generator",
    "PyDataset",
    "generator in fit",
    "PyDataset in fit",
    "function",
    "batches",
    "arrays",
    "arrays in fit",
    "shuffled in fit",
]


def rows_of(strategy, batch, count, *, is_stacked):
    """Returns the rows of a batch, or of the first `count` steps of a stack, in the order of the replicas: a list of (x, y)."""
    parts = [list(map(np.asarray, strategy.experimental_local_results(leaf))) for leaf in batch]
    if not is_stacked:
        return [tuple(np.concatenate(leaf) for leaf in parts)]
    return [
        tuple(np.concatenate([part[step] for part in leaf]) for leaf in parts)
        for step in range(count or len(parts[0][0]))
    ]


def rows_seen(
    strategy: phalanx.Strategy,
    *,
    kind: str,
    sizes: list[int],
    width: int,
    shared: tuple[int, int],
    offset: int,
    ahead: int,
    steps: int | None,
    holds: bool,
) -> list[list[int]]:
    """Reads all batches, and returns the numbers of the rows that the replicas of this process see, per step.

    Raises:
      AssertionError: a row is not as it was handed over, or a batch changes as long as it lives.
    """
    batches, write = opened(kind, Source(sizes, width, shared, offset), strategy, ahead, steps)
    is_stacked = steps is not None
    seen, held = [], []
    for batch, count in batches:
        write()
        now = rows_of(strategy, batch, count, is_stacked=is_stacked)
        for x, y in now:
            assert (x == x[:, :1]).all()
            np.testing.assert_array_equal(x[:, :1], y)
            # All rows of a step have the same version of what the caller wrote.
            assert len({*(y // 1000).ravel().tolist()}) <= 1
            seen.append([int(number) for number in (y % 1000).ravel()])
        if holds:
            held.append((batch, count, now))
    for batch, count, before in held:
        later = rows_of(strategy, batch, count, is_stacked=is_stacked)
        assert all(
            np.array_equal(*pair)
            for one, other in zip(later, before, strict=True)
            for pair in zip(one, other, strict=True)
        )
    return seen


def cases(kinds: list[str] = KINDS) -> st.SearchStrategy[dict[str, Any]]:
    """Draws the arguments of `rows_seen`."""

    def fitting(case: dict[str, Any]) -> dict[str, Any]:
        sizes = case["sizes"]
        if "arrays" in case["kind"] or "shuffled" in case["kind"]:
            sizes = [max(sizes)] * (len(sizes) - 1) + [min(sizes)]
        return {**case, "sizes": sizes}

    return st.fixed_dictionaries(
        {
            "kind": st.sampled_from(kinds),
            "sizes": st.lists(st.integers(1, 6), min_size=1, max_size=7),
            "width": st.sampled_from([3, 4096]),
            "shared": st.tuples(st.integers(1, 3), st.integers(1, 3)),
            "offset": st.integers(0, 1),
            "ahead": st.integers(0, 3),
            "steps": st.sampled_from([None, 2, 3]),
            "holds": st.booleans(),
        }
    ).map(fitting)
