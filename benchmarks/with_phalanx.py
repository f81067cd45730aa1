# SPDX-License-Identifier: Apache-2.0
"""The same steps with Phalanx: the custom training loop of the tf.distribute guide."""

from collections.abc import Callable
from typing import Any

import jax
import keras

import phalanx
from benchmarks import timing
from benchmarks.handwritten import HandWritten
from benchmarks.models import CASES, LEARNING_RATE


def train_step(strategy: phalanx.Strategy, model_of: Callable[[], Any]) -> Callable[[Any], Any]:
    """Makes a model in the scope of a strategy, and returns one replica's training step.

    Args:
      strategy: the strategy.
      model_of: makes the model, which returns logits.
    """
    return train_step_and_variables(strategy, model_of)[0]


def train_step_and_variables(
    strategy: phalanx.Strategy, model_of: Callable[[], Any]
) -> tuple[Callable[[Any], Any], list[keras.Variable]]:
    """Returns what `train_step` returns, and the variables of the model and of its optimizer."""
    with strategy.scope():
        model = model_of()
        optimizer = keras.optimizers.Adam(LEARNING_RATE)
        optimizer.build(model.trainable_variables)
        losses = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

    def step(batch: Any) -> Any:
        x, y = batch
        with phalanx.GradientTape() as tape:
            loss = phalanx.nn.compute_average_loss(losses(y, model(x, training=True)))
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        return loss

    return step, [*model.variables, *optimizer.variables]


class WithPhalanx:
    """A training step over all devices of this process.

    Args:
      case: the name of the model.
    """

    def __init__(self, case: str) -> None:
        self.strategy = phalanx.MirroredStrategy()
        self._train_step = train_step(self.strategy, lambda: CASES[case].model(keras))
        batch = CASES[case].batch(self.strategy.num_replicas_in_sync)
        self._batch = next(iter(self.strategy.experimental_distribute_dataset([batch])))

    def __call__(self) -> Any:
        """Does one step and returns the replicas' losses."""
        return self.strategy.run(self._train_step, args=(self._batch,))

    def lowered(self) -> jax.stages.Lowered:
        """Returns the step's program before XLA compiles it."""
        step = phalanx.function(lambda batch: self.strategy.run(self._train_step, args=(batch,)))
        return step.lower(self._batch)


def wait(result: Any) -> list[float]:
    """Waits for a step and returns the replicas' losses."""
    return [float(x) for leaf in jax.tree.leaves(result) for x in jax.device_get(leaf).ravel()]


_programs: list[Callable[[], Any]] = []


def prepare(case: str) -> list[float]:
    """Makes the program, runs ten steps, and returns the sums of their losses."""
    return _prepared(WithPhalanx(case))


def prepare_hand_written(case: str) -> list[float]:
    """The same with the step that an expert writes in JAX."""
    return _prepared(HandWritten(case))


def _prepared(program: Callable[[], Any]) -> list[float]:
    _programs.append(program)
    return [sum(wait(program())) for _ in range(10)]


def seconds_a_step(count: int) -> float:
    """Times `count` steps."""
    return timing.seconds_a_step(_programs[0], wait, count)


def steps_for(turn_s: float) -> int:
    """Returns how many steps take about `turn_s`."""
    return timing.steps_for(_programs[0], wait, turn_s)
