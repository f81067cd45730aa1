"""Which worker and replica gets which rows: properties of the arithmetic."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation import SHAPES, batch_sizes, workers

from phalanx._src.input.shard import InputWorker, shares, split

ROWS, FEW = st.integers(0, 10_000), st.integers(1, 40)


@given(ROWS, FEW)
def test_shares_add_up_evenly(rows, replicas):
    """They add up, differ by one at most, and the first replicas have more."""
    result = shares(rows, replicas)
    assert sum(result) == rows
    assert max(result) - min(result) <= 1
    assert result == sorted(result, reverse=True)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=40))
def test_split_holds_every_row_once(counts):
    """Real rows are in order; padded rows come last and are copies of real rows. Replicas may have any numbers of rows."""
    places = max(1, *counts, 1)
    index, is_real = split(counts, places), np.arange(places) < np.array(counts)[:, None]
    assert index.shape == (len(counts), places)
    assert index[is_real].tolist() == list(range(sum(counts)))
    assert index.min() >= 0
    assert index.max() < max(1, sum(counts))


@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.integers(1, 5), st.integers(0, 3))
def test_split_of_several_steps(counts, steps, missing):
    """Each step lies as a batch does, behind the rows of the steps before it; the last one fills the rest of the room."""
    places, first_row = max(1, *counts, 1), sum(counts)
    stacked = split(counts, places, steps, steps + missing)
    for step in range(steps + missing):
        expected = split(counts, places) + min(step, steps - 1) * first_row
        assert np.array_equal(stacked[:, step], expected)


@pytest.mark.parametrize("shape", SHAPES)
def test_shares_sum_to_the_rows(shape):
    """Whatever the rows and the batch size; shares differ by at most one, and all workers know those of all."""
    for n in range(41):
        for b in range(1, 10):
            for size in batch_sizes(n, b):
                counts = [count for w in workers(*shape) for count in w.shares(size)]
                assert sum(counts) == size
                assert np.ptp(counts) <= 1
                assert all(w.all_shares(size) == counts for w in workers(*shape))


@settings(max_examples=200)
@given(ROWS, FEW, FEW)
def test_rows_of_many_workers(rows, count, replicas):
    """Each row belongs to one worker, whose rows are as many as the shares of its replicas."""
    everyone = workers(count, replicas)
    assert [i for w in everyone for i in w.rows(rows)] == list(range(rows))
    assert [n for w in everyone for n in w.shares(rows)] == shares(rows, count * replicas)
    assert [len(w.rows(rows)) for w in everyone] == [sum(w.shares(rows)) for w in everyone]


@given(st.integers(0, 100), FEW)
def test_files_of_all_workers(num_files, count):
    """Worker w of W has the files w, w + W, ...: each file belongs to one."""
    each = [w.files(num_files) for w in workers(count, 1)]
    assert sorted(i for files in each for i in files) == list(range(num_files))
    assert all(i % count == w for w, files in enumerate(each) for i in files)


def test_one_worker_has_everything():
    worker = InputWorker()
    assert (worker.num_replicas, worker.is_chief) == (1, True)
    assert not InputWorker(1, 2, 3).is_chief
    assert InputWorker(1, 2, 3).num_replicas == 6
    assert (worker.rows(7), list(worker.files(3)), worker.shares(7)) == (range(7), [0, 1, 2], [7])
