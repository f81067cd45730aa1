# SPDX-License-Identifier: Apache-2.0
"""Nests of arguments and results, taken apart into arrays, which enter a program, and the rest, which selects it."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.tree_util import tree_flatten

from phalanx.errors import InputError, TraceError, shown
from phalanx.mesh.arrays import as_number, copied, map_named
from phalanx.mesh.values import Mirrored, PerReplica, RowMask, is_distributed
from phalanx.typing import PyTree

T = TypeVar("T")


class AbstractStream:
    """An argument that a program gets anew at each call, and that does not select the program."""


class _Array(NamedTuple):
    def join(self, arrays: Iterator[Any], rows: Sequence[RowMask], streams: Sequence[AbstractStream]) -> PyTree:
        return next(arrays)


class _PerReplica(NamedTuple):
    each: int | None
    batch: int | None

    def join(self, arrays: Iterator[Any], rows: Sequence[RowMask], streams: Sequence[AbstractStream]) -> PyTree:
        if self.batch is None:
            return PerReplica(next(arrays))
        batch = rows[self.batch]
        return PerReplica(next(arrays), None if self.each is None else batch.repeated(self.each), batch)


class _Mirrored(NamedTuple):
    tree: PyTree

    def join(self, arrays: Iterator[Any], rows: Sequence[RowMask], streams: Sequence[AbstractStream]) -> PyTree:
        return Mirrored(self.tree.unflatten([next(arrays) for _ in range(self.tree.num_leaves)]))


class _Stream(NamedTuple):
    kind: type
    number: int

    def join(self, arrays: Iterator[Any], rows: Sequence[RowMask], streams: Sequence[AbstractStream]) -> PyTree:
        return streams[self.number]


@dataclass(frozen=True)
class _Static:
    kind: type
    key: Hashable
    value: Any = field(compare=False)

    def join(self, arrays: Iterator[Any], rows: Sequence[RowMask], streams: Sequence[AbstractStream]) -> PyTree:
        return self.value


@jax.tree_util.register_static
class Structure(NamedTuple):
    """A nest without its arrays; hashable. A pytree without leaves, so that a traced function can return it.

    Args:
      tree: the nest.
      leaves: how each of its leaves is made.
    """

    tree: PyTree
    leaves: tuple[Any, ...]

    def join(self, arrays: Sequence[Any], rows: Sequence[RowMask], streams: Sequence[AbstractStream] = ()) -> PyTree:
        """Returns the nest with these arrays, row masks and streams."""
        if not self.leaves:
            return self.tree.unflatten(())
        given = iter(arrays)
        return self.tree.unflatten([leaf.join(given, rows, streams) for leaf in self.leaves])


class Parts:
    """A nest taken apart.

    Args:
      nest: a pytree in which distributed values are leaves.
      as_array: returns what enters the program for a leaf that is neither distributed nor an array of JAX; None for a leaf
        that selects the program.
      rows: row masks that are known already, so that their numbers stay the same.
      streams: likewise; others are then Python objects like all others. None if none are known.

    Attributes:
      structure: the nest without its arrays.
      arrays: its arrays, in order.
      sharded: for each array, whether its leading dim is the replica.
      rows: the row masks of its per-replica leaves; leaves of one batch share one.
      streams: its streams, each once.
    """

    __slots__ = ("arrays", "rows", "sharded", "streams", "structure")

    def __init__(
        self,
        nest: PyTree,
        as_array: Callable[[Any], Any] = lambda leaf: None,
        rows: Sequence[RowMask] = (),
        streams: Sequence[AbstractStream] | None = None,
    ) -> None:
        leaves, tree = tree_flatten(nest, is_distributed)
        kinds: list[Any] = []
        arrays: list[Any] = []
        sharded: list[bool] = []
        known, known_streams = list(rows), list(streams or ())
        # One loop without calls for what there is most of: arguments are taken apart at every step.
        for leaf in leaves:
            if isinstance(leaf, PerReplica):
                arrays.append(leaf.data)
                sharded.append(True)
                kinds.append(_UNPADDED if leaf.batch is None else _padded(leaf.rows, leaf.batch, known))
            elif isinstance(leaf, Mirrored):
                values, own = tree_flatten(leaf.value)
                arrays += [x if (array := as_array(x)) is None else array for x in values]
                sharded += [False] * len(values)
                kinds.append(_Mirrored(own))
            elif isinstance(leaf, jax.Array):
                arrays.append(leaf)
                sharded.append(False)
                kinds.append(_ARRAY)
            elif isinstance(leaf, AbstractStream) and (streams is None or any(leaf is s for s in streams)):
                kinds.append(_Stream(type(leaf), _number(leaf, known_streams)))
            elif (array := as_array(leaf)) is not None:
                arrays.append(array)
                sharded.append(False)
                kinds.append(_ARRAY)
            else:
                kinds.append(_static(leaf))
        self.structure = Structure(tree, tuple(kinds))
        self.arrays, self.sharded, self.rows, self.streams = arrays, sharded, known, known_streams


class Arguments(Parts):
    """The arguments of one call. Arrays of every library and numbers enter the program; nobody can change them later.

    Args:
      args: positional arguments.
      kwargs: keyword arguments.

    Attributes:
      key: what about them selects the program.

    Raises:
      InputError: an argument is no array that JAX can hold; the error says which.
    """

    __slots__ = ("key",)

    def __init__(self, args: PyTree, kwargs: PyTree) -> None:
        try:
            super().__init__((args, kwargs), _as_argument)
        except InputError:
            for nest, name in ((args, "args"), (kwargs, "kwargs")):
                map_named(as_number, nest, name, is_leaf=is_distributed)
            raise
        for rows in self.rows:
            self.arrays += (rows.mask, np.int32(rows.count))
            self.sharded += (True, False)
        self.key: Hashable = (self.structure, len(self.rows), tuple(map(_spec, self.arrays)))

    @staticmethod
    def rebuild(
        structure: Structure, num_rows: int, arrays: Sequence[Any], streams: Sequence[AbstractStream] = ()
    ) -> tuple[Any, Any, list[RowMask]]:
        """Returns `(args, kwargs, row masks)` with these arrays and streams."""
        split = len(arrays) - 2 * num_rows
        rows = [RowMask(*arrays[i : i + 2]) for i in range(split, len(arrays), 2)]
        return (*structure.join(arrays[:split], rows, streams), rows)


def require_alive(args: PyTree, kwargs: PyTree) -> None:
    """Raises if an argument was deleted. Asked when a program has failed, for each step's arguments are too many to ask.

    Raises:
      InputError: it was; the error says which.
    """
    for nest, name in ((args, "args"), (kwargs, "kwargs")):
        map_named(as_number, nest, name)


def require_returnable(arrays: Sequence[Any]) -> None:
    """Raises for what a step returned and no program can return. While it is traced.

    Raises:
      InputError: a deleted array.
      TraceError: a `PerReplica` of Python objects.
    """
    for array in arrays:
        if isinstance(array, tuple):
            raise TraceError(
                f"a step that returns PerReplica({shown(array)})",
                "its components are Python objects, and a program returns arrays.",
                "return arrays, and make the objects of them outside the step",
            )
        as_number(array, "the result of a step")


def _as_argument(leaf: Any) -> Any:
    # What is common without further calls, for a step has few to spare.
    kind = type(leaf)
    if kind in _NARROW_SCALARS or (kind is float and -_FITS < leaf < _FITS):
        return leaf
    if kind is np.ndarray and leaf.dtype in _NARROW:
        return copied(leaf)
    return copied(as_number(leaf))


_FITS = 2.0**31
_NARROW_SCALARS = frozenset((np.float32, np.float16, np.int32, np.int16, np.int8, np.uint8))
_NARROW = frozenset(map(np.dtype, _NARROW_SCALARS))
"""Whose values fit into the arrays of JAX, whatever they are."""
_ARRAY, _UNPADDED = _Array(), _PerReplica(None, None)


def _padded(rows: RowMask | None, batch: RowMask, known: list[RowMask]) -> _PerReplica:
    return _PerReplica(None if rows is None else rows.each, _number(batch, known))


def _static(leaf: Any) -> _Static:
    try:
        hash(leaf)
    except TypeError:
        return _Static(type(leaf), id(leaf), leaf)
    return _Static(type(leaf), leaf, leaf)


def _number(item: T, known: list[T]) -> int:
    """Returns the place of an item in a list, by identity; a new one is appended."""
    for number, other in enumerate(known):
        if other is item:
            return number
    known.append(item)
    return len(known) - 1


def refuse_outer_trace() -> TraceError:
    """Returns the error for a program that is called while JAX traces another function."""
    return TraceError(
        "a phalanx program called on traced values",
        "it is inside jax.jit or another transformation of jax, which knows nothing of its variables.",
        "@phalanx.function instead of @jax.jit",
    )


def _spec(array: Any) -> Hashable:
    """What about an array selects the program."""
    if isinstance(array, jax.core.Tracer):
        raise refuse_outer_trace()
    if isinstance(array, tuple):
        raise TraceError(
            f"an argument PerReplica({shown(array)})",
            "its components are Python objects, and all replicas run one program.",
            "pass arrays, and let the replica function choose by replica_id_in_sync_group",
        )
    if isinstance(array, jax.Array):
        # Arrays of random keys have no weak types.
        return (array.shape, array.dtype, getattr(array, "weak_type", False))
    if isinstance(array, (np.ndarray, np.generic)):
        return (array.shape, array.dtype)
    return type(array).__name__
