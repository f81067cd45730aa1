"""Sums that notice what has changed on a disk."""

import itertools

import numpy as np
import pytest

from phalanx._src.checkpoint import sums

SIZES = [1, 7, 8, 9, 100, 3 * 8 * (1 << 14) + 5]


@pytest.mark.parametrize("size", SIZES)
def test_changed_bits_and_orders_are_noticed(size):
    random = np.random.default_rng(size)
    array = random.integers(0, 256, size, np.uint8)
    whole = sums.of_array(array)
    for place in {0, size // 2, size - 1}:
        for bit in (1, 128):
            changed = array.copy()
            changed[place] ^= bit
            assert sums.of_array(changed) != whole
    for length in (8, 8 << 14):
        if size >= 2 * length:
            changed = array.copy()
            changed[:length], changed[length : 2 * length] = array[length : 2 * length], array[:length]
            assert sums.of_array(changed) != whole
    assert sums.of_array(array[:-1]) != whole


@pytest.mark.cover(["dtype"], {"float32", "float16"})
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_changes_do_not_cancel(dtype):
    """Two bits each, signs among them, and two numbers that change places, of which one is the negative of the other."""
    values = np.random.default_rng(0).normal(size=6).astype(dtype)
    values[1], values[4] = -values[0], -values[3]
    whole, bits = sums.of_array(values), 8 * values.nbytes
    for one, other in itertools.combinations(range(bits), 2):
        changed = np.unpackbits(values.view(np.uint8))
        changed[[one, other]] ^= 1
        assert sums.of_array(np.packbits(changed)) != whole
    for order in itertools.permutations(range(6)):
        assert order == tuple(range(6)) or sums.of_array(values[list(order)]) != whole


def test_sum_of_the_format_before_has_no_order():
    """It is the sum of the words."""
    assert sums.of_bytes(np.array([1, 2], np.uint64)) == sums.of_bytes(np.array([2, 1], np.uint64)) == 3
    assert sums.of_bytes(np.array([5, 7], np.uint8)) == 12
