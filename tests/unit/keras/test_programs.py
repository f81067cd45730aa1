"""The programs of `fit`: what they take from outside."""

import re
import weakref

import keras
import numpy as np

from phalanx.keras import steps
from phalanx.keras.programs import StepProgram


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
