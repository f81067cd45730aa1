# SPDX-License-Identifier: Apache-2.0
"""What one replica does with its rows of a batch, as Keras's own trainer would with the whole batch.

Each computes means over its own rows; `context.averaging` makes of them the means over the global batch.
"""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras

from phalanx import compat, context
from phalanx.autodiff import value_and_grad
from phalanx.errors import TraceError


def train(model: keras.Model, batch: Any) -> Any:
    """One step of `fit`; returns what the model's own `train_step` does, or nothing."""
    own = _overridden(model, "train_step")
    if own is None:
        return _train(model, batch)
    with context.averaging():
        return _called(own, batch)


def test(model: keras.Model, batch: Any) -> Any:
    """One step of `evaluate`; returns what the model's own `test_step` does, or nothing."""
    with context.averaging():
        own = _overridden(model, "test_step")
        return _test(model, batch) if own is None else _called(own, batch)


def predict(model: keras.Model, batch: Any) -> Any:
    """One step of `predict`; returns the model's outputs."""
    own = _overridden(model, "predict_step")
    if own is not None:
        return _called(own, batch)
    x, _, _ = compat.unpacked(batch)
    return compat.forward(model, x, training=False)


def _train(model: keras.Model, batch: Any) -> None:
    x, y, sample_weight = compat.unpacked(batch)
    replica = context.get_replica_context()
    assert replica is not None

    def loss_of() -> tuple[Any, Any]:
        y_pred = compat.forward(model, x, training=True)
        loss = compat.compute_loss(model, x, y, y_pred, sample_weight, training=True)
        # Weighted before it is differentiated: a layer that communicates mixes the replicas' gradients.
        return model.optimizer.scale_loss(loss * jnp.asarray(replica.weight, loss.dtype)), (loss, y_pred)

    variables = model.trainable_variables
    with context.averaging():
        (_, (loss, y_pred)), grads = value_and_grad(loss_of, variables, has_aux=True)()
    model.optimizer.apply(grads, variables)
    with context.averaging():
        _update_metrics(model, x, y, y_pred, sample_weight, loss)


def _test(model: keras.Model, batch: Any) -> None:
    x, y, sample_weight = compat.unpacked(batch)
    y_pred = compat.forward(model, x, training=False)
    loss = compat.compute_loss(model, x, y, y_pred, sample_weight, training=False)
    _update_metrics(model, x, y, y_pred, sample_weight, loss)


def _update_metrics(model: keras.Model, x: Any, y: Any, y_pred: Any, sample_weight: Any, loss: Any) -> None:
    rows = jax.tree.leaves(x)[0].shape[0]
    compat.loss_tracker(model).update_state(loss, sample_weight=rows)
    model.compute_metrics(x, y, y_pred, sample_weight)


def _overridden(model: keras.Model, name: str) -> Callable[..., Any] | None:
    """Returns the model's method where its class has one of its own."""
    method = getattr(type(model), name)
    return None if method is getattr(keras.Model, name) else getattr(model, name)


def _called(step: Callable[..., Any], batch: Any) -> Any:
    """Calls a step of the user's own.

    Raises:
      TraceError: it is written for Keras's trainer on JAX, whose gradients no strategy sees.
    """
    if len(inspect.signature(step).parameters) == 1:
        return step(batch)
    name = step.__name__
    raise TraceError(
        f"{name}{inspect.signature(step)} of {type(step.__self__).__name__}",  # type: ignore[attr-defined]
        "it takes and returns the state, so its gradients would stay those of one replica.",
        f"def {name}(self, data), which reads and assigns variables; gradients with phalanx.GradientTape",
    )
