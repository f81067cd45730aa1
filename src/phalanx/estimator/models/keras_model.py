# SPDX-License-Identifier: Apache-2.0
"""`model_to_estimator`: an Estimator of a compiled Keras model."""

import copy
import os
from collections.abc import Mapping
from typing import Any

import keras

from phalanx._src import compat
from phalanx.errors import InputError, InvalidArgumentError, arguments, shown
from phalanx.estimator.config import RunConfig
from phalanx.estimator.estimator import Estimator
from phalanx.estimator.loop.graph import Graph
from phalanx.estimator.loop.optimizing import minimize
from phalanx.estimator.loop.spec import EstimatorSpec, ModeKeys
from phalanx.typing import PyTree


def model_to_estimator(
    keras_model: keras.Model | None = None,
    keras_model_path: str | os.PathLike[str] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    model_dir: str | os.PathLike[str] | None = None,
    config: RunConfig | None = None,
    checkpoint_format: str | None = None,
    metric_names_map: Mapping[str, str] | None = None,
    export_outputs: None = None,
) -> Estimator:
    """Returns an Estimator that trains a copy of a Keras model, starting from its weights. May be called outside all scopes.

    Args:
      keras_model: a compiled model that has a configuration. It is not modified.
      keras_model_path: a file that `model.save` wrote, instead of `keras_model`.
      custom_objects: custom classes in the file, by name.
      model_dir: see `Estimator`.
      config: see `Estimator`.
      checkpoint_format: has no effect; for TensorFlow programs.
      metric_names_map: dict from names of metrics to the names that `evaluate` returns.
      export_outputs: must be None.

    Raises:
      InvalidArgumentError: both or none of the models are given, the model is not compiled or has no configuration, or an
        argument has the wrong type.

    Source: tf.keras.estimator.model_to_estimator.

    Example:
      >>> import keras
      >>> import phalanx.estimator as estimator
      >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
      >>> model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
      >>> trained = estimator.model_to_estimator(model)
    """
    # The same rule as in keras_lib.py of tf.estimator.
    if (keras_model is None) == (keras_model_path is None):
        raise InvalidArgumentError(
            "model_to_estimator(keras_model, keras_model_path)",
            "exactly one of them must be given.",
            "model_to_estimator(keras_model=model)",
        )
    if export_outputs is not None:
        raise InvalidArgumentError(f"export_outputs={shown(export_outputs)}", "all outputs are exported.", "omit it")
    if metric_names_map is not None and not isinstance(metric_names_map, Mapping):
        raise InvalidArgumentError(
            f"metric_names_map={shown(metric_names_map)}", "must be a dict.", 'metric_names_map={"accuracy": "correct"}'
        )
    if keras_model is None:
        path = arguments.path("keras_model_path", keras_model_path)
        keras_model = _loaded(path, custom_objects)
    arguments.instance("keras_model", keras_model, keras.Model, "model_to_estimator(keras_model=model)")
    # The model is copied per trace: two traces must not build the same layers, and the caller's model must not change.
    copies = _Copies(keras_model, dict(metric_names_map or {}))
    return _ModelEstimator(copies, model_dir, config)


def _loaded(path: str, custom_objects: Mapping[str, Any] | None) -> keras.Model:
    try:
        return keras.saving.load_model(path, custom_objects=custom_objects)
    # Keras raises ValueError for a file that is missing, TypeError for a class that it does not know.
    except (OSError, TypeError, ValueError) as e:
        raise InvalidArgumentError(
            f"keras_model_path={path!r}",
            f"Keras cannot load it: {str(e).partition(chr(10))[0]}",
            'model.save("model.keras"), and this path; custom_objects={...} for its own classes',
        ) from e


class _ModelEstimator(Estimator):
    """An Estimator whose variables begin with the weights of a model."""

    def __init__(self, copies: "_Copies", model_dir: str | os.PathLike[str] | None, config: RunConfig | None) -> None:
        super().__init__(copies.model_fn, model_dir, config)
        # Only if there is no checkpoint: a second `train` continues, as
        # keras_lib.py saves the weights once as a checkpoint.
        self._first_values = copies.first_values


class _Copies:
    """Copies of a model, one per trace.

    Args:
      model: the model.
      names: dict from names of metrics to other names.
    """

    def __init__(self, model: keras.Model, names: dict[str, str]) -> None:
        if not model.compiled:
            raise InvalidArgumentError(
                f"model_to_estimator of {model.name!r}", "the model is not compiled.", "model.compile(optimizer, loss)"
            )
        try:
            self._config, self._compile_config = model.get_config(), model.get_compile_config()
        except NotImplementedError as e:
            raise InvalidArgumentError(
                f"model_to_estimator of {model.name!r}",
                "the model has no configuration, so it cannot be copied.",
                "keras.Sequential or a functional model; or a model_fn that creates the model",
            ) from e
        self._kind, self._weights, self._names = type(model), model.get_weights() if model.built else None, names
        self._copy: keras.Model | None = None
        self._losses = compat.VariableStore()

    def model_fn(self, features: PyTree, labels: PyTree, mode: str) -> EstimatorSpec:
        """Creates a copy, and applies it."""
        model = self._copy = self._kind.from_config(copy.deepcopy(self._config))  # Keras empties it.
        with self._losses.reusing():
            # Metrics of the loss are no part of the model. The optimizer is created below, with the variables of the graph.
            model.compile_from_config({**self._compile_config, "optimizer": "sgd"})
        x, sample_weight = _inputs_of(model, features)
        outputs = compat.forward(model, x, training=mode == ModeKeys.TRAIN)
        named = _named(model, outputs)
        if mode == ModeKeys.PREDICT:
            return EstimatorSpec(mode, predictions=named)
        loss = compat.compute_loss(model, x, labels, outputs, sample_weight, training=mode == ModeKeys.TRAIN)
        if mode == ModeKeys.TRAIN:
            # Created inside the graph, so that its variables belong to the checkpoint.
            optimizer = keras.optimizers.deserialize(self._compile_config["optimizer"])
            train_op = minimize(optimizer, loss, model.trainable_variables)
            return EstimatorSpec(mode, predictions=named, loss=loss, train_op=train_op)
        model.compute_metrics(x, labels, outputs, sample_weight)
        metrics = {self._names.get(name, name): m for name, m in compat.compiled_metrics(model).items()}
        return EstimatorSpec(mode, predictions=named, loss=loss, eval_metric_ops=metrics)

    def first_values(self, graph: Graph) -> None:
        """Gives the variables of the last copy the weights of the model."""
        assert self._copy is not None
        if self._weights is not None:
            with graph.strategy.scope():
                self._copy.set_weights(self._weights)


def _inputs_of(model: keras.Model, features: PyTree) -> tuple[PyTree, Any]:
    """Returns the inputs of a model and the weights of rows, from features.

    Raises:
      InputError: the features have other names than the inputs.
    """
    sample_weight = None
    # The two keys by which keras_lib.py passes weights of rows, because an input_fn returns only features and labels.
    if isinstance(features, Mapping) and set(features) == {"features", "sample_weights"}:
        features, sample_weight = features["features"], features["sample_weights"]
    if not isinstance(features, Mapping):
        return features, sample_weight
    # A model with one input takes a dict of one feature whatever its name is: its input is often called keras_tensor.
    if len(features) == 1:
        return next(iter(features.values())), sample_weight
    names = [tensor.name for tensor in model.inputs or ()]
    if set(names) != set(features):
        raise InputError(
            f"features of the names {sorted(features)}",
            f"the inputs of the model are {names}.",
            f"features of the names {names}",
        )
    return {name: features[name] for name in names}, sample_weight


def _named(model: keras.Model, outputs: PyTree) -> dict[str, Any]:
    """Returns the outputs of a model by name."""
    if isinstance(outputs, Mapping):
        return dict(outputs)
    # A Sequential has one output, which is that of its last layer.
    is_sequential = isinstance(model, keras.Sequential)
    names = [model.layers[-1].name] if is_sequential else list(getattr(model, "output_names", []))
    listed = list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]
    return dict(zip(names if len(names) == len(listed) else map(str, range(len(listed))), listed, strict=True))
