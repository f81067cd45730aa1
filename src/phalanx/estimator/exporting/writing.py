# SPDX-License-Identifier: Apache-2.0
"""Writes an exported model: the program of the predictions, its variables, and the shapes of its features."""

import json
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import NoneType
from typing import Any

import jax
import keras
import numpy as np
from jax import export
from safetensors.numpy import save_file

from phalanx import feature_column
from phalanx._src.compat import Variable
from phalanx._src.typed_jax import shape_dtype
from phalanx.errors import CheckpointError, InvalidArgumentError, arguments, shown
from phalanx.estimator.export import ServingInputReceiver
from phalanx.estimator.exporting.saved_model import PROGRAM, SIGNATURE, TEXT, VARIABLES, named, require_flatbuffers
from phalanx.estimator.loop.graph import Graph
from phalanx.feature_column.preparation import on_host_only
from phalanx.typing import PyTree


def export_graph(
    graph: Graph,
    base: str,
    receiver: object,
    restore: Callable[[], None],
    *,
    columns: Sequence[Any],
    classes: Sequence[str] | None,
    assets: Mapping[str, str] | None,
    as_text: bool,
) -> str:
    """Writes an exported model. Returns its folder.

    Numbers are normalized in the program, so that the export needs no `normalizer_fn`.

    Args:
      graph: the graph of the predictions.
      base: folder of the exports.
      receiver: a `ServingInputReceiver`.
      restore: gives the variables their values, once they exist.
      columns: feature columns, for which categories are replaced by their numbers.
      classes: names of the classes. None if the model predicts none.
      assets: dict from paths in `assets.extra` to files to copy there.
      as_text: whether to write the text of the program.

    Raises:
      CheckpointError: the folder cannot be written to.
      InvalidArgumentError: the program depends on the number of rows, or a file is missing.
      MissingDependencyError: flatbuffers is not installed.
    """
    require_flatbuffers()

    hint = "serving_input_receiver_fn=estimator.export.build_raw_serving_input_receiver_fn(features)"
    receiver = arguments.instance("the result of serving_input_receiver_fn", receiver, ServingInputReceiver, hint)
    extra = _checked_assets(assets)
    raw = jax.tree.map(np.asarray, receiver.features)
    batch = feature_column.prepare(raw, columns) if columns else raw
    # The program is traced before the checkpoint is read, because the variables exist only then.
    graph.prepare((batch, None))
    restore()
    exported = export_program(graph.predictions, graph.variables, batch, "export_saved_model of this model_fn")
    signature = signature_of(raw, exported, _described(columns), classes)
    folder = _new_folder(base)
    with unfinished(folder) as part:
        write(part, exported, {name: np.array(v.value) for name, v in graph.variables.items()}, signature)
        if as_text:
            (part / TEXT).write_text(exported.mlir_module())
        _copy_assets(extra, part)
    return os.fspath(folder)


def signature_of(
    raw: PyTree, exported: export.Exported, columns: Sequence[Any] = (), classes: Sequence[str] | None = None
) -> dict[str, Any]:
    """Returns the inputs of a program of predictions, as JSON."""
    return {
        "features": {name: [str(x.dtype), list(x.shape[1:])] for name, x in named(raw).items()},
        "is_dict": isinstance(raw, Mapping),
        "columns": list(columns),
        "classes": classes,
        "platforms": list(exported.platforms),
    }


def write(folder: Path, exported: export.Exported, values: dict[str, np.ndarray], signature: dict[str, Any]) -> None:
    """Writes a program, the values of its variables and its signature into a folder."""
    (folder / PROGRAM).write_bytes(exported.serialize())
    # Variables are arguments of the program and no constants, so that other
    # tools can read and replace them in this file.
    save_file(values, folder / VARIABLES)
    (folder / SIGNATURE).write_text(json.dumps(signature, indent=1))


def _described(columns: Sequence[Any]) -> list[Any]:
    """Returns the columns that prepare features on the host, as JSON.

    Raises:
      InvalidArgumentError: a part of it is a function that cannot be loaded again.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Of a lambda. It is refused below.
        described = [keras.saving.serialize_keras_object(column) for column in on_host_only(columns)]
    try:
        for column in described:
            # Tried once, now: an export that cannot be loaded must fail where it is written.
            keras.saving.deserialize_keras_object(column)
    except (TypeError, ValueError) as e:
        raise InvalidArgumentError(
            "export_saved_model with a crossed_column of numbers that have a normalizer_fn",
            f"the host computes them when the export is used, and it could not load the function: {str(e)[:200]}",
            "@keras.saving.register_keras_serializable() before the definition of the function, which needs a name",
        ) from e
    return described


def export_program(
    predictions: Callable[[Any], PyTree], variables: Mapping[str, Variable], batch: PyTree, call: str
) -> export.Exported:
    """Returns the program of predictions for any number of rows.

    Args:
      predictions: computes them from features, and reads variables.
      variables: the variables by name.
      batch: features (rows, ...).
      call: what the user has called.

    Raises:
      InvalidArgumentError: the program depends on the number of rows.
    """
    # One symbol for all features: they have the same number of rows, and the program may rely on it.
    (rows,) = export.symbolic_shape("rows")

    def predict(values: dict[str, Any], features: PyTree) -> PyTree:
        mapping = [(variable, values[name]) for name, variable in variables.items()]
        # The exported function is pure: variables are read from its arguments, and the live ones stay as they are.
        with keras.StatelessScope(state_mapping=mapping):
            return predictions(features)

    variable_specs = {name: shape_dtype(v.shape, np.dtype(v.value.dtype)) for name, v in variables.items()}
    specs = jax.tree.map(lambda x: shape_dtype((rows, *x.shape[1:]), jax.dtypes.canonicalize_dtype(x.dtype)), batch)
    try:
        return export.export(jax.jit(predict))(variable_specs, specs)
    # JAX raises many kinds of errors for shapes that depend on a symbol. All of them mean the same for the user.
    except Exception as e:
        raise InvalidArgumentError(
            call,
            f"its program cannot be exported for any number of rows: {str(e).partition(chr(10))[0]}",
            "x[:1] as features, with the dim of the rows; and keras.ops.reshape(x, (-1, ...)) instead of x.shape[0] in the model",
        ) from e


def _new_folder(base: str) -> Path:
    """Returns a folder that does not exist yet, named by the time in seconds."""
    # TensorFlow Serving's rule: a folder per version, named by a number, and the largest is the newest.
    number = int(time.time())
    while (Path(base) / str(number)).exists():
        number += 1
    return Path(base) / str(number)


@contextmanager
def unfinished(folder: Path) -> Iterator[Path]:
    """Yields a hidden folder, which gets its name after the `with` block. If the block raises an error, nothing is left."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # In the same folder, because a rename is atomic only within a file system.
        part = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    except OSError as e:
        raise CheckpointError(
            f"an export into {str(folder.parent)!r}", f"the folder cannot be written to: {e}.", "another folder"
        ) from e
    try:
        yield part
        # mkdtemp gives 0700, and a server often runs as another user.
        part.chmod(0o755)
        part.rename(folder)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def _copy_assets(assets: Mapping[str, str], folder: Path) -> None:
    inside = folder / "assets.extra"
    for name, source in assets.items():
        target = inside / name
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
        except OSError as e:
            raise InvalidArgumentError(
                f"assets_extra={{{name!r}: {source!r}}}", f"the file cannot be copied: {e}.", "paths of files"
            ) from e


def _checked_assets(assets: object) -> dict[str, str]:
    """Returns a dict from paths inside a folder to paths.

    Raises:
      InvalidArgumentError: it is none, or a path leads out of the folder.
    """
    hint = 'assets_extra={"words.txt": "data/words.txt"}'
    if not isinstance(assets, (Mapping, NoneType)):
        raise InvalidArgumentError(f"assets_extra={shown(assets)}", "must be a dict from paths to paths.", hint)
    paths = {arguments.path("assets_extra", k): arguments.path("assets_extra", v) for k, v in (assets or {}).items()}
    for name in paths:
        # A path of the user that leads out of the folder would overwrite other files.
        if os.path.isabs(name) or ".." in Path(name).parts:
            raise InvalidArgumentError(f"assets_extra={{{name!r}: ...}}", "the path leads out of the export.", hint)
    return paths
