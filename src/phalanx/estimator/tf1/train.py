# SPDX-License-Identifier: Apache-2.0
"""Optimizers, hooks and checkpoints of `tf.compat.v1.train`."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.typing import ArrayLike

from phalanx.errors import InvalidArgumentError, shown
from phalanx.estimator.hooks.basic import LoggingTensorHook, NanTensorHook, StepCounterHook, StopAtStepHook
from phalanx.estimator.hooks.others import FinalOpsHook, GlobalStepWaiterHook, ProfilerHook
from phalanx.estimator.hooks.saving import CheckpointSaverHook, CheckpointSaverListener, SummarySaverHook
from phalanx.estimator.hooks.timer import SecondOrStepTimer
from phalanx.estimator.loop.graph import get_global_step, get_or_create_global_step, require_graph
from phalanx.estimator.loop.optimizing import TrainOp, gradients_of, minimize
from phalanx.estimator.loop.session import SessionRunArgs, SessionRunContext, SessionRunHook, SessionRunValues
from phalanx.estimator.loop.spec import Scaffold
from phalanx.train import (
    Checkpoint,
    CheckpointManager,
    latest_checkpoint,
    list_variables,
    load_checkpoint,
    load_variable,
)

Count: TypeAlias = ArrayLike | keras.Variable
"""A number of steps."""

Rate: TypeAlias = ArrayLike | Callable[[], ArrayLike]
"""A learning rate, or a function that returns it."""


class Optimizer:
    """An optimizer of TensorFlow 1. Each model function creates its Keras optimizer from it.

    Args:
      kind: function of `learning_rate` that creates the Keras optimizer.
      learning_rate: float, an array of the model function, or a function without arguments.

    Raises:
      InvalidArgumentError: `learning_rate` is something else.

    Source: tf.compat.v1.train.Optimizer.
    """

    def __init__(self, kind: Callable[..., keras.optimizers.Optimizer], learning_rate: Rate) -> None:
        if not (
            isinstance(learning_rate, (int, float, np.number))
            or callable(learning_rate)
            or hasattr(learning_rate, "dtype")
        ):
            raise InvalidArgumentError(
                f"learning_rate={shown(learning_rate)}", "must be a number, or an array.", "learning_rate=0.01"
            )
        self._kind, self._rate = kind, learning_rate
        # compute_gradients and apply_gradients are two calls for one optimizer, whose loss scale both must use.
        self._made: keras.optimizers.Optimizer | None = None

    def create(self) -> keras.optimizers.Optimizer:
        """Returns a new Keras optimizer. Call it in a model function."""
        rate = self._rate
        # A function, so that the rate is no variable: a checkpoint does not change it.
        return self._kind(learning_rate=rate if callable(rate) else lambda: jnp.asarray(rate, jnp.float32))

    def minimize(
        self, loss: jax.Array, global_step: object = None, var_list: Sequence[keras.Variable] | None = None, **_: object
    ) -> Callable[[], None]:
        """Returns the `train_op` that minimizes a loss. See `phalanx.estimator.minimize`."""
        return minimize(self.create(), loss, var_list)

    def compute_gradients(
        self, loss: jax.Array, var_list: Sequence[keras.Variable] | None = None
    ) -> list[tuple[Any, keras.Variable]]:
        """Returns pairs of gradients and variables. Call it in a model function, in mode TRAIN."""
        self._made = self.create()
        return gradients_of(self._made, loss, var_list)

    def apply_gradients(
        self, grads_and_vars: Iterable[tuple[Any, Any]], global_step: object = None
    ) -> Callable[[], None]:
        """Returns the `train_op` that applies gradients of `compute_gradients`. Call it in a model function."""
        require_graph("optimizer.apply_gradients")
        # Forgotten after use: the next trace creates another one, with variables of its graph.
        made, self._made, pairs = self._made, None, list(grads_and_vars)
        if not pairs:
            raise InvalidArgumentError("apply_gradients([])", "there are no gradients.", "compute_gradients(loss)")
        return TrainOp(made or self.create(), pairs)


class GradientDescentOptimizer(Optimizer):
    """Gradient descent. Source: tf.compat.v1.train.GradientDescentOptimizer."""

    def __init__(self, learning_rate: Rate) -> None:
        super().__init__(keras.optimizers.SGD, learning_rate)


class MomentumOptimizer(Optimizer):
    """Gradient descent with momentum. Source: tf.compat.v1.train.MomentumOptimizer."""

    def __init__(self, learning_rate: Rate, momentum: float, use_nesterov: bool = False) -> None:
        super().__init__(
            lambda learning_rate: keras.optimizers.SGD(learning_rate, momentum, use_nesterov), learning_rate
        )


class AdamOptimizer(Optimizer):
    """Adam. Source: tf.compat.v1.train.AdamOptimizer."""

    def __init__(
        self, learning_rate: Rate = 0.001, beta1: float = 0.9, beta2: float = 0.999, epsilon: float = 1e-8
    ) -> None:
        super().__init__(
            lambda learning_rate: keras.optimizers.Adam(learning_rate, beta1, beta2, epsilon), learning_rate
        )


class AdagradOptimizer(Optimizer):
    """Adagrad. Source: tf.compat.v1.train.AdagradOptimizer."""

    def __init__(self, learning_rate: Rate, initial_accumulator_value: float = 0.1) -> None:
        super().__init__(
            # TensorFlow 1 adds no epsilon to the root of Adagrad's accumulator; Keras adds 1e-7.
            lambda learning_rate: keras.optimizers.Adagrad(learning_rate, initial_accumulator_value, epsilon=0.0),
            learning_rate,
        )


class RMSPropOptimizer(Optimizer):
    """RMSprop. Source: tf.compat.v1.train.RMSPropOptimizer."""

    def __init__(
        self,
        learning_rate: Rate,
        decay: float = 0.9,
        momentum: float = 0.0,
        epsilon: float = 1e-10,
        centered: bool = False,
    ) -> None:
        super().__init__(
            lambda learning_rate: keras.optimizers.RMSprop(learning_rate, decay, momentum, epsilon, centered),
            learning_rate,
        )


class FtrlOptimizer(Optimizer):
    """Ftrl. Source: tf.compat.v1.train.FtrlOptimizer."""

    def __init__(
        self,
        learning_rate: Rate,
        learning_rate_power: float = -0.5,
        initial_accumulator_value: float = 0.1,
        l1_regularization_strength: float = 0.0,
        l2_regularization_strength: float = 0.0,
    ) -> None:
        super().__init__(
            lambda learning_rate: keras.optimizers.Ftrl(
                learning_rate,
                learning_rate_power,
                initial_accumulator_value,
                l1_regularization_strength,
                l2_regularization_strength,
            ),
            learning_rate,
        )


def _steps(global_step: Count) -> jax.Array:
    return jnp.asarray(global_step.value if isinstance(global_step, keras.Variable) else global_step, jnp.float32)


def exponential_decay(
    learning_rate: float, global_step: Count, decay_steps: int, decay_rate: float, staircase: bool = False
) -> jax.Array:
    """Returns a learning rate that decays exponentially. Call it in a model function.

    Source: tf.compat.v1.train.exponential_decay.
    """
    # In floats, as learning_rate_decay.py computes it, so that a decay without `staircase` is smooth.
    periods = _steps(global_step) / decay_steps
    return learning_rate * jnp.power(decay_rate, jnp.floor(periods) if staircase else periods)


def polynomial_decay(
    learning_rate: float, global_step: Count, decay_steps: int, end_learning_rate: float = 0.0001, power: float = 1.0
) -> jax.Array:
    """Returns a learning rate that decays to `end_learning_rate`. Call it in a model function.

    Source: tf.compat.v1.train.polynomial_decay.
    """
    done = jnp.minimum(_steps(global_step), decay_steps) / decay_steps
    return (learning_rate - end_learning_rate) * jnp.power(1 - done, power) + end_learning_rate
