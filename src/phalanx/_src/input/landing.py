# SPDX-License-Identifier: Apache-2.0
"""Decides whether rows are used where they are or copied, and copies them once, to where the devices take them from.

A CPU device shares the memory of an aligned array for as long as the JAX array lives, and copies other memory after `device_put` has
returned. A GPU reads memory after that, too. So memory to which its owner may write again is copied before the owner continues.
"""

from collections.abc import Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from phalanx._src.input.sources.base import Owner, Piece
from phalanx._src.input.sources.rows import LARGE_BYTES, ChosenRows, copy, joined, read
from phalanx._src.mesh.arrays import is_on_cpu
from phalanx._src.mesh.memory import Pool
from phalanx._src.runtime.dispatch import process_dispatching
from phalanx.errors import InputError
from phalanx.typing import PyTree


@final
class Landed:
    """Rows in memory to which nobody else writes. A leaf of a piece, in addition to NumPy and JAX arrays.

    Args:
      stack: array (replicas, steps, places, ...), which holds the same leaf of other steps too.
      step: which step of the stack these rows are.
    """

    __slots__ = ("stack", "step")

    def __init__(self, stack: np.ndarray, step: int) -> None:
        self.stack, self.step = stack, step

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the rows of one replica."""
        return self.stack.shape[2:]

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the rows."""
        return self.stack.dtype

    def __getitem__(self, rows: slice) -> np.ndarray:
        """Returns rows of the first replica."""
        return self.stack[0, self.step, rows]  # type: ignore[no-any-return]


@final
class Landing:
    """Takes over the rows that one reader reads.

    Args:
      owner: who owns the memory of what is read.
      pool: the memory for copies.
      fits_devices: whether copies have the dtypes of the devices. Otherwise they have those of the rows.
    """

    def __init__(self, owner: Owner, pool: Pool, *, fits_devices: bool = True) -> None:
        self._is_borrowed, self._pool, self._fits_devices = owner is not Owner.NOBODY, pool, fits_devices

    def land(self, piece: Piece, step: int, room: int | None, before: Piece | None) -> Piece:
        """Returns a piece to whose rows nobody else writes. Called before the next piece is read.

        Args:
          piece: the rows of one step.
          step: index of the step in its stack.
          room: number of steps that the stack has room for. None for a single step.
          before: the piece of the step before, which has landed since the last batch was complete. None if there is none.
        """
        columns, tree = columns_of(piece)
        # A stack ends before a step with other numbers of rows.
        is_next = before is not None and (before.rows, before.counts) == (piece.rows, piece.counts)
        stacks = columns_of(before)[0] if before is not None and is_next else [()] * len(columns)
        places, landed = max(1, *piece.counts), []
        for leaves, last in zip(columns, stacks, strict=False):
            if self._stays(leaves[0], is_stacked=room is not None):
                landed.append(leaves)
                continue
            stack = last[0].stack if last and isinstance(last[0], Landed) else None
            if stack is None or not _has_place(stack, leaves, places):
                stack = self.empty(leaves, len(piece.counts), room or 1, places)
            write(stack[:, step], [np.asarray(x) if isinstance(x, jax.Array) else x for x in leaves], piece.counts)
            landed.append((Landed(stack, step),) * len(leaves))
        return piece._replace(parts=list(map(tree.unflatten, zip(*landed, strict=True))))

    def _stays(self, leaf: PyTree, *, is_stacked: bool) -> bool:
        """Whether the rows of a leaf stay where they are until they are placed."""
        array = leaf.array if isinstance(leaf, ChosenRows) else leaf
        if not isinstance(array, jax.Array):
            return leaf is array and not (self._is_borrowed or is_stacked)
        # JAX arrays cannot change. Only NumPy copies rows of a CPU: those to be stacked, gathered or cast.
        is_view = not is_stacked if leaf is array else isinstance(leaf.index, slice) and leaf.dtype == array.dtype
        return is_view or not is_on_cpu(array)

    def stacked(self, steps: Sequence[PyTree], counts: Sequence[int], places: int, room: int | None) -> PyTree:
        """Returns one leaf of the steps of a batch in the layout of the devices, without a copy if it has that layout.

        Args:
          steps: per step, the leaf of each part of the piece.
          counts: number of rows per local replica.
          places: number of rows that each replica has room for.
          room: number of steps that the stack has room for, of which the last may be missing. None for a single step.

        Returns:
          An array (replicas, places, ...); with `room`, an array (replicas, room, places, ...).
        """
        first, replicas = steps[0][0], len(counts)
        if room is None and isinstance(first, Landed) and first.stack.shape[2] == places:
            return first.stack[:, first.step]
        # What is on a GPU or TPU stays there.
        array = first.array if isinstance(first, ChosenRows) else first
        if isinstance(array, jax.Array) and not is_on_cpu(array):
            return _stacked_on_device(steps, counts, places, room)
        is_full = sum(counts) == places * replicas and len(steps) == (room or 1) and len(steps[0]) == 1
        is_in_order = is_full and 1 in (replicas, len(steps)) and not isinstance(first, Landed)
        if is_in_order and (whole := joined([leaf for (leaf,) in steps])) is not None:
            rows = np.asarray(read(whole))
            return rows.reshape(replicas, *(() if room is None else (room,)), places, *rows.shape[1:])
        # The rows were written to where they are needed when they were read, unless steps were put back or a batch is uneven.
        stack = _common(steps, places, room or 1)
        if stack is None:
            stack = self.empty(steps[0], replicas, room or 1, places)
            for step, leaves in enumerate(steps):
                write(stack[:, step], leaves, counts)
        if room is None:
            return stack[:, 0]
        stack[:, len(steps) :] = 0
        return stack

    def empty(self, leaves: Sequence[PyTree], replicas: int, room: int, places: int) -> np.ndarray:
        """Returns a new stack for rows like those of one leaf, which is given for each part of a piece."""
        like = leaves[0] if len(leaves) == 1 or isinstance(leaves[0], Landed) else max(leaves, key=len)
        shape, dtype = like.shape[1:], like.dtype
        if self._fits_devices and dtype.itemsize > _NARROW_BYTES:
            dtype = jax.dtypes.canonicalize_dtype(dtype)
        return self._pool.empty((replicas, room, places, *shape), dtype)


_NARROW_BYTES = 4


def columns_of(piece: Piece) -> tuple[list[tuple[PyTree, ...]], PyTree]:
    """Returns, for each leaf of a piece, the leaf of each of its parts; and the structure of a part."""
    parts = piece.parts
    leaves, tree = jax.tree.flatten(parts[0])
    return list(zip(leaves, *map(jax.tree.leaves, parts[1:]), strict=True)), tree


def bytes_on_host(piece: Piece) -> int:
    """Returns the size of the rows of a piece that are in the memory of the host, those of all replicas of this process together."""
    columns, _ = columns_of(piece)
    landed = [leaves[0].stack[:, leaves[0].step] for leaves in columns if isinstance(leaves[0], Landed)]
    return sum(x.nbytes for leaves in [landed, *columns] for x in leaves if isinstance(x, np.ndarray))


def _has_place(stack: np.ndarray, leaves: Sequence[PyTree], places: int) -> bool:
    """Returns whether rows can be written to a stack that was made for those of the step before."""
    like = leaves[0] if len(leaves) == 1 else max(leaves, key=len)
    can_cast = like.dtype == stack.dtype or jax.dtypes.canonicalize_dtype(like.dtype) == stack.dtype
    return stack.shape[2:] == (places, *like.shape[1:]) and can_cast


def _common(steps: Sequence[PyTree], places: int, room: int) -> np.ndarray | None:
    """Returns the stack in which all steps lie, in their order; None if there is none that is as it should be."""
    first = steps[0][0]
    stack = first.stack if isinstance(first, Landed) else None
    if stack is None or stack.shape[1] < room or stack.shape[2] != places:
        return None
    for step, (leaf, *_) in enumerate(steps):
        if not isinstance(leaf, Landed) or leaf.stack is not stack or leaf.step != step:
            return None
    return stack[:, :room]


def write(out: np.ndarray, leaves: Sequence[PyTree], counts: Sequence[int]) -> None:
    """Writes rows into an array (replicas, places, ...). The last real row fills the places that have none.

    A real row instead of zeros: a function that is finite on the data is then also finite on the padding.

    Args:
      out: the array.
      leaves: either the rows of all replicas, or one array per replica.
      counts: number of rows per replica.

    Raises:
      InputError: the arrays of the replicas differ in their shapes.
    """
    leaf, places = leaves[0], out.shape[1]
    if isinstance(leaf, Landed):
        rows = leaf.stack[:, leaf.step]
        width = min(places, rows.shape[1])
        out[:, :width], out[:, width:] = rows[:, :width], rows[:, width - 1 : width]
    elif len(leaves) > 1:
        _write_parts(out, leaves)
    elif leaf.shape[0] == out.shape[0] * places and (out.flags.c_contiguous or not isinstance(leaf, ChosenRows)):
        if isinstance(leaf, ChosenRows):
            leaf.write(out.reshape(leaf.shape))
        elif out.nbytes < LARGE_BYTES:
            out[...] = np.asarray(leaf).reshape(out.shape)
        else:
            for row, rows in zip(out, np.asarray(leaf).reshape(out.shape), strict=True):
                copy(row, rows)
    else:
        start = 0
        last = leaf[max(0, sum(counts) - 1) :][:1]
        for row, count in zip(out, counts, strict=True):
            copy(row[:count], leaf[start : start + count])
            if count < places:
                row[count:] = read(last) if len(last) else 0
            start += count


def _require_alike(parts: Sequence[PyTree]) -> None:
    """Checks that the rows of all replicas have one shape.

    Raises:
      InputError: they have not.
    """
    if len({part.shape[1:] for part in parts}) > 1:
        raise InputError(
            f"batches of shapes {sorted({p.shape for p in parts})}",
            "the batches of the replicas must have equal shapes, except for dim 0.",
            "pad the rows to one shape",
        )


def _write_parts(out: np.ndarray, parts: Sequence[PyTree]) -> None:
    _require_alike(parts)
    widest = max(parts, key=len)
    for row, part in zip(out, parts, strict=True):
        copy(row[: len(part)], part)
        if len(part) < len(row):
            row[len(part) :] = read(widest[-1:]) if len(widest) else 0


def _stacked_on_device(steps: Sequence[PyTree], counts: Sequence[int], places: int, room: int | None) -> PyTree:
    """Does what `Landing.stacked` does, without a copy through the host."""
    leaves = [leaf for parts in steps for leaf in parts]
    rows = joined(leaves)
    if rows is None:
        _require_alike(leaves)
        arrays = list(map(read, leaves))
        with process_dispatching():
            rows = jnp.concatenate([jax.device_put(x, arrays[0].sharding) for x in arrays])
    if isinstance(rows, jax.Array):
        rows = ChosenRows(rows, slice(0, len(rows)))
    return rows.laid(tuple(counts), places, len(steps), room)
