"""Convolutions in loops and branches, against those of plain JAX."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from tests.draws import draws

import phalanx
from phalanx._src.kernels import bodies, platforms
from phalanx._src.kernels.rewriting import rewritten

ORDERS = ("N{}C", "{}IO", "N{}C"), ("NC{}", "OI{}", "NC{}"), ("C{}N", "I{}O", "N{}C")


@st.composite
def convolutions(draw):
    """A convolution of any order of dims, with strides, dilations and groups; its input and its kernel."""
    rank, groups = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2]))
    order = [each.format("DHW"[:rank]) for each in draw(st.sampled_from(ORDERS))]
    lengths = {"N": 2, "C": 2 * groups, "I": 2, "O": 2 * groups}
    settings = {
        "window_strides": draw(st.tuples(*[st.integers(1, 2)] * rank)),
        "padding": draw(st.sampled_from(["SAME", "VALID"])),
        "rhs_dilation": draw(st.tuples(*[st.integers(1, 2)] * rank)),
        "feature_group_count": groups,
        "dimension_numbers": tuple(order),
    }
    random = np.random.default_rng(0)
    x = random.normal(size=[lengths.get(dim, 5) for dim in order[0]]).astype("float32")
    kernel = random.normal(size=[lengths.get(dim, 2) for dim in order[1]]).astype("float32")
    return lambda x, kernel: lax.conv_general_dilated(x, kernel, **settings), x, kernel


def gradients_in_bodies(convolve, is_first, x, kernel):
    """Gradients in a loop, in one of two branches, and outside of both."""
    gradient = jax.grad(lambda x, kernel: jnp.square(convolve(x, kernel)).sum(), argnums=(0, 1))

    def step(kernel, _):
        of_x, of_kernel = gradient(x, kernel)
        return kernel - 1e-3 * of_kernel, of_x

    branches = lambda: gradient(x, kernel), lambda: gradient(2 * x, kernel)  # noqa: E731
    return lax.scan(step, kernel, length=3), lax.cond(is_first, *branches), gradient(x, kernel)


@draws(4, 80)
@given(convolutions())
def test_gradients_are_those_of_plain_jax(case):
    """Whatever the order of dims, and also under `jit` and `shard_map`."""
    convolve, *arrays = case
    mesh = jax.make_mesh((1,), ("replica",))

    def mapped(*args):
        body = lambda *args: jax.jit(lambda *args: gradients_in_bodies(convolve, *args))(*args)  # noqa: E731
        spec = jax.sharding.PartitionSpec()
        return jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)(*args)

    expected = jax.jit(mapped)(True, *arrays)
    results = jax.jit(lambda *args: rewritten(mapped, [bodies.in_fast_order], *args))(True, *arrays)
    for a, b in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4)


def training(strategy):
    """A step that takes gradients of a convolution in a loop."""

    @phalanx.function
    def step(x, kernel):
        def replica(x, kernel):
            gradient = jax.grad(lambda k: jnp.square(lax.conv(x, k, (1, 1), "SAME")).sum())
            return lax.scan(lambda k, _: (k - 1e-3 * gradient(k), None), kernel, length=3)[0]

        return strategy.run(replica, args=(x, kernel))

    return step.lower(np.ones((2, 3, 8, 8), "float32"), np.ones((4, 3, 2, 2), "float32")).as_text()


@pytest.mark.parametrize("devices", [["cpu:0"], ["cpu:0", "cpu:1"]], ids=len)
def test_steps_for_cpus_have_one_order_of_dims(devices):
    """Rows first and channels last, also in the gradient. Programs for other platforms keep what the function says."""
    strategy = phalanx.MirroredStrategy(devices)
    with strategy.scope():
        orders = re.findall(r"dim_numbers = (.*?), window", training(strategy))
        assert orders == ["[b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f]"] * 2
        with platforms.compiled_for(("tpu",)):
            assert orders[0] not in training(strategy)
