"""LoRA: a frozen base has no gradients and no slots, whether devices hold it whole or in shards."""

import contextlib
import functools

import keras
import numpy as np
import pytest
from strategy_table import devices

import phalanx
from phalanx._src.tools.estimate.hlo import HloProgram

WIDTH, RANK = 64, 2
RANDOM = np.random.default_rng(5)
X = RANDOM.normal(size=(22, WIDTH)).astype("float32")
Y = np.tanh(X[:, ::-1])

STRATEGIES = {
    "replicas": lambda: phalanx.MirroredStrategy(devices(2)),
    "fully_sharded": lambda: phalanx.MirroredStrategy(devices(2), layout=phalanx.fully_sharded(min_size=WIDTH * WIDTH)),
    "model_axis": lambda: phalanx.MirroredStrategy(
        devices(4), model_axis=("model", 2), layout={".*base/kernel": (None, "model"), ".*head/kernel": ("model", None)}
    ),
}


def made(strategy=None):
    """Two layers, of which only the biases and LoRA's matrices learn."""
    keras.utils.set_random_seed(1)
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        layers = [keras.layers.Dense(WIDTH, activation="tanh", name="base"), keras.layers.Dense(WIDTH, name="head")]
        model = keras.Sequential([keras.Input((WIDTH,)), *layers])
        for layer in layers:
            layer.enable_lora(RANK)
        model.compile(keras.optimizers.Adam(1e-2, epsilon=1e-3), "mse")
    return model


def fit(model):
    """Trains on batches of 8, 8 and 6 rows; returns the losses."""
    return model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0).history["loss"]


@functools.cache
def trained_on_one_device():
    model = made()
    return fit(model), model.get_weights()


# Each strategy in one of the two tests, and whole variables in both.
@pytest.mark.cover(["strategy"], {"replicas", "fully_sharded"})
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_lora_equals_one_device(strategy):
    """The frozen kernels stay as they were, and the optimizer has slots for what learns only."""
    model = made(STRATEGIES[strategy]())
    kernels = [layer._kernel for layer in model.layers]
    before = [kernel.numpy() for kernel in kernels]
    losses, weights = trained_on_one_device()
    np.testing.assert_allclose(fit(model), losses, rtol=1e-5)
    for variable, expected in zip(model.weights, weights, strict=True):
        np.testing.assert_allclose(variable.numpy(), expected, rtol=0, atol=1e-5, err_msg=variable.path)
    for kernel, value in zip(kernels, before, strict=True):
        np.testing.assert_array_equal(kernel.numpy(), value)
        assert kernel.value.sharding.is_fully_replicated == (strategy == "replicas")
    slots = [v.shape for v in model.optimizer.variables if v.shape]
    assert sorted(slots) == sorted(2 * [v.shape for v in model.trainable_variables])


@pytest.mark.cover(["strategy"], {"replicas", "model_axis"})
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_gradient_of_the_base_travels(strategy):
    """All that replicas sum in a step is smaller than one frozen kernel."""
    made_strategy = STRATEGIES[strategy]()
    model = made(made_strategy)

    def replica_step(x, y):
        with phalanx.GradientTape() as tape:
            loss = phalanx.nn.compute_average_loss(keras.ops.mean((model(x) - y) ** 2, -1))
        model.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    @phalanx.function
    def step(batch):
        return made_strategy.run(replica_step, args=batch)

    batch = next(iter(made_strategy.experimental_distribute_dataset((X[:16], Y[:16]), batch_size=16)))
    program = HloProgram(step.lower(batch).compile().as_text())
    summed = [c.num_bytes for c in program.collectives if c.kind in ("all-reduce", "reduce-scatter")]
    learned = sum(4 * int(np.prod(v.shape)) for v in model.trainable_variables)
    assert learned <= sum(summed) + 8
    assert sum(summed) < 4 * WIDTH * WIDTH, summed
