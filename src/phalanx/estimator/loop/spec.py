# SPDX-License-Identifier: Apache-2.0
"""What a model function returns: `EstimatorSpec`."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any, final

import jax
import jax.numpy as jnp
import keras
from jax.typing import ArrayLike

from phalanx._src.collectives import primitives
from phalanx._src.mesh.arrays import is_array
from phalanx.errors import InvalidArgumentError, ReduceOpError, arguments, shown
from phalanx.estimator.loop.session import SessionRunHook, checked_hooks
from phalanx.train import Checkpoint
from phalanx.typing import PyTree


@final
class ModeKeys:
    """The modes of a model function. May be used in any context.

    Source: tf.estimator.ModeKeys.

    Example:
      >>> import phalanx.estimator as estimator
      >>> estimator.ModeKeys.PREDICT
      'infer'
    """

    TRAIN = "train"
    EVAL = "eval"
    # The value in tf.estimator, which some model functions compare with instead of with the constant.
    PREDICT = "infer"


_MODES = (ModeKeys.TRAIN, ModeKeys.EVAL, ModeKeys.PREDICT)


@final
@dataclass(frozen=True)
class Scaffold:
    """Objects that a model function saves by attributes instead of by names. May be created in any context.

    Args:
      saver: a `phalanx.train.Checkpoint`. The Estimator saves and restores it instead of its variables by name.

    Raises:
      InvalidArgumentError: `saver` is something else.

    Source: tf.compat.v1.train.Scaffold.

    Example:
      >>> import phalanx
      >>> import phalanx.estimator as estimator
      >>> scaffold = estimator.Scaffold(saver=phalanx.train.Checkpoint(step=estimator.get_or_create_global_step()))
    """

    saver: Checkpoint | None = None

    def __post_init__(self) -> None:
        if self.saver is not None:
            arguments.instance("saver", self.saver, Checkpoint, "saver=phalanx.train.Checkpoint(model=model)")


@final
@dataclass(frozen=True)
class EstimatorSpec:
    """The operations that a model function defines for one mode. Create it in a model function.

    Args:
      mode: a value of `ModeKeys`.
      predictions: array, or dict of arrays (per_replica_batch, ...).
      loss: scalar. A mean over the rows of this replica.
      train_op: what `optimizer.minimize` or `optimizer.apply_gradients` returned; a function without arguments that applies the
        optimizer; or a list of these.
      eval_metric_ops: dict from names to Keras metrics that the model function has updated, to metrics of `tf1.metrics`, or to
        pairs `(value, update_op)`.
      export_outputs: dict, or None. Has no effect, because an exported model returns the predictions.
      training_chief_hooks: hooks that run on the chief during training.
      training_hooks: hooks that run during training.
      scaffold: objects to save by attributes.
      evaluation_hooks: hooks that run during evaluation.
      prediction_hooks: hooks that run during prediction.

    Raises:
      InvalidArgumentError: something that the mode needs is missing, or has the wrong type.

    Source: tf.estimator.EstimatorSpec.

    Example:
      >>> import jax.numpy as jnp
      >>> import phalanx.estimator as estimator
      >>> spec = estimator.EstimatorSpec(estimator.ModeKeys.EVAL, loss=jnp.float32(0.5))
    """

    mode: str
    predictions: PyTree = None
    loss: jax.Array | None = None
    train_op: PyTree = None
    eval_metric_ops: Mapping[str, Any] | None = None
    export_outputs: Mapping[str, Any] | None = None
    training_chief_hooks: Iterable[SessionRunHook] | None = ()
    training_hooks: Iterable[SessionRunHook] | None = ()
    scaffold: Scaffold | None = None
    evaluation_hooks: Iterable[SessionRunHook] | None = ()
    prediction_hooks: Iterable[SessionRunHook] | None = ()

    def __post_init__(self) -> None:
        if not isinstance(self.mode, str) or self.mode not in _MODES:
            raise InvalidArgumentError(
                f"EstimatorSpec(mode={shown(self.mode)})", f"must be one of {_MODES}.", "mode=estimator.ModeKeys.TRAIN"
            )
        # The table of tf.estimator's model_fn.py: what is not needed may be there, so one return can serve all modes.
        needed = {ModeKeys.TRAIN: ("loss", "train_op"), ModeKeys.EVAL: ("loss",), ModeKeys.PREDICT: ("predictions",)}
        for name in needed[self.mode]:
            if getattr(self, name) is None:
                raise InvalidArgumentError(
                    f"EstimatorSpec(mode={self.mode!r}) without {name}", f"the mode needs {name}.", _HINTS[name]
                )
        if self.predictions is not None:
            _check_predictions(self.predictions)
        _check_update(self.train_op)
        if not isinstance(self.export_outputs, (Mapping, NoneType)):
            raise InvalidArgumentError(f"export_outputs={shown(self.export_outputs)}", "must be a dict.", "omit it")
        if self.loss is not None:
            # The dataclass is frozen. A loss of shape (1,) becomes a scalar, as `model_fn.py` reshapes it.
            object.__setattr__(self, "loss", _scalar(self.loss))
        for name in ("training_chief_hooks", "training_hooks", "evaluation_hooks", "prediction_hooks"):
            object.__setattr__(self, name, checked_hooks(name, getattr(self, name)))
        if self.scaffold is not None:
            arguments.instance("scaffold", self.scaffold, Scaffold, "scaffold=estimator.Scaffold(saver=checkpoint)")
        _check_metrics(self.eval_metric_ops)

    @property
    def metrics(self) -> dict[str, Any]:
        """The evaluation metrics, by name."""
        return dict(self.eval_metric_ops or {})


_HINTS = {
    "loss": "estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)",
    "train_op": "train_op=estimator.minimize(keras.optimizers.Adam(), loss)",
    "predictions": 'predictions={"logits": logits}',
}


def _scalar(loss: ArrayLike) -> jax.Array:
    """Returns a loss as a scalar."""
    try:
        value = primitives.as_array(loss)
    except ReduceOpError as e:
        raise InvalidArgumentError(
            f"loss={shown(loss)}", "is not an array of numbers.", "loss=keras.ops.mean(x)"
        ) from e
    # An integer loss has no gradient. The check is here, where the message can name the loss.
    if value.size != 1 or not jnp.issubdtype(value.dtype, jnp.floating):
        raise InvalidArgumentError(
            f"a loss of {value.dtype}{list(value.shape)}", "must be a floating scalar.", "loss=keras.ops.mean(losses)"
        )
    return value.reshape(())


def _check_predictions(predictions: PyTree) -> None:
    # Text predictions do not exist here: heads add the names of classes on the host, after the program.
    leaves = jax.tree.leaves(predictions)
    if not leaves or not all(is_array(x) or isinstance(x, keras.Variable) for x in leaves):
        raise InvalidArgumentError(
            f"predictions={shown(predictions)}", "must be an array, or a dict of arrays.", _HINTS["predictions"]
        )


def _check_update(train_op: PyTree) -> None:
    if isinstance(train_op, (list, tuple)):
        for op in train_op:
            _check_update(op)
    # Variables and arrays are what `assign_add` and friends return in
    # TensorFlow 1. They have happened already, so they pass.
    elif not (train_op is None or callable(train_op) or isinstance(train_op, keras.Variable) or is_array(train_op)):
        raise InvalidArgumentError(f"train_op={shown(train_op)}", "is not an update of variables.", _HINTS["train_op"])


@final
class UpdatedMetric(tuple[Any, Any]):
    """A metric that a model function has updated, as the pair of its values that TensorFlow 1 calls `(value, update_op)`.

    Attributes:
      metric: the metric of Keras.
    """

    metric: keras.metrics.Metric

    def __new__(cls, metric: keras.metrics.Metric) -> "UpdatedMetric":
        """Returns the pair."""
        # Both halves are the value so far: the update happened in the model
        # function, and TensorFlow 1 returns the new value, too.
        value = metric.result()
        pair = super().__new__(cls, (value, value))
        pair.metric = metric
        return pair


def _check_metrics(metrics: object) -> None:
    hint = 'eval_metric_ops={"accuracy": metric}, after metric.update_state(labels, predictions)'
    if metrics is not None and not isinstance(metrics, Mapping):
        raise InvalidArgumentError(f"eval_metric_ops={shown(metrics)}", "must be a dict.", hint)
    for name, metric in (metrics or {}).items():
        # A pair from a library other than tf1.metrics: its update ran in the
        # model function, only the value is averaged.
        is_pair = isinstance(metric, tuple) and len(metric) == 2
        if not isinstance(name, str) or not (isinstance(metric, keras.metrics.Metric) or is_pair):
            raise InvalidArgumentError(
                f"eval_metric_ops={{{shown(name)}: {shown(metric)}}}",
                "must map names to Keras metrics, or to pairs (value, update_op).",
                hint,
            )
