"""Sources of whole global batches: each worker keeps its rows of each batch."""

import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulation import DATA, MOVES, SHAPES, assert_goes_on, assert_shared, batch_sizes, open_all, rows_of, take
from tests.draws import draws

from phalanx._src.input.feed import Feed
from phalanx._src.input.landing import Landing
from phalanx._src.input.shard import InputWorker
from phalanx._src.input.sources.adapt import source_of
from phalanx._src.input.sources.base import Facts
from phalanx._src.input.sources.batches import BatchSequence, BatchStream, OneShot, batched, sizes
from phalanx._src.mesh.memory import Pool
from phalanx.errors import InputError


def cut(batch_rows):
    """Returns batches of the rows 0, 1, ... with these numbers of rows."""
    return np.split(np.arange(sum(batch_rows)), np.cumsum(batch_rows[:-1], dtype=int)) if batch_rows else []


KINDS = {
    "list": lambda batch_rows, **kwargs: BatchSequence(cut(batch_rows), sizes(cut(batch_rows)), **kwargs),
    "stream": lambda batch_rows, **kwargs: BatchStream(lambda: iter(cut(batch_rows)), Facts(), **kwargs),
    "adapted": lambda batch_rows, **kwargs: source_of(lambda: iter(cut(batch_rows)), **kwargs),
}


@pytest.fixture(params=KINDS)
def make(request):
    """Makes a source of batches with these numbers of rows."""
    return KINDS[request.param]


@pytest.mark.cover(["make", "shape"], {([*KINDS][sum(shape) % 3], shape) for shape in SHAPES})
@pytest.mark.parametrize("shape", SHAPES)
def test_every_row_once_and_in_order(make, shape):
    """For all numbers of rows, batch sizes, workers and replicas."""
    for n in range(0, 19, 1 if shape[0] < 3 else 3):
        for b in range(1, 10):
            assert_shared(make(batch_sizes(n, b)), shape, batch_sizes(n, b))


@draws(20, 600)
@given(st.lists(st.integers(0, 70), max_size=12), st.integers(1, 9), st.integers(1, 9))
def test_batches_of_any_sizes(batch_rows, count, replicas):
    """Batches of the user may differ in size, and have no row at all."""
    assert_shared(KINDS["stream"](batch_rows), (count, replicas), batch_rows)


@draws(20, 600)
@given(st.integers(0, 300), st.integers(1, 60), st.integers(1, 9))
def test_records_of_an_iterable(n, b, count):
    """They are grouped, and each worker keeps its own."""
    assert_shared(source_of(lambda: iter(range(n)), b), (count, 2), batch_sizes(n, b))


@pytest.mark.parametrize(("before", "after"), MOVES)
def test_goes_on_from_every_position(make, before, after):
    for batch_rows in ([], [3, 3, 1], [4, 0, 9, 1], [8, 8]):
        assert_goes_on(make(batch_rows), before, after, list(range(sum(batch_rows))))


def test_drop_remainder_leaves_short_batches_out(make):
    """Batches that are shorter than the longest before them are dropped."""
    taken = take(open_all(make([4, 4, 2], drop_remainder=True), (2, 1)))
    assert rows_of(taken) == list(range(8))


def test_facts_of_batches_in_memory():
    facts = sizes(cut([4, 4, 3]))
    assert (facts.batch_size, facts.is_full, facts.num_batches, facts.num_records) == (4, False, 3, 11)
    assert sizes(cut([4, 4])).is_full
    assert sizes([]).num_batches == 0


class Squares(keras.utils.PyDataset):
    def __init__(self):
        super().__init__()
        self.asked = []

    def __len__(self):
        return 3

    def __getitem__(self, i):
        self.asked.append(i)
        return np.full((2, 2), i), np.array([i, i])

    def on_epoch_begin(self):
        self.asked.append("begin")

    def on_epoch_end(self):
        self.asked.append("end")


def test_py_dataset_keeps_order_and_epochs():
    """Its `on_epoch_begin` and `on_epoch_end` are called around the reads. Batches before a restored position are not read."""
    dataset = Squares()
    source = source_of(dataset)
    assert source.facts.num_batches == 3
    assert rows_of(take([source.open(InputWorker(), DATA, None)])) == [[0, 0]] * 2 + [[1, 1]] * 2 + [[2, 2]] * 2
    assert dataset.asked == ["begin", 0, 1, 2, "end"]
    take([source.open(InputWorker(), DATA, {"batches": 2})])
    assert dataset.asked[5:] == ["begin", 2, "end"]


def test_generator_that_writes_into_one_array():
    """The source says that a batch is the generator's again at the next read."""

    def batches():
        buffer = np.zeros(2)
        for i in range(3):
            buffer[:] = i
            yield buffer

    source = source_of(batches)
    steps = Feed(source.open(InputWorker(), DATA, None), Landing(source.facts.owner, Pool())).read(3)
    assert [step.piece.parts[0][:].tolist() for step in steps] == [[0, 0], [1, 1], [2, 2]]


def test_one_shot_iterator_is_handed_out_once():
    make = OneShot(iter([1]))
    assert list(make()) == [1]
    message = "a second pass over an iterator: an iterator can be read only once.\nHINT: .*"
    with pytest.raises(InputError, match=message):
        make()


def test_batched_rows_end_with_short_batch():
    assert [b.tolist() for b in batched(range(5), 2)] == [[0, 1], [2, 3], [4]]
    assert list(batched([], 2)) == []
