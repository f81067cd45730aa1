# SPDX-License-Identifier: Apache-2.0
"""Reads an exported model: the program of the predictions, its variables, and the shapes of its features."""

import importlib.util
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, final

import jax
import keras
import numpy as np

from phalanx import feature_column
from phalanx._src.checkpoint.tensors import Tensors
from phalanx._src.cluster.untrusted import parse_json, read_data
from phalanx.errors import CheckpointError, InputError, MissingDependencyError, arguments
from phalanx.estimator.export import is_text
from phalanx.estimator.exporting.operations import refused_operation
from phalanx.estimator.heads.classes import with_classes
from phalanx.typing import PyTree

PROGRAM, VARIABLES, SIGNATURE, TEXT = "program.bin", "variables.safetensors", "signature.json", "program.txt"
"""The files of an exported model."""


@final
class SavedModel:
    """An exported model. `load_saved_model` returns it; may be used in any context.

    Args:
      folder: the folder of the export.

    Raises:
      CheckpointError: the folder is not an export, or is incomplete.

    Example:
      >>> import phalanx.estimator as estimator
      >>> def predict(path, features):
      ...     return estimator.load_saved_model(path).predict(features)
    """

    def __init__(self, folder: str) -> None:
        require_flatbuffers()
        from jax import export

        path = Path(folder)
        try:
            self.signature = _checked_signature(parse_json(read_data(path / SIGNATURE)))
            tensors = Tensors(path / VARIABLES)
            self._variables = {name: tensors.array(name) for name in tensors.entries}
            # Compiled at the first prediction: JAX exports a portable program (StableHLO), not machine code.
            program = export.deserialize(bytearray(read_data(path / PROGRAM)))
            if operation := refused_operation(program):
                raise ValueError(f"its program has {operation}, which computes nothing from arrays")
            self._call = jax.jit(program.call)
            self._columns = [keras.saving.deserialize_keras_object(column) for column in self.signature["columns"]]
        except Exception as e:  # Each of the three formats has its own errors.
            raise CheckpointError(
                f"load_saved_model({folder!r})",
                f"it is not an exported model, or is incomplete: {e}.",
                "the folder that export_model or estimator.export_saved_model has returned",
            ) from e

    def predict(self, features: PyTree) -> PyTree:
        """Returns the predictions.

        Args:
          features: array, or dict of arrays and lists (rows, ...), as the model was exported for.

        Returns:
          Dict of NumPy arrays, or an array, (rows, ...).

        Raises:
          CheckpointError: the names of the classes do not fit the program.
          InputError: the features have other names, shapes or dtypes.
        """
        # Checked before the program runs: it would report a mismatch in terms of its own arguments.
        raw = {name: self._checked(name, x) for name, x in self._by_name(features).items()}
        inputs: dict[str, Any] = feature_column.prepare(raw, self._columns) if self._columns else raw
        try:
            predictions = self._call(self._variables, inputs if self.signature["is_dict"] else inputs[""])
        except ValueError as e:
            raise InputError(
                f"features of the shapes {jax.tree.map(np.shape, raw)}",
                f"the model cannot compute this number of rows: {str(e).partition(chr(10))[0]}",
                "as many rows for all features; keras.ops.reshape(x, (-1, ...)) in the model_fn",
            ) from e
        predictions = jax.tree.map(np.asarray, predictions)
        classes = self.signature["classes"]
        try:
            return predictions if classes is None else with_classes(predictions, classes)
        except (LookupError, TypeError) as e:
            raise CheckpointError(
                "the predictions of an exported model",
                f"its {SIGNATURE} names {len(classes)} classes, which do not fit its program.",
                "the folder that export_model or estimator.export_saved_model has returned",
            ) from e

    def _by_name(self, features: PyTree) -> dict[str, Any]:
        specs = self.signature["features"]
        arrays = named(features)
        if set(arrays) != set(specs):
            raise InputError(
                f"features of the names {sorted(arrays)}", f"the model takes {sorted(specs)}.", "all of them, as arrays"
            )
        return arrays

    def _checked(self, name: str, feature: object) -> np.ndarray:
        dtype, shape = self.signature["features"][name]
        try:
            # Text keeps its length: a dtype such as <U5 would cut longer words.
            array = np.asarray(feature) if is_text(dtype) else np.asarray(feature, dtype)
        except (TypeError, ValueError) as e:
            raise InputError(
                f"the feature {name!r}", f"it is not an array of {dtype}: {e}.", "one row per example"
            ) from e
        if not array.ndim or not array.size or list(array.shape[1:]) != shape:
            raise InputError(
                f"the feature {name!r} of the shape {array.shape}" if name else f"features of the shape {array.shape}",
                f"a row has the shape {shape}.",
                f"an array of the shape (rows, {', '.join(map(str, shape))})"
                if shape
                else "an array of the shape (rows,)",
            )
        return array


def _checked_signature(signature: dict[str, Any]) -> dict[str, Any]:
    """Returns the signature of an export, which may come from anyone.

    Raises:
      ValueError: it has another form than those that `export_saved_model` writes.
    """
    features, classes = signature["features"], signature["classes"]
    for dtype, shape in features.values():
        if not (isinstance(dtype, str) and dtype.strip("<>|").isalnum() and all(type(n) is int for n in shape)):
            raise ValueError(f"{SIGNATURE} has a feature of {dtype!r} and {shape!r}")
        np.dtype(dtype)
    is_one = set(features) == {""}
    is_list = classes is None or (isinstance(classes, list) and all(isinstance(word, str) for word in classes))
    if not is_list or type(signature["is_dict"]) is not bool or not (signature["is_dict"] or is_one):
        raise ValueError(f"{SIGNATURE} has another form")
    for module, name in _objects_in(signature["columns"]):
        # Keras would make any of its layers, of any size.
        if not module.startswith("phalanx.feature_column.") and name != "function":
            raise ValueError(f"{SIGNATURE} has a column with {module}.{name}")
    return signature


def _objects_in(described: PyTree) -> Iterator[tuple[str, str]]:
    """Yields the modules and names of the classes in what `keras.saving.serialize_keras_object` has returned."""
    if isinstance(described, dict):
        if "class_name" in described:
            yield str(described.get("module")), str(described["class_name"])
        described = list(described.values())
    if isinstance(described, list):
        for each in described:
            yield from _objects_in(each)


def load_saved_model(path: str | os.PathLike[str]) -> SavedModel:
    """Loads an exported model, without the program that has trained it. May be called in any context.

    Args:
      path: what `Estimator.export_saved_model` has returned.

    Raises:
      CheckpointError: the folder is not an export, or is incomplete.
      InvalidArgumentError: `path` is not a path.
      MissingDependencyError: flatbuffers is not installed.

    Example:
      >>> import phalanx.estimator as estimator
      >>> def predict(path, features):
      ...     return estimator.load_saved_model(path).predict(features)
    """
    return SavedModel(arguments.local_path("path", path))


def named(features: PyTree) -> dict[str, Any]:
    """Returns features by name. A single array has the empty name."""
    return dict(features) if isinstance(features, Mapping) else {"": features}


def require_flatbuffers() -> None:
    """Requires the library that reads and writes the program of an exported model.

    Raises:
      MissingDependencyError: flatbuffers is not installed.
    """
    # find_spec does not import, so a complete installation pays nothing.
    if importlib.util.find_spec("flatbuffers") is None:
        raise MissingDependencyError(
            "an exported model",
            "it needs the library flatbuffers, which is not installed.",
            'pip install ".[estimator]" in a clone of Phalanx',
        )
