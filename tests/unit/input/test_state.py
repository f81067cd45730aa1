"""Positions as text, and those of all workers as one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulation import combined, together

from phalanx._src.input.state import from_text, of_all_workers, of_worker, to_text
from phalanx.errors import InputError

LEAVES = st.one_of(st.integers(), st.text(), st.binary(), st.none(), st.booleans(), st.floats(allow_nan=False))
KEYS = st.sampled_from(["records", "source", "", "é"])
STATES = st.dictionaries(
    KEYS, st.recursive(LEAVES, lambda x: st.lists(x, max_size=3) | st.dictionaries(KEYS, x, max_size=3), max_leaves=5)
)


@given(STATES)
def test_text_and_back(state):
    """Numbers, text, bytes, lists and dicts."""
    assert from_text(to_text(state)) == state


def test_other_types_in_positions_are_refused():
    """Numbers of NumPy become ordinary ones."""
    assert from_text(to_text({"records": np.int64(3)})) == {"records": 3}
    with pytest.raises(TypeError, match="must not contain an object of type ndarray"):
        to_text({"records": np.arange(3)})


def test_positions_in_files_become_one():
    """The worker that reads a file knows best how far."""
    states = [{"files": [5, 0, 2]}, {"files": [0, 7, 0]}]
    assert together(2, lambda i, exchange: of_all_workers(states[i], exchange)) == [{"files": [5, 7, 2]}] * 2
    assert combined(states) == {"files": [5, 7, 2]}


def test_other_positions_are_kept_side_by_side():
    """Each worker takes back its own, whatever the lengths of their texts."""
    states = [{"batches": 3}, {"batches": 12345, "source": b"\x00\xff" * 40}, {"batches": 0}]
    whole = together(3, lambda i, exchange: of_all_workers(states[i], exchange))
    assert whole == [{"workers": states}] * 3
    assert [of_worker(whole[0], i, 3) for i in range(3)] == states
    # A position that all workers share fits any number of them.
    assert of_worker({"records": 3}, 4, 5) == {"records": 3}


@pytest.mark.parametrize("count", [1, 3])
def test_positions_of_another_number_of_workers(count):
    with pytest.raises(
        InputError,
        match=f"set_state of a position of 2 workers: the number of workers is now {count}.*\nHINT: AutoShardPolicy.DATA",
    ):
        of_worker({"workers": [{}, {}]}, 0, count)
