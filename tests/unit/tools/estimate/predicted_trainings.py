"""Trainings whose first step is predicted. They fail if they are not stopped."""

import keras
import numpy as np
import pytest

import phalanx


def dense(*widths):
    return keras.Sequential([keras.Input((64,)), *(keras.layers.Dense(n) for n in widths)])


def mirrored(**options):
    return lambda: phalanx.MirroredStrategy(1, **options)


def fit(strategy, *widths, rows=32, **options):
    """A training with `fit`. `rows` is that of one replica."""

    def train():
        with strategy().scope():
            model = dense(*widths)
            model.compile("adam", "mse", **options)
        model.fit(np.ones((4 * rows, 64)), np.ones((4 * rows, widths[-1])), batch_size=rows, verbose=0)
        pytest.fail("The training was not stopped.")

    return train


def loop(strategy, *widths, rows=32):
    """A training with a loop of `run`."""

    def train():
        made = strategy()
        with made.scope():
            model, optimizer = dense(*widths), keras.optimizers.Adam()

        def step(x, y):
            with phalanx.GradientTape() as tape:
                loss = phalanx.nn.compute_average_loss(keras.losses.mean_squared_error(y, model(x)))
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

        for batch in made.experimental_distribute_dataset(batches(rows, widths[-1])):
            made.run(step, args=batch)
        pytest.fail("The training was not stopped.")

    return train


def batches(rows, width):
    return [(np.ones((rows, 64), "float32"), np.ones((rows, width), "float32"))] * 2


def num_parameters(*widths):
    return sum((a + 1) * b for a, b in zip((64, *widths), widths, strict=False))
