# SPDX-License-Identifier: Apache-2.0
"""Implements `phalanx checkpoint`, which runs `python -m phalanx._src.tools.checkpoint`."""

import json
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, final

import jax
import keras
import numpy as np

from phalanx._src.checkpoint.checkpoint import Checkpoint
from phalanx._src.checkpoint.manager import latest_checkpoint, numbered
from phalanx._src.checkpoint.reader import CheckpointReader, load_checkpoint
from phalanx._src.checkpoint.remote import is_remote, path_from, status_of
from phalanx._src.checkpoint.restoration import Restoration
from phalanx._src.checkpoint.shards import size_on_disk
from phalanx._src.checkpoint.status import CheckpointStatus
from phalanx._src.checkpoint.store import CheckpointFile, export_arrays
from phalanx._src.cluster.untrusted import new_file
from phalanx._src.launch.tables import print_table
from phalanx.errors import CheckpointError, InvalidArgumentError, PhalanxError, arguments
from phalanx.typing import PyTree

_WIDTH = 60
_LARGEST_FILE_BYTES = 5_000_000_000
"""As in the libraries of the Hugging Face Hub. More arrays than these are divided among several files and an index."""
_KIND = {".npz": "arrays", ".safetensors": "arrays", ".keras": "model"}


def ls(folder: str) -> int:
    """Prints the checkpoints of a folder, oldest first. Returns the exit code."""
    call, hint = f"phalanx checkpoint ls {folder}", "the folder of a CheckpointManager"
    # Unlike the methods of `Path`, these functions accept a name that is too long.
    if os.path.isfile(folder):
        raise CheckpointError(call, "it is a file.", f"phalanx checkpoint show {folder}")
    if not (os.path.isdir(folder) or is_remote(path_from(folder))):
        raise CheckpointError(call, "there is no such folder.", hint)
    rows = []
    checkpoints = numbered(folder)
    for _, file in checkpoints:
        try:
            arrays = str(len(load_checkpoint(str(file)).get_variable_to_shape_map()))
            rows.append((str(file), _time(status_of(file).st_mtime), _size(size_on_disk(file)), arrays))
        # A training run may delete its oldest checkpoints at any time.
        except (CheckpointError, OSError):
            rows.append((str(file), "", "", "cannot be read"))
    if not checkpoints:
        raise CheckpointError(call, "the folder contains no checkpoint.", hint)
    print_table(("checkpoint", "saved", "size", "arrays"), rows)
    return 0


def show(path: str) -> int:
    """Prints the contents of a checkpoint. Returns the exit code."""
    reader = load_checkpoint(path)
    dtypes, sizes = reader.get_variable_to_dtype_map(), _sizes(reader)
    rows = []
    for name, shape in sorted(reader.get_variable_to_shape_map().items(), key=lambda item: _order(item[0])):
        rows.append((name, str(tuple(shape)), str(dtypes[name]), _size(sizes[name])))
    for name, value in reader.values.items():
        rows.append((name, "", type(value).__name__, _short(value)))
    print_table(("name", "shape", "dtype", "size"), rows)
    print(f"{len(dtypes)} arrays, {_size(sum(sizes.values()))}")
    return 0


def diff(first: str, second: str) -> int:
    """Prints how two checkpoints differ. Returns 1 if they do, else 0."""
    sides = [_Side(load_checkpoint(path)) for path in (first, second)]
    rows = []
    for name in sorted(set().union(*(side.names for side in sides)), key=_order):
        if (row := _difference(*(side.value(name) for side in sides))) is not None:
            rows.append((name, *row))
    if not rows:
        print("They are equal.")
        return 0
    print_table(("name", first, second, ""), rows)
    return 1


def export(path: str, output: str, name: str, largest: int = _LARGEST_FILE_BYTES) -> int:
    """Writes the arrays or the model of a checkpoint to a new file, or to several. Returns the exit code.

    Args:
      path: the checkpoint.
      output: the file.
      name: only what was saved under this name. Empty for everything.
      largest: number of bytes of arrays from which a .safetensors file is divided into several.

    Raises:
      CheckpointError: the checkpoint does not contain what was asked for, or the file cannot be written.
      InvalidArgumentError: the suffix of the file names no known format.
    """
    reader, file = load_checkpoint(path), Path(output)
    call = f"phalanx checkpoint export {path} {output}"
    if file.suffix not in _KIND:
        raise InvalidArgumentError(
            call, "the name must end with .npz, .safetensors or .keras.", str(file.with_suffix(".npz"))
        )
    # `lexists`, because a link that leads nowhere counts too.
    if os.path.lexists(file) or os.path.lexists(_index_of(file)):
        raise CheckpointError(call, "the file exists already.", "another name, or delete the file")
    if not file.parent.is_dir():
        raise CheckpointError(call, f"there is no folder {file.parent}.", f"mkdir -p {file.parent}")
    try:
        if _KIND[file.suffix] == "model":
            _export_model(call, path, reader, file, name)
            written = [file]
        else:
            written = _export_arrays(call, reader, file, name, largest)
    except OSError as e:
        raise CheckpointError(call, f"the file cannot be written: {e}.", "a folder that this user may write to") from e
    for each in written:
        print(f"{each}: {_size(each.stat().st_size)}")
    return 0


def _export_arrays(call: str, reader: CheckpointReader, file: Path, name: str, largest: int) -> list[Path]:
    """Writes arrays to a file, or to several with an index if they are large. Returns the files."""
    names = [n for n in reader.get_variable_to_shape_map() if not name or n == name or n.startswith(f"{name}/")]
    if not names:
        known = sorted({n.partition("/")[0] for n in reader.get_variable_to_shape_map()})
        raise CheckpointError(
            f"{call} --object {name}", f"it contains only {', '.join(known)}.", f"--object {known[0]}"
        )
    sizes_of_all = _sizes(reader)
    sizes = {n: sizes_of_all[n] for n in names}
    groups = _groups(sizes, largest) if file.suffix == ".safetensors" else [names]
    if len(groups) == 1:
        export_arrays(file, {n: reader.get_tensor(n) for n in names})
        return [file]
    files = [
        file.with_name(f"{file.stem}-{i:05d}-of-{len(groups):05d}{file.suffix}") for i in range(1, len(groups) + 1)
    ]
    # The memory holds the arrays of one file at a time.
    for each, group in zip(files, groups, strict=True):
        export_arrays(each, {n: reader.get_tensor(n) for n in group})
    places = {n: each.name for each, group in zip(files, groups, strict=True) for n in group}
    index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": places}
    # Last, so that whoever finds the index finds all files.
    with new_file(_index_of(file)) as opened:
        opened.write(json.dumps(index, indent=2).encode())
    return [*files, _index_of(file)]


def _index_of(file: Path) -> Path:
    """Returns the path of the index of several files, as transformers and KerasHub look for it."""
    return file.with_name(f"{file.name}.index.json")


def _groups(sizes: Mapping[str, int], largest: int) -> list[list[str]]:
    """Divides names into groups of at most `largest` bytes, in their order. A larger array has a group to itself."""
    groups: list[list[str]] = [[]]
    room = largest
    for name, size in sizes.items():
        if groups[-1] and size > room:
            groups.append([])
            room = largest
        groups[-1].append(name)
        room -= size
    return groups


def _export_model(call: str, path: str, reader: CheckpointReader, file: Path, name: str) -> None:
    models = reader.models
    chosen = name or (next(iter(models)) if len(models) == 1 else "")
    if chosen not in models:
        raise CheckpointError(
            f"{call}{f' --object {name}' if name else ''}",
            f"the models whose architecture it contains are: {', '.join(models) or 'none'}.",
            f"--object {next(iter(models))}"
            if models
            else "in your program: checkpoint.restore(path), model.save(file). A model is exported here if it has get_config()",
        )
    try:
        # Traced, a model of any size takes no memory. Its variables must fit the file before they are made.
        variables = jax.eval_shape(lambda: [v.value for v in keras.models.model_from_json(models[chosen]).variables])
        size = sum(math.prod(v.shape) * v.dtype.itemsize for v in variables)
        if size > sum(_sizes(reader).values()):
            raise ValueError(f"its variables would have {_size(size)}, more than the file has")
        model = keras.models.model_from_json(models[chosen])
    # Keras and the layers of users raise errors of any type for a configuration.
    except Exception as e:
        raise CheckpointError(
            call,
            f"Keras cannot create the model {chosen!r} from its configuration: {_without_configuration(e)}",
            "in your program, with @keras.saving.register_keras_serializable() above your classes: checkpoint.restore(path), "
            f'model.save("{file.name}"). This command imports none of your modules',
        ) from e
    # `path` may be the folder of a manager.
    checkpoint, stored = Checkpoint(model=model), CheckpointFile(latest_checkpoint(path) or path)
    # As an alias, because `chosen` may be a name that no argument of `Checkpoint` can have: a key such as "save", or a path.
    stored.notes["aliases"]["model"] = chosen
    restoration = Restoration(checkpoint, stored)
    restoration.begin()
    CheckpointStatus(restoration, checkpoint).assert_existing_objects_matched()
    # Keras writes to the name itself, and would follow a link. The copy is complete when it takes the name.
    with tempfile.TemporaryDirectory() as folder:
        model.save(saved := Path(folder) / file.name)
        with saved.open("rb") as complete, new_file(file) as opened:
            shutil.copyfileobj(complete, opened)


def _without_configuration(error: Exception) -> str:
    """Returns the cause that Keras names, without the configurations of the layers around it, which take many lines."""
    cause = str(error).rpartition("Exception encountered: ")[2]
    return cause.partition(" Full object config:")[0].partition("\n")[0]


def _sizes(reader: CheckpointReader) -> dict[str, int]:
    """Returns the bytes of each array, by name."""
    shapes, dtypes = reader.get_variable_to_shape_map(), reader.get_variable_to_dtype_map()
    return {name: math.prod(shape) * dtypes[name].itemsize for name, shape in shapes.items()}


_MISSING = object()


@final
class _Side:
    """One of two checkpoints that are compared. Its arrays are read one by one."""

    def __init__(self, reader: CheckpointReader) -> None:
        self._reader, self._values = reader, reader.values
        self.names = {*reader.get_variable_to_shape_map(), *self._values}

    def value(self, name: str) -> Any:
        """Returns an array or another value, or `_MISSING`."""
        return self._reader.get_tensor(name) if self._reader.has_tensor(name) else self._values.get(name, _MISSING)


def _difference(first: Any, second: Any) -> tuple[str, str, str] | None:
    """Returns the columns of the two checkpoints, and how far apart they are. None if nothing differs."""
    about = _about(first), _about(second)
    if first is _MISSING or second is _MISSING:
        return *about, "missing"
    if not (isinstance(first, np.ndarray) and isinstance(second, np.ndarray)):
        # By text, because a NaN is not equal to itself, and True is equal to 1.
        return None if repr(first) == repr(second) else (*about, "")
    if first.shape != second.shape or first.dtype != second.dtype:
        return *about, "shape" if first.shape != second.shape else "dtype"
    # By bytes, because a NaN is not equal to itself.
    if first.tobytes() == second.tobytes():
        return None
    widest = np.complex128 if first.dtype.kind == "c" else np.float64
    apart = np.abs(first.astype(widest) - second.astype(widest))
    differ = int(np.count_nonzero(first != second))
    return *about, f"{differ} of {first.size} values, by up to {np.max(apart):.3g}"


def _order(name: str) -> list[tuple[int, str]]:
    """Returns the key by which names are sorted.

    Example:
      >>> sorted(["v/10", "v/2", "v/\u00b2", "v/" + "9" * 5000], key=_order)[2:]
      ['v/2', 'v/10']
    """
    return [(int(part) if arguments.is_number(part) else -1, part) for part in name.split("/")]


def _about(value: PyTree) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {value.shape}"
    return "" if value is _MISSING else _short(value)


def _short(value: PyTree) -> str:
    """Returns a value for a table."""
    try:
        shown = json.dumps(value)
    except TypeError:
        shown = repr(value)
    return shown if len(shown) <= _WIDTH else f"{shown[: _WIDTH - 3]}..."


def _time(seconds: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    except (OSError, OverflowError, ValueError):  # Whoever owns a file may give it any year.
        return "unknown"


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


COMMANDS: dict[str, Callable[..., int]] = {"ls": ls, "show": show, "diff": diff, "export": export}

if __name__ == "__main__":
    try:
        sys.exit(COMMANDS[sys.argv[1]](*sys.argv[2:]))
    except PhalanxError as error:
        print(f"phalanx: {error}", file=sys.stderr)
        sys.exit(2)
