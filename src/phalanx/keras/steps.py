# SPDX-License-Identifier: Apache-2.0
"""What one replica does with its rows of a batch, as Keras's own trainer would with the whole batch.

Each computes means over its own rows; `context.averaging` makes of them the means over the global batch.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import keras

from phalanx import compat
from phalanx.errors import TraceError
from phalanx.tracing import context
from phalanx.tracing.scope import innermost
from phalanx.tracing.tape import value_and_grad


def train(model: keras.Model, batch: Any) -> Any:
    """One step of `fit`; returns what the model's own `train_step` does, or nothing."""
    own = _overridden(model, "train_step")
    if own is None:
        return _train(model, batch)
    with context.averaging():
        return _averaged(own(batch) if _is_stateful(own) else _stateless_train(model, own, batch))


def test(model: keras.Model, batch: Any) -> Any:
    """One step of `evaluate`; returns what the model's own `test_step` does, or nothing."""
    with context.averaging():
        own = _overridden(model, "test_step")
        if own is None:
            return _test(model, batch)
        if _is_stateful(own):
            return _averaged(own(batch))
        groups = [model.trainable_variables, model.non_trainable_variables, model.metrics_variables]
        logs, new = own(_values(groups), batch)
        _refuse(own, groups[0], new[0])
        _assign(groups[1:], new[1:])
        return _averaged(logs)


def predict(model: keras.Model, batch: Any) -> Any:
    """One step of `predict`; returns the model's outputs."""
    own = _overridden(model, "predict_step")
    if own is not None and _is_stateful(own):
        return own(batch)
    if own is not None:
        groups = [model.trainable_variables, model.non_trainable_variables]
        outputs, new = own(_values(groups), batch)
        _assign(groups[1:], [new])
        return outputs
    return predict_as_keras(model, batch)


def train_as_keras(model: keras.Model, batch: Any) -> Any:
    """What `super().train_step(data)` does in a step of the user's own; returns the metrics."""
    with context.enter(replace(context.current(), averaging=False)):
        _train(model, batch)
    return model.get_metrics_result()


def test_as_keras(model: keras.Model, batch: Any) -> Any:
    """What `super().test_step(data)` does in a step of the user's own; returns the metrics."""
    _test(model, batch)
    return model.get_metrics_result()


def predict_as_keras(model: keras.Model, batch: Any) -> Any:
    """What `super().predict_step(data)` does in a step of the user's own; returns the outputs."""
    x, _, _ = compat.unpacked(batch)
    return compat.forward(model, x, training=False)


def has_own(model: keras.Model, kind: str) -> bool:
    """Whether a model has a step of the user's own that takes the data alone."""
    own = _overridden(model, f"{kind}_step")
    return own is not None and _is_stateful(own)


def is_refused_by_keras(model: keras.Model, kind: str) -> bool:
    """Whether Keras's own trainer would call a step of the user's own with more than it takes."""
    own = _overridden(model, f"{kind}_step")
    if own is None or _overridden(model, f"make_{kind}_function") is not None:
        return False
    return not _takes(own, 2) and _takes(own, 1)


def _train(model: keras.Model, batch: Any) -> Any:
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
        return _update_metrics(model, x, y, y_pred, sample_weight, loss)


def _test(model: keras.Model, batch: Any) -> Any:
    x, y, sample_weight = compat.unpacked(batch)
    y_pred = compat.forward(model, x, training=False)
    loss = compat.compute_loss(model, x, y, y_pred, sample_weight, training=False)
    return _update_metrics(model, x, y, y_pred, sample_weight, loss)


def _update_metrics(model: keras.Model, x: Any, y: Any, y_pred: Any, sample_weight: Any, loss: Any) -> Any:
    """Returns what the model's own `compute_metrics` does, or nothing."""
    rows = jax.tree.leaves(x)[0].shape[0]
    compat.loss_tracker(model).update_state(loss, sample_weight=rows)
    logs = model.compute_metrics(x, y, y_pred, sample_weight)
    return None if _overridden(model, "compute_metrics") is None else _averaged(logs)


def _averaged(logs: Any) -> Any:
    """Returns a step's logs as means over the rows of all replicas."""
    replica = context.get_replica_context()
    assert replica is not None
    if replica.num_replicas_in_sync == 1:
        return logs
    mean = lambda x: replica.all_reduce("SUM", x * jnp.asarray(replica.weight, x.dtype))  # noqa: E731
    is_mean = lambda x: isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.floating)  # noqa: E731
    return jax.tree.map(lambda x: mean(x) if is_mean(x) else x, logs)


def _overridden(model: keras.Model, name: str) -> Callable[..., Any] | None:
    """Returns the model's method where its class has one of its own."""
    method = getattr(type(model), name)
    return None if method is getattr(keras.Model, name) else getattr(model, name)


def _is_stateful(step: Callable[..., Any]) -> bool:
    """Whether a step of the user's own takes the data alone; Keras's on JAX take and return the state too.

    One that hands on `*args` is Keras's.
    """
    kinds = (p.kind for p in inspect.signature(step).parameters.values())
    return _takes(step, 1) and inspect.Parameter.VAR_POSITIONAL not in kinds


def _takes(step: Callable[..., Any], count: int) -> bool:
    """Whether a function can be called with so many positional arguments."""
    try:
        inspect.signature(step).bind(*range(count))
    except TypeError:
        return False
    return True


def _stateless_train(model: keras.Model, step: Callable[..., Any], batch: Any) -> Any:
    groups = [model.trainable_variables, model.non_trainable_variables, model.optimizer.variables]
    groups.append(model.metrics_variables)
    scope = innermost()
    assert scope is not None
    known = scope.aggregations
    logs, (trained, rest, slots, metrics) = step(_values(groups), batch)
    if scope.aggregations == known:
        _refuse(step, groups[0], trained)
    # Equal on all replicas: the gradients were aggregated.
    with scope.updating():
        _assign([groups[0], groups[2]], [trained, slots])
    _assign([groups[1], groups[3]], [rest, metrics])
    return logs


def _values(groups: Sequence[Sequence[keras.Variable]]) -> tuple[list[Any], ...]:
    return tuple([v.value for v in group] for group in groups)


def _assign(groups: Sequence[Sequence[keras.Variable]], values: Sequence[Sequence[Any]]) -> None:
    for group, new in zip(groups, values, strict=True):
        for variable, value in zip(group, new, strict=True):
            if value is not variable.value:
                variable.assign(value)


def _refuse(step: Callable[..., Any], variables: Sequence[keras.Variable], values: Sequence[Any]) -> None:
    """Raises where a step changes weights without the optimizer.

    Raises:
      TraceError: it does.
    """
    if any(x is not v.value for v, x in zip(variables, values, strict=True)):
        raise TraceError(
            f"{step.__name__}{inspect.signature(step)} of {type(step.__self__).__name__}",  # type: ignore[attr-defined]
            "it returns new weights without the optimizer, so each replica would go its own way.",
            "self.optimizer.stateless_apply(optimizer_variables, grads, trainable_variables) in train_step",
        )
