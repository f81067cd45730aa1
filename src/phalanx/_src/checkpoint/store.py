# SPDX-License-Identifier: Apache-2.0
"""Checkpoint files. Each is one file in the safetensors format, so that a checkpoint is there completely or not at all.

The arrays are the tensors of the file. Everything else is JSON in the metadata of the file. Files are written here, array by array, so
that training continues in the meantime: the library safetensors copies all arrays into one buffer first, and holds Python's lock. The
format is described at
https://huggingface.co/docs/safetensors/index#format.

Each array has a sum in the notes, and all that comes before the arrays has one in its first bytes.
"""

import contextlib
import errno
import functools
import itertools
import json
import math
import os
import shutil
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from io import BufferedWriter
from pathlib import Path
from typing import Any

import numpy as np

from phalanx._src.checkpoint import remote, shards, sums, text
from phalanx._src.checkpoint.remote import as_os_error, is_remote, path_from, require_writable
from phalanx._src.checkpoint.shards import Box, Division
from phalanx._src.checkpoint.tensors import DTYPES, Tensors
from phalanx._src.cluster.untrusted import SparseFileError, new_file, require_memory
from phalanx.errors import CheckpointError

SUFFIX = ".safetensors"
OLD_FORMAT, _FORMAT = "phalanx-checkpoint-1", "phalanx-checkpoint-2"
# What `json.dumps` begins a header with. The sum has a fixed place, so that it can be replaced by zeros when it is computed.
_BEFORE_SUM = b'{"__metadata__": {"sum": "'
_NO_SUM = b"0" * 8
_SHOWN = 200

_UNREADABLE = (AttributeError, EOFError, LookupError, MemoryError, OSError, RecursionError, TypeError, ValueError)
"""The exceptions that a malformed file can cause."""

_CODES = {name: code for code, name in DTYPES.items()}
"""Arrays of other dtypes are stored as bytes, with the name of the dtype in the notes."""


def file_of(path: str | os.PathLike[str]) -> Path:
    """Returns the file of a checkpoint, from its path with or without the suffix."""
    name = os.fspath(path)
    return path_from(name if name.endswith(SUFFIX) else name + SUFFIX)


def path_of(file: Path) -> str:
    """Returns the path of a checkpoint without the suffix."""
    return str(file).removesuffix(SUFFIX)


def write(file: Path, arrays: Mapping[str, np.ndarray], notes: Mapping[str, Any]) -> None:
    """Writes a checkpoint, completely or not at all.

    Args:
      file: the name of the new file.
      arrays: contiguous arrays by name.
      notes: what else to store. Must be convertible to JSON.

    Raises:
      CheckpointError: the file exists already, cannot be written, or could not be restored.
    """
    refuse_existing(file)  # The thread writes later than the check in `Checkpoint`.
    dtypes = {name: array.dtype.name for name, array in arrays.items() if array.dtype.name not in _CODES}
    # The format has no checksums of its own.
    array_sums = {name: sums.of_array(array) for name, array in arrays.items()}
    metadata = {"format": _FORMAT, "notes": json.dumps({**notes, "dtypes": dtypes, "sums": array_sums})}
    header = _header(arrays, metadata)
    try:
        require_memory(header, len(header) + sum(array.nbytes for array in arrays.values()))
    except ValueError as e:
        hint = "arrays instead of lists and dicts of many numbers"
        raise CheckpointError(f"a checkpoint as {_short(file)}", f"it could not be restored: {e}.", hint) from e
    try:
        opening = remote.new_file(file) if is_remote(file) else new_file(file, shards.user_folder(file))
        with opening as opened:
            _write_all(opened, header, arrays)
    except OSError as e:
        raise _refuse_write(file, e) from e


def refuse_existing(file: Path) -> None:
    """Checks that a new checkpoint does not replace another one.

    Raises:
      CheckpointError: it would.
    """
    try:
        with as_os_error():
            exists = file.exists()
    except OSError as e:
        raise _refuse_write(file, e) from e
    if exists:
        hint = "use another path or number; or delete the file, if it is not needed"
        if file.is_dir():
            raise CheckpointError(f"a checkpoint as {_short(file)}", "there is a folder of this name.", hint)
        if shards.user_folder(file) != file.parent:  # The chief has deleted the pieces of an earlier save that it sees.
            hint = "a folder that all machines share, because each process writes the shards that it holds"
        raise CheckpointError(f"a checkpoint as {_short(file)}", "the file exists already.", hint)


def require_room(folder: str | os.PathLike[str], size: int = 0) -> None:
    """Checks that a checkpoint can be written into a folder, which may not be there yet.

    Args:
      folder: the folder.
      size: the bytes of the arrays.

    Raises:
      CheckpointError: this user may not write there, or the disk has less room.
    """
    path = path_from(folder)
    try:
        if is_remote(path):
            require_writable(path)
            return
        # Parents that are missing are made at the first save, so the nearest folder that exists decides.
        there = next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())
        problem = None if there.is_dir() else errno.ENOTDIR
        if problem is None and not os.access(there, os.W_OK | os.X_OK):
            problem = errno.EACCES
        usage = shutil.disk_usage(there)
        if problem is None and usage.total and usage.free < size:
            problem = errno.ENOSPC
        # Not a disk, such as /proc, or a file system that does not report its size.
        if problem is None and not usage.total:
            with tempfile.TemporaryFile(dir=there):
                pass
    except OSError as e:
        raise _refuse_write(path, e) from e
    if problem is not None:
        raise _refuse_write(path, OSError(problem, os.strerror(problem), str(there)))


def _header(arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> bytes:
    """Returns the first part of a file of the format: its length, and JSON that says where each array is."""
    entries: dict[str, Any] = {"__metadata__": {"sum": _NO_SUM.decode(), **metadata}} if metadata else {}
    end = 0
    for name, array in arrays.items():
        begin, end = end, end + array.nbytes
        code = _CODES.get(array.dtype.name)
        shape = [*array.shape, *([] if code else [array.dtype.itemsize])]
        entries[name] = {"dtype": code or "U8", "shape": shape, "data_offsets": [begin, end]}
    header = json.dumps(entries).encode()
    # As safetensors does, so that the arrays are aligned.
    header += b" " * (-len(header) % 8)
    header = struct.pack("<Q", len(header)) + header
    if not metadata:
        return header
    begin = 8 + len(_BEFORE_SUM)
    # CRC-32 and not `sums`, because its speed does not matter for a header.
    return header[:begin] + b"%08x" % zlib.crc32(header) + header[begin + len(_NO_SUM) :]


def sum_of_contents(file: Path) -> str:
    """Returns the sum of what comes before the arrays in a file, with the sums of the arrays. Empty if the file does not yet contain it."""
    size = 8 + len(_BEFORE_SUM) + len(_NO_SUM)
    with file.open("rb") as opened:
        header = opened.read(size)
    return _sum_in(header) if len(header) == size else ""


def _sum_in(header: bytes) -> str:
    return header[: 8 + len(_BEFORE_SUM) + len(_NO_SUM)][-len(_NO_SUM) :].decode(errors="replace")


def _is_sound(header: bytes) -> bool:
    """Returns whether the bytes before the arrays of a file are those that were written."""
    begin = 8 + len(_BEFORE_SUM)
    without = header[:begin] + _NO_SUM + header[begin + len(_NO_SUM) :]
    return header[8:begin] == _BEFORE_SUM and f"{zlib.crc32(without):08x}" == _sum_in(header)


def _write_all(opened: BufferedWriter, header: bytes, arrays: Mapping[str, np.ndarray]) -> None:
    opened.write(header)
    for array in arrays.values():
        opened.write(array.reshape(-1).view(np.uint8).data)


def _refuse_write(file: Path, error: Exception) -> CheckpointError:
    number = error.errno if isinstance(error, OSError) else None
    if number == errno.ENOSPC:
        return CheckpointError(
            f"a checkpoint as {_short(file)}",
            "the disk is full. Earlier checkpoints are unharmed.",
            "delete files, or keep fewer checkpoints: CheckpointManager(..., max_to_keep=2)",
        )
    # The name is in the message already.
    problem = os.strerror(number) if number == errno.ENAMETOOLONG else error
    return CheckpointError(
        f"a checkpoint as {_short(file)}",
        f"the file cannot be written: {problem}. Earlier checkpoints are unharmed.",
        _HINTS.get(number, "use a folder that this user may write to"),
    )


_HINTS: dict[int | None, str] = {
    errno.ENAMETOOLONG: "use a shorter name",
    **dict.fromkeys((errno.ENOTDIR, errno.EEXIST), "use another folder, because there is a file of this name"),
}
"""Hints by the error numbers of the operating system."""


class CheckpointFile:
    """A checkpoint file that is open for reading. Arrays are read one at a time.

    Args:
      path: path of the checkpoint, with or without the suffix.

    Raises:
      CheckpointError: there is no such file, or it is not a complete checkpoint of Phalanx.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.file = file_of(path)
        if not _is_file(self.file):
            problem, hint = _foreign(path_of(self.file)) or ("there is no such file", _nearest(self.file))
            raise CheckpointError(f"the checkpoint {_short(self.file)}", f"{problem}.", hint)
        try:
            self._tensors = Tensors(self.file)
        except SparseFileError as e:
            raise CheckpointError(
                f"the checkpoint {_short(self.file)}",
                f"{e}. The others would be zeros that fill the memory.",
                "if you trust the file: cp --sparse=never FILE COPY, and restore the copy",
            ) from e
        except _UNREADABLE as e:
            raise CheckpointError(
                f"the checkpoint {_short(self.file)}",
                f"the file cannot be read: it is incomplete, or not a checkpoint ({e}).",
                _newest_other(self.file),
            ) from e
        metadata = self._tensors.metadata
        if metadata.get("format") not in (OLD_FORMAT, _FORMAT):
            raise CheckpointError(
                f"the checkpoint {_short(self.file)}",
                f"the file is of the safetensors format, but not written by Phalanx (its metadata is {str(metadata or 'empty')[:_SHOWN]}).",
                "safetensors.numpy.load_file(path), and assign the arrays",
            )
        self.is_old = metadata["format"] == OLD_FORMAT
        if not (self.is_old or _is_sound(self._tensors.header)):
            raise self._refuse("its list of contents is not what was saved")
        whole = frozenset(self._tensors.entries)
        try:
            self.notes: dict[str, Any] = _checked(json.loads(metadata["notes"]), whole)
            self._divisions = {name: Division.of_notes(each) for name, each in self.notes["divided"].items()}
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as e:
            raise self._refuse(f"its notes cannot be read ({type(e).__name__}: {e})") from e
        self.names = whole | set(self._divisions)
        self._dtypes: dict[str, str] = self.notes["dtypes"]
        self._sound: set[str] = set()
        self._files_of_ranks: dict[int, CheckpointFile] = {}

    def _refuse(self, problem: str) -> CheckpointError:
        return CheckpointError(
            f"the checkpoint {_short(self.file)}",
            f"the file is damaged: {problem}.",
            f"{_newest_other(self.file)}; and check the disk",
        )

    def spec(self, name: str) -> tuple[tuple[int, ...], np.dtype]:
        """Returns the shape and the dtype of an array without reading it."""
        division = self._divisions.get(name)
        if division is not None:
            return division.shape, np.dtype(division.dtype)
        entry, dtype = self._tensors.entries[name], self._dtypes.get(name)
        if entry.code not in DTYPES:
            raise self._refuse(f"{name} has the dtype {entry.code}, which Phalanx does not write")
        if dtype is not None:
            return entry.shape[:-1], np.dtype(dtype)
        return entry.shape, np.dtype(DTYPES[entry.code])

    @functools.cached_property
    def num_bytes(self) -> int:
        """The size of all arrays."""
        whole = sum(entry.end - entry.begin for entry in self._tensors.entries.values())
        return whole + sum(math.prod(x.shape) * np.dtype(x.dtype).itemsize for x in self._divisions.values())

    def array(self, name: str) -> np.ndarray:
        """Reads an array.

        Raises:
          CheckpointError: the file is damaged, or one with pieces of the array is missing.
        """
        shape, dtype = self.spec(name)
        # The pieces of a divided array are in other files.
        if name in self._divisions:
            return self.part(name, tuple((0, n) for n in shape))
        try:
            array = self._tensors.array(name)
        except (MemoryError, ValueError) as e:
            raise self._refuse(f"{name}, of the shape {shape}, does not fit into the memory of this process") from e
        except (EOFError, OSError) as e:
            raise self._refuse(f"{name} cannot be read: {e}") from e
        if name not in self._sound:
            sum_of = sums.of_bytes if self.is_old else sums.of_array
            if sum_of(array) != self.notes["sums"][name]:
                raise self._refuse(f"{name} is not what was saved")
            # Once per open file: a restore may read an array several times.
            self._sound.add(name)
        if name not in self._dtypes:
            return array
        if array.nbytes != int(np.prod(shape)) * dtype.itemsize:
            raise self._refuse(f"{name} is no array of {dtype}")
        return np.frombuffer(array.tobytes(), dtype).reshape(shape)

    def part(self, name: str, box: Box) -> np.ndarray:
        """Reads a part of an array. Of one that is divided into pieces, only the pieces of this part.

        Raises:
          CheckpointError: see `array`.
        """
        division = self._divisions.get(name)
        if division is None:
            # All of it is read, because its sum covers all of it.
            return self.array(name)[tuple(slice(begin, end) for begin, end in box)]

        def read(rank: int, piece: Box) -> np.ndarray:
            stored, name_there = self._of_rank(rank), shards.name_of(name, piece)
            # NumPy would copy one value into the whole place of a piece, and a small file fill the memory.
            expected = tuple(end - begin for begin, end in piece), np.dtype(division.dtype)
            if name_there not in stored.names or stored.spec(name_there) != expected:
                raise self._refuse(f"{_short(stored.file)} does not have the piece {name_there}")
            return stored.array(name_there)

        try:
            return division.assemble(box, read)
        except (MemoryError, OverflowError, ValueError) as e:
            raise self._refuse(f"{name}, of the shape {division.shape}, does not fit into the memory") from e

    def _of_rank(self, rank: int) -> "CheckpointFile":
        """Returns the file with the pieces of one process."""
        if rank not in self._files_of_ranks:
            path = shards.file_of_rank(self.file, rank)
            pieces = CheckpointFile(str(path))
            # The sums of all arrays are in the header, so its sum stands for the complete file.
            if _sum_in(pieces._tensors.header) != self.notes["files"].get(str(rank)):
                raise self._refuse(f"{_short(path)} belongs to another checkpoint")
            self._files_of_ranks[rank] = pieces
        return self._files_of_ranks[rank]

    def value(self, name: str) -> Any:
        """Reads a value that is not an array.

        Raises:
          CheckpointError: the file is damaged.
        """
        try:
            return text.decode(self.notes["values"][name], self.array)
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as e:
            raise self._refuse(f"{name} is not what was saved ({type(e).__name__}: {e})") from e

    def items(self) -> Iterator[tuple[str, np.ndarray]]:
        """Reads all arrays, one after the other."""
        return ((name, self.array(name)) for name in sorted(self.names))


def _checked(notes: dict[str, Any], names: frozenset[str]) -> dict[str, Any]:
    """Returns the notes of a file whose arrays have some names.

    Raises:
      KeyError, TypeError, ValueError: they are not such notes.
    """
    # Old files lack most of these parts, and files of pieces have none.
    empty: dict[str, Any] = {
        part: {} for part in ("models", "optimizers", "accumulation", "chosen", "divided", "files")
    }
    checked = {**empty, "states": [], **notes}
    texts = ("names", "aliases", "models", "optimizers", "chosen", "files", "dtypes")
    kinds = {"sums": int, "accumulation": int, **dict.fromkeys(texts, str)}
    for part, kind in kinds.items():
        for name, value in checked[part].items():
            if not isinstance(value, kind):
                raise TypeError(f"{part} of {name}")
    for name, dtype in checked["dtypes"].items():
        if name not in names or text.dtype_of_name(dtype) is None:
            raise ValueError(f"the dtype of {name}")
    if any(steps < 1 for steps in checked["accumulation"].values()):
        raise ValueError("accumulation")
    references = text.references(list(checked["values"].values()))
    missing = (names - set(checked["sums"])) | (set(references) - names - set(checked["divided"]))
    if missing:
        raise KeyError(min(missing))
    # Each would be a copy of the array, which may be large.
    if len(set(references)) < len(references):
        raise ValueError("two references to one array")
    return checked


def export_arrays(file: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes arrays for other programs: an .npz file, or safetensors without notes. Dtypes that NumPy lacks become float32.

    Raises:
      CheckpointError: the file cannot be written.
    """
    plain = set(_CODES) if file.suffix == SUFFIX else set(_CODES) - {"bfloat16"}
    for name in arrays:
        # Programs that unpack an archive would write outside of their folder.
        if file.suffix != SUFFIX and ".." in name.split("/"):
            raise CheckpointError(
                f"{_short(file)}", f"an archive takes no array of the name {name!r}.", f"{file.with_suffix(SUFFIX)}"
            )
        if file.suffix == SUFFIX and arrays[name].dtype.kind == "c" and arrays[name].dtype.name not in _CODES:
            problem = f"the format has no {arrays[name].dtype}, which {name} has."
            raise CheckpointError(f"{_short(file)}", problem, f"{file.with_suffix('.npz')}")
    converted = {
        n: a if a.dtype.name in plain or a.dtype.kind != "V" else a.astype(np.float32) for n, a in arrays.items()
    }
    try:
        with new_file(file) as opened:
            if file.suffix == SUFFIX:
                _write_all(opened, _header(converted, {}), converted)
                return
            # As `numpy.savez`, which takes no array of the name `file`.
            with zipfile.ZipFile(opened, "w") as archive:
                for name, array in converted.items():
                    with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                        np.lib.format.write_array(member, array, allow_pickle=False)
    except OSError as e:
        raise _refuse_write(file, e) from e


def _short(file: Path) -> str:
    """Returns a path for a message."""
    name = str(file)
    return name if len(name) <= _SHOWN else f"...{name[-_SHOWN:]}"


def _is_file(file: Path) -> bool:
    try:
        with as_os_error():
            return file.is_file()
    except OSError:  # The name is too long. Of a store, the attempt to read it says more.
        return is_remote(file)


_FOREIGN = {
    ".weights.h5": ("the path belongs to Keras weights", "model.load_weights({path!r})"),
    ".keras": ("the path belongs to a Keras model", "keras.models.load_model({path!r})"),
    ".h5": ("the path belongs to a Keras model", "keras.models.load_model({path!r})"),
    "": ("Phalanx has not written the file at this path", "the path that save returned"),
}
"""What files of other programs are, by the ends of their names, and how to read them."""


def _foreign(path: str) -> tuple[str, str] | None:
    """Returns the kind of file at a path that is not a checkpoint, and a hint. None if there is nothing."""
    if _is_file(path_from(f"{path}.index")):
        what, hint = (
            "the path belongs to a TensorFlow checkpoint",
            "tf.train.load_checkpoint({path!r}), and assign the arrays",
        )
    elif _is_file(path_from(path)):
        what, hint = next(words for end, words in _FOREIGN.items() if path.endswith(end))
    else:
        return None
    return what, hint.format(path=path)


def _nearest(file: Path) -> str:
    """Returns a hint about what to restore instead of a missing file."""
    path = path_of(file)
    if next(_checkpoints(path_from(path)), None) is not None:
        return f"it is a folder: phalanx.train.latest_checkpoint({path!r})"
    newest = list(itertools.islice(_readable(file), 3))
    if shards.user_folder(file) != file.parent:
        return f"the folder {_short(file.parent)}, which belongs to the checkpoint: copy it too"
    if not newest:
        return f"the path that save returned; {_short(file.parent)} contains no checkpoint"
    return f"one of {', '.join(reversed(newest))}"


def _newest_other(file: Path) -> str:
    """Returns a hint to restore the newest other checkpoint instead of an unreadable file."""
    newest = next(_readable(file), None)
    if newest is None:
        return "delete it, to begin again; the folder contains no other checkpoint"
    return f"checkpoint.restore({newest!r}), or delete the damaged file, so that this one is the latest"


def _readable(file: Path) -> Iterator[str]:
    """Yields the paths of the other checkpoints in the folder of a file, the newest first."""
    for _, path in sorted(_checkpoints(file.parent), reverse=True):
        with contextlib.suppress(*_UNREADABLE):
            if path != path_of(file) and Tensors(file_of(path)).metadata.get("format") in (OLD_FORMAT, _FORMAT):
                yield path


def _checkpoints(folder: Path) -> Iterator[tuple[float, str]]:
    """Yields the times and paths of the checkpoints in a folder."""
    with contextlib.suppress(OSError), as_os_error():
        yield from ((s.st_mtime, path_of(f)) for f, s in shards.with_status(folder.glob(f"*{SUFFIX}")) if _is_file(f))
