# SPDX-License-Identifier: Apache-2.0
"""`phalanx.elastic.steps`: a custom training loop that goes on when processes of its group die, leave or join."""

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import numpy as np

from phalanx.elastic.training import GroupChange, Training, training_of
from phalanx.errors import InvalidArgumentError, PeerLostError, arguments, shown
from phalanx.input.distributed import DistributedDataset
from phalanx.input.iterator import DistributedIterator
from phalanx.mesh.topology import Topology
from phalanx.programs.function import Function
from phalanx.strategies.base import Strategy, strategy_on

T = TypeVar("T")


class _Loop:
    """Epochs over a distributed dataset."""

    def __init__(self, dataset: DistributedDataset, epochs: int) -> None:
        self._dataset, self._epochs = dataset, epochs
        self.epoch = 0
        self._iterator: DistributedIterator | None = None
        self._before: Any = None
        self.begun = 0

    @property
    def is_agreed(self) -> bool:
        return self._dataset.is_agreed

    def next(self) -> tuple[Any] | None:
        """Returns the next batch in a tuple. None at the end of the last epoch."""
        while self.epoch < self._epochs:
            if self._iterator is None:
                self._iterator = iter(self._dataset)
            self._before = self._iterator.position
            optional = self._iterator.get_next_as_optional()
            if optional.has_value():
                self.begun += 1
                return (optional.get_value(),)
            self.epoch, self._iterator, self.begun = self.epoch + 1, None, 0
        return None

    @property
    def stage(self) -> list[int]:
        return [self.epoch, 0]

    def get_position(self, *, undone: bool) -> dict[str, Any]:
        state = {"epoch": self.epoch, "begun": self.begun - undone, "iterator": None}
        if self._iterator is None:
            return state
        position = self._before if undone else self._iterator.position
        return {**state, "iterator": self._iterator.state_at(position)}

    def set_position(self, position: dict[str, Any]) -> None:
        self.epoch, self.begun, self._iterator = position["epoch"], position["begun"], None
        if position["iterator"] is not None:
            self._iterator = iter(self._dataset)
            self._iterator.set_state(position["iterator"])

    def move(self, topology: Topology) -> None:
        self._dataset, self._iterator = self._dataset.on(topology), None


def steps(step: Callable[[Any], T], dataset: DistributedDataset, epochs: int = 1) -> Iterator[T]:
    """Yields the results of a training step for all batches, also if processes of the group die, leave or join meanwhile.

    In the processes of `phalanx run --workers 2:4`, a step that fails because a process was lost does not end the program. The other
    processes form another group, go back to the newest variables that one of them has, and go on at that batch. A process that starts
    later makes one step alone, so that all its variables exist, and then takes over those of the others. Elsewhere, this is a plain loop.

    Every result is yielded once, in order. Steps that are repeated yield nothing. All processes must make the same calls of `steps` and
    `fit`, in the same order. May be used in cross-replica context or outside all scopes.

    Args:
      step: a function of a batch, for example a `phalanx.function`, that trains the variables of a strategy.
      dataset: a distributed dataset that can be read again.
      epochs: how often to read it.

    Yields:
      What `step` returned. In an elastic group with arrays of NumPy instead of JAX, because those of JAX end with the group.

    Raises:
      InvalidArgumentError: an argument has the wrong type.
      PeerLostError: a process was lost, and nobody can go on.

    Example:
      >>> import keras, numpy as np, phalanx
      >>> strategy = phalanx.MirroredStrategy(["cpu:0", "cpu:1"])
      >>> with strategy.scope():
      ...     total = keras.Variable(0.0, aggregation="sum")
      >>> @phalanx.function
      ... def step(batch):
      ...     strategy.run(lambda x: total.assign_add(x.sum()), args=(batch,))
      ...     return total.value
      >>> dataset = strategy.experimental_distribute_dataset(np.arange(4.0), batch_size=2)
      >>> [float(result) for result in phalanx.elastic.steps(step, dataset)]
      [1.0, 6.0]
    """
    arguments.function("step", step, "phalanx.elastic.steps(train_step, dataset)")
    arguments.instance(
        "dataset", dataset, DistributedDataset, "strategy.experimental_distribute_dataset(dataset, batch_size=64)"
    )
    arguments.integer("epochs", epochs, hint="epochs=3")
    return _results(step, dataset, epochs)


def _results(step: Callable[[Any], T], dataset: DistributedDataset, epochs: int) -> Iterator[T]:
    loop = _Loop(dataset, epochs)
    training = training_of(_strategy_of(dataset), loop)
    if training is None:
        while (batch := loop.next()) is not None:
            yield step(*batch)
        return
    with training.leaving_when_told():
        yield from _elastic_results(step, loop, training)


def _elastic_results(step: Callable[[Any], T], loop: _Loop, training: Training) -> Iterator[T]:
    if not training.is_over:
        _enter(training, step, loop)
    while not training.is_over:
        try:
            batch = loop.next()
            if batch is None:
                training.finish()
                return
            if training.has_changed:
                training.has_changed = False
                if isinstance(step, Function):
                    step.prepare(*batch)  # Then all variables exist, and are copied.
            is_new = training.begin_steps(loop.begun)
            result = _on_host(step(*batch))
            training.end_steps()
        except (PeerLostError, GroupChange) as e:
            training.survive(e)
            continue
        if is_new:
            yield result


def _on_host(result: T) -> T:
    """Returns a result whose arrays outlive the devices of the group, as far as this process has the whole of them."""
    found: T = jax.tree.map(
        lambda x: np.asarray(x) if isinstance(x, jax.Array) and x.is_fully_replicated else x, result
    )
    return found


def _enter(training: Training, step: Callable[[Any], Any], loop: _Loop) -> None:
    """Makes a step alone, so that all variables exist, before this process joins the others; if it has started later than they."""
    with training.trying() as is_late:
        if is_late and (batch := loop.next()) is not None:
            if isinstance(step, Function):
                step.prepare(*batch)
            else:
                step(*batch)
    training.enter()


def _strategy_of(dataset: DistributedDataset) -> Strategy:
    strategy = strategy_on(dataset.topology)
    if strategy is not None:
        return strategy
    raise InvalidArgumentError(
        f"dataset={shown(dataset)}", "its strategy no longer exists.", "keep the strategy in a variable"
    )
