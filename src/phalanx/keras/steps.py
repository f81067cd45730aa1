# SPDX-License-Identifier: Apache-2.0
"""The steps of `fit`, `evaluate` and `predict` on one replica, equivalent to those of Keras's trainer on the whole batch.

Each replica computes means over its own rows. Inside `context.averaging` they are weighted such that their sum over the replicas
is the mean over the global batch.

A custom step has one of two forms. A *stateful* one takes the data only, as in tf.keras, and works on variables. A *stateless*
one takes `(state, data)` and returns the new state, as in Keras 3 on JAX.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import keras

from phalanx._src import compat
from phalanx._src.tracing import context
from phalanx._src.tracing.scope import program_scope
from phalanx._src.tracing.tape import value_and_grad
from phalanx.errors import TraceError
from phalanx.typing import PyTree


def train(model: keras.Model, batch: PyTree) -> PyTree:
    """Runs one step of `fit`. Returns the logs of a custom `train_step`, averaged over the replicas, or None."""
    step = _overridden(model, "train_step")
    if step is None:
        return _train(model, batch)
    with context.averaging():
        return _averaged(step(batch) if _is_stateful(step) else _stateless_train(model, step, batch))


def test(model: keras.Model, batch: PyTree) -> PyTree:
    """Runs one step of `evaluate`. Returns the logs of a custom `test_step`, averaged over the replicas, or None."""
    with context.averaging():
        step = _overridden(model, "test_step")
        if step is None:
            return _test(model, batch)
        if _is_stateful(step):
            return _averaged(step(batch))
        groups = [model.trainable_variables, model.non_trainable_variables, model.metrics_variables]
        logs, new = step(_values(groups), batch)
        _refuse(step, groups[0], new[0])
        _assign(groups[1:], new[1:])
        return _averaged(logs)


def predict(model: keras.Model, batch: PyTree) -> PyTree:
    """Runs one step of `predict`. Returns the outputs of the model for this replica's rows."""
    step = _overridden(model, "predict_step")
    if step is not None and _is_stateful(step):
        return step(batch)
    if step is not None:
        groups = [model.trainable_variables, model.non_trainable_variables]
        outputs, new = step(_values(groups), batch)
        _assign(groups[1:], [new])
        return outputs
    return predict_as_keras(model, batch)


def train_as_keras(model: keras.Model, batch: PyTree) -> PyTree:
    """Implements `super().train_step(data)` of a custom step. Returns the metrics."""
    # `_train` weights the loss. Within `averaging`, `optimizer.apply` would weight the gradients once more.
    with context.enter(replace(context.current(), averaging=False)):
        _train(model, batch)
    return model.get_metrics_result()


def test_as_keras(model: keras.Model, batch: PyTree) -> PyTree:
    """Implements `super().test_step(data)` of a custom step. Returns the metrics."""
    _test(model, batch)
    return model.get_metrics_result()


def predict_as_keras(model: keras.Model, batch: PyTree) -> PyTree:
    """Implements `super().predict_step(data)` of a custom step. Returns the outputs."""
    x, _, _ = compat.unpacked(batch)
    return compat.forward(model, x, training=False)


def has_own(model: keras.Model, kind: str) -> bool:
    """Whether a model has a custom step that is stateful."""
    step = _overridden(model, f"{kind}_step")
    return step is not None and _is_stateful(step)


def is_refused_by_keras(model: keras.Model, kind: str) -> bool:
    """Whether Keras's own trainer cannot run the custom step of a model, because the step takes the data only."""
    step = _overridden(model, f"{kind}_step")
    if step is None or _overridden(model, f"make_{kind}_function") is not None:
        return False
    return not _takes(step, 2) and _takes(step, 1)


def _train(model: keras.Model, batch: PyTree) -> PyTree:
    x, y, sample_weight = compat.unpacked(batch)
    replica = context.require_replica()

    def loss_of() -> tuple[Any, Any]:
        y_pred = compat.forward(model, x, training=True)
        loss = compat.compute_loss(model, x, y, y_pred, sample_weight, training=True)
        # Apply the replica's weight before differentiating. Weighting the gradients would be wrong if a layer, such as
        # synchronized BatchNormalization, communicates: its gradients already mix the losses of all replicas.
        return model.optimizer.scale_loss(loss * jnp.asarray(replica.weight, loss.dtype)), (loss, y_pred)

    variables = model.trainable_variables
    with context.averaging():
        (_, (loss, y_pred)), grads = value_and_grad(loss_of, variables, has_aux=True)()
    model.optimizer.apply(grads, variables)
    with context.averaging():
        return _update_metrics(model, x, y, y_pred, sample_weight, loss)


def _test(model: keras.Model, batch: PyTree) -> PyTree:
    x, y, sample_weight = compat.unpacked(batch)
    y_pred = compat.forward(model, x, training=False)
    loss = compat.compute_loss(model, x, y, y_pred, sample_weight, training=False)
    return _update_metrics(model, x, y, y_pred, sample_weight, loss)


def _update_metrics(
    model: keras.Model, x: PyTree, y: PyTree, y_pred: PyTree, sample_weight: PyTree, loss: jax.Array
) -> PyTree:
    """Updates the metrics. Returns the logs of an overridden `compute_metrics`, averaged over the replicas, or None."""
    rows = jax.tree.leaves(x)[0].shape[0]
    # As Keras does, so that a short batch counts less.
    compat.loss_tracker(model).update_state(loss, sample_weight=rows)
    compute_metrics = _overridden(model, "compute_metrics")
    if compute_metrics is None:
        compat.update_compiled_metrics(model, y, y_pred, sample_weight)
        return None
    return _averaged(compute_metrics(x, y, y_pred, sample_weight))


def _averaged(logs: PyTree) -> PyTree:
    """Returns the logs of a step as means over the rows of all replicas. Values that are not floats are not changed."""
    replica = context.require_replica()
    if replica.num_replicas_in_sync == 1:
        return logs

    def averaged(leaf: object) -> object:
        if not (isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.floating)):
            return leaf
        return replica.all_reduce("SUM", leaf * jnp.asarray(replica.weight, leaf.dtype))

    return jax.tree.map(averaged, logs)


def _overridden(model: keras.Model, name: str) -> Callable[..., Any] | None:
    """Returns the bound method of a model if its class overrides Keras's, else None."""
    method = getattr(type(model), name)
    return None if method is getattr(keras.Model, name) else getattr(model, name)


def _is_stateful(step: Callable[..., Any]) -> bool:
    """Whether a custom step takes the data only. A step that takes `*args` forwards them to Keras, so it is stateless."""
    kinds = (p.kind for p in inspect.signature(step).parameters.values())
    return _takes(step, 1) and inspect.Parameter.VAR_POSITIONAL not in kinds


def _takes(step: Callable[..., Any], count: int) -> bool:
    """Whether a function can be called with `count` positional arguments."""
    try:
        inspect.signature(step).bind(*range(count))
    except TypeError:
        return False
    return True


def _stateless_train(model: keras.Model, step: Callable[..., Any], batch: PyTree) -> PyTree:
    """Runs a stateless `train_step` on the current values, assigns the state that it returns, and returns its logs."""
    scope = program_scope()
    known = scope.aggregations
    # Keras matches values to variables by their order, so the optimizer must not show variables that have been frozen since.
    with compat.restricted(model.optimizer, model.trainable_variables):
        groups = [model.trainable_variables, model.non_trainable_variables, model.optimizer.variables]
        groups.append(model.metrics_variables)
        logs, (trained, rest, slots, metrics) = step(_values(groups), batch)
    # The step has not used the optimizer, whose `stateless_apply` aggregates the gradients.
    if scope.aggregations == known:
        _refuse(step, groups[0], trained)
    # These values are equal on all replicas because the gradients were aggregated, so they need no aggregation now.
    with scope.updating():
        _assign([groups[0], groups[2]], [trained, slots])
    _assign([groups[1], groups[3]], [rest, metrics])
    return logs


def _values(groups: Sequence[Sequence[keras.Variable]]) -> tuple[list[Any], ...]:
    return tuple([v.value for v in group] for group in groups)


def _assign(groups: Sequence[Sequence[keras.Variable]], values: Sequence[Sequence[Any]]) -> None:
    for group, new in zip(groups, values, strict=True):
        for variable, value in zip(group, new, strict=True):
            if value is not variable.value:  # A variable that is assigned becomes an output of the program.
                variable.assign(value)


def _refuse(step: Callable[..., Any], variables: Sequence[keras.Variable], values: Sequence[Any]) -> None:
    """Rejects a stateless step that changes weights without the optimizer.

    Raises:
      TraceError: the step returns new weights.
    """
    # Identity is enough: a step that leaves the weights alone returns the tracers that it got.
    if any(x is not v.value for v, x in zip(variables, values, strict=True)):
        raise TraceError(
            f"{step.__name__}{inspect.signature(step)} of {type(step.__self__).__name__}",  # type: ignore[attr-defined]
            "it returns new weights without using the optimizer, so the replicas would diverge.",
            "call self.optimizer.stateless_apply(optimizer_variables, grads, trainable_variables) in train_step",
        )
