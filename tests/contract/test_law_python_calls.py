"""A step costs few calls of Python functions: each takes a tenth of a microsecond that nothing hides."""

import sys
from pathlib import Path

import keras
import numpy as np
import pytest
from strategy_table import devices

import phalanx

SOURCES = str(Path(phalanx.__file__).parent)
STEPS = 20


class Calls:
    """Counts calls of Phalanx's own functions between `start` and `stop`, in this thread."""

    def __init__(self):
        self.count = 0

    def start(self):
        sys.setprofile(self._note)

    def stop(self):
        sys.setprofile(None)

    def _note(self, frame, event, _):
        self.count += event == "call" and frame.f_code.co_filename.startswith(SOURCES)


@pytest.fixture
def strategy():
    return phalanx.MirroredStrategy(devices(2))


@pytest.fixture
def calls():
    """A counter that has stopped when the test ends."""
    calls = Calls()
    yield calls
    calls.stop()


def test_calls_of_a_run(strategy, calls):
    """At most 35 for a step that is compiled."""
    with strategy.scope():
        total = keras.Variable(0.0, trainable=False, aggregation="sum")
    batch = next(iter(strategy.experimental_distribute_dataset(np.zeros(8, "float32"), batch_size=8)))

    def step(x):
        total.assign_add(x.sum())
        return x

    for _ in range(3):
        strategy.run(step, args=(batch,))
    calls.start()
    for _ in range(STEPS):
        strategy.run(step, args=(batch,))
    calls.stop()
    assert 0 < calls.count <= 35 * STEPS


def test_calls_of_the_next_batch(strategy, calls):
    """At most 40 for a batch of an array in memory."""
    batches = iter(strategy.experimental_distribute_dataset(np.zeros((1024, 4), "float32"), batch_size=8))
    for _ in range(10):
        next(batches)
    calls.start()
    for _ in range(STEPS):
        next(batches)
    calls.stop()
    assert 0 < calls.count <= 40 * STEPS


def test_calls_of_a_step_of_fit(strategy, calls):
    """At most 110 for a step of `fit` with inputs and targets."""

    class Counting(keras.callbacks.Callback):
        """Counts from step 20 to 40."""

        def on_train_batch_end(self, batch, logs=None):
            if batch == 20:
                calls.start()
            if batch == 20 + STEPS:
                calls.stop()

    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        model.compile("sgd", "mse")
    model.fit(
        np.zeros((512, 4), "float32"), np.zeros((512, 3), "float32"), batch_size=8, verbose=0, callbacks=[Counting()]
    )
    assert 0 < calls.count <= 110 * STEPS
