# SPDX-License-Identifier: Apache-2.0
"""Ready-made models: linear, deep, wide and deep, and baselines."""

import copy
import functools
import math
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import keras

from phalanx import feature_column, summary
from phalanx._src import compat
from phalanx.errors import InputError, InvalidArgumentError, arguments, shown
from phalanx.estimator.config import RunConfig
from phalanx.estimator.estimator import Estimator
from phalanx.estimator.heads.base import Head, WeightColumn
from phalanx.estimator.heads.classes import BinaryClassHead, MultiClassHead
from phalanx.estimator.loop.optimizing import minimize
from phalanx.estimator.loop.spec import EstimatorSpec, ModeKeys
from phalanx.estimator.loop.warm_start import WarmStartSettings
from phalanx.feature_column.base import AbstractColumn
from phalanx.feature_column.names import checked_columns
from phalanx.typing import PyTree

Optimizer: TypeAlias = str | keras.optimizers.Optimizer | Callable[[], Any]
"""A name of an optimizer, an optimizer, or a function that creates one."""

Columns: TypeAlias = AbstractColumn | Iterable[AbstractColumn] | None
"""A feature column, or several."""

# The names that optimizers.py of tf.estimator knows.
_NAMES = ("Adagrad", "Adam", "Ftrl", "RMSProp", "SGD")
# `_LEARNING_RATE` in linear.py and baseline.py of tf.estimator, which calls both a historical artifact.
_LINEAR_RATE, _BASELINE_RATE = 0.2, 0.3
# `_LINEAR_LEARNING_RATE` and `_DNN_LEARNING_RATE` in dnn_linear_combined.py of tf.estimator.
_WIDE_RATE, _DEEP_RATE = 0.005, 0.001
Activation: TypeAlias = str | Callable[[jax.Array], jax.Array] | None
"""An activation function, or its name in Keras."""

Logits: TypeAlias = Callable[[PyTree, str], tuple[jax.Array, list[keras.Variable]]]
"""Function of features and mode. Returns logits, and the variables that they depend on."""

TrainedLogits: TypeAlias = Callable[[PyTree, str], tuple[jax.Array, Callable[[jax.Array], PyTree]]]
"""Function of features and mode. Returns logits, and a function that creates the `train_op` of a loss."""


class HeadEstimator(Estimator):
    """An Estimator of a head and a function that computes its logits.

    Args:
      head: the head.
      logits_fn: function of features and mode. Returns the logits and a function that creates the `train_op` of a loss.
      columns: feature columns of the model.
      model_dir: see `Estimator`.
      config: see `Estimator`.
      warm_start_from: see `Estimator`.
    """

    def __init__(
        self,
        head: Head,
        logits_fn: TrainedLogits,
        columns: Sequence[AbstractColumn],
        model_dir: str | os.PathLike[str] | None,
        config: RunConfig | None,
        warm_start_from: str | WarmStartSettings | None = None,
    ) -> None:
        if not isinstance(head, Head):
            raise InvalidArgumentError(f"head={shown(head)}", "must be a head.", "head=estimator.BinaryClassHead()")

        # The head stands outside of the model function: it has no variables,
        # and its checks run once, when the user calls.
        def model_fn(features: PyTree, labels: PyTree, mode: str) -> EstimatorSpec:
            logits, train_op_fn = logits_fn(features, mode)
            return head.create_estimator_spec(features, mode, logits, labels, train_op_fn=train_op_fn)

        super().__init__(model_fn, model_dir, config, warm_start_from=warm_start_from)
        self._columns, self._labels_fn, self._predictions_fn = list(columns), head.host_labels, head.host_predictions
        self._classes = head.classes


def creator_of(optimizer: Optimizer, learning_rate: float | None = None) -> Callable[[], keras.optimizers.Optimizer]:
    """Returns a function that creates an optimizer, with the options of another one, or of a name. Call it in a model function.

    Args:
      optimizer: a name, an optimizer, or a function without arguments that creates one.
      learning_rate: learning rate if `optimizer` is a name. None for the default of the optimizer.

    Raises:
      InvalidArgumentError: `optimizer` is something else.
    """
    if isinstance(optimizer, str) and optimizer in _NAMES:
        # tf.estimator and Keras spell only this one differently.
        kind = {"RMSProp": keras.optimizers.RMSprop}.get(optimizer) or getattr(keras.optimizers, optimizer)
        return kind if learning_rate is None else functools.partial(kind, learning_rate=learning_rate)
    if isinstance(optimizer, compat.BaseOptimizer):
        # The variables of the given one belong to no graph. Their values can be read now, but not in a model function.
        config = optimizer.get_config()
        return lambda: type(optimizer).from_config(copy.deepcopy(config))
    # `create` is the method of the optimizers of tf1.train, which describe a Keras optimizer without creating it.
    if callable(optimizer) or callable(getattr(optimizer, "create", None)):
        return lambda: _created(optimizer)
    raise _no_optimizer(optimizer)


def _created(optimizer: Optimizer) -> keras.optimizers.Optimizer:
    made: Any = optimizer() if callable(optimizer) else optimizer
    made = made.create() if callable(getattr(made, "create", None)) else made
    if isinstance(made, compat.BaseOptimizer):
        return made
    raise _no_optimizer(optimizer)


def _no_optimizer(optimizer: object) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"optimizer={shown(optimizer)}",
        f"must be a Keras optimizer, a function that creates one, or one of {_NAMES}.",
        'optimizer="Adam"',
    )


def class_head(
    n_classes: int, weight_column: WeightColumn, label_vocabulary: Sequence[str] | None, loss_reduction: str
) -> Head:
    """Returns the head for a number of classes."""
    arguments.integer("n_classes", n_classes, least=2)
    options: dict[str, Any] = {
        "weight_column": weight_column,
        "label_vocabulary": label_vocabulary,
        "loss_reduction": loss_reduction,
    }
    return BinaryClassHead(**options) if n_classes == 2 else MultiClassHead(n_classes, **options)


def _units(hidden_units: object) -> list[int]:
    if not isinstance(hidden_units, (list, tuple)) or not all(arguments.is_integer(n, least=1) for n in hidden_units):
        raise InvalidArgumentError(
            f"hidden_units={shown(hidden_units)}", "must be a list of numbers of units.", "hidden_units=[64, 32]"
        )
    return list(hidden_units)


def _require_dict(features: PyTree) -> None:
    if not isinstance(features, dict):
        raise InputError(f"features={shown(features)}", "must be a dict from names to arrays.", '{"age": ages}, labels')


def _activation(activation_fn: Activation) -> Callable[[jax.Array], jax.Array]:
    try:
        # `get` also takes functions. None is the identity, as in Keras; tf.estimator has no activation then, either.
        return keras.activations.get(activation_fn)  # type: ignore[no-any-return]
    except ValueError as e:
        raise InvalidArgumentError(
            f"activation_fn={shown(activation_fn)}", "Keras has no such activation.", 'activation_fn="relu"'
        ) from e


def _deep_part(
    head: Head,
    hidden_units: Sequence[int] | None,
    columns: Sequence[AbstractColumn],
    activation_fn: Activation,
    dropout: float | None,
    batch_norm: bool,
) -> Logits:
    """Returns a function of features and mode that computes the logits of a deep network.

    Raises:
      InvalidArgumentError: an argument has the wrong type or value.
    """
    units, activation = _units(hidden_units), _activation(activation_fn)
    arguments.flag("batch_norm", batch_norm)
    if dropout is not None and not (isinstance(dropout, (int, float)) and 0 <= dropout < 1):
        raise InvalidArgumentError(f"dropout={shown(dropout)}", "must be from 0 to less than 1.", "dropout=0.5")

    def logits_of(features: PyTree, mode: str) -> tuple[jax.Array, list[keras.Variable]]:
        _require_dict(features)
        is_training = mode == ModeKeys.TRAIN
        # The variables of this part alone: a combined model trains its parts with two optimizers.
        layers: list[keras.layers.Layer] = []

        def apply(layer: keras.layers.Layer, x: PyTree, **options: object) -> jax.Array:
            layers.append(layer)
            outputs: jax.Array = layer(x, **options)
            return outputs

        # The names of the scopes and layers are those of dnn.py in tf.estimator, so that names of variables are equal.
        with keras.name_scope("dnn"):
            net = apply(feature_column.DenseFeatures(columns, name="input_from_feature_columns"), features)
            for i, size in enumerate(units):
                net = apply(keras.layers.Dense(size, activation=activation, name=f"hiddenlayer_{i}"), net)
                # Not created otherwise, since it has a seed: an unused random layer
                # would still be a variable of the graph.
                if dropout is not None and is_training:
                    net = apply(keras.layers.Dropout(dropout), net, training=True)
                if batch_norm:
                    # 0.999 is the momentum in dnn.py of tf.estimator. The default of Keras is 0.99.
                    normalize = keras.layers.BatchNormalization(momentum=0.999, name=f"batchnorm_{i}")
                    net = apply(normalize, net, training=is_training)
                _summarize(net, f"dnn/hiddenlayer_{i}", mode)
            logits = apply(keras.layers.Dense(head.logits_dimension, name="logits"), net)
            _summarize(logits, "dnn/logits", mode)
        return logits, [v for layer in layers for v in layer.trainable_variables]

    return logits_of


def _summarize(values: jax.Array, name: str, mode: str) -> None:
    if mode == ModeKeys.TRAIN:
        # The tags of `_add_hidden_layer_summary` in dnn.py of tf.estimator: dead ReLUs show as a fraction near 1.
        summary.scalar(f"{name}/fraction_of_zero_values", jnp.mean(values == 0))
        summary.histogram(f"{name}/activation", values)


def _linear_part(head: Head, columns: Sequence[AbstractColumn], sparse_combiner: str) -> Logits:
    def logits_of(features: PyTree, mode: str) -> tuple[jax.Array, list[keras.Variable]]:
        _require_dict(features)
        layer = feature_column.LinearFeatures(
            columns, head.logits_dimension, sparse_combiner=sparse_combiner, name="linear_model"
        )
        with keras.name_scope("linear"):
            logits = layer(features)
        return logits, layer.trainable_variables

    return logits_of


def _linear_rate(columns: Sequence[AbstractColumn], most: float = _LINEAR_RATE) -> float:
    """Returns the learning rate of Ftrl in tf.estimator."""
    # More columns, smaller steps: the rule of `_get_default_optimizer` in linear.py of tf.estimator.
    return min(most, 1 / math.sqrt(len(columns)))


def _trained(logits_of: Logits, create: Callable[[], keras.optimizers.Optimizer]) -> TrainedLogits:
    """Returns a function of features and mode that computes logits, and a function that creates their `train_op`."""

    def fn(features: PyTree, mode: str) -> tuple[jax.Array, Callable[[jax.Array], PyTree]]:
        logits, variables = logits_of(features, mode)
        return logits, lambda loss: minimize(create(), loss, variables)

    return fn


def dnn_logits(
    head: Head,
    hidden_units: Sequence[int] | None,
    columns: Sequence[AbstractColumn],
    optimizer: Optimizer,
    activation: Activation,
    dropout: float | None,
    norm: bool,
) -> TrainedLogits:
    """Returns the logits of a deep network, and their `train_op`."""
    logits_of = _deep_part(head, hidden_units, columns, activation, dropout, norm)
    return _trained(logits_of, creator_of(optimizer))


def linear_logits(
    head: Head, columns: Sequence[AbstractColumn], optimizer: Optimizer | None, combiner: str
) -> TrainedLogits:
    """Returns the logits of a linear model, and their `train_op`."""
    # Only None asks for the rule. The default "Ftrl" has the fixed rate, which looks odd and is what tf.estimator does.
    default = ("Ftrl", _linear_rate(columns)) if optimizer is None else (optimizer, _LINEAR_RATE)
    return _trained(_linear_part(head, columns, combiner), creator_of(*default))


def combined_logits(
    head: Head,
    linear: tuple[Columns, Optimizer, str],
    deep: tuple[Columns, Optimizer, Sequence[int] | None, Activation, float | None, bool],
) -> tuple[TrainedLogits, list[AbstractColumn]]:
    """Returns the logits of a wide and a deep model, each with its own optimizer, and the columns of both."""
    linear_columns, linear_optimizer, combiner = linear
    deep_columns, deep_optimizer, hidden_units, activation, dropout, norm = deep
    linear_columns = checked_columns(linear_columns, "linear_feature_columns") if linear_columns else []
    deep_columns = checked_columns(deep_columns, "dnn_feature_columns") if deep_columns else []
    if not linear_columns and not deep_columns:
        raise InvalidArgumentError(
            "linear_feature_columns=None and dnn_feature_columns=None",
            "the model has no features.",
            'linear_feature_columns=[numeric_column("age")]',
        )
    parts: list[tuple[Logits, Callable[[], keras.optimizers.Optimizer]]] = []
    if deep_columns:
        logits_of = _deep_part(head, hidden_units, deep_columns, activation, dropout, norm)
        parts.append((logits_of, creator_of(deep_optimizer, _DEEP_RATE)))
    if linear_columns:
        rate = _linear_rate(linear_columns, _WIDE_RATE)
        parts.append((_linear_part(head, linear_columns, combiner), creator_of(linear_optimizer, rate)))

    def fn(features: PyTree, mode: str) -> tuple[jax.Array, Callable[[jax.Array], PyTree]]:
        # Both parts see the gradient of one loss, of the sum of their logits. Each updates its own variables.
        outputs = [(*logits_of(features, mode), create) for logits_of, create in parts]
        logits = sum((logits for logits, _, _ in outputs[1:]), start=outputs[0][0])
        return logits, lambda loss: [minimize(create(), loss, variables) for _, variables, create in outputs]

    return fn, [*linear_columns, *deep_columns]


def baseline_logits(head: Head, optimizer: Optimizer) -> TrainedLogits:
    """Returns the logits of a constant, and their `train_op`."""

    def logits_of(features: PyTree, mode: str) -> tuple[jax.Array, list[keras.Variable]]:
        arrays = jax.tree.leaves(features)
        if not arrays:
            raise InputError(
                f"features={shown(features)}",
                "have no array, so the number of rows is unknown.",
                "a feature, although it is not used",
            )
        # Any feature will do: only the number of rows counts.
        rows = arrays[0].shape[0]
        with keras.name_scope("baseline"):
            bias = keras.Variable("zeros", shape=(head.logits_dimension,), name="bias")
        return jnp.broadcast_to(bias.value, (rows, head.logits_dimension)), [bias]

    return _trained(logits_of, creator_of(optimizer, _BASELINE_RATE))
