"""Batches with a part of the rows of a dataset's batches: which rows, in which steps, and positions for another part."""

from fractions import Fraction

import jax
import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulation import DATA, FILE, open_all, rows, rows_of, take, through_text
from tests.draws import draws

import phalanx
from phalanx._src.input.shard import InputWorker
from phalanx._src.input.sources.adapt import source_of
from phalanx._src.input.sources.partial import partial_source
from phalanx._src.input.sources.records import NumpyDataset
from phalanx.errors import InputError

ROWS, BATCH = 45, 8


def part_of(dataset, part, batch_size=None, *, drop_remainder=False):
    return partial_source(
        lambda drop: source_of(dataset, batch_size, drop_remainder=drop), part, drop_remainder=drop_remainder
    )


def batches(ends=(8, 16, 24, 32, 40, 45)):
    return np.split(np.arange(ends[-1]), ends[:-1])


def sizes_of(taken):
    return [[len(rows(piece)) for piece in pieces] for pieces in taken]


DATASETS = {
    "arrays": (np.arange(ROWS), BATCH),
    "records in order": (lambda: iter(range(ROWS)), BATCH),
    "list of batches": (batches(), None),
    "stream of batches": (lambda: iter(batches()), None),
    "batched rows": (NumpyDataset(np.arange(ROWS)).batch(BATCH), None),
}


@pytest.mark.parametrize("name", DATASETS)
@draws(12, 250)
@given(parts=st.lists(st.integers(1, 4), min_size=1, max_size=4), steps=st.integers(0, 4))
def test_rows_come_once_whoever_leaves_and_joins(name, parts, steps):
    """With n of 4 workers each step has n / 4 of the rows, and another number continues at the next row."""
    dataset, batch_size = DATASETS[name]
    found, state = [], None
    for number, count in enumerate(parts):
        readers = open_all(part_of(dataset, Fraction(count, 4), batch_size), (count, 1), state=state)
        taken = take(readers, None if number + 1 == len(parts) else steps)
        sizes = list(map(sum, sizes_of(taken)))
        # A step that begins in the last batch, which is short, may be short too.
        begins = len(found) + np.cumsum([0, *sizes])[: len(sizes)]
        assert all(
            size == min(2 * count, ROWS - first) for size, first in zip(sizes, begins, strict=True) if first < 40
        )
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
    assert sizes_of(take(full, 1)) == [[2] * 4]
    left = open_all(part_of(dataset, Fraction(1, 2), 8), (2, 1), FILE, state={"files": [2] * 4})
    assert sizes_of(take(left)) == [[2, 2]] * 6


def test_batches_whose_rows_differ_are_not_joined():
    """Sequences of another length begin another step."""
    dataset = [np.zeros((4, 3)), np.ones((4, 5)), np.ones((4, 5))]
    (reader,) = open_all(part_of(dataset, Fraction(3, 4)), (1, 1))
    shapes = [piece.parts[0].shape for (piece,) in take([reader])]
    assert shapes == [(3, 3), (1, 3), (3, 5), (3, 5), (2, 5)]


def test_batches_of_different_sizes():
    """A step has the part of the batch in which it begins; in a complete group, the batches are those of the dataset."""
    dataset = batches((4, 12, 18))
    for data in (dataset, lambda: iter(dataset)):
        for part, sizes in ((Fraction(1), [4, 8, 6]), (Fraction(1, 2), [2, 2, 4, 4, 3, 3])):
            assert sizes_of(take(open_all(part_of(data, part), (1, 1)))) == [[size] for size in sizes]


class Reused(keras.utils.PyDataset):
    """Batches that are written into one array; counts its epochs."""

    def __init__(self):
        super().__init__()
        self.array, self.epochs = np.zeros(BATCH, int), 0

    def __len__(self):
        return 5

    def __getitem__(self, index):
        self.array[:] = np.arange(BATCH) + BATCH * index
        return self.array

    def on_epoch_end(self):
        self.epochs += 1


@pytest.mark.parametrize("part", [Fraction(1), Fraction(3, 4), Fraction(1, 4)])
def test_batches_in_arrays_that_are_used_again(part):
    """Rows that wait for those of the next batch are not overwritten. The end is reached once."""
    dataset, found = Reused(), []
    (reader,) = open_all(part_of(dataset, part), (1, 1))
    while (piece := reader.read()) is not None:
        found += rows(piece)
    assert found == list(range(40))
    assert reader.read() is None
    assert dataset.epochs == 1


def test_keys_of_random_numbers():
    dataset = [jax.random.split(jax.random.key(seed), 4) for seed in (0, 1)]
    (reader,) = open_all(part_of(dataset, Fraction(3, 4)), (1, 1))
    found = [piece.parts[0] for (piece,) in take([reader])]
    assert [len(keys) for keys in found] == [3, 3, 2]
    whole = np.concatenate([jax.random.key_data(keys) for keys in dataset])
    np.testing.assert_array_equal(np.concatenate([jax.random.key_data(keys) for keys in found]), whole)


@pytest.mark.parametrize("name", DATASETS)
def test_only_short_batches_are_dropped(name):
    """Only the last batch is short, so only that is left out. Of batches of unknown sizes, the last part of a short one is kept."""
    dataset, batch_size = DATASETS[name]
    if name == "batched rows":
        dataset, batch_size = np.arange(ROWS), BATCH
    (reader,) = open_all(part_of(dataset, Fraction(3, 4), batch_size, drop_remainder=True), (1, 1))
    assert rows_of(take([reader])) == list(range(42))


class Endless(Reused):
    num_batches = None


def test_facts_about_partial_batches():
    """Nothing that is true of whole batches only is promised."""
    facts = part_of(batches((8, 16)), Fraction(1)).facts
    assert (facts.batch_size, facts.is_full, facts.num_batches, facts.num_records) == (8, False, -2, 16)
    assert not facts.has_random_access
    endless = phalanx.OneDeviceStrategy("cpu:0").experimental_distribute_dataset(Endless())
    assert endless.cardinality == part_of(Endless(), Fraction(1, 2)).facts.num_batches == -1


def test_whole_source_without_a_part():
    """A dataset of batches is read without a change."""
    source = part_of(batches(), None)
    assert source.facts.num_batches == 6
    assert rows(source.open(InputWorker(), DATA, {"batches": 5}).read()) == list(range(40, 45))


def test_positions_between_batches_are_those_of_whole_ones():
    """They fit a training run without missing processes, and vice versa."""
    (reader,) = open_all(part_of(batches(), Fraction(1, 2)), (1, 1))
    take([reader], 2)
    assert reader.get_state() == {"batches": 1}
    take([reader], 1)
    assert reader.get_state() == {"batches": 1, "used": 4}
    (reader,) = open_all(part_of(batches(), Fraction(1, 2)), (1, 1), state={"batches": 5})
    assert rows_of(take([reader])) == list(range(40, 45))


def test_position_within_a_batch_in_a_training_without_missing_processes():
    """The pass continues there, and the marks of the data still fit."""
    strategy = phalanx.OneDeviceStrategy("cpu:0")
    iterator = iter(strategy.experimental_distribute_dataset(batches((8, 16, 24))))
    iterator.set_state({"batches": 1, "used": 2, "data": {"rows": 24, "batches": 3, "batch_size": 8}})
    assert [np.asarray(batch).tolist() for batch in iterator] == [[*range(10, 18)], [*range(18, 24)]]
    with pytest.raises(InputError, match="belongs to other data"):
        iterator.set_state({"batches": 1, "used": 2, "data": {"rows": 25}})


@pytest.mark.parametrize("state", [{"records": 1}, {"batches": 1, "used": 9}, {"batches": 1, "used": -1}])
def test_position_of_other_data_is_refused(state):
    """One of rows, and one of more rows than a batch has."""
    with pytest.raises(InputError, match="set_state"):
        open_all(part_of(batches(), Fraction(1, 2)), (1, 1), state=state)


@pytest.mark.parametrize("replicas", [1, 2])
def test_random_keys_of_several_steps(replicas):
    """They stay on their device, because NumPy has no dtype for them."""
    keys = jax.random.split(jax.random.key(0), 8)
    strategy = phalanx.MirroredStrategy([f"cpu:{i}" for i in range(replicas)])
    iterator = iter(strategy.experimental_distribute_dataset(keys, batch_size=2))
    drawn = strategy.run_steps(lambda k: jax.vmap(jax.random.uniform)(k), iterator, 4)
    rows = np.stack(strategy.experimental_local_results(drawn), axis=1).reshape(8)
    np.testing.assert_array_equal(rows, jax.vmap(jax.random.uniform)(keys))
