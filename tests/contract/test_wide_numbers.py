"""With `jax_enable_x64` numbers keep their 64 bits everywhere: in data, steps, variables, reductions, `fit` and masks."""

import os
import sys

import pytest
from tests import forks

HEADER = """
import phalanx

phalanx.set_virtual_cpu_devices(3)

import jax
import jax.numpy as jnp
import keras
import numpy as np

"""
STRATEGIES = {
    "one_device": 'phalanx.OneDeviceStrategy("cpu:0")',
    "mirrored": 'phalanx.MirroredStrategy(["cpu:0", "cpu:1"])',
    "central": 'phalanx.experimental.CentralStorageStrategy(["cpu:0", "cpu:1"], "cpu:2")',
    "sharded": 'phalanx.MirroredStrategy(["cpu:0", "cpu:1"], layout=phalanx.fully_sharded())',
}
PROGRAM = """
IDS = 2**40 + np.arange(7)
THIRDS = np.arange(7) / 3


def whole(value):
    return strategy.experimental_local_results(value)[0]


# Data: every number arrives.
dataset = strategy.experimental_distribute_dataset((IDS, THIRDS), batch_size=4)
batches = list(dataset)
ids = [strategy.gather(i, axis=0) for i, _ in batches]
thirds = [strategy.gather(x, axis=0) for _, x in batches]
assert np.concatenate(ids).tolist() == IDS.tolist() and ids[0].dtype == np.int64
assert np.concatenate(thirds).tolist() == THIRDS.tolist() and thirds[0].dtype == np.float64

# Steps, their arguments, and reductions over real rows.
doubled = [strategy.run(lambda batch: batch[0] * 2, args=(batch,)) for batch in batches]
assert sum(int(strategy.reduce("SUM", x, axis=0)) for x in doubled) == 2 * int(IDS.sum())
mean = strategy.reduce("MEAN", strategy.run(lambda x: x, args=(batches[1][1],)), axis=0)
assert mean.dtype == np.float64 and abs(float(mean) / THIRDS[4:].mean() - 1) < 1e-15
assert int(whole(strategy.run(lambda i, j: i + j, args=(2**40, np.int64(3))))) == 2**40 + 3
assert float(whole(strategy.run(lambda x: x, args=(1e300,)))) == 1e300

# Values, and collectives inside a step.
made = strategy.experimental_distribute_values_from_function(lambda c: np.int64(2**40) + c.replica_id_in_sync_group)
assert int(whole(made)) == 2**40


def collectives():
    context = phalanx.get_replica_context()
    return context.all_reduce("SUM", jnp.float64(1) / 3), context.all_gather(jnp.array([2**40]), axis=0)


total, gathered = map(whole, strategy.run(collectives))
assert abs(float(total) - strategy.num_replicas_in_sync / 3) < 1e-15
assert gathered.tolist() == [2**40] * strategy.num_replicas_in_sync

# Variables, in a function and in steps of one program.
with strategy.scope():
    count = keras.Variable(np.int64(2**40), dtype="int64", aggregation="only_first_replica")
    sums = keras.Variable(0.0, dtype="float64", synchronization="on_read", aggregation="sum")


@phalanx.function
def advance(by):
    strategy.run(lambda: (count.assign_add(1), sums.assign_add(1e-12)))
    return count.value + by


assert int(advance(2**41)) == 3 * 2**40 + 1
assert count.value.dtype == np.int64 and sums.value.dtype == np.float64
assert abs(float(sums.value) / strategy.num_replicas_in_sync - 1e-12) < 1e-24
count.assign(np.array(2**50))
assert int(count.value) == 2**50
iterator = iter(strategy.experimental_distribute_dataset(IDS[:6], batch_size=2))
per_step = strategy.reduce("SUM", strategy.run_steps(lambda batch: batch.sum(), iterator, 3), axis=None)
assert per_step.tolist() == IDS[:6].reshape(3, 2).sum(1).tolist()

# An optimizer: weights and slots have 64 bits, the loss is that of one device.
with strategy.scope():
    weight = keras.Variable(np.ones(2), dtype="float64")
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build([weight])


def step(x):
    with phalanx.GradientTape() as tape:
        loss = phalanx.nn.compute_average_loss((x @ weight) ** 2)
    optimizer.apply_gradients(zip(tape.gradient(loss, [weight]), [weight]))
    return loss


x = np.random.default_rng(0).random((5, 2))
expected = np.ones(2)
for rows in (x[:3], x[3:]):
    expected -= np.float32(0.1) * 2 * rows.T @ (rows @ expected) / len(rows)
for batch in strategy.experimental_distribute_dataset(x, batch_size=3):
    strategy.run(step, args=(batch,))
assert weight.value.dtype == np.float64
np.testing.assert_allclose(weight.value, expected, rtol=1e-13)

# `fit`, `evaluate` and `predict`: of ids that need 64 bits, and in float64, as one device does it.
def model():
    keras.utils.set_random_seed(1)
    keras.backend.set_floatx("float64")
    inputs = keras.Input((3,)), keras.Input((), dtype="int64")
    embedded = keras.layers.Embedding(7, 2)(keras.layers.Lambda(lambda i: i - 2**40)(inputs[1]))
    outputs = keras.layers.Dense(1)(keras.layers.Concatenate()([inputs[0], embedded]))
    made = keras.Model(inputs, outputs)
    made.compile(keras.optimizers.SGD(0.1), "mse")
    return made


data, labels = (np.random.default_rng(1).random((7, 3)), IDS), np.arange(7.0)[:, None]
plain = model()
with strategy.scope():
    ours = model()
histories = [m.fit(data, labels, batch_size=4, epochs=2, shuffle=False, verbose=0).history["loss"] for m in (plain, ours)]
np.testing.assert_allclose(*histories, rtol=1e-6)  # Keras adds losses up in float32.
for mine, theirs in zip(ours.get_weights(), plain.get_weights(), strict=True):
    assert mine.dtype == np.float64
    np.testing.assert_allclose(mine, theirs, rtol=1e-13)
predictions = ours.predict(data, batch_size=4, verbose=0)
assert predictions.dtype == np.float64
np.testing.assert_allclose(predictions, plain.predict(data, batch_size=4, verbose=0), rtol=1e-13)
print("all numbers are equal")
"""


@pytest.mark.cover(["name"], {"mirrored"})
@pytest.mark.parametrize("name", STRATEGIES)
def test_numbers_keep_64_bits(tmp_path, name):
    """The same program under each strategy; every number in it is compared with NumPy's, or with plain Keras's."""
    program = tmp_path / "program.py"
    program.write_text(f"{HEADER}strategy = {STRATEGIES[name]}\n{PROGRAM}")
    environment = os.environ | {"JAX_ENABLE_X64": "1"}
    done = forks.run([sys.executable, program], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "all numbers are equal\n"
