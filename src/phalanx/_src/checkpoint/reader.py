# SPDX-License-Identifier: Apache-2.0
"""Reads checkpoints without the objects that were saved: `load_checkpoint` and its like."""

import os
from typing import Any, final

import numpy as np

from phalanx._src.checkpoint.manager import latest_checkpoint
from phalanx._src.checkpoint.restoration import with_nearest
from phalanx._src.checkpoint.store import CheckpointFile
from phalanx.errors import CheckpointError, arguments, shown
from phalanx.typing import PyTree


@final
class CheckpointReader:
    """The contents of a checkpoint, by name. `load_checkpoint` creates it; may be used in any context.

    Args:
      stored: the file.

    Source: tf.train.CheckpointReader.

    Example:
      >>> import keras, os, phalanx, tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     path = phalanx.train.Checkpoint(step=keras.Variable(3)).save(os.path.join(folder, "ckpt"))
      ...     reader = phalanx.train.load_checkpoint(path)
      >>> reader.get_variable_to_shape_map()
      {'save_counter': [], 'step': []}
      >>> int(reader.get_tensor("step"))
      3
    """

    def __init__(self, stored: CheckpointFile) -> None:
        self._stored = stored

    def get_variable_to_shape_map(self) -> dict[str, list[int]]:
        """Returns the shapes of all arrays, by name."""
        return {name: list(self._stored.spec(name)[0]) for name in sorted(self._stored.names)}

    def get_variable_to_dtype_map(self) -> dict[str, np.dtype]:
        """Returns the dtypes of all arrays, by name."""
        return {name: self._stored.spec(name)[1] for name in sorted(self._stored.names)}

    def has_tensor(self, tensor_str: str) -> bool:
        """Returns whether there is an array of this name."""
        return isinstance(tensor_str, str) and tensor_str in self._stored.names

    def get_tensor(self, tensor_str: str) -> np.ndarray:
        """Reads an array.

        Raises:
          CheckpointError: there is no array of this name.
        """
        if not self.has_tensor(tensor_str):
            name = tensor_str if isinstance(tensor_str, str) else shown(tensor_str)
            raise CheckpointError(
                f"get_tensor({shown(tensor_str)}) of {self._stored.file}",
                f"it does not contain {with_nearest([name], sorted(self._stored.names))}.",
                "reader.get_variable_to_shape_map()",
            )
        return self._stored.array(tensor_str)

    @property
    def values(self) -> dict[str, PyTree]:
        """The values that are not arrays, by name: numbers, text, positions in data, states of generators."""
        values: dict[str, Any] = self._stored.notes["values"]
        return {name: self._stored.value(name) for name in sorted(values)}

    @property
    def models(self) -> dict[str, str]:
        """The architectures of the saved Keras models, by name, as JSON that `keras.models.model_from_json` reads."""
        return dict(self._stored.notes.get("models", {}))


def load_checkpoint(ckpt_dir_or_file: str | os.PathLike[str]) -> CheckpointReader:
    """Returns a reader of a checkpoint. May be called in any context.

    Args:
      ckpt_dir_or_file: the path of a checkpoint, or a folder, whose latest checkpoint it reads.

    Raises:
      CheckpointError: there is no such checkpoint, or it is incomplete.
      InvalidArgumentError: `ckpt_dir_or_file` is not a path.

    Source: tf.train.load_checkpoint.

    Example:
      >>> import os, phalanx, tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     path = phalanx.train.Checkpoint(epoch=3).write(os.path.join(folder, "state"))
      ...     phalanx.train.load_checkpoint(path).values
      {'epoch': 3}
    """
    path = arguments.path("ckpt_dir_or_file", ckpt_dir_or_file)
    return CheckpointReader(CheckpointFile(latest_checkpoint(path) or path))


def list_variables(ckpt_dir_or_file: str | os.PathLike[str]) -> list[tuple[str, list[int]]]:
    """Returns the names and shapes of the arrays of a checkpoint. May be called in any context.

    Args:
      ckpt_dir_or_file: see `load_checkpoint`.

    Raises:
      CheckpointError, InvalidArgumentError: see `load_checkpoint`.

    Source: tf.train.list_variables.

    Example:
      >>> import keras, os, phalanx, tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     path = phalanx.train.Checkpoint(w=keras.Variable([1.0, 2.0])).write(os.path.join(folder, "state"))
      ...     phalanx.train.list_variables(path)
      [('w', [2])]
    """
    return list(load_checkpoint(ckpt_dir_or_file).get_variable_to_shape_map().items())


def load_variable(ckpt_dir_or_file: str | os.PathLike[str], name: str) -> np.ndarray:
    """Reads an array of a checkpoint. May be called in any context.

    Args:
      ckpt_dir_or_file: see `load_checkpoint`.
      name: name of the array.

    Raises:
      CheckpointError: there is no such checkpoint or array.
      InvalidArgumentError: `ckpt_dir_or_file` is not a path.

    Source: tf.train.load_variable.

    Example:
      >>> import keras, os, phalanx, tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     path = phalanx.train.Checkpoint(w=keras.Variable([1.0, 2.0])).write(os.path.join(folder, "state"))
      ...     phalanx.train.load_variable(path, "w")
      array([1., 2.], dtype=float32)
    """
    return load_checkpoint(ckpt_dir_or_file).get_tensor(name)
