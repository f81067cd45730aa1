"""Python values as JSON."""

import json
import math

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.draws import draws

from phalanx._src.checkpoint import text

KEYS = st.none() | st.booleans() | st.integers() | st.text() | st.binary()
SCALARS = KEYS | st.floats(allow_nan=False) | st.complex_numbers(allow_nan=False)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(KEYS, inner), max_leaves=12
)


@draws(12, 500)
@given(VALUES)
def test_plain_values_come_back_equal(value):
    """Types and all digits too."""
    assert text.is_plain(value)
    back = text.decode(json.loads(json.dumps(text.encode(value))), {}.__getitem__)
    assert repr(back) == repr(value)


def test_numbers_without_an_end_come_back():
    """NaN and the infinities."""
    back = text.decode(json.loads(json.dumps(text.encode([math.nan, math.inf, -math.inf]))), {}.__getitem__)
    assert math.isnan(back[0])
    assert back[1:] == [math.inf, -math.inf]


def test_arrays_are_stored_and_referred_to():
    """Arrays, scalars of NumPy and random keys of JAX, anywhere in a nest."""
    arrays = {}

    def put(array):
        arrays[f"a{len(arrays)}"] = array
        return f"a{len(arrays) - 1}"

    key = jax.random.key(3)
    encoded = json.loads(json.dumps(text.encode({"x": [np.arange(3), key], 5: (np.float32(2),)}, put)))
    assert text.references(encoded) == list(arrays) == ["a0", "a1", "a2"]
    back = text.decode(encoded, arrays.__getitem__)
    np.testing.assert_array_equal(back["x"][0], np.arange(3))
    assert jax.random.uniform(back["x"][1]) == jax.random.uniform(key)
    assert back[5][0] == 2


@pytest.mark.parametrize("value", [object(), {1, 2}, [lambda: None]])
def test_other_objects_are_refused(value):
    """By the name of their type."""
    assert not text.is_plain(value)
    with pytest.raises(TypeError, match="neither to an array nor to JSON"):
        text.encode(value)


def test_arrays_are_not_plain():
    """Without a place for them, they are refused; so are arrays of objects with one."""
    assert not text.is_plain([np.float64(1.0)])
    with pytest.raises(TypeError, match="ndarray is not plain"):
        text.encode(np.zeros(2))
    with pytest.raises(TypeError, match="an array of dtype object has no fixed format"):
        text.encode(np.array([None]), lambda array: "a")
