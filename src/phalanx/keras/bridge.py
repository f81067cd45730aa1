# SPDX-License-Identifier: Apache-2.0
"""Which strategy a Keras model belongs to, and who trains it."""

import weakref

import keras

from phalanx import compat, context
from phalanx.errors import MixedStrategyError
from phalanx.keras.scheduled import ScheduledTrainer
from phalanx.keras.training import ModelTrainer
from phalanx.strategies.base import Strategy
from phalanx.strategies.parameter_server import ParameterServerStrategy

_METHODS = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")


class _Models:
    """What is known of the models that were made or compiled in a scope."""

    def __init__(self) -> None:
        self._strategies: dict[int, Strategy] = {}
        self._trainers: dict[int, ModelTrainer] = {}

    def hear(self, model: keras.Model) -> None:
        """Notes the strategy in whose scope a model is made or compiled; a compiled model gets a trainer anew."""
        key = id(model)
        self._trainers.pop(key, None)
        if not context.has_strategy() or context.get_strategy().topology is None:
            return
        if key not in self._strategies:
            weakref.finalize(model, self._forget, key)
        self._strategies[key] = context.get_strategy()

    def trainer(self, model: keras.Model) -> ModelTrainer | None:
        """Returns who trains a model; None where Keras does: no strategy is its own or current.

        Raises:
          MixedStrategyError: it belongs to another strategy than the current one.
        """
        key, current = id(model), context.get_strategy()
        if key not in self._strategies and current.topology is not None:
            self.hear(model)
        strategy = self._strategies.get(key)
        if strategy is None:
            return None
        if current.topology is not None and current is not strategy:
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

    def _forget(self, key: int) -> None:
        self._strategies.pop(key, None)
        self._trainers.pop(key, None)


_models = _Models()
compat.on_model(_models.hear)
compat.take_over(_METHODS, _models.trainer)
