"""The array of all predictions, whose number may be unknown."""

import tracemalloc

import jax.numpy as jnp
import numpy as np
import pytest

from phalanx.keras.predictions import Outputs


@pytest.mark.parametrize("expected", [None, 1, 3, 40, 100])
@pytest.mark.parametrize("shape", [(), (3,), (0,), (2, 5)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "int8", jnp.bfloat16], ids=str)
def test_rows_stay_in_order(expected, shape, dtype):
    """However many are expected, and however many come at once."""
    rng = np.random.default_rng(0)
    parts = [rng.integers(-99, 99, (count, *shape)).astype(dtype) for count in [3, *rng.integers(0, 4, 38), 1000]]
    outputs = Outputs(expected)
    for part in parts:
        assert outputs.add([{"a": part}])["a"] is part
    rows = outputs.result()["a"]
    assert rows.dtype == dtype
    np.testing.assert_array_equal(rows, np.concatenate(parts))
    rows[:] = 0


def test_rows_of_a_wider_dtype_join_those_before():
    """The rows before are converted once, and more rows of that dtype follow."""
    parts = [np.full(4, i, "int32" if i < 5 else "float32") for i in range(20)]
    outputs = Outputs(None)
    for part in parts:
        outputs.add([part])
    np.testing.assert_array_equal(outputs.result(), np.concatenate(parts))


def test_rows_of_an_unknown_number_are_not_held_twice():
    """NumPy holds no copy while the array grows from 1 MB to 100."""
    outputs, part = Outputs(None), np.ones((1, 1 << 18), "float32")
    outputs.add([part])
    tracemalloc.start()
    try:
        for _ in range(99):
            outputs.add([part])
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert outputs.result().shape == (100, 1 << 18)
