"""Batches with a part of the rows of a dataset's batches: which rows, in which steps, and positions for another part."""

import functools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation import DATA, FILE, open_all, rows, rows_of, take, through_text

import phalanx
from phalanx.errors import InputError
from phalanx.input.shard import InputWorker
from phalanx.input.sources.adapt import source_of
from phalanx.input.sources.partial import partial

ROWS, BATCH = 45, 8


def part_of(dataset, part, batch_size=None, *, drop_remainder=False):
    """The source of a part of each batch."""
    make = functools.partial(source_of, dataset, drop_remainder=drop_remainder)
    return partial(make, batch_size, part, drop_remainder=drop_remainder)


def batches(ends=(8, 16, 24, 32, 40, 45)):
    """Batches of the numbers from 0."""
    return [np.arange(start, end) for start, end in zip((0, *ends), ends, strict=False)]


DATASETS = {
    "arrays": (np.arange(ROWS), BATCH),
    "records in order": (lambda: iter(range(ROWS)), BATCH),
    "list of batches": (batches(), None),
    "stream of batches": (lambda: iter(batches()), None),
}


@pytest.mark.parametrize("name", DATASETS)
@settings(max_examples=25)
@given(parts=st.lists(st.integers(1, 4), min_size=1, max_size=4), steps=st.integers(0, 4))
def test_rows_come_once_whoever_leaves_and_joins(name, parts, steps):
    """With n of 4 workers each step has n / 4 of the rows, and another number goes on at the next row."""
    dataset, batch_size = DATASETS[name]
    found, state = [], None
    for number, count in enumerate(parts):
        readers = open_all(part_of(dataset, Fraction(count, 4), batch_size), (count, 1), state=state)
        taken = take(readers, None if number + 1 == len(parts) else steps)
        sizes = [sum(len(rows(piece)) for piece in pieces) for pieces in taken]
        if name != "stream of batches":  # The sizes of these are unknown, and the last one is short.
            assert all(size == 2 * count for size in sizes[:-1])
        found += rows_of(taken)
        states = [reader.get_state() for reader in readers]
        assert states == states[:1] * count
        state = through_text(states[0])
    assert found == list(range(ROWS))


def test_files_that_workers_share(tmp_path):
    """Each worker reads the rows that it read before from its own files; the position counts the rows of each file."""
    for name in "abcd":
        (tmp_path / name).write_text("x\n" * 8)
    dataset = phalanx.data.from_files(tmp_path / "*", lambda path: [ord(path[-1])] * 8)
    full = open_all(part_of(dataset, Fraction(1), 8), (4, 1), FILE)
    assert [len(rows(piece)) for piece in take(full, 1)[0]] == [2] * 4
    left = open_all(part_of(dataset, Fraction(1, 2), 8), (2, 1), FILE, state={"files": [2] * 4})
    assert [[len(rows(piece)) for piece in pieces] for pieces in take(left)] == [[2, 2]] * 6


def test_batches_whose_rows_differ_are_not_joined():
    """Sequences of another length begin another step."""
    dataset = [np.zeros((4, 3)), np.ones((4, 5)), np.ones((4, 5))]
    (reader,) = open_all(part_of(dataset, Fraction(3, 4)), (1, 1))
    shapes = [piece.parts[0].shape for (piece,) in take([reader])]
    assert shapes == [(3, 3), (1, 3), (3, 5), (3, 5), (2, 5)]


def test_size_of_batches_that_is_unknown_before():
    """A step has the part of the batch in which it begins."""
    (reader,) = open_all(part_of(lambda: iter(batches((8, 10, 20))), Fraction(1, 2)), (1, 1))
    assert [len(rows(piece)) for (piece,) in take([reader])] == [4, 4, 1, 1, 5, 5]


def test_dropped_remainders():
    """A short batch is left out, also if the dataset has none."""
    even = batches((8, 16))
    (reader,) = open_all(part_of(even, Fraction(3, 4), drop_remainder=True), (1, 1))
    assert rows_of(take([reader])) == list(range(12))
    assert part_of(even, Fraction(3, 4), drop_remainder=True).facts.is_full
    assert not part_of(even, Fraction(3, 4)).facts.is_full


def test_whole_source_without_a_part():
    """A dataset of batches is then read as it is."""
    source = part_of(batches(), None)
    assert source.facts.num_batches == 6
    assert rows(source.open(InputWorker(), DATA, {"batches": 5}).read()) == list(range(40, 45))


@pytest.mark.parametrize("state", [{"batches": 1}, {"whole": {"batches": 1}, "used": 9}, {"whole": None, "used": -1}])
def test_position_of_other_data_is_refused(state):
    """One of whole batches, and one of more rows than a batch has."""
    with pytest.raises(InputError, match="set_state"):
        open_all(part_of(batches(), Fraction(1, 2)), (1, 1), state=state)
