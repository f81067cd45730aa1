# SPDX-License-Identifier: Apache-2.0
"""`keras.random` without a seed, inside a step, draws from Keras's global generator."""

import jax
import keras
import numpy as np
import pytest

import phalanx


@pytest.fixture
def strategy():
    return phalanx.MirroredStrategy(["cpu:0", "cpu:1"])


def draw():
    return keras.random.normal(())


def numbers(strategy, step, count=3):
    """Returns what the replicas drew in some steps."""
    return [float(x) for _ in range(count) for x in strategy.experimental_local_results(step())]


def test_each_replica_and_step_draws_its_own(strategy):
    """Six numbers of two replicas and three steps differ, and repeat from the seed without another trace. So do others."""
    traces = []

    @phalanx.function
    def step():
        traces.append(1)
        return strategy.run(draw)

    first = numbers(strategy, step)
    assert len(set(first)) == 6
    count = len(traces)
    keras.utils.set_random_seed(0)
    assert numbers(strategy, step) == first
    keras.utils.set_random_seed(1)
    assert not set(first) & set(numbers(strategy, step))
    assert len(traces) == count


def test_one_sequence_inside_and_outside(strategy):
    """What is drawn outside of steps is not drawn again in them, by any strategy. An eager step draws the same numbers."""
    step = lambda: strategy.run(draw)  # noqa: E731
    first = numbers(strategy, step)
    keras.utils.set_random_seed(0)
    draw()
    assert numbers(strategy, step, 2) == first[2:]
    keras.utils.set_random_seed(0)
    one = phalanx.OneDeviceStrategy("cpu:3")
    numbers(one, lambda: one.run(draw), 1)
    assert numbers(strategy, step, 2) == first[2:]
    keras.utils.set_random_seed(0)
    eager = numbers(strategy, lambda: strategy.run(draw, options=phalanx.RunOptions(eager=True)), 1)
    np.testing.assert_allclose(eager, first[:2], rtol=1e-5)


def test_numbers_are_normal(strategy):
    with strategy.scope():
        total, square = (keras.Variable(0.0, aggregation="sum", trainable=False) for _ in range(2))

    def step():
        x = keras.random.normal((1000,))
        total.assign_add(keras.ops.sum(x))
        square.assign_add(keras.ops.sum(x * x))

    for _ in range(20):
        strategy.run(step)
    assert abs(float(total)) / 40_000 < 0.02
    assert abs(float(square) / 40_000 - 1) < 0.03


@pytest.mark.slow
def test_in_a_train_step(strategy):
    """Of `fit`, and of several steps in one program."""

    class Noisy(keras.Model):
        def train_step(self, data):
            return {"drawn": draw()}

    def fit(**given):
        seen = []
        keras.utils.set_random_seed(2)
        with strategy.scope():
            model = Noisy()
            model.compile("sgd", **given)
        see = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(float(logs["drawn"])))
        model.fit(np.zeros((8, 1)), batch_size=2, verbose=0, callbacks=[see])
        return seen

    drawn = fit()
    assert len(set(drawn)) == 4
    np.testing.assert_allclose(fit(steps_per_execution=4), drawn[3:], rtol=1e-6)


def test_outside_of_steps_keras_refuses():
    """A plain jit has nowhere to keep the state."""
    with pytest.raises(ValueError, match="JAX RNG"):
        jax.jit(draw)()
