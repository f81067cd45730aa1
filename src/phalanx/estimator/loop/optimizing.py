# SPDX-License-Identifier: Apache-2.0
"""`minimize`: gradients and updates in a model function that opens no tape."""

from collections.abc import Callable, Sequence
from types import NoneType
from typing import Any, final

import jax
import jax.numpy as jnp
import keras

from phalanx._src import compat
from phalanx._src.mesh.arrays import is_array
from phalanx._src.tracing import context
from phalanx.errors import InvalidArgumentError, arguments, shown
from phalanx.estimator.loop.graph import require_graph


@final
class TrainOp:
    """An update that runs at the end of the step, after the model function. `minimize` returns it.

    Args:
      optimizer: the optimizer.
      pairs: gradients and variables.
    """

    def __init__(self, optimizer: keras.optimizers.Optimizer, pairs: Sequence[tuple[Any, Any]]) -> None:
        self._optimizer, self._pairs = optimizer, list(pairs)

    def __call__(self) -> None:
        """Applies the gradients."""
        # In `__call__`, not in `minimize`: in TensorFlow 1 nothing is updated until the session runs the train_op.
        gradients, variables = zip(*self._pairs, strict=True)
        self._optimizer.apply(list(gradients), list(variables))


def gradients_of(
    optimizer: keras.optimizers.Optimizer, loss: jax.Array, variables: Sequence[keras.Variable] | None
) -> list[tuple[Any, keras.Variable]]:
    """Returns pairs of gradients and variables, without the variables on which the loss does not depend.

    The gradients are weighted, such that their sum over the replicas is the gradient of the loss of the global batch.

    Raises:
      InvalidArgumentError: the loss depends on none of the variables.
    """
    graph = require_graph("optimizer.minimize")
    if not isinstance(variables, (Sequence, NoneType)):
        raise InvalidArgumentError(f"var_list={shown(variables)}", "must be a list of variables.", "var_list=None")
    if not is_array(loss):
        raise InvalidArgumentError(f"minimize(loss={shown(loss)})", "is not an array.", "loss=keras.ops.mean(losses)")
    variables = graph.trainable_variables if variables is None else list(variables)
    # If a layer communicates, weighting the loss is still correct, but weighting the gradients is not.
    target = optimizer.scale_loss(loss * jnp.asarray(context.require_replica().weight, loss.dtype))
    gradients = graph.tape.gradient(target, variables)
    # compute_gradients of TensorFlow 1 returns None for unused variables, and
    # apply_gradients skips them. Here they are skipped at once.
    pairs = [(g, v) for g, v in zip(gradients, variables, strict=True) if g is not None]
    if not pairs:
        raise InvalidArgumentError(
            f"minimize(loss={shown(loss)})",
            "the loss depends on no trainable variable.",
            "create the layers in the model_fn, and compute the loss from their outputs",
        )
    return pairs


def minimize(
    optimizer: keras.optimizers.Optimizer,
    loss: jax.Array,
    var_list: Sequence[keras.Variable] | None = None,
    global_step: object = None,
) -> Callable[[], None]:
    """Returns the `train_op` that minimizes a loss. Call it in a model function, in mode TRAIN.

    Args:
      optimizer: a Keras optimizer. The model function may create it.
      loss: scalar. A mean over the rows of this replica.
      var_list: variables to train. None for all trainable variables that the model function has created.
      global_step: has no effect, because the Estimator counts the steps.

    Returns:
      An update that the Estimator runs at the end of the step. In other modes it does nothing.

    Raises:
      ContextError: called outside a model function.
      InvalidArgumentError: `optimizer` is not an optimizer, or the loss depends on no trainable variable.

    Source: tf.compat.v1.train.Optimizer.minimize.

    Example:
      >>> import keras
      >>> import phalanx.estimator as estimator
      >>> def model_fn(features, labels, mode):
      ...     predictions = keras.layers.Dense(1)(features)
      ...     loss = keras.losses.MeanSquaredError()(labels, predictions)
      ...     train_op = estimator.minimize(keras.optimizers.Adam(0.01), loss)
      ...     return estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)
    """
    hint = "estimator.minimize(keras.optimizers.Adam(), loss)"
    arguments.instance("optimizer", optimizer, compat.BaseOptimizer, hint)
    graph = require_graph("estimator.minimize")
    # Many model functions create the train_op in every mode and return it only in TRAIN.
    if not graph.is_training:
        return _nothing
    return TrainOp(optimizer, gradients_of(optimizer, loss, var_list))


def _nothing() -> None:
    """The update of the other modes."""
