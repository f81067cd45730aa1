"""Sums over the replicas by all-to-alls, against those of XLA in one process, which need no gloo."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from tests.draws import draws

import phalanx
from phalanx._src.kernels.rewriting import all_equations, rewritten
from phalanx._src.kernels.sums import by_all_to_all
from phalanx._src.mesh.layout import REPLICA_AXIS

_DTYPES = "float32", "bfloat16", "float16", "int32", "int8", "complex64"


def mapped(fn, count):
    """A function of one array per replica, on so many of them."""
    topology = phalanx.MirroredStrategy([f"cpu:{i}" for i in range(count)]).topology
    axis = jax.P(REPLICA_AXIS)
    return jax.shard_map(lambda x: fn(x[0])[None], mesh=topology.mesh, in_specs=axis, out_specs=axis, check_vma=False)


def both(fn, arrays):
    """The results of a function with the rule and without it, and its operations with the rule."""
    plain, rule = mapped(fn, len(arrays)), by_all_to_all(REPLICA_AXIS, len(arrays), is_whole=True)
    changed = lambda x: rewritten(plain, [rule], x)  # noqa: E731
    names = Counter(eqn.primitive.name for eqn in all_equations(jax.make_jaxpr(changed)(arrays).jaxpr))
    return np.asarray(jax.jit(changed)(arrays)), np.asarray(jax.jit(plain)(arrays)), names


def require_alike(result, expected):
    """Compares as exactly as the dtype allows, since the orders of the additions differ."""
    assert result.dtype == expected.dtype
    tolerance = 2e-2 if result.dtype.itemsize == 2 else 1e-5
    wide = np.complex64 if result.dtype.kind == "c" else np.float64
    np.testing.assert_allclose(result.astype(wide), expected.astype(wide), rtol=tolerance, atol=tolerance)


@draws(12, 200)
@given(st.data())
def test_shards_of_sums_are_those_of_xla(data):
    """Along any dim, which stays or vanishes, of all replicas or in groups of them."""
    count, dtype, is_tiled = (
        data.draw(st.sampled_from([2, 3, 4])),
        data.draw(st.sampled_from(_DTYPES)),
        data.draw(st.booleans()),
    )
    groups = [[0, 3], [1, 2]] if count == 4 and data.draw(st.booleans()) else None
    size = 2 if groups else count
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    dim = data.draw(st.integers(0, len(shape) - 1))
    shape[dim] = shape[dim] * size if is_tiled else size
    arrays = np.asarray(jnp.asarray(np.random.default_rng(0).uniform(-3, 3, (count, *shape)), dtype))
    scatter = lambda x: lax.psum_scatter(  # noqa: E731
        x, REPLICA_AXIS, scatter_dimension=dim, axis_index_groups=groups, tiled=is_tiled
    )
    result, expected, names = both(scatter, arrays)
    assert "reduce_scatter" not in names
    require_alike(result, expected)


@pytest.mark.parametrize("dtype", _DTYPES)
def test_small_sums_are_those_of_xla(dtype):
    arrays = np.asarray(jnp.asarray(np.random.default_rng(0).uniform(-3, 3, (3, 4, 5)), dtype))
    result, expected, names = both(lambda x: lax.psum(x, REPLICA_AXIS), arrays)
    assert names["all_to_all"] == 1
    assert not names["psum"]
    require_alike(result, expected)


def test_sums_in_loops_and_of_derivatives():
    """At any depth, and where the derivative of a gather makes a sum of shards."""

    def loss(x):
        return lax.scan(lambda total, _: (total + lax.psum(jnp.sin(x), REPLICA_AXIS).sum(), None), 0.0, length=3)[0] + (
            jnp.square(lax.all_gather(x, REPLICA_AXIS, tiled=True)).sum()
        )

    result, expected, names = both(jax.grad(loss), np.linspace(-1, 1, 12, dtype="float32").reshape(3, 4))
    assert not names["psum"] + names["reduce_scatter"]
    require_alike(result, expected)


@pytest.mark.parametrize(
    ("count", "num_bytes", "is_whole", "is_rewritten"),
    [
        pytest.param(2, 4 << 20, True, True, id="two send as many bytes in either way"),
        pytest.param(2, (4 << 20) + 4, True, False, id="a large array of two"),
        pytest.param(3, 576 << 10, True, True, id="three save three rounds for 0.4 MB"),
        pytest.param(3, (576 << 10) + 4, True, False, id="more of three"),
        pytest.param(4, 512 << 10, True, False, id="four would send more of it"),
        pytest.param(2, 16, False, False, id="XLA may divide it along another axis"),
        pytest.param(2, 0, True, False, id="an empty one"),
    ],
)
def test_sums_that_gain_nothing_stay(count, num_bytes, is_whole, is_rewritten):
    arrays = jax.ShapeDtypeStruct((count, num_bytes // 4), "float32")
    plain = mapped(lambda x: lax.psum(x, REPLICA_AXIS), count)
    rule = by_all_to_all(REPLICA_AXIS, count, is_whole=is_whole)
    jaxpr = jax.make_jaxpr(lambda x: rewritten(plain, [rule], x))(arrays).jaxpr
    names = [eqn.primitive.name for eqn in all_equations(jaxpr)]
    assert ("psum" in names) != is_rewritten
    assert ("all_to_all" in names) == is_rewritten


@pytest.mark.parametrize("axis", ["other", ("other", REPLICA_AXIS)], ids=str)
def test_sums_over_other_axes_stay(axis):
    mesh = jax.make_mesh((2, 2), ("other", REPLICA_AXIS))
    plain = jax.shard_map(lambda x: lax.psum(x, axis), mesh=mesh, in_specs=jax.P(), out_specs=jax.P(), check_vma=False)
    rule = by_all_to_all(REPLICA_AXIS, 2, is_whole=True)
    jaxpr = jax.make_jaxpr(lambda x: rewritten(plain, [rule], x))(np.ones((2, 2), "float32")).jaxpr
    assert "psum" in [eqn.primitive.name for eqn in all_equations(jaxpr)]
