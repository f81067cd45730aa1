"""Positions that are none, or belong to other data: each is refused, and the iterator stays where it was."""

import keras
import numpy as np
import pytest

import phalanx
from phalanx.errors import InputError


class Batches(keras.utils.PyDataset):
    """Five batches."""

    def __len__(self):
        return 5

    def __getitem__(self, index):
        return np.full(2, index)


KINDS = {
    "rows": (lambda: np.arange(10), 2),
    "sequence": (lambda: range(10), 2),
    "batches": (lambda: [np.full(2, i) for i in range(5)], None),
    "py_dataset": (Batches, None),
    "stream": (lambda: lambda: iter([np.full(2, i) for i in range(5)]), None),
    "stream of rows": (lambda: lambda: iter(range(10)), 2),
}


@pytest.fixture(params=KINDS.values(), ids=KINDS.keys())
def iterator(request):
    """An iterator after its first batch."""
    make, batch_size = request.param
    strategy = phalanx.MirroredStrategy(["cpu:0", "cpu:1"])
    iterator = iter(strategy.experimental_distribute_dataset(make(), batch_size=batch_size))
    next(iterator)
    return iterator


def second(iterator):
    """Its second batch."""
    return [int(x) for part in next(iterator).values for x in part]


def wrong_ones(state):
    """Positions like `state` that are none."""
    (key,) = set(state) - {"data"}
    for entry in (-1, 99, True, None, 1.5, "1", [1], 2**70):
        yield {**state, key: entry}
        yield {key: entry}
    yield from (None, 3, [], {}, {"row": 1}, {**state, "more": 1}, {"workers": 3}, {"workers": [state], "more": 1})
    yield {"files": [1]}
    yield {"pipelines": [state]}


def test_wrong_positions_are_refused(iterator):
    """Each with a typed error; afterwards the pass goes on."""
    state = iterator.get_state()
    for wrong in wrong_ones(state):
        with pytest.raises(InputError, match=r"(?s)set_state.*HINT: "):
            iterator.set_state(wrong)
    assert iterator.get_state() == state
    after = second(iterator)
    iterator.set_state(state)
    assert second(iterator) == after


def test_positions_without_a_mark_are_taken(iterator):
    """Those that an earlier version has saved."""
    state = {key: entry for key, entry in iterator.get_state().items() if key != "data"}
    expected = second(iterator)
    iterator.set_state(state)
    assert second(iterator) == expected


def test_a_position_of_other_rows(tmp_path):
    """Of 100 rows by 32 is none of 50 rows by 16; both numbers are told."""
    strategy = phalanx.MirroredStrategy(["cpu:0", "cpu:1"])
    longer = iter(strategy.experimental_distribute_dataset(np.arange(100), batch_size=32))
    shorter = iter(strategy.experimental_distribute_dataset(np.arange(50), batch_size=16))
    next(longer)
    longer.save_state(tmp_path / "state")
    with pytest.raises(
        InputError,
        match=r"the position belongs to other data: rows=100 in the position and 50 in this dataset.\nHINT: .*del state",
    ):
        shorter.load_state(tmp_path / "state")
    assert second(shorter) == list(range(16))


def test_a_position_of_other_batches():
    """Batches are counted, so their number and size must be the same."""
    strategy = phalanx.MirroredStrategy(["cpu:0", "cpu:1"])
    of_four = iter(strategy.experimental_distribute_dataset([np.arange(4)] * 3))
    of_two = iter(strategy.experimental_distribute_dataset([np.arange(2)] * 6))
    next(of_four)
    with pytest.raises(
        InputError, match="batch_size=4 in the position and 2 in this dataset, batches=3 in the position and 6 in"
    ):
        of_two.set_state(of_four.get_state())


def test_a_position_by_another_batch_size():
    """Rows are counted, so the batch size may change."""
    strategy = phalanx.MirroredStrategy(["cpu:0", "cpu:1"])
    by_four = iter(strategy.experimental_distribute_dataset(np.arange(20), batch_size=4))
    by_six = iter(strategy.experimental_distribute_dataset(np.arange(20), batch_size=6))
    next(by_four)
    by_six.set_state(by_four.get_state())
    assert second(by_six) == [4, 5, 6, 7, 8, 9]


def test_a_position_beyond_the_end_of_a_stream():
    """A stream knows its end when it has read so far."""
    strategy = phalanx.MirroredStrategy(["cpu:0", "cpu:1"])
    iterator = iter(strategy.experimental_distribute_dataset(lambda: iter([np.arange(2)] * 3)))
    with pytest.raises(InputError, match="set_state of batch 4: this dataset has only 3"):
        iterator.set_state({"batches": 4})
    iterator.set_state({"batches": 3})
    assert not iterator.get_next_as_optional().has_value()


def test_wrong_positions_of_functions_and_files(tmp_path):
    """Each entry of their lists is checked."""
    strategy = phalanx.MirroredStrategy(["cpu:0", "cpu:1"])
    of_function = iter(strategy.distribute_datasets_from_function(lambda context: [np.arange(2)] * 3))
    for wrong in (
        {"pipelines": 3},
        {"pipelines": []},
        {"pipelines": [{"batches": -1}]},
        {"pipelines": [{"records": 1}]},
    ):
        with pytest.raises(InputError, match=r"(?s)set_state.*HINT: "):
            of_function.set_state(wrong)
    (tmp_path / "a").write_text("1\n2\n")
    read = lambda path: [int(line) for line in open(path)]  # noqa: E731, SIM115
    of_files = iter(
        strategy.experimental_distribute_dataset(phalanx.data.from_files([tmp_path / "a"], read), batch_size=2)
    )
    for wrong in ({"files": 3}, {"files": []}, {"files": [-1]}, {"files": [True]}, {"files": ["1"]}):
        with pytest.raises(InputError, match=r"(?s)set_state.*HINT: "):
            of_files.set_state(wrong)
