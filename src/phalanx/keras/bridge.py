# SPDX-License-Identifier: Apache-2.0
"""Records which strategy a Keras model belongs to, and dispatches `fit` and the like to its trainer."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import keras

from phalanx._src import compat
from phalanx._src.checkpoint.checkpoint import writes_here
from phalanx._src.cluster.watch import watch
from phalanx._src.input.distributed import DistributedDataset
from phalanx._src.mesh.arrays import spans_processes
from phalanx._src.programs.identity import IdentityMap
from phalanx._src.strategies.base import Strategy, living_strategies, strategy_on
from phalanx._src.strategies.current import get_strategy
from phalanx._src.strategies.parameter_server import ParameterServerStrategy
from phalanx._src.tracing import context
from phalanx.errors import ContextError, MixedStrategyError, warn_of_slip
from phalanx.keras import steps
from phalanx.keras.scheduled import ScheduledTrainer
from phalanx.keras.training import ModelTrainer
from phalanx.typing import PyTree

_KINDS = {
    "fit": "train",
    "evaluate": "test",
    "predict": "predict",
    "train_on_batch": "train",
    "test_on_batch": "test",
    "predict_on_batch": "predict",
}
"""The methods of `keras.Model` that Phalanx replaces, and the kind of step that each runs."""

_PREDICTING = ("predict", "predict_on_batch")
"""The methods that change neither the model nor its metrics, so that several threads may call them."""


@dataclass
class _Adopted:
    """What is known about a model that belongs to a strategy.

    Args:
      strategy: the strategy.
      trainer: runs its methods. None until the first call.
      busy: held while a thread trains or evaluates the model.
    """

    strategy: Strategy
    trainer: ModelTrainer | None = None
    busy: threading.RLock = field(default_factory=threading.RLock)

    def trainer_of(self, model: keras.Model) -> ModelTrainer:
        """Returns the trainer of the model, which is created at the first call."""
        if self.trainer is None:
            if isinstance(self.strategy, ParameterServerStrategy):
                self.trainer = ScheduledTrainer(model, self.strategy)
            else:
                self.trainer = ModelTrainer(model, self.strategy)
        return self.trainer

    @contextmanager
    def alone(self, model: keras.Model, method: str) -> Iterator[None]:
        """Prevents two threads from training or evaluating the model at the same time.

        The lock is reentrant, because `fit` may run `evaluate` from a callback.

        Raises:
          ContextError: another thread trains or evaluates the model.
        """
        if not self.busy.acquire(blocking=False):
            raise ContextError(
                f"{method} of the model {model.name!r}",
                "another thread is training or evaluating it, and both would write to its variables and metrics.",
                "wait for the other thread, or give each thread its own model: keras.models.clone_model(model)",
            )
        try:
            yield
        finally:
            self.busy.release()


class _Models:
    """The strategies and trainers of all living models."""

    def __init__(self) -> None:
        self._adopted: IdentityMap[_Adopted] = IdentityMap()

    def note(self, model: keras.Model) -> None:
        """Records the strategy in whose scope a model is created or compiled. A newly compiled model gets a new trainer."""
        adopted = self._adopted.get(model)
        if adopted is not None:
            # The programs of the old trainer contain the old loss and metrics.
            adopted.trainer = None
        if context.has_strategy() and get_strategy().topology.has_devices:
            self._adopt(model, get_strategy())

    def call(
        self, method: str, original: Callable[..., Any], model: keras.Model, *args: PyTree, **kwargs: PyTree
    ) -> PyTree:
        """Runs a method of a model on its strategy, or Keras's own method if the model has none and none is current."""
        adopted = self._find(model, method, args[0] if args else kwargs.get("x"))
        if adopted is None:
            with compat.in_loop_of_keras(model):
                return original(model, *args, **kwargs)
        run = getattr(adopted.trainer_of(model), method)
        if method in _PREDICTING:
            return run(*args, **kwargs)
        with adopted.alone(model, method):
            return run(*args, **kwargs)

    def save(self, owner: object, path: str, write: Callable[[], Any], read: Callable[[], Any]) -> Any:
        """Saves a model: the chief of its strategy writes the file, and the other processes read along and wait for it."""
        adopted = self._adopted.get(owner)
        # An `ExportArchive` has no strategy, so the one with the most processes decides.
        strategies = [adopted.strategy] if adopted else [] if isinstance(owner, keras.Model) else living_strategies()
        topology = max((s.topology for s in strategies), key=lambda t: t.num_workers, default=None)
        watchdog = None if topology is None or topology.num_workers == 1 else watch.own()
        # All read the same values in the same order, because reading a sharded variable is a collective call.
        result = write() if topology is None or topology.is_chief else read()
        is_written = watchdog is None or watchdog.pass_save(path)
        # A file of this process alone. To read sharded variables again would be a collective call.
        if not is_written and not any(spans_processes(compat.raw_value(v)) for v in getattr(owner, "variables", ())):
            return write()
        return result

    def _find(self, model: keras.Model, method: str, data: PyTree) -> _Adopted | None:
        """Returns the strategy and trainer that run a method of a model on some data; None for Keras's own trainer.

        Raises:
          MixedStrategyError: the model belongs to a strategy other than the current one.
          ContextError: the model belongs to no strategy, and Keras's own trainer cannot run its custom step.
        """
        adopted, current = self._adopted.get(model), get_strategy()
        # The default strategy places nothing, so another strategy may take over its models.
        if adopted is None or not adopted.strategy.topology.has_devices:
            if current.topology.has_devices:
                adopted = self._adopt(model, current)
            elif isinstance(data, DistributedDataset):
                adopted = self._adopt(model, _strategy_of(data, method))
        if adopted is None:
            _require_steps_of_keras(model, method)
            if method == "fit":
                _warn_of_fit_outside()
            return None
        if current.topology.has_devices and current is not adopted.strategy:
            raise MixedStrategyError(
                f"a model of {adopted.strategy!r} in the scope of {current!r}",
                "its variables are on the devices of the other strategy.",
                "create or load the model in the scope of this strategy",
            )
        return adopted

    def _adopt(self, model: keras.Model, strategy: Strategy) -> _Adopted:
        adopted = self._adopted.get(model)
        if adopted is None:
            adopted = self._adopted[model] = _Adopted(strategy)
        elif adopted.strategy is not strategy:
            adopted.strategy, adopted.trainer = strategy, None
        return adopted


def _warn_of_fit_outside() -> None:
    """Warns that a model of no strategy trains on one device, although a strategy with several replicas exists."""
    strategies = [s for s in living_strategies() if s.num_replicas_in_sync > 1]
    if strategies:
        # Names the oldest one, so that the message of a line stays the same, and is shown once, if more are created.
        oldest = min(strategies, key=lambda s: s.number)
        warn_of_slip(
            f"fit was called outside the scope of {oldest!r}, on a model that was also created outside it. "
            "The model trains on one device.",
            "with strategy.scope(): around the lines that create and compile the model. If one device is intended: "
            'with phalanx.OneDeviceStrategy("cpu:0").scope():',
        )


def _strategy_of(dataset: DistributedDataset, method: str) -> Strategy:
    """Returns the strategy that distributes a dataset.

    Raises:
      ContextError: the strategy no longer exists.
    """
    strategy = strategy_on(dataset.topology)
    if strategy is not None:
        return strategy
    raise ContextError(
        f"{method} of a DistributedDataset outside all scopes",
        "the strategy of the dataset no longer exists, and the model was not created in a scope.",
        "with strategy.scope(): around the lines that create and compile the model",
    )


def _require_steps_of_keras(model: keras.Model, method: str) -> None:
    """Rejects custom steps that Keras cannot run, before the failure would destroy the variables of the model.

    Keras's JAX trainer empties the variables during an epoch (`_purge_model_variables` in Keras 3.15), and does not refill them
    if a step raises.

    Raises:
      ContextError: the step takes the data only.
    """
    kind = _KINDS[method]
    if steps.is_refused_by_keras(model, kind):
        raise ContextError(
            f"{method} of a {type(model).__name__} outside all scopes",
            f"its {kind}_step takes only the data, but on JAX Keras calls {kind}_step(state, data).",
            "with strategy.scope(): around the lines that create the model. For one device, use "
            'strategy = phalanx.OneDeviceStrategy("cpu:0")',
        )


_models = _Models()
compat.on_model(_models.note)
compat.on_save(_models.save, writes_here)
compat.take_over(_KINDS, _models.call)
for _kind, _step in {
    "train": steps.train_as_keras,
    "test": steps.test_as_keras,
    "predict": steps.predict_as_keras,
}.items():
    compat.take_over_step(f"{_kind}_step", _step)
