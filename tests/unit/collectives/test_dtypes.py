"""The table of dtypes against `jnp.sum` and `jnp.mean`, and means of integers against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from phalanx import ReduceOp
from phalanx._src.collectives.dtypes import dtype_of, mean_of_parts, parts_of_mean, term

INTEGERS = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
WIDE = ["int64", "uint64", "float64", "complex128"]
DTYPES = [*INTEGERS, "float16", "bfloat16", "float32", "float64", "complex64", "complex128"]


@pytest.mark.parametrize("x64", [False, True])
def test_dtypes_are_those_of_jax(x64):
    """Also with 64-bit types. A sum of two large terms, and a mean, has the value that JAX computes."""
    with jax.enable_x64(x64):
        for op, function in ((ReduceOp.SUM, jnp.sum), (ReduceOp.MEAN, jnp.mean)):
            for name in DTYPES if x64 else (name for name in DTYPES if name not in WIDE):
                x = np.full(2, 100, jnp.dtype(name))

                def both(x, op=op, function=function):
                    terms = term(op, x)
                    result = (terms[0] + terms[1]) / (2 if op is ReduceOp.MEAN else 1)
                    return result.astype(dtype_of(op, x.dtype)), function(x)

                result, expected = map(np.asarray, jax.jit(both)(x))
                assert dtype_of(op, x.dtype) == expected.dtype, (op, name)
                assert result == expected, (op, name)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "uint32"])
@pytest.mark.parametrize("counts", [None, np.array([True, False, True])], ids=["all", "some"])
def test_mean_of_integers_has_no_fraction(dtype, counts):
    """Exact up to the largest numbers, where a float32 would lose digits; negative means are cut off too, not rounded down."""
    limits = np.iinfo(dtype)
    values = np.random.default_rng(0).integers(limits.min, limits.max, (3, 200), dtype, endpoint=True)
    values[:, :4] = [[limits.min, limits.max, 3, limits.max - 1]] * 3
    values[:, 5:8] = np.array([[-3, -2, 1], [-2, 0, 1], [-3, -3, 2]]).astype(dtype)
    is_counted = np.ones(3, bool) if counts is None else counts
    count = 3 if counts is None else np.float32(2)

    def mean_of(values, count):
        parts = [parts_of_mean(x, None if counts is None else counts[i], count) for i, x in enumerate(values)]
        return mean_of_parts([sum(part) for part in zip(*parts, strict=True)], count, dtype)

    mean = jax.jit(mean_of, static_argnums=() if counts is not None else 1)(values, count)
    assert mean.dtype == dtype
    np.testing.assert_array_equal(mean, np.trunc(values[is_counted].astype("float64").mean(0)).astype(dtype))
