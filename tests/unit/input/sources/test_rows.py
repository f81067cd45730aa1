# SPDX-License-Identifier: Apache-2.0
"""Rows that are written to where they are needed."""

import threading

import numpy as np
import pytest

from phalanx._src.input.sources.rows import ChosenRows, copy

LARGE = (129, 1 << 15)  # 16.9 MB of float32, with an odd number of rows.


@pytest.fixture
def rows() -> np.ndarray:
    """Rows of which no two are equal."""
    return np.arange(np.prod(LARGE), dtype=np.float32).reshape(LARGE)


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32"])
def test_copies_every_row_of_a_large_array(rows, dtype):
    """The halves are copied by two threads, cast or not."""
    out = np.full(LARGE, -1, dtype)
    copy(out, rows)
    np.testing.assert_array_equal(out, rows.astype(dtype))


@pytest.mark.parametrize("index", [slice(3, 128), np.random.default_rng(0).permutation(129)], ids=["slice", "shuffled"])
def test_writes_chosen_rows_of_a_large_array(rows, index):
    """As NumPy chooses them."""
    out = np.full((len(range(129)[index]) if isinstance(index, slice) else len(index), LARGE[1]), -1, "float32")
    copy(out, ChosenRows(rows, index))
    np.testing.assert_array_equal(out, rows[index])


AFTER_MAIN = """
import threading, time
import numpy as np
from phalanx._src.input.sources.rows import copy

def late():
    while threading.main_thread().is_alive():
        time.sleep(0.01)
    out = np.zeros((4, 1 << 20))
    copy(out, np.ones_like(out))
    print(out.min())

threading.Thread(target=late).start()
"""


@pytest.mark.slow
def test_copies_after_the_end_of_the_main_thread(run_python):
    """Python starts no other thread then."""
    assert run_python(AFTER_MAIN) == "1.0\n"


def test_copies_one_row_of_many_bytes(rows):
    """It has no halves."""
    out = np.full((1, rows.size), -1, "float32")
    copy(out, rows.reshape(1, -1))
    np.testing.assert_array_equal(out[0], rows.ravel())


def test_failure_in_either_half_is_raised(rows):
    """And no thread is left."""
    before = threading.active_count()
    with pytest.raises(ValueError, match="broadcast"):
        copy(np.empty(LARGE, "float32"), rows[:, :-1])
    with pytest.raises(ValueError, match="convert"):
        copy(np.empty(LARGE, "float32"), np.concatenate([rows[:-1].astype(object), np.full((1, LARGE[1]), "text")]))
    assert threading.active_count() == before
