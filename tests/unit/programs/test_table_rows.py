# SPDX-License-Identifier: Apache-2.0
"""Gradients of tables that replicas exchange as rows, compared with one device."""

import re

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from jax import lax

import phalanx
from phalanx._src.programs import table_rows

_ROWS = 50_000  # 3.2 MB with 16 columns.


def _strategy(replicas, **options):
    return phalanx.MirroredStrategy([f"cpu:{i}" for i in range(replicas)], **options)


class _Model:
    """A table and a bias, which a strategy trains with Adam on batches of ids.

    Args:
      strategy: the strategy.
      shape: the shape of the table.
      look_up: function of the table and ids. Returns a float per id.
    """

    def __init__(self, strategy, shape=(_ROWS, 16), look_up=lambda table, ids: keras.ops.take(table, ids, axis=0)):
        self.strategy, self._look_up = strategy, look_up
        numbers = np.random.default_rng(0)
        with strategy.scope():
            arrays = {"table": numbers.normal(size=shape), "bias": numbers.normal(size=16)}
            self.variables = [keras.Variable(a.astype("float32"), name=name) for name, a in arrays.items()]
            self._optimizer = keras.optimizers.Adam(0.1)
            self._optimizer.build(self.variables)

    def step(self, ids):
        """Trains on one replica's ids, and returns their loss."""
        with phalanx.GradientTape() as tape:
            table, bias = self.variables
            loss = keras.ops.sum(keras.ops.sin(self._look_up(table, ids)) * bias[0]) / 16
        self._optimizer.apply_gradients(zip(tape.gradient(loss, self.variables), self.variables, strict=True))
        return loss

    def train(self, ids, steps=3):
        """Trains on a batch again and again, and returns the variables."""
        (batch,) = self.strategy.experimental_distribute_dataset([ids])
        for _ in range(steps):
            self.strategy.run(self.step, args=(batch,))
        return [v.numpy() for v in self.variables]

    def sizes_exchanged(self, ids):
        """Returns the number of elements of each array that the replicas all-reduce or reduce-scatter."""
        (batch,) = self.strategy.experimental_distribute_dataset([ids])
        step = phalanx.function(lambda batch: self.strategy.run(self.step, args=(batch,)))
        text = step.lower(batch).as_text()
        types = re.findall(
            r'"stablehlo\.(?:all_reduce|reduce_scatter)".*?: \(tensor<([\dx]*?)x?f32>\)', text, re.DOTALL
        )
        return [int(np.prod([int(n) for n in t.split("x") if n])) for t in types]


def _ids(*size, least=0, rows=_ROWS):
    ids = np.random.default_rng(1).integers(least, rows, size).astype("int32")
    ids[:2] = ids[-2:] = 7  # Both replicas look up one row several times.
    return ids


@pytest.mark.parametrize(
    ("replicas", "shape"),
    [
        pytest.param(2, (_ROWS, 16), id="shards of rows"),
        pytest.param(2, (_ROWS + 1, 16), id="shards of columns"),
        pytest.param(3, (_ROWS, 16), id="whole"),
        pytest.param(3, (_ROWS + 1, 4, 6), id="shards of the third dim"),
    ],
)
def test_rows_instead_of_whole_tables(replicas, shape):
    ids = _ids(12, 5, rows=shape[0])
    model = _Model(_strategy(replicas), shape)
    assert max(model.sizes_exchanged(ids)) < 100
    expected = _Model(_strategy(1), shape).train(ids)
    for array, other in zip(model.train(ids), expected, strict=True):
        np.testing.assert_allclose(array, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "look_up",
    [
        pytest.param(lambda table, ids: table.value[ids], id="by index"),
        pytest.param(lambda table, ids: jnp.take(table.value, ids, axis=0, mode="fill", fill_value=0), id="filled"),
        pytest.param(lambda table, ids: jnp.take(table.value, ids, axis=0, mode="wrap"), id="wrapped"),
    ],
)
def test_ids_may_be_negative_or_too_large(look_up):
    ids = _ids(8, 3, least=-_ROWS)
    ids[1, 1], ids[6, 2] = _ROWS + 3, -_ROWS - 2
    model = _Model(_strategy(2), look_up=look_up)
    assert max(model.sizes_exchanged(ids)) < 100
    for array, other in zip(model.train(ids), _Model(_strategy(1), look_up=look_up).train(ids), strict=True):
        np.testing.assert_allclose(array, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "look_up",
    [
        pytest.param(lambda table, ids: table.value[ids] + table.value[ids + 1], id="two lookups"),
        pytest.param(lambda table, ids: table.value[ids] * table.value[0], id="a row of its own"),
        pytest.param(lambda table, ids: jnp.take(table.value, ids, axis=0, mode="clip"), id="clipped"),
        pytest.param(lambda table, ids: jnp.take(table.value, ids % 16, axis=1), id="columns"),
        pytest.param(lambda table, ids: table.value[ids].astype("bfloat16").astype("float32"), id="cast"),
    ],
)
def test_other_lookups_are_those_of_one_device(look_up):
    ids = _ids(8, 3, rows=_ROWS - 1)
    results = [_Model(_strategy(n), look_up=look_up).train(ids) for n in (2, 1)]
    for array, other in zip(*results, strict=True):
        np.testing.assert_allclose(array, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_packs", [0, 1, 2])
def test_tables_beside_other_gradients_in_one_buffer(num_packs):
    ids = _ids(8, 3)
    model = _Model(_strategy(2, cross_device_ops=phalanx.NcclAllReduce(num_packs)))
    assert max(model.sizes_exchanged(ids)) < 100
    for array, other in zip(model.train(ids), _Model(_strategy(1)).train(ids), strict=True):
        np.testing.assert_allclose(array, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"layout": phalanx.fully_sharded()}, id="fully sharded"),
        pytest.param({"weight_update_sharding": False}, id="whole updates"),
        pytest.param({"model_axis": ("model", 2), "layout": {"table": (None, "model")}}, id="model axis"),
    ],
)
def test_tables_under_other_placements(options):
    ids = _ids(8, 3)
    strategy = _strategy(4 if "model_axis" in options else 2, **options)
    for array, other in zip(_Model(strategy).train(ids), _Model(_strategy(1)).train(ids), strict=True):
        np.testing.assert_allclose(array, other, rtol=1e-5, atol=1e-6)


def test_several_steps_in_one_program():
    ids = _ids(8, 3)
    model = _Model(_strategy(2))
    dataset = model.strategy.experimental_distribute_dataset([ids] * 3)
    model.strategy.run_steps(model.step, iter(dataset), 3)
    for array, other in zip([v.numpy() for v in model.variables], _Model(_strategy(1)).train(ids), strict=True):
        np.testing.assert_allclose(array, other, rtol=1e-5, atol=1e-6)


def test_short_batches_are_those_of_one_device():
    ids = _ids(7, 3)
    for array, other in zip(_Model(_strategy(2)).train(ids), _Model(_strategy(1)).train(ids), strict=True):
        np.testing.assert_allclose(array, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("shape", "count"), [((_ROWS, 16), 4000), ((1000, 16), 8)], ids=["many rows", "a small table"])
def test_gradients_of_many_rows_are_whole(shape, count):
    model = _Model(_strategy(2), shape)
    assert max(model.sizes_exchanged(_ids(count, 1, rows=shape[0]))) >= shape[0] * shape[1]


@pytest.mark.parametrize(
    "scattered",
    [
        pytest.param(lambda ids: jnp.zeros((_ROWS, 32)).at[ids].add(1.0), id="rows"),
        pytest.param(lambda ids: jnp.ones((_ROWS, 32)).at[ids].add(1.0), id="ones"),
        pytest.param(lambda ids: jnp.zeros((_ROWS, 32)).at[ids, 3].add(1.0), id="elements"),
        pytest.param(lambda ids: jnp.zeros((32, _ROWS)).at[:, ids].add(1.0).T, id="columns"),
        pytest.param(lambda ids: jnp.zeros((_ROWS, 32)).at[ids].max(1.0), id="maximum"),
        pytest.param(lambda ids: jnp.zeros((_ROWS, 32)).at[ids].add(1.0).ravel(), id="reshaped rows"),
        pytest.param(lambda ids: jnp.zeros((_ROWS, 32)).at[ids.astype("uint16")].add(1.0), id="unsigned ids"),
        pytest.param(lambda ids: jnp.concatenate([jnp.zeros((_ROWS, 32)).at[ids].add(1.0)] * 2), id="rows of two"),
        pytest.param(
            lambda ids: jnp.concatenate([jnp.zeros((_ROWS, 32)).at[ids].add(1.0)] * 2, 1), id="columns of two"
        ),
        pytest.param(
            lambda ids: jnp.concatenate(
                [jnp.zeros((_ROWS, 32)).at[x].add(1.0).ravel() for x in (ids, ids.astype("uint16"))] + [jnp.ones(5)]
            ),
            id="flat ones together",
        ),
    ],
)
def test_sums_of_what_users_scatter(scattered):
    strategy, ids = _strategy(2), _ids(8)
    table = jnp.zeros((_ROWS, 32))

    def total(ids):
        return phalanx.get_replica_context().all_reduce("SUM", scattered(ids)) + table[ids].sum()

    (batch,) = strategy.experimental_distribute_dataset([ids])
    for part in strategy.experimental_local_results(strategy.run(total, args=(batch,))):
        np.testing.assert_array_equal(part, scattered(ids[:4]) + scattered(ids[4:]))


def test_shards_of_what_users_reshape():
    strategy, ids = _strategy(2), _ids(8)
    table = jnp.zeros((_ROWS, 32))

    def total(ids):
        counts = jnp.zeros((_ROWS, 32)).at[ids].add(jnp.arange(32.0))
        arrays = [counts, counts.reshape(-1, 4), jnp.concatenate([counts.ravel()[:0], counts.ravel()])]
        parts = [lax.psum_scatter(x, phalanx.REPLICA_AXIS, scatter_dimension=0, tiled=True) for x in arrays]
        return [parts[0].ravel() - part.ravel() + table[ids].sum() for part in parts[1:]]

    (batch,) = strategy.experimental_distribute_dataset([ids])
    for result in strategy.run(total, args=(batch,)):
        assert not any(part.any() for part in strategy.experimental_local_results(result))


def test_fit_trains_a_table_as_one_device():
    x, y = _ids(64, 4), np.random.default_rng(2).normal(size=(64, 1)).astype("float32")
    results = []
    for replicas in (2, 1):
        keras.utils.set_random_seed(0)
        with _strategy(replicas).scope():
            layers = [keras.layers.Embedding(_ROWS, 16), keras.layers.Flatten(), keras.layers.Dense(1)]
            model = keras.Sequential(layers)
            model.compile("adagrad", "mse")
        history = model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0).history
        results.append([history["loss"], *model.get_weights()])
    for array, other in zip(*results, strict=True):
        np.testing.assert_allclose(array, other, rtol=1e-5, atol=1e-6)


def test_only_programs_for_cpus_exchange_rows():
    assert jax.default_backend() == "cpu"
    strategy = _strategy(2)
    model, ids = _Model(strategy), _ids(8, 3)
    with table_rows.platforms.compiled_for(["tpu"]):
        assert max(model.sizes_exchanged(ids)) >= _ROWS * 16
