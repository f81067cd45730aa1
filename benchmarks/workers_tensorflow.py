# SPDX-License-Identifier: Apache-2.0
"""In each of several workers: the same step with tf.distribute's `MultiWorkerMirroredStrategy`, in a custom loop and by `fit`.

In an environment of its own. All-reduces are tf.distribute's ring over gRPC; Adam is the one of `tensorflow_peer`.
"""

import functools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras as keras

from benchmarks import timing
from benchmarks.models import COMPARED_STEPS, LEARNING_RATE, MLP, sizes
from benchmarks.tensorflow_peer import train_step

_measures: dict[str, Callable[[int], float]] = {}


@functools.cache
def _strategy(threads: int) -> Any:
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    options = tf.distribute.experimental.CommunicationOptions(
        implementation=tf.distribute.experimental.CommunicationImplementation.RING
    )
    return tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)


def prepare_loop(name: str, threads: int) -> list[float]:
    """Makes the custom loop, and returns the mean loss of some steps and the sizes of the weights after them."""
    strategy = _strategy(threads)
    model, optimizer = _model(strategy)
    batch = next(iter(strategy.experimental_distribute_dataset(_dataset(strategy))))
    train = train_step(model, optimizer)

    @tf.function
    def step(x: Any, y: Any) -> Any:
        return strategy.run(train, args=(x, y))

    found = [float(strategy.reduce("SUM", step(*batch), axis=None)) for _ in range(COMPARED_STEPS)]
    _measures[name] = functools.partial(timing.seconds_a_step, lambda: step(*batch), float)
    return [float(np.mean(found)), *sizes(model.get_weights())]


def prepare_fit(name: str, threads: int) -> list[float]:
    """The same with `fit`."""
    strategy = _strategy(threads)
    with strategy.scope():
        model, optimizer = _model(strategy)
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    dataset = _dataset(strategy).cache().repeat()

    def fit(epochs: int, steps: int) -> tuple[float, float]:
        """Returns the loss and the seconds of the last epoch."""
        times: list[float] = []
        note = lambda *_: times.append(time.perf_counter())  # noqa: E731
        clock = [keras.callbacks.LambdaCallback(on_epoch_begin=note, on_epoch_end=note)]
        history = model.fit(dataset, epochs=epochs, steps_per_epoch=steps, verbose=0, callbacks=clock).history
        return history["loss"][-1], times[-1] - times[-2]

    loss, _ = fit(1, COMPARED_STEPS)
    _measures[name] = lambda count: fit(2, count)[1] / count
    return [loss, *sizes(model.get_weights())]


def seconds_a_step(name: str, count: int) -> float:
    """Times `count` steps; of `fit`, those of the second of two epochs."""
    return _measures[name](count)


def _model(strategy: Any) -> tuple[Any, Any]:
    with strategy.scope():
        return MLP.model(keras), keras.optimizers.legacy.Adam(LEARNING_RATE)


def _dataset(strategy: Any) -> Any:
    x, y = MLP.batch(strategy.num_replicas_in_sync)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(len(x)).with_options(options)
