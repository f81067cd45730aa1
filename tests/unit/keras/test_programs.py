"""The programs of `fit`: what they take from outside."""

import re
import weakref

import keras
import numpy as np
import pytest

from phalanx.keras import steps
from phalanx.keras.programs import StepProgram, WaitingSteps


def test_values_of_replicas_are_inputs(strategy):
    """A program that is made when replicas have accumulated gradients closes over none of these."""
    x, y = np.ones((8, 3), "float32"), np.ones((8, 4), "float32")
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4)])
        model.compile(keras.optimizers.SGD(0.1, gradient_accumulation_steps=3), "mse", steps_per_execution=2)
    model.fit(x, y, batch_size=4, verbose=0)
    assert "on_demand" in {v.synchronization for v in model.optimizer.variables}
    stack, count = iter(strategy.experimental_distribute_dataset((x, y), batch_size=3)).next_steps(2)
    text = StepProgram(weakref.ref(model), strategy, steps.train)._compiled.lower(stack, count).as_text()
    assert "tensor<2x3x4xf32>" in text
    assert not re.findall(r"stablehlo.constant .*tensor<2x3x4xf32>", text)


@pytest.mark.parametrize(("megabytes", "most"), [(77, 2), (4, 4), (1, 16), (0.4, None)])
def test_steps_with_large_batches_wait_for_earlier_ones(megabytes, most):
    """Their batches in memory have 16 MiB, or are two. JAX alone limits the others."""
    ended = []

    class Log:
        def __init__(self, step):
            self._step = step

        def block_until_ready(self):
            ended.append(self._step)

    waiting = WaitingSteps((np.empty(int(megabytes * 2**20), "int8"),))
    for step in range(50):
        waiting.add({"loss": Log(step)})
    assert ended == ([] if most is None else list(range(50 - most)))


@pytest.mark.parametrize(("method", "options"), [("fit", {"shuffle": False}), ("evaluate", {})])
def test_no_batches_pile_up_before_slow_steps(strategy, method, options, monkeypatch):
    """`fit` and `evaluate` wait for steps if their batches are large."""
    waited = []
    monkeypatch.setattr("phalanx.keras.programs.block_until_ready", waited.append)
    with strategy.scope():
        model = keras.Sequential([keras.Input((10**5,)), keras.layers.Lambda(lambda x: x[:, :1])])
        model.compile("sgd", "mse")
    x, y = np.ones((4, 10**5), "float32"), np.ones((4, 1), "float32")
    data = ((x, y) for _ in range(15))  # 1.6 MB each, so 10 steps may wait.
    getattr(model, method)(data, verbose=0, **options)
    assert [set(logs) for logs in waited] == [{"loss"}] * (15 - 10)
