"""Arrays and sequences of records: every row once, in order, from any position, on any workers."""

import dataclasses
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulation import DATA, MOVES, SHAPES, assert_goes_on, assert_shared, batch_sizes, open_all, rows_of, take
from tests.draws import draws

from phalanx._src.input.shard import InputWorker
from phalanx._src.input.sources.adapt import source_of
from phalanx._src.input.sources.base import Owner
from phalanx._src.input.sources.records import ArrayRecords, NumpyDataset, SequenceRecords
from phalanx.errors import InputError, InvalidArgumentError

KINDS = {
    "arrays": lambda n, b, **kwargs: ArrayRecords(np.arange(n), b, **kwargs),
    "sequence": lambda n, b, **kwargs: SequenceRecords(range(n), b, **kwargs),
}


@pytest.fixture(params=KINDS)
def make(request):
    """Makes a source of the rows 0, 1, ... n - 1."""
    return KINDS[request.param]


@pytest.mark.cover(["make", "shape"], {([*KINDS][sum(shape) % 2], shape) for shape in SHAPES})
@pytest.mark.parametrize("shape", SHAPES)
def test_every_row_once_and_in_order(make, shape):
    """For all numbers of rows, batch sizes, workers and replicas."""
    for n in range(19):
        for b in range(1, 10):
            assert_shared(make(n, b), shape, batch_sizes(n, b))


@draws(20, 600)
@given(st.integers(0, 2000), st.integers(1, 500), st.integers(1, 12), st.integers(1, 12))
def test_every_row_once_at_larger_sizes(n, b, count, replicas):
    assert_shared(ArrayRecords(np.arange(n), b), (count, replicas), batch_sizes(n, b))


@pytest.mark.parametrize("shape", [(1, 1), (1, 3), (2, 2), (3, 1)])
def test_drop_remainder_keeps_full_batches(make, shape):
    for n in range(20):
        source = make(n, 6, drop_remainder=True)
        taken = take(open_all(source, shape))
        assert rows_of(taken) == list(range(n // 6 * 6))
        assert len(taken) == source.facts.num_batches
        assert source.facts.is_full


@pytest.mark.parametrize(("before", "after"), MOVES)
def test_goes_on_from_every_position(make, before, after):
    for n, b in [(0, 3), (1, 4), (13, 4), (24, 6), (25, 1)]:
        assert_goes_on(make(n, b), before, after, list(range(n)))


def test_facts_are_known_before_reading(make):
    facts = make(10, 4).facts
    assert (facts.batch_size, facts.num_batches, facts.num_records) == (4, 3, 10)
    assert facts.has_random_access
    assert not facts.is_full
    assert make(8, 4).facts.is_full
    assert make(0, 4).facts.num_batches == 0


class Recording:
    def __init__(self, n):
        self.n, self.read = n, []

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        self.read.append(i)
        return {"x": np.full(2, i), "y": i}


def test_no_worker_reads_the_records_of_another():
    """A worker asks a sequence for its own records only; if it has none, for one as padding."""
    seen = []
    for index in range(2):
        sequence = Recording(10)
        take([SequenceRecords(sequence, 4).open(InputWorker(index, 2, 2), DATA, None)])
        seen.append(sequence.read)
    assert seen == [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 8]]


def test_endless_records_have_no_number_of_batches():
    """A Grain dataset that repeats says it has `sys.maxsize` records."""
    source = SequenceRecords(Recording(sys.maxsize), 4)
    assert (source.facts.num_batches, source.facts.num_records, source.facts.is_full) == (-1, None, True)
    assert len(take([source.open(InputWorker(), DATA, None)], steps=30)) == 30


def test_records_become_batches():
    """A pytree of stacked leaves, with their dtypes."""
    (piece,) = take([SequenceRecords(Recording(3), 4).open(InputWorker(), DATA, None)])[0]
    (batch,) = piece.parts
    assert batch["x"].tolist() == [[0, 0], [1, 1], [2, 2]]
    assert batch["y"].tolist() == [0, 1, 2]


def test_a_record_that_is_none():
    """A filter of Grain leaves such holes. Other records that make no batch: test_rows_that_make_no_batch."""
    with pytest.raises(InputError, match="record 1 of a list: it is None, because a filter"):
        SequenceRecords([1, None], 2).open(InputWorker(), DATA, None).read()


def test_arrays_of_jax():
    """They stay on their device, and nobody writes to them."""
    array = jnp.arange(3)
    source = ArrayRecords({"x": array}, 4)
    (piece,) = take([source.open(InputWorker(), DATA, None)])[0]
    assert piece.parts[0]["x"].array is array
    assert source.facts.owner is Owner.NOBODY


def test_rows_are_not_copied():
    array = np.arange(8)
    piece = ArrayRecords(array, 4).open(InputWorker(), DATA, None).read()
    assert np.shares_memory(piece.parts[0], array)


def test_numpy_dataset_takes_lists_as_arrays():
    """Rows of a pytree, of which a list is one array."""
    dataset = NumpyDataset({"x": np.zeros((5, 2)), "y": [1, 2, 3, 4, 5]})
    assert len(dataset) == 5
    assert dataset.batch(2, drop_remainder=True).facts.num_batches == 2
    with pytest.raises(InputError, match=r"its leaves have different numbers of rows: \[2, 3\]"):
        NumpyDataset((np.zeros(2), np.zeros(3)))
    for size in (0, None):
        with pytest.raises(InvalidArgumentError, match=f"batch_size={size}: must be"):
            dataset.batch(size)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Columns:
    """A pytree class of a user."""

    x: np.ndarray
    y: np.ndarray | None = None


@pytest.mark.parametrize("y", [None, np.arange(4)], ids=["one_array", "two_arrays"])
def test_pytree_classes_of_arrays(y):
    """A class with a single array is a dataset too."""
    assert source_of(Columns(np.arange(4), y), 2).facts.num_records == 4
