# SPDX-License-Identifier: Apache-2.0
"""Keras `fit` of a model whose step only sums the batch: what is left is Keras's data path. Phalanx is not imported."""

import os
import time
from typing import Any

import jax
import keras
import numpy as np

from benchmarks import batches

_fits: list[Any] = []


class _Summing(keras.Model):
    """Its step is a sum and has no state."""

    def train_step(self, state: Any, data: Any) -> Any:
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        return {"sum": x.sum() + y.sum()}, state


class _Clock(keras.callbacks.Callback):
    """Times the passes of `fit`, without what a call of it costs before and after them."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._start = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        jax.block_until_ready(logs)
        self.seconds.append(time.perf_counter() - self._start)


def prepare(batch_bytes: int, devices: int) -> float:
    """Makes the model, passes over the arrays once, and returns the sum of the last batch."""
    jax.config.update("jax_num_cpu_devices", int(os.environ["PHALANX_CPU_DEVICES"]))
    if devices > 1:
        keras.distribution.set_distribution(
            keras.distribution.DataParallel(devices=[f"cpu:{i}" for i in range(devices)])
        )
    x, y = batches.arrays(batch_bytes, aligned=False)
    inputs = keras.Input((batches.WIDTH,))
    model = _Summing(inputs, inputs)
    model.compile()

    def fit(epochs: int) -> Any:
        clock = _Clock()
        rows = batches.rows_of(batch_bytes)
        history = model.fit(x, y, batch_size=rows, epochs=epochs, shuffle=False, verbose=0, callbacks=[clock])
        return clock.seconds, history.history["sum"]

    _fits.append(fit)
    return float(np.sum(fit(1)[1][-1]))


def seconds_a_pass(passes: int) -> float:
    """Times passes over all batches, after one in the same call of `fit`."""
    return float(np.mean(_fits[0](1 + passes)[0][1:]))
