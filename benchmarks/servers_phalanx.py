# SPDX-License-Identifier: Apache-2.0
"""The coordinator of `ParameterServerStrategy`, in a process of its own, and an actor of raw Ray beside its servers."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

import phalanx
from benchmarks import timing
from benchmarks.models import COMPARED_STEPS, LEARNING_RATE, MLP, sizes
from phalanx._src.parameter_server.processes.ray import load_ray
from phalanx._src.parameter_server.remote.plans import Push, Pusher
from phalanx._src.parameter_server.remote.shared_memory import SharedMemoryConnection

_coordinators: list[phalanx.coordinator.ClusterCoordinator] = []
_measures: dict[str, Callable[[int], float]] = {}
_OPTIMIZERS = {"SGD": keras.optimizers.SGD, "Adam": keras.optimizers.Adam}
_ME, _KEY = Pusher(worker=1000, life=0), -1


def start(workers: int, ps: int) -> None:
    """Starts the processes."""
    strategy = phalanx.ParameterServerStrategy(workers=workers, ps=ps)
    _coordinators.append(phalanx.coordinator.ClusterCoordinator(strategy))


def close() -> None:
    """Ends them."""
    _coordinators.pop().strategy.close()


def prepare_training(name: str, optimizer: str) -> list[float]:
    """Makes the step, and returns the mean loss of some, one after the other, and the sizes of the weights after them."""
    (coordinator,) = _coordinators
    with coordinator.strategy.scope():
        model, updates = MLP.model(keras), _OPTIMIZERS[optimizer](LEARNING_RATE)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def train(x: Any, y: Any) -> Any:
        with phalanx.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        updates.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    step = lambda iterator: coordinator.strategy.run(train, args=next(iterator))  # noqa: E731
    iterator = iter(coordinator.create_per_worker_dataset(_dataset))
    losses = [coordinator.schedule(step, args=(iterator,)).fetch() for _ in range(COMPARED_STEPS)]
    _measures[name] = lambda count: _seconds_a_step(step, (iterator,), count)
    return [float(np.mean(losses)), *sizes(model.get_weights())]


def prepare_empty(name: str) -> list[float]:
    """Makes a step that does nothing."""
    step = lambda: None  # noqa: E731
    _measures[name] = lambda count: _seconds_a_step(step, (), count)
    return []


def prepare_transport(name: str, size_bytes: int) -> None:
    """Makes pulls and pushes of one array, between this process and a parameter server, and an actor of Ray."""
    (coordinator,) = _coordinators
    array = np.ones(size_bytes // 4, "float32")
    ray, server = load_ray(), coordinator.strategy.homes.servers.actors[0]
    actor = ray.remote(_Actor).options(num_cpus=0).remote(array)
    coordinator.strategy.homes.servers.tell("put", {_KEY: array})
    numbers = itertools.count()

    coordinator.strategy.homes.servers.tell("enter", [_ME])
    line = SharedMemoryConnection(_ME)
    assert ray.get(server.near.remote(_ME, line.greeting()))

    def pull() -> Any:
        return line.unpack(ray.get(server.pull.remote([_KEY], _ME)))

    def push() -> Any:
        sent = line.pack(Push(_ME, next(numbers), 0, set={_KEY: array}))
        return ray.get(server.exchange.remote(sent))

    calls = {
        f"{name}: pull": pull,
        f"{name}: push": push,
        f"{name}: pull of Ray": lambda: ray.get(actor.give.remote()),
        f"{name}: push of Ray": lambda: ray.get(actor.take.remote(array)),
    }
    for key, call in calls.items():
        _measures[key] = lambda count, call=call: timing.seconds_a_step(call, lambda _: None, count)


def seconds_a_step(name: str, count: int) -> float:
    """Times `count` steps, or pulls, or pushes."""
    return _measures[name](count)


class _Actor:
    """What hand-written code on Ray would be."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def give(self) -> np.ndarray:
        """Returns the array."""
        return self._array

    def take(self, array: np.ndarray) -> None:
        """Replaces it."""
        self._array = array.copy()


def _dataset() -> Iterator[Any]:
    return itertools.repeat(MLP.batch(1))


def _seconds_a_step(step: Callable[..., Any], args: tuple[Any, ...], count: int) -> float:
    (coordinator,) = _coordinators
    return timing.seconds_a_step(lambda: coordinator.schedule(step, args=args), lambda _: coordinator.join(), count)
