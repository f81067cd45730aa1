# SPDX-License-Identifier: Apache-2.0
"""Arrays of which no process holds the whole. Each process writes a file with the pieces that it owns, and reads those that it needs.

The files are in a folder next to the checkpoint. The checkpoint itself, which the chief writes last, says which piece is in which
file: the folder without it is none.
"""

import contextlib
import math
import os
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from phalanx._src.checkpoint import text
from phalanx._src.checkpoint.remote import FileStatus, as_os_error, is_remote, status_of
from phalanx._src.cluster.untrusted import opened_folder
from phalanx._src.programs.slots import parted

_PIECE = re.compile(r"\d{5}\.safetensors|\.\d{5}\.safetensors\.\w+\.part")
_SUFFIX = ".shards"

Box = tuple[tuple[int, int], ...]
"""Beginning and end of a piece in each dim of its array."""


def folder_of(file: Path) -> Path:
    """Returns the folder with the pieces of a checkpoint."""
    return file.with_suffix(_SUFFIX)


def file_of_rank(file: Path, rank: int) -> Path:
    """Returns the file with the pieces that one process has written."""
    return folder_of(file) / f"{rank:05d}{file.suffix}"


def with_status(files: Iterable[Path]) -> Iterator[tuple[Path, os.stat_result | FileStatus]]:
    """Yields each file with its status, but for those that another process has renamed or deleted since they were listed."""
    for file in files:
        try:
            status = status_of(file)
        except FileNotFoundError:
            continue
        yield file, status


def delete(file: Path) -> None:
    """Deletes a checkpoint; first what makes it one, so that its pieces are never missing."""
    # Files of other users in a folder such as /tmp, and folders, stay.
    with contextlib.suppress(FileNotFoundError, IsADirectoryError, PermissionError), as_os_error():
        file.unlink()
    delete_pieces(folder_of(file))


def delete_pieces(folder: Path) -> None:
    """Deletes a folder with pieces. Other files in it stay."""
    if is_remote(folder):
        with contextlib.suppress(OSError), as_os_error():
            for file in [file for file in folder.glob("*") if _PIECE.fullmatch(file.name)]:
                file.unlink()
        return
    # Other users may have put a link in its place, which would lead elsewhere.
    with contextlib.suppress(OSError), opened_folder(folder, below=folder.parent) as descriptor:
        for piece in filter(_PIECE.fullmatch, os.listdir(descriptor)):
            os.unlink(piece, dir_fd=descriptor)
        folder.rmdir()


def user_folder(file: Path) -> Path:
    """Returns the folder that the user has chosen for a checkpoint or for a file with pieces."""
    return file.parent.parent if file.parent.suffix == _SUFFIX else file.parent


def size_on_disk(file: Path) -> int:
    """Returns the bytes of a checkpoint, with its pieces."""
    return sum(status.st_size for _, status in with_status((file, *folder_of(file).glob(f"*{file.suffix}"))))


class Division(NamedTuple):
    """How an array is divided.

    Args:
      shape: its shape.
      dtype: the name of its dtype.
      pieces: for each piece, the rank of the process that writes it, and its place.
    """

    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[tuple[int, Box], ...]

    @classmethod
    def of(cls, array: jax.Array) -> "Division":
        """Returns how an array lies on the devices. Of several devices with the same piece, the process of the first one writes it."""
        # All processes see the devices in the same order, so they agree on the owners without communicating.
        owners: dict[Box, int] = {}
        places: Mapping[Any, Any] = array.sharding.devices_indices_map(array.shape)
        for device, index in places.items():
            owners.setdefault(box_of(index, array.shape), device.process_index)
        return cls(tuple(array.shape), array.dtype.name, tuple((rank, box) for box, rank in owners.items()))

    @classmethod
    def of_notes(cls, notes: Sequence[Any]) -> "Division":
        """Returns the value that was stored as JSON.

        Raises:
          TypeError, ValueError: the notes are not those of a division.
        """
        shape, dtype, pieces = notes
        boxes = [(int(rank), tuple((int(begin), int(end)) for begin, end in box)) for rank, box in pieces]
        division = cls(tuple(map(int, shape)), str(dtype), tuple(boxes))
        whole = whole_box(division.shape)
        sizes = [_size(box) for _, box in boxes if len(box) == len(whole) and _is_inside(box, whole)]
        if (
            not len(sizes) == len(boxes) == len({box for _, box in boxes})
            or sum(sizes) != _size(whole)
            or text.dtype_of_name(division.dtype) is None
        ):
            raise ValueError("the pieces do not make up the array")
        return division

    @property
    def ranks(self) -> set[int]:
        """The processes that write pieces."""
        return {rank for rank, _ in self.pieces}

    def assemble(self, box: Box, read: Callable[[int, Box], np.ndarray]) -> np.ndarray:
        """Returns a part of the array. If that is one of its pieces, what `read` returns, without a copy.

        Args:
          box: which part.
          read: returns a piece, given the rank of its process and its place.
        """
        for rank, piece in self.pieces:
            if piece == box:
                return read(rank, piece)
        # Not `np.empty`: pieces of a file of others may overlap and leave gaps, which would have what was in the memory before.
        part = np.zeros([end - begin for begin, end in box], np.dtype(self.dtype))
        for rank, piece in self.pieces:
            both = _common(box, piece)
            if both is not None:
                part[_within(both, box)] = read(rank, piece)[_within(both, piece)]
        return part


def pieces_here(path: str, array: jax.Array, division: Division) -> Mapping[str, np.ndarray]:
    """Returns the pieces that this process writes, by name, copied to the host."""
    boxes_here = {box for rank, box in division.pieces if rank == jax.process_index()}
    return {name_of(path, box): piece for box, piece in shards_here(array, boxes_here).items()}


def shards_here(array: jax.Array, boxes: Container[Box]) -> dict[Box, np.ndarray]:
    """Returns those pieces that the devices of this process have and whose places are in `boxes`, copied to the host."""
    was_parted = parted.get(array)
    shards = {box_of(shard.index, array.shape): shard.data for shard in array.addressable_shards}
    pieces = {box: np.array(data, order="C") for box, data in shards.items() if box in boxes}
    if not was_parted:
        # The copies share no memory with the array, so that the next step may consume it.
        parted.discard(array)
    return pieces


def cut(piece: np.ndarray, place: Box, boxes: Iterable[Box]) -> dict[Box, np.ndarray]:
    """Returns the parts of a piece, which is at `place`, that are in some boxes. They do not keep the rest of it in memory."""
    both = {common for box in boxes if (common := _common(place, box)) is not None}
    return {box: piece if box == place else piece[_within(box, place)].copy() for box in both}


def name_of(path: str, box: Box) -> str:
    """Returns the name that a piece of an array has in its file."""
    return f"{path}@{','.join(f'{begin}:{end}' for begin, end in box)}"


def whole_box(shape: Sequence[int]) -> Box:
    """Returns the place of all of an array."""
    return tuple((0, n) for n in shape)


def box_of(index: Sequence[slice], shape: Sequence[int]) -> Box:
    """Returns the place of a part of an array, which JAX describes by slices."""
    return tuple((s.indices(n)[0], s.indices(n)[1]) for s, n in zip(index, shape, strict=True))


def _common(box: Box, other: Box) -> Box | None:
    both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, other, strict=True))
    return both if all(begin < end for begin, end in both) else None


def _is_inside(box: Box, outer: Box) -> bool:
    return all(first <= begin <= end <= last for (begin, end), (first, last) in zip(box, outer, strict=True))


def _within(box: Box, outer: Box) -> tuple[slice, ...]:
    """Returns where a box is in an array that has the values of a larger one."""
    return tuple(slice(begin - first, end - first) for (begin, end), (first, _) in zip(box, outer, strict=True))


def _size(box: Box) -> int:
    return math.prod(end - begin for begin, end in box)
