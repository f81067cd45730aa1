# SPDX-License-Identifier: Apache-2.0
"""`phalanx.elastic.steps`: a custom training loop that continues when processes of its group die, leave or join."""

from collections.abc import Callable, Iterator
from typing import Any, TypeVar, final

import jax
import numpy as np
from typing_extensions import override

from phalanx._src.checkpoint.checkpoint import AbstractPosition
from phalanx._src.elastic.training import GroupChange, Training, training_of
from phalanx._src.input.distributed import DistributedDataset
from phalanx._src.input.iterator import DistributedIterator
from phalanx._src.mesh.topology import Topology
from phalanx._src.programs.function import Function
from phalanx._src.strategies.base import Strategy, strategy_on
from phalanx.errors import ContextError, InvalidArgumentError, PeerLostError, arguments, shown

T = TypeVar("T")


class _Loop:
    """Epochs over a distributed dataset, of which the last one may end early."""

    def __init__(self, dataset: DistributedDataset, epochs: int | None, max_steps: int | None) -> None:
        self._dataset, self._epochs, self._max_steps = dataset, epochs, max_steps
        self._iterator: DistributedIterator | None = None
        self._before: Any = None
        # Steps of this epoch, and of those before it.
        self.epoch = self.begun = self._earlier = 0

    @property
    def strategy(self) -> Strategy:
        strategy = strategy_on(self._dataset.topology)
        if strategy is not None:
            return strategy
        raise InvalidArgumentError(
            f"dataset={shown(self._dataset)}", "its strategy no longer exists.", "keep the strategy in a variable"
        )

    @property
    def is_agreed(self) -> bool:
        return self._dataset.is_agreed

    def next(self) -> tuple[Any] | None:
        """Returns the next batch in a tuple. None at the end."""
        while self.epoch != self._epochs and self._earlier + self.begun != self._max_steps:
            if self._iterator is None:
                self._iterator = iter(self._dataset)
            self._before = self._iterator.position
            optional = self._iterator.get_next_as_optional()
            if optional.has_value():
                self.begun += 1
                return (optional.get_value(),)
            if not self.begun:  # Without any data, there would be no end of epochs.
                return None
            self.epoch, self._iterator = self.epoch + 1, None
            self._earlier, self.begun = self._earlier + self.begun, 0
        return None

    @property
    def stage(self) -> list[int]:
        return [self.epoch, 0]

    def get_position(self, *, undone: bool) -> dict[str, Any]:
        state = {"epoch": self.epoch, "earlier": self._earlier, "begun": self.begun - undone, "iterator": None}
        if self._iterator is None:
            return state
        position = self._before if undone else self._iterator.position
        return {**state, "iterator": self._iterator.state_at(position)}

    def set_position(self, position: dict[str, Any]) -> None:
        self.epoch, self._earlier, self.begun = position["epoch"], position["earlier"], position["begun"]
        self._iterator = None
        if position["iterator"] is not None:
            self._iterator = iter(self._dataset)
            self._iterator.set_state(position["iterator"])

    def move(self, topology: Topology) -> None:
        self._iterator = None


@final
class Steps(Iterator[T], AbstractPosition):
    """The steps of a training loop, from `phalanx.elastic.steps`. May be used in cross-replica context or outside all scopes.

    A `phalanx.train.Checkpoint` saves and restores how far it has come.

    Args:
      step: see `steps`.
      loop: the epochs.

    Example:
      >>> import numpy as np, phalanx
      >>> dataset = phalanx.OneDeviceStrategy("cpu:0").experimental_distribute_dataset(np.arange(4.0), batch_size=2)
      >>> loop = phalanx.elastic.steps(lambda batch: batch, dataset, epochs=3)
      >>> _ = next(loop)
      >>> rest = phalanx.elastic.steps(lambda batch: batch, dataset, epochs=3)
      >>> rest.set_state(loop.get_state())
      >>> len(list(rest))
      5
    """

    def __init__(self, step: Callable[[Any], T], loop: _Loop) -> None:
        self._loop, self._results, self._has_begun = loop, _results(step, loop), False

    @override
    def __next__(self) -> T:
        self._has_begun = True
        return next(self._results)

    @property
    def epoch(self) -> int:
        """The number of the epoch that the last result belongs to, from 0. May be called in any context."""
        return self._loop.epoch

    @property
    @override
    def place(self) -> tuple[int, int]:
        return self._loop.epoch, self._loop.begun

    def get_state(self) -> dict[str, Any]:
        """Returns the position after the last result. All workers must call it, between two steps.

        Returns:
          A dict of numbers, strings, lists and dicts. It does not depend on the number of workers.
        """
        return self._loop.get_position(undone=False)

    def set_state(self, state: dict[str, Any]) -> None:
        """Moves to a position. All workers must call it, before the first step.

        Args:
          state: result of `get_state` of a loop over the same data.

        Raises:
          ContextError: the loop has begun.
          InputError: the position belongs to other data.
          InvalidArgumentError: `state` is not a position.
        """
        if self._has_begun:
            raise ContextError(
                "set_state(state) of steps that have begun",
                "its processes already agree on how far they have come.",
                "restore the checkpoint before the loop; to go back, call phalanx.elastic.steps again",
            )
        if not isinstance(state, dict) or state.keys() != self._loop.get_position(undone=False).keys():
            raise InvalidArgumentError(f"state={shown(state)}", "is not a position.", "state=loop.get_state()")
        self._loop.set_position(state)


def steps(
    step: Callable[[Any], T], dataset: DistributedDataset, epochs: int | None = 1, *, max_steps: int | None = None
) -> Steps[T]:
    """Returns an iterator over the results of a training step for all batches, even if processes of the group die, leave or join.

    In the processes of `phalanx run --workers 2:4`, a step that fails because a process was lost does not end the program. The other
    processes form another group, go back to the newest variables that one of them has, and continue at that batch. A process that starts
    later runs one step alone, so that all its variables exist, and then takes over those of the others. Elsewhere, this is a plain loop.

    Every result is yielded once, in order. Steps that are repeated yield nothing. All processes must make the same calls of `steps` and
    `fit`, in the same order. May be used in cross-replica context or outside all scopes.

    Args:
      step: a function of a batch, for example a `phalanx.function`, that trains the variables of a strategy.
      dataset: a distributed dataset that can be read again.
      epochs: how often to read it. None for as often as `max_steps` needs.
      max_steps: number of steps after which it ends, even within an epoch. None for no limit. Do not leave the loop by `break`
        instead, because the processes then do not agree on the last step.

    Returns:
      An iterator over what `step` returns. In an elastic group, the results are NumPy arrays, because JAX arrays end with the group.
      A checkpoint that contains the iterator saves its position. If a process is lost during a save between two steps, that save is skipped with
      a warning.

    Raises:
      InvalidArgumentError: an argument has the wrong type or value.
      PeerLostError: a process was lost, and nobody can continue. Raised between the results.

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
    if epochs is not None:
        arguments.integer("epochs", epochs, hint="epochs=3")
    if max_steps is not None:
        arguments.integer("max_steps", max_steps, kind="1 or more steps", hint="max_steps=1000")
    if epochs is None and max_steps is None:
        raise InvalidArgumentError("epochs=None and max_steps=None", "the loop would never end.", "epochs=3")
    return Steps(step, _Loop(dataset, epochs, max_steps))


def _results(step: Callable[[Any], T], loop: _Loop) -> Iterator[T]:
    strategy = loop.strategy
    training = training_of(strategy, loop)
    if training is None:
        while (batch := loop.next()) is not None:
            result = step(*batch)
            strategy.topology.require_peers()
            yield result
        return
    with training.leaving_when_told():
        yield from _elastic_results(step, loop, training)


def _elastic_results(step: Callable[[Any], T], loop: _Loop, training: Training) -> Iterator[T]:
    if not training.is_over:
        training.enter(lambda: _try(step, loop))
    while not training.is_over:
        try:
            batch = loop.next()
            if batch is None:
                training.finish()
                return
            if training.has_changed:
                training.catch_up()
                if isinstance(step, Function):
                    step.prepare(*batch)  # Then all variables exist, and are copied.
            is_new = training.begin_steps(loop.begun)
            result = _on_host(step(*batch))
            training.end_steps()
        except (PeerLostError, GroupChange) as e:
            training.survive(e)
            continue
        if is_new:
            with training.between_steps():
                yield result


def _on_host(result: T) -> T:
    """Returns a result with its fully replicated arrays on the host, so that they outlive the devices of the group."""
    # This process has only a part of other arrays, and to read the rest would be a collective.
    host_result: T = jax.tree.map(
        lambda x: np.asarray(x) if isinstance(x, jax.Array) and x.is_fully_replicated else x, result
    )
    return host_result


def _try(step: Callable[[Any], Any], loop: _Loop) -> None:
    """Makes a step, so that all variables exist; only traces it if that will do."""
    if (batch := loop.next()) is not None:
        (step.prepare if isinstance(step, Function) else step)(*batch)
