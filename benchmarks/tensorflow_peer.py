# SPDX-License-Identifier: Apache-2.0
"""The same step with tf.distribute: `strategy.run` inside `tf.function`, as in its guide. In an environment of its own.

It uses tf_keras with its legacy Adam, which updates a variable in one fused kernel. Keras 3, the newer Adam of tf_keras
and other sizes of the thread pools were tried too; none was clearly faster.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf
import tf_keras as keras

from benchmarks import timing
from benchmarks.models import CASES, LEARNING_RATE

_programs: list[Callable[[], Any]] = []


def prepare(case: str, replicas: int) -> list[float]:
    """Makes the program, runs ten steps, and returns the sums of their losses."""
    _programs.append(_program(case, replicas))
    return [sum(_wait(_programs[0]())) for _ in range(10)]


def seconds_a_step(count: int) -> float:
    """Times `count` steps."""
    return timing.seconds_a_step(_programs[0], _wait, count)


def steps_for(turn_s: float) -> int:
    """Returns how many steps take about `turn_s`."""
    return timing.steps_for(_programs[0], _wait, turn_s)


def mirrored(replicas: int) -> Any:
    """Divides the CPU into `replicas` devices and returns the strategy over them."""
    logical = [tf.config.LogicalDeviceConfiguration()] * replicas
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], logical)
    return tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])


def train_step(model: Any, optimizer: Any) -> Callable[[Any, Any], Any]:
    """Returns the replica function, as the guide of tf.distribute writes it."""
    losses = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.nn.compute_average_loss(losses(y, model(x, training=True)))
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        return loss

    return step


def _program(case: str, replicas: int) -> Callable[[], Any]:
    strategy = mirrored(replicas)
    with strategy.scope():
        model = CASES[case].model(keras)
        optimizer = keras.optimizers.legacy.Adam(LEARNING_RATE)
    x, y = CASES[case].batch(replicas)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(len(x))
    batch = next(iter(strategy.experimental_distribute_dataset(dataset)))
    train = train_step(model, optimizer)

    @tf.function
    def step(x: Any, y: Any) -> Any:
        return strategy.experimental_local_results(strategy.run(train, args=(x, y)))

    return lambda: step(*batch)


def _wait(losses: Any) -> list[float]:
    return [float(x) for x in losses]
