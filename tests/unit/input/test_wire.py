"""Rows travel between workers as dtypes, shapes and bytes."""

import collections

import jax.numpy as jnp
import numpy as np
import pytest

from phalanx._src.input.wire import packed, unpacked
from phalanx.errors import InputError

Pair = collections.namedtuple("Pair", ["x", "y"])


@pytest.mark.parametrize(
    "dtype",
    ["float32", "int64", "uint8", "bool", "complex64", "bfloat16", "float8_e4m3fn", "float8_e5m2", ">i4", "<U3", "S4"],
)
def test_arrays_of_each_dtype(dtype):
    sent = np.arange(6).reshape(1, 2, 3).astype(jnp.dtype(dtype))
    (found,) = unpacked(packed((sent,)))
    assert (found.dtype, found.shape) == (sent.dtype, sent.shape)
    assert (found == sent).all()


def test_structures_of_tuples_lists_and_dicts():
    sent = {"x": [np.zeros(1), (np.ones((1, 0)), None)], "y": np.float32([[2]])}
    found = unpacked(packed(sent))
    assert sorted(found) == ["x", "y"]
    assert isinstance(found["x"][1], tuple)
    assert found["x"][1][0].shape == (1, 0)
    assert found["x"][1][1] is None


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        (Pair(np.zeros(1), np.zeros(1)), "Pair"),
        (np.array([{"a": 1}], dtype=object), "an array of object"),
        (np.array([None, "a"], dtype=object), "an array of object"),
        ([np.zeros(1), np.zeros(1, [("a", "f4")])], "an array of "),
        ({"\ud800": np.zeros(1)}, "PyTreeDef"),
    ],
)
def test_classes_of_the_user(rows, named):
    """Cannot be restored without unpickling, which would run their code."""
    with pytest.raises(InputError, match=named) as raised:
        unpacked(packed(rows))
    assert "at least one row for each worker" in str(raised.value)
