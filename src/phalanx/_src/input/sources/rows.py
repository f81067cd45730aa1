# SPDX-License-Identifier: Apache-2.0
"""Rows of an array that were chosen and not yet read, so that they are written once, to where they are needed."""

import functools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import final

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import DTypeLike

from phalanx._src.input import shard
from phalanx._src.mesh.arrays import is_on_cpu
from phalanx._src.mesh.memory import Pool
from phalanx._src.runtime.dispatch import process_dispatching
from phalanx.typing import PyTree

# Half of it is copied in about half a millisecond. A thread costs a tenth of that.
LARGE_BYTES = 8 << 20


@final
class ChosenRows:
    """Rows of an array. A leaf of a batch, in addition to NumPy and JAX arrays.

    Args:
      array: all rows: a NumPy array, whose owner is that of the batch, or a JAX array, to which nobody writes.
      index: the chosen rows, as a slice from a number to a number, or as an array of integers.
      dtype: the dtype in which the rows are wanted. None for that of the array.
    """

    __slots__ = ("array", "dtype", "index", "shape")

    def __init__(self, array: PyTree, index: slice | np.ndarray, dtype: DTypeLike | None = None) -> None:
        # The dtype of random keys is none of NumPy's.
        is_same = dtype is None or array.dtype == dtype
        self.array, self.index, self.dtype = array, index, array.dtype if is_same else np.dtype(dtype)
        count = index.stop - index.start if isinstance(index, slice) else len(index)
        self.shape = (count, *array.shape[1:])

    def __len__(self) -> int:
        return int(self.shape[0])

    def __getitem__(self, part: slice) -> "ChosenRows":
        """Returns some of the rows, which are not read either."""
        start, stop, _ = part.indices(len(self))
        index, stop = self.index, max(start, stop)
        chosen = slice(index.start + start, index.start + stop) if isinstance(index, slice) else index[start:stop]
        return ChosenRows(self.array, chosen, self.dtype)

    @property
    def is_on_host(self) -> bool:
        """Whether NumPy reads the rows without a copy of the whole array."""
        return not isinstance(self.array, jax.Array) or is_on_cpu(self.array)

    def read(self) -> PyTree:
        """Returns the rows as a NumPy array or, if they are on a device other than a CPU, as a JAX array on that device.

        Consecutive rows are not copied on the host.
        """
        if self.is_on_host:
            return np.asarray(self.array)[self.index].astype(self.dtype, copy=False)
        return self.laid()

    def laid(self, *layout: PyTree) -> PyTree:
        """Returns the rows of a JAX array, by one call of a program on its device. `layout` are arguments of `shard.split`, if any."""
        index = self.index.start if isinstance(self.index, slice) else self.index
        # Two threads that dispatch programs over several devices deadlock (DESIGN.md).
        with process_dispatching():
            return _taken(self.array, index, len(self), layout, self.dtype)

    def write(self, out: np.ndarray, *, is_half: bool = False) -> None:
        """Writes the rows, or half of those of a batch, into `out`, which has their shape. They must be on the host."""
        if out.nbytes >= LARGE_BYTES and not is_half:
            _copy_halves(out, self)
            return
        array, index = np.asarray(self.array), self.index
        # `take` copies an array that is not contiguous as a whole, and casts in a copy. With mode="raise" it writes to a copy
        # of `out` first.
        if isinstance(index, np.ndarray) and array.flags.c_contiguous and out.dtype == array.dtype:
            np.take(array, index, axis=0, out=out, mode="clip")
        else:
            out[...] = array[index]


def read(leaf: PyTree) -> PyTree:
    """Returns a leaf of a batch as an array, which may share the memory of its owner."""
    return leaf.read() if isinstance(leaf, ChosenRows) else leaf


def joined(leaves: Sequence[PyTree]) -> PyTree | None:
    """Returns the rows of several leaves, one after the other, without reading them. None if they cannot be rows of one array."""
    first = leaves[0]
    if len(leaves) == 1:
        return first
    if any(not isinstance(leaf, ChosenRows) or leaf.array is not first.array for leaf in leaves):
        return None
    if not isinstance(first.index, slice):
        return ChosenRows(first.array, np.concatenate([leaf.index for leaf in leaves]), first.dtype)
    follows = all(before.index.stop == leaf.index.start for before, leaf in pairwise(leaves))
    return ChosenRows(first.array, slice(first.index.start, leaves[-1].index.stop), first.dtype) if follows else None


def copy(out: np.ndarray, leaf: PyTree, *, is_half: bool = False) -> None:
    """Writes a leaf of a batch, or half of it, into an array of the host."""
    if isinstance(leaf, ChosenRows):
        leaf.write(out, is_half=is_half)
    elif out.nbytes < LARGE_BYTES or is_half:
        out[...] = leaf
    else:
        _copy_halves(out, leaf)


def _copy_halves(out: np.ndarray, leaf: PyTree) -> None:
    """Writes the halves of a large leaf in two threads: one core does not use the bandwidth of the memory."""
    middle = len(out) // 2
    # A thread that lived on would be missing in a process that is forked.
    with ThreadPoolExecutor(1) as thread:
        try:
            half = thread.submit(copy, out[middle:], leaf[middle:], is_half=True)
        except RuntimeError:  # The main thread has ended, and Python starts no other one.
            copy(out, leaf, is_half=True)
            return
        copy(out[:middle], leaf[:middle], is_half=True)
    half.result()


def owned(leaf: PyTree, pool: Pool) -> PyTree:
    """Returns a copy of a leaf, to which nobody else writes. JAX arrays cannot change, so they are not copied."""
    if isinstance(leaf, jax.Array) or (isinstance(leaf, ChosenRows) and not leaf.is_on_host):
        return read(leaf)
    array = pool.empty((1, *leaf.shape), leaf.dtype)[0]
    copy(array, leaf)
    return array


# One program for all batches: the rows, or the first of consecutive ones, are an argument.
@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _taken(array: jax.Array, index: jax.Array, count: int, layout: PyTree, dtype: PyTree) -> jax.Array:
    places = shard.split(*layout) if layout else np.arange(count)
    if jnp.ndim(index):
        rows = jnp.take(array, index[places], axis=0)
    # Rows in their order are one block of the array, which needs no gather.
    elif np.array_equal(places.ravel(), np.arange(count)):
        rows = jax.lax.dynamic_slice_in_dim(array, index, count).reshape(*places.shape, *array.shape[1:])
    else:
        rows = jnp.take(array, index + places, axis=0)
    return rows.astype(dtype)
