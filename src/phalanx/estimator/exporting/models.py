# SPDX-License-Identifier: Apache-2.0
"""Exports Keras models as programs that need neither Keras nor TensorFlow."""

import os
from pathlib import Path

import jax
import keras
import numpy as np

from phalanx._src.checkpoint.names import numbered
from phalanx.errors import InputError, InvalidArgumentError, arguments
from phalanx.estimator.exporting.saved_model import require_flatbuffers
from phalanx.estimator.exporting.writing import export_program, signature_of, unfinished, write
from phalanx.typing import PyTree


def export_model(model: keras.Model, path: str | os.PathLike[str], features: PyTree) -> str:
    """Exports the program of `model(features, training=False)` with its variables, for any number of rows.

    May be called in any cross-replica context. All processes must call it, and the first one writes. The folder contains
    `program.bin`, which `jax.export.deserialize` reads, and `variables.safetensors`.

    Args:
      model: a Keras model, trained under any strategy.
      path: a folder that does not exist yet.
      features: array, or dict of arrays (rows, ...), of the shapes and dtypes that the model takes.

    Returns:
      The path of the export, for `phalanx.estimator.load_saved_model`.

    Raises:
      CheckpointError: the folder cannot be written to.
      InputError: `features` are no arrays of rows.
      InvalidArgumentError: an argument has the wrong type, the folder exists, or the program depends on the number of rows.
      MissingDependencyError: flatbuffers is not installed.

    Example:
      >>> import keras, numpy as np, phalanx.estimator as estimator
      >>> model = keras.Sequential([keras.layers.Dense(1, kernel_initializer="ones")])
      >>> def export(folder):
      ...     path = estimator.export_model(model, folder, np.ones((1, 3), "float32"))
      ...     return estimator.load_saved_model(path).predict(np.ones((5, 3))).shape
    """
    require_flatbuffers()
    hint = 'phalanx.estimator.export_model(model, "export/1", x[:1])'
    arguments.instance("model", model, keras.Model, hint)
    folder = Path(arguments.local_path("path", path))
    if os.path.lexists(folder):
        raise InvalidArgumentError(f"path={str(folder)!r}", "the folder exists already.", "the name of a new folder")
    raw = jax.tree.map(np.asarray, features)
    leaves = jax.tree.leaves(raw)
    if not leaves or any(not leaf.ndim or leaf.dtype.kind not in "biufcV" for leaf in leaves):
        raise InputError("features for export_model", "they must be arrays of numbers (rows, ...).", hint)
    if not model.built:
        model(raw, training=False)
    variables = dict(zip(numbered(v.path for v in model.variables), model.variables, strict=True))
    exported = export_program(lambda x: model(x, training=False), variables, raw, f"export_model of {model.name!r}")
    values = {name: np.asarray(variable) for name, variable in variables.items()}
    if jax.process_index() == 0:
        with unfinished(folder) as part:
            write(part, exported, values, signature_of(raw, exported))
    return os.fspath(folder)
