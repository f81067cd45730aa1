# SPDX-License-Identifier: Apache-2.0
"""Sums that travel together between processes."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from jax import lax
from jax.extend import core as jex

import phalanx
from phalanx._src.mesh.layout import REPLICA_AXIS
from phalanx._src.programs import exchanges, table_rows

_LARGE = 20_000  # 80 kB


def _sum(x):
    return lax.psum(x, REPLICA_AXIS)


def _independent(x):
    return [_sum(x), _sum(x.sum()), _sum(jnp.sin(x[:3])), jnp.cos(x)]


def _dependent(x):
    mean = _sum(x.mean()) / 2
    return [_sum(((x - mean) ** 2).sum()), _sum(x[:2]), mean]


def _of_two_dtypes(x):
    count = _sum(jnp.int32(3) + x[:2].astype("int32"))
    return [count, _sum(x[:2].astype("int32")), _sum(x), _sum(2 * x)]


def _others(x):
    return [lax.pmax(x.max(), REPLICA_AXIS), _sum(x.sum()), lax.all_gather(x[:2], REPLICA_AXIS), _sum(x[:4])]


def _of_large_arrays(x):
    return [_sum(x), _sum(2 * x), _sum(3 * x), _sum(x[0]), _sum(x[1])]


def _mapped(fn, topology):
    return jax.shard_map(
        lambda x: [y[None] for y in fn(x[0])],
        mesh=topology.mesh,
        in_specs=jax.P(REPLICA_AXIS),
        out_specs=jax.P(REPLICA_AXIS),
        check_vma=False,
    )


@pytest.mark.parametrize(
    ("fn", "size", "counts"),
    [
        pytest.param(_independent, 8, (3, 1), id="small ones"),
        pytest.param(_independent, _LARGE, (3, 1), id="small ones and a large one"),
        pytest.param(_dependent, 8, (3, 2), id="one that waits for another"),
        pytest.param(_of_two_dtypes, 8, (4, 2), id="two dtypes"),
        pytest.param(_others, 8, (2, 1), id="next to other exchanges"),
        pytest.param(_of_large_arrays, _LARGE, (5, 3), id="large ones"),
    ],
)
def test_sums_that_do_not_wait_for_each_other_are_one(fn, size, counts):
    topology = phalanx.MirroredStrategy(["cpu:0", "cpu:1"]).topology
    x = jax.device_put(np.linspace(-1, 1, 2 * size, dtype="float32").reshape(2, size), topology.per_replica)
    found = []

    def joined(x):
        closed = jax.make_jaxpr(fn)(x)
        jaxpr = closed.jaxpr.replace(eqns=exchanges.with_joined_sums(closed.jaxpr.eqns))
        found.extend(sum(map(table_rows.is_sum, each.eqns)) for each in (closed.jaxpr, jaxpr))
        return jex.jaxpr_as_fun(jex.ClosedJaxpr(jaxpr, closed.consts))(x)

    for array, expected in zip(_mapped(joined, topology)(x), _mapped(fn, topology)(x), strict=True):
        np.testing.assert_allclose(array, expected, rtol=1e-6)
    assert tuple(found) == counts


def test_tables_that_are_gathered_by_layer_are_trained():
    ids, numbers = np.int32([[3, 7, 7], [1, 7, 40_000]] * 2), np.random.default_rng(0)
    table = numbers.normal(size=(50_000, 16)).astype("float32")
    results = []
    for strategy in (
        phalanx.MirroredStrategy(["cpu:0", "cpu:1"], layout=phalanx.fully_sharded(gather="layer")),
        phalanx.OneDeviceStrategy("cpu:0"),
    ):
        with strategy.scope():
            variable, optimizer = keras.Variable(table), keras.optimizers.Adam(0.1)
            optimizer.build([variable])

        def step(ids):
            with phalanx.GradientTape() as tape:
                loss = keras.ops.sum(keras.ops.sin(keras.ops.take(variable, ids, axis=0)))  # noqa: B023
            optimizer.apply(tape.gradient(loss, [variable]), [variable])  # noqa: B023

        (batch,) = strategy.experimental_distribute_dataset([ids])
        for _ in range(2):
            strategy.run(step, args=(batch,))
        results.append(np.asarray(variable.value))
    np.testing.assert_allclose(*results, rtol=1e-5, atol=1e-6)
