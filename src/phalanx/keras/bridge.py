# SPDX-License-Identifier: Apache-2.0
"""Which strategy a Keras model belongs to, and who trains it."""

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras

from phalanx import compat
from phalanx.errors import ContextError, MixedStrategyError, warn_of_slip
from phalanx.input.distributed import DistributedDataset
from phalanx.keras import steps
from phalanx.keras.scheduled import ScheduledTrainer
from phalanx.keras.training import ModelTrainer
from phalanx.strategies.base import Strategy, living_strategies
from phalanx.strategies.current import get_strategy
from phalanx.strategies.parameter_server import ParameterServerStrategy
from phalanx.tracing import context

_KINDS = {
    "fit": "train",
    "evaluate": "test",
    "predict": "predict",
    "train_on_batch": "train",
    "test_on_batch": "test",
    "predict_on_batch": "predict",
}
"""The methods that are taken over, and what kind of step each takes."""

_PREDICTING = ("predict", "predict_on_batch")
"""The methods that leave a model and its metrics as they are."""


class _Models:
    """What is known of the models that were made or compiled in a scope."""

    def __init__(self) -> None:
        self._strategies: dict[int, Strategy] = {}
        self._trainers: dict[int, ModelTrainer] = {}
        self._busy: dict[int, threading.RLock] = {}

    def note(self, model: keras.Model) -> None:
        """Notes the strategy in whose scope a model is made or compiled. A compiled model gets a new trainer."""
        self._trainers.pop(id(model), None)
        if context.has_strategy() and get_strategy().topology.has_devices:
            self._adopt(model, get_strategy())

    def call(self, method: str, original: Callable[..., Any], model: keras.Model, *args: Any, **kwargs: Any) -> Any:
        """Runs a method of a model on its strategy, or as Keras does if no strategy is its own or current."""
        trainer = self._trainer(model, method, args[0] if args else kwargs.get("x"))
        if trainer is None:
            return original(model, *args, **kwargs)
        if method in _PREDICTING:
            return getattr(trainer, method)(*args, **kwargs)
        with self._alone(model, method):
            return getattr(trainer, method)(*args, **kwargs)

    def _trainer(self, model: keras.Model, method: str, data: Any) -> ModelTrainer | None:
        """Returns the trainer that runs a method of a model on some data; None for Keras's own.

        Raises:
          MixedStrategyError: it belongs to another strategy than the current one.
          ContextError: Keras cannot.
        """
        key, current = id(model), get_strategy()
        if key not in self._strategies and current.topology.has_devices:
            self._adopt(model, current)
        if key not in self._strategies and isinstance(data, DistributedDataset):
            self._adopt(model, _strategy_of(data, method))
        strategy = self._strategies.get(key)
        if strategy is None:
            _require_steps_of_keras(model, method)
            if method == "fit":
                self._warn_of_fit_outside()
            return None
        if current.topology.has_devices and current is not strategy:
            raise MixedStrategyError(
                f"a model of {strategy!r} in the scope of {current!r}",
                "its variables are on the other strategy's devices.",
                "make it, or load it, in this strategy's scope",
            )
        if key not in self._trainers:
            if isinstance(strategy, ParameterServerStrategy):
                self._trainers[key] = ScheduledTrainer(model, strategy)
            else:
                self._trainers[key] = ModelTrainer(model, strategy)
        return self._trainers[key]

    def _adopt(self, model: keras.Model, strategy: Strategy) -> None:
        if id(model) not in self._strategies:
            weakref.finalize(model, self._forget, id(model))
            self._busy[id(model)] = threading.RLock()
        self._strategies[id(model)] = strategy

    def _forget(self, key: int) -> None:
        for known in (self._strategies, self._trainers, self._busy):
            known.pop(key, None)

    @contextmanager
    def _alone(self, model: keras.Model, method: str) -> Iterator[None]:
        """Refuses to train or evaluate one model in two threads at once.

        Raises:
          ContextError: another thread does.
        """
        busy = self._busy[id(model)]
        if not busy.acquire(blocking=False):
            raise ContextError(
                f"{method} of the model {model.name!r}",
                "another thread trains or evaluates it, and both would use its variables and metrics.",
                "wait for the other thread, or give each a model: keras.models.clone_model(model)",
            )
        try:
            yield
        finally:
            busy.release()

    def _warn_of_fit_outside(self) -> None:
        used = set(map(id, self._strategies.values()))
        unused = [s for s in living_strategies() if s.num_replicas_in_sync > 1 and id(s) not in used]
        if unused:
            warn_of_slip(
                f"fit was called outside the scope of {unused[0]!r}, on a model that was made outside too. "
                "It trains on one device.",
                "with strategy.scope(): around the lines that make and compile the model",
            )


def _strategy_of(dataset: DistributedDataset, method: str) -> Strategy:
    """Returns the strategy that distributes a dataset.

    Raises:
      ContextError: it does not exist any more.
    """
    for strategy in living_strategies():
        if strategy.topology.has_devices and strategy.topology is dataset.topology:
            return strategy
    raise ContextError(
        f"{method} of a DistributedDataset outside all scopes",
        "the strategy that distributes it does not exist any more, and the model was made in no scope.",
        "with strategy.scope(): around the lines that make and compile the model",
    )


def _require_steps_of_keras(model: keras.Model, method: str) -> None:
    """Refuses what would fail in Keras, and leave the model without its variables."""
    kind = _KINDS[method]
    if steps.is_refused_by_keras(model, kind):
        raise ContextError(
            f"{method} of a {type(model).__name__} outside all scopes",
            f"its {kind}_step takes the data alone, and Keras itself calls {kind}_step(state, data).",
            'with strategy.scope(): around the model; strategy = phalanx.OneDeviceStrategy("cpu:0") for one device',
        )


_models = _Models()
compat.on_model(_models.note)
compat.take_over(_KINDS, _models.call)
for _kind, _step in {
    "train": steps.train_as_keras,
    "test": steps.test_as_keras,
    "predict": steps.predict_as_keras,
}.items():
    compat.take_over_step(f"{_kind}_step", _step)
