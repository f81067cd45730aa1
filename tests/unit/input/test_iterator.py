"""Positions that are invalid or belong to other data: each is refused, and the iterator stays where it was."""

import keras
import numpy as np
import pytest

import phalanx
from phalanx.errors import InputError


class Batches(keras.utils.PyDataset):
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
def iterator(request, strategy):
    """An iterator after its first batch."""
    make, batch_size = request.param
    iterator = iter(strategy.experimental_distribute_dataset(make(), batch_size=batch_size))
    next(iterator)
    return iterator


def next_rows(iterator):
    return [int(x) for part in next(iterator).values for x in part]


def assert_refuses(iterator, wrong):
    with pytest.raises(InputError, match=r"(?s)set_state.*HINT: "):
        iterator.set_state(wrong)


def invalid_states(state):
    """Yields invalid positions that resemble `state`."""
    (key,) = set(state) - {"data"}
    for entry in (-1, 99, True, None, 1.5, "1", [1], 2**70):
        yield {**state, key: entry}
        yield {key: entry}
    yield from (None, 3, [], {}, {"row": 1}, {**state, "more": 1}, {"workers": 3}, {"workers": [state], "more": 1})
    yield {"files": [1]}
    yield {"pipelines": [state]}


def test_wrong_positions_are_refused(iterator):
    """Each with a typed error; afterwards the pass continues. Positions without a mark, from earlier versions, are taken."""
    state = iterator.get_state()
    for wrong in invalid_states(state):
        assert_refuses(iterator, wrong)
    assert iterator.get_state() == state
    expected = next_rows(iterator)
    for valid in (state, {key: entry for key, entry in state.items() if key != "data"}):
        iterator.set_state(valid)
        assert next_rows(iterator) == expected


def test_a_position_of_other_rows(strategy):
    """A position of 100 rows by 32 is refused by 50 rows by 16; the message has both numbers."""
    longer = iter(strategy.experimental_distribute_dataset(np.arange(100), batch_size=32))
    shorter = iter(strategy.experimental_distribute_dataset(np.arange(50), batch_size=16))
    next(longer)
    message = r"the position belongs to other data: rows=100 in the position and 50 in this dataset.\nHINT: .*del state"
    with pytest.raises(InputError, match=message):
        shorter.set_state(longer.get_state())
    assert next_rows(shorter) == list(range(16))


def test_a_position_of_other_batches(strategy):
    """Batches are counted, so their number and size must be the same."""
    of_four = iter(strategy.experimental_distribute_dataset([np.arange(4)] * 3))
    of_two = iter(strategy.experimental_distribute_dataset([np.arange(2)] * 6))
    next(of_four)
    message = "batch_size=4 in the position and 2 in this dataset, batches=3 in the position and 6 in"
    with pytest.raises(InputError, match=message):
        of_two.set_state(of_four.get_state())


def test_a_position_by_another_batch_size(strategy):
    """Rows are counted, so the batch size may change."""
    by_four = iter(strategy.experimental_distribute_dataset(np.arange(20), batch_size=4))
    by_six = iter(strategy.experimental_distribute_dataset(np.arange(20), batch_size=6))
    next(by_four)
    by_six.set_state(by_four.get_state())
    assert next_rows(by_six) == [4, 5, 6, 7, 8, 9]


def test_a_position_beyond_the_end_of_a_stream(strategy):
    """A stream finds its end only by reading that far."""
    iterator = iter(strategy.experimental_distribute_dataset(lambda: iter([np.arange(2)] * 3)))
    with pytest.raises(InputError, match="set_state of batch 4: this dataset has only 3"):
        iterator.set_state({"batches": 4})
    iterator.set_state({"batches": 3})
    assert not iterator.get_next_as_optional().has_value()


def test_skipped_batches_end_with_the_data(strategy):
    """However many are to be skipped."""
    iterator = iter(strategy.experimental_distribute_dataset(np.arange(8), batch_size=2))
    iterator.advance(1)
    assert next_rows(iterator) == [2, 3]
    iterator.advance(10**30)
    assert not iterator.get_next_as_optional().has_value()


def test_wrong_positions_of_functions_and_files(strategy, tmp_path):
    """Each entry of their lists is checked."""
    of_function = iter(strategy.distribute_datasets_from_function(lambda context: [np.arange(2)] * 3))
    for wrong in (3, [], [{"batches": -1}], [{"records": 1}]):
        assert_refuses(of_function, {"pipelines": wrong})
    (tmp_path / "a").write_text("1\n2\n")
    files = phalanx.data.from_files([tmp_path / "a"], lambda path: [1, 2])
    of_files = iter(strategy.experimental_distribute_dataset(files, batch_size=2))
    for wrong in (3, [], [-1], [True], ["1"]):
        assert_refuses(of_files, {"files": wrong})
