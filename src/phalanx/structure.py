# SPDX-License-Identifier: Apache-2.0
"""Nests of arguments and results, taken apart into arrays, which enter a program, and the rest, which selects it."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np

from phalanx.values import Mirrored, PerReplica, RowMask, flatten


class _Array(NamedTuple):
    def join(self, arrays: Iterator[Any], rows: Sequence[RowMask]) -> Any:
        return next(arrays)


class _PerReplica(NamedTuple):
    each: int | None
    batch: int | None

    def join(self, arrays: Iterator[Any], rows: Sequence[RowMask]) -> Any:
        if self.batch is None:
            return PerReplica(next(arrays))
        batch = rows[self.batch]
        return PerReplica(next(arrays), None if self.each is None else batch.repeated(self.each), batch)


class _Mirrored(NamedTuple):
    tree: Any

    def join(self, arrays: Iterator[Any], rows: Sequence[RowMask]) -> Any:
        return Mirrored(self.tree.unflatten([next(arrays) for _ in range(self.tree.num_leaves)]))


@dataclass(frozen=True)
class _Static:
    kind: type
    key: Hashable
    value: Any = field(compare=False)

    def join(self, arrays: Iterator[Any], rows: Sequence[RowMask]) -> Any:
        return self.value


class Structure(NamedTuple):
    """A nest without its arrays; hashable.

    Args:
      tree: the nest.
      leaves: how each of its leaves is made.
    """

    tree: Any
    leaves: tuple[Any, ...]

    def join(self, arrays: Sequence[Any], rows: Sequence[RowMask]) -> Any:
        """Returns the nest with these arrays and row masks."""
        given = iter(arrays)
        return self.tree.unflatten([leaf.join(given, rows) for leaf in self.leaves])


class Parts(NamedTuple):
    """A nest taken apart.

    Args:
      structure: the nest without its arrays.
      arrays: its arrays, in order.
      sharded: for each array, whether its leading dim is the replica.
      rows: the row masks of its per-replica leaves; leaves of one batch share one.
    """

    structure: Structure
    arrays: list[Any]
    sharded: list[bool]
    rows: list[RowMask]


def is_array(leaf: Any) -> bool:
    """Whether `leaf` is an array that jax understands: no array of strings, dates or objects, and no single bool."""
    if isinstance(leaf, (np.ndarray, np.generic)):
        return leaf.dtype.kind not in "OSUMm" and not isinstance(leaf, np.bool_)
    return isinstance(leaf, jax.Array)


def is_number(leaf: Any) -> bool:
    """Whether `leaf` is an array or a number, which enter a program."""
    return is_array(leaf) or (isinstance(leaf, (int, float, complex)) and not isinstance(leaf, bool))


def take_apart(nest: Any, is_array: Callable[[Any], bool], rows: Sequence[RowMask] = ()) -> Parts:
    """Takes a nest apart.

    Args:
      nest: a pytree in which distributed values are leaves.
      is_array: whether a leaf that is not distributed enters the program.
      rows: row masks that are known already, so that their numbers stay the same.
    """
    leaves, tree = flatten(nest)
    kinds: list[Any] = []
    arrays: list[Any] = []
    sharded: list[bool] = []
    known = list(rows)
    # One loop without calls for what there is most of: arguments are taken apart at every step.
    for leaf in leaves:
        if isinstance(leaf, PerReplica):
            arrays.append(leaf.data)
            sharded.append(True)
            kinds.append(_UNPADDED if leaf.batch is None else _padded(leaf.rows, leaf.batch, known))
        elif isinstance(leaf, Mirrored):
            values, own = jax.tree.flatten(leaf.value)
            arrays += values
            sharded += [False] * len(values)
            kinds.append(_Mirrored(own))
        elif isinstance(leaf, jax.Array) or is_array(leaf):
            arrays.append(leaf)
            sharded.append(False)
            kinds.append(_ARRAY)
        else:
            kinds.append(_static(leaf))
    return Parts(Structure(tree, tuple(kinds)), arrays, sharded, known)


_ARRAY, _UNPADDED = _Array(), _PerReplica(None, None)


def _padded(rows: RowMask | None, batch: RowMask, known: list[RowMask]) -> _PerReplica:
    return _PerReplica(None if rows is None else rows.each, _row_number(batch, known))


def _static(leaf: Any) -> _Static:
    try:
        hash(leaf)
    except TypeError:
        return _Static(type(leaf), id(leaf), leaf)
    return _Static(type(leaf), leaf, leaf)


def _row_number(rows: RowMask, known: list[RowMask]) -> int:
    for number, other in enumerate(known):
        if other is rows:
            return number
    known.append(rows)
    return len(known) - 1
