# SPDX-License-Identifier: Apache-2.0
"""Files of models that several processes save: each process reads all weights in the same order, and one writes."""

import io
import os
import tempfile
from collections.abc import Callable
from typing import Any

import h5py
import keras
from keras.src.legacy.saving import legacy_h5_format
from keras.src.saving import saving_lib
from keras.src.utils import io_utils

from phalanx._src.compat.hooks import extend
from phalanx.typing import PyTree


class _Nowhere(io.BytesIO):
    """A weight file in memory that has names, but no values."""

    def __str__(self) -> str:
        return ".weights.h5"  # `save_weights_only` refuses a path with another suffix.


@extend(saving_lib.H5IOStore, "__setitem__")
def _setitem(original: Callable[..., None], self: saving_lib.H5IOStore, key: str, value: PyTree) -> None:
    # A store of several files has none of these names.
    files = (getattr(self, "path_or_io", None), getattr(getattr(self, "archive", None), "fp", None))
    if any(isinstance(file, _Nowhere) for file in files):
        keras.ops.convert_to_numpy(value)  # Reading may be a collective call, in which this process takes part.
    else:
        original(self, key, value)


Save = Callable[[object, str, Callable[[], Any], Callable[[], Any]], Any]
"""Calls one of two functions for a model and a path: the first writes the file, the second reads the same values and leaves no file."""

_Read = Callable[..., Any]
"""Reads what the Keras function in its first argument would write. The other arguments are those of that function: an object, a path, and more."""


def on_save(save: Save, may_write: Callable[[], bool]) -> None:
    """Registers who writes when a model is saved or exported.

    Args:
      save: see `Save`.
      may_write: whether this process writes files, so that it may ask whether to overwrite one.
    """

    def divide(owner: object, name: str, read: _Read) -> None:
        def saved(
            original: Callable[..., Any], model: object, filepath: PyTree, *args: PyTree, **kwargs: PyTree
        ) -> Any:
            if isinstance(filepath, io.IOBase):  # It belongs to the process that has opened it.
                return original(model, filepath, *args, **kwargs)
            return save(
                model,
                str(filepath),
                lambda: original(model, filepath, *args, **kwargs),
                lambda: read(original, model, filepath, *args, **kwargs),
            )

        extend(owner, name)(saved)

    # `keras.saving` and the methods of models call these. The programs of users may have imported the former already.
    divide(saving_lib, "save_model", lambda original, model, *_, **__: original(model, _Nowhere()))
    divide(saving_lib, "save_weights_only", _read_weights)
    divide(legacy_h5_format, "save_model_to_hdf5", _read_old)
    divide(keras.Model, "export", _export_for_nobody)
    divide(keras.export.ExportArchive, "write_out", _export_for_nobody)

    @extend(io_utils, "ask_to_proceed_with_overwrite")
    def _ask(original: Callable[[str], bool], filepath: str) -> bool:
        return original(filepath) if may_write() else True


def _read_weights(
    original: Callable[..., None],
    model: object,
    filepath: PyTree,
    max_shard_size: PyTree = None,
    *args: PyTree,
    **kwargs: PyTree,
) -> None:
    original(model, _Nowhere(), None, *args, **kwargs)


def _read_old(original: Callable[..., None], model: object, filepath: PyTree, *args: PyTree, **kwargs: PyTree) -> None:
    with h5py.File(io.BytesIO(), "w") as file:
        original(model, file, *args, **kwargs)


def _export_for_nobody(
    original: Callable[..., Any], model: object, filepath: PyTree, *args: PyTree, **kwargs: PyTree
) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        return original(model, os.path.join(folder, os.path.basename(filepath)), *args, **kwargs)
