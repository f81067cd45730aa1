# SPDX-License-Identifier: Apache-2.0
"""Which strategy a Keras model belongs to, and who trains it."""

import weakref

import keras

from phalanx import compat, context
from phalanx.errors import ContextError, MixedStrategyError
from phalanx.keras import steps
from phalanx.keras.scheduled import ScheduledTrainer
from phalanx.keras.training import ModelTrainer
from phalanx.strategies.base import Strategy
from phalanx.strategies.parameter_server import ParameterServerStrategy

_KINDS = {
    "fit": "train",
    "evaluate": "test",
    "predict": "predict",
    "train_on_batch": "train",
    "test_on_batch": "test",
    "predict_on_batch": "predict",
}
"""The methods that are taken over, and what kind of step each takes."""


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

    def trainer(self, model: keras.Model, method: str) -> ModelTrainer | None:
        """Returns who runs a method of a model; None where Keras does: no strategy is its own or current.

        Raises:
          MixedStrategyError: it belongs to another strategy than the current one.
          ContextError: Keras cannot.
        """
        key, current = id(model), context.get_strategy()
        if key not in self._strategies and current.topology is not None:
            self.hear(model)
        strategy = self._strategies.get(key)
        if strategy is None:
            _require_steps_of_keras(model, method)
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


def _require_steps_of_keras(model: keras.Model, method: str) -> None:
    """Refuses what would fail in Keras, and leave the model without its variables."""
    kind = _KINDS[method]
    if steps.is_stateful(model, kind):
        raise ContextError(
            f"{method} of a {type(model).__name__} outside all scopes",
            f"its {kind}_step takes the data alone, and Keras itself calls {kind}_step(state, data).",
            'with strategy.scope(): around the model; strategy = phalanx.OneDeviceStrategy("cpu:0") for one device',
        )


_models = _Models()
compat.on_model(_models.hear)
compat.take_over(_KINDS, _models.trainer)
