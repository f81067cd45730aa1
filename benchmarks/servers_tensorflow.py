# SPDX-License-Identifier: Apache-2.0
"""The same with tf.distribute's `ParameterServerStrategy`, as in its guide: the coordinator, and the servers of one cluster.

Each is a process of an environment of its own. The optimizers are the legacy ones of tf_keras, which update a variable in
one fused kernel. Servers with one and with two threads for each operation were tried too; neither was clearly faster.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras as keras

from benchmarks import timing
from benchmarks.models import COMPARED_STEPS, LEARNING_RATE, MLP, sizes
from benchmarks.tensorflow_peer import train_step

_coordinators: list[Any] = []
_servers: list[Any] = []
_measures: dict[str, Callable[[int], float]] = {}
_OPTIMIZERS = {"SGD": keras.optimizers.legacy.SGD, "Adam": keras.optimizers.legacy.Adam}


def serve(cluster: dict[str, list[str]], job: str, index: int) -> None:
    """Starts a server, which works as long as the process is alive."""
    config = tf.compat.v1.ConfigProto()
    # With fewer than this, says the guide, workers that wait for each other hang.
    config.inter_op_parallelism_threads = len(cluster["worker"]) + 1
    _servers.append(tf.distribute.Server(tf.train.ClusterSpec(cluster), job, index, protocol="grpc", config=config))


def start(cluster: dict[str, list[str]]) -> None:
    """Connects the coordinator to the servers."""
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(tf.train.ClusterSpec(cluster), rpc_layer="grpc")
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    _coordinators.append(tf.distribute.coordinator.ClusterCoordinator(strategy))


def prepare_training(name: str, optimizer: str) -> list[float]:
    """Makes the step, and returns the mean loss of some, one after the other, and the sizes of the weights after them."""
    (coordinator,) = _coordinators
    with coordinator.strategy.scope():
        model, updates = MLP.model(keras), _OPTIMIZERS[optimizer](LEARNING_RATE)
    train = train_step(model, updates)

    @tf.function
    def step(iterator: Any) -> Any:
        return coordinator.strategy.run(train, args=next(iterator))

    iterator = iter(coordinator.create_per_worker_dataset(_dataset))
    losses = [coordinator.schedule(step, args=(iterator,)).fetch() for _ in range(COMPARED_STEPS)]
    _measures[name] = lambda count: _seconds_a_step(step, (iterator,), count)
    return [float(np.mean(losses)), *sizes(model.get_weights())]


def prepare_empty(name: str) -> list[float]:
    """Makes a step that does nothing."""
    step = tf.function(lambda: None)
    _measures[name] = lambda count: _seconds_a_step(step, (), count)
    return []


def seconds_a_step(name: str, count: int) -> float:
    """Times `count` steps."""
    return _measures[name](count)


def _dataset() -> Any:
    return tf.data.Dataset.from_tensors(MLP.batch(1)).repeat().prefetch(2)


def _seconds_a_step(step: Callable[..., Any], args: tuple[Any, ...], count: int) -> float:
    (coordinator,) = _coordinators
    return timing.seconds_a_step(lambda: coordinator.schedule(step, args=args), lambda _: coordinator.join(), count)
