# SPDX-License-Identifier: Apache-2.0
"""Splits nests of arguments and results into arrays, which enter a program, and the rest, which selects the program."""

import copy
import gc
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any, NamedTuple, TypeVar

import jax
import keras
import numpy as np

from phalanx._src.mesh.arrays import as_number, copied, map_named, require_live
from phalanx._src.mesh.values import ComponentSizes, Mirrored, PerReplica, flatten, is_distributed, map_leaves
from phalanx._src.runtime.settings import settings
from phalanx.errors import InputError, TraceError, VariableError, shown
from phalanx.typing import PyTree

T = TypeVar("T")


class AbstractStream:
    """An argument, such as an iterator, that each call passes to the function and that does not select the program."""


class _Array(NamedTuple):
    """A leaf that is an array. The `join` of each kind of leaf rebuilds the leaf from the next arrays."""

    def join(self, arrays: Iterator[Any], streams: Sequence[AbstractStream]) -> PyTree:
        return next(arrays)


class _PerReplica(NamedTuple):
    """A leaf that is a `PerReplica`.

    Args:
      rows: the sizes of its components. None if they are equal.
      batch: the sizes of the components of its batch. None if they are equal.
    """

    rows: ComponentSizes | None
    batch: ComponentSizes | None

    def join(self, arrays: Iterator[Any], streams: Sequence[AbstractStream]) -> PyTree:
        return PerReplica(next(arrays), self.rows, self.batch)


@dataclass(frozen=True)
class _Mirrored:
    """A leaf that is a `Mirrored`, whose value has the structure `content`.

    No tuple, because tuples of different classes compare their items, and a structure of JAX refuses to be compared with others.
    """

    content: "Structure"

    def join(self, arrays: Iterator[Any], streams: Sequence[AbstractStream]) -> PyTree:
        return Mirrored(self.content.join(arrays, streams))


class _Stream(NamedTuple):
    """A leaf that is a stream. `number` tells two streams apart, and recognizes one that is passed twice."""

    kind: type
    number: int

    def join(self, arrays: Iterator[Any], streams: Sequence[AbstractStream]) -> PyTree:
        return streams[self.number]


@dataclass(frozen=True)
class _Static:
    """A leaf that selects the program, because it is neither an array nor a stream.

    Args:
      kind: type of the leaf. Without it, `True` and `1` would select the same program.
      key: the leaf, or its id if it is not hashable.
      value: the leaf.
    """

    kind: type
    key: Hashable
    value: Any = field(compare=False)

    def join(self, arrays: Iterator[Any], streams: Sequence[AbstractStream]) -> PyTree:
        return self.value


@jax.tree_util.register_static
class Structure(NamedTuple):
    """A nest without its arrays. It is hashable, and a pytree without leaves, so that a traced function can return it.

    Args:
      tree: structure of the nest.
      leaves: kind of each leaf.
    """

    tree: PyTree
    leaves: tuple[Any, ...]

    def static_leaves(self) -> Iterator[_Static]:
        """Returns the leaves that select the program."""
        for leaf in self.leaves:
            if isinstance(leaf, _Static):
                yield leaf
            elif isinstance(leaf, _Mirrored):
                yield from leaf.content.static_leaves()

    def join(self, arrays: Iterable[Any], streams: Sequence[AbstractStream] = ()) -> PyTree:
        """Returns the nest with these arrays and streams."""
        if not self.leaves:
            return self.tree.unflatten(())
        remaining = iter(arrays)
        return self.tree.unflatten([leaf.join(remaining, streams) for leaf in self.leaves])


class Parts:
    """A nest, split into its structure, arrays and streams.

    Args:
      nest: pytree. Distributed values are leaves.
      as_array: function of a leaf that is neither a distributed value nor a JAX array. It returns the array that enters the
        program, or None if the leaf selects the program.
      streams: streams with known numbers. Any other stream is then a static leaf. None means that all streams are new.

    Attributes:
      structure: the nest without its arrays.
      arrays: its arrays, in order.
      sharded: per array, whether its leading dim is the replica.
      streams: its streams, each once.
    """

    __slots__ = ("arrays", "sharded", "streams", "structure")
    structure: Structure
    arrays: list[Any]
    sharded: list[bool]
    streams: list[AbstractStream]

    def __init__(
        self,
        nest: PyTree,
        as_array: Callable[[Any], Any] = lambda leaf: None,
        streams: Sequence[AbstractStream] | None = None,
    ) -> None:
        leaves, tree = flatten(nest)
        kinds: list[Any] = []
        arrays: list[Any] = []
        sharded: list[bool] = []
        all_streams = list(streams or ())
        # Arguments are split at every step, so the common kinds of leaves are handled in this loop, without function calls.
        for leaf in leaves:
            if isinstance(leaf, PerReplica):
                arrays.append(leaf.data)
                sharded.append(True)
                kinds.append(_EQUAL if leaf.batch is None else _PerReplica(leaf.rows, leaf.batch))
            elif isinstance(leaf, Mirrored):
                content = Parts(leaf.value, as_array, all_streams)
                arrays += content.arrays
                sharded += content.sharded
                kinds.append(_Mirrored(content.structure))
            elif isinstance(leaf, jax.Array):
                arrays.append(leaf)
                sharded.append(False)
                kinds.append(_ARRAY)
            elif isinstance(leaf, AbstractStream) and (streams is None or any(leaf is s for s in streams)):
                kinds.append(_Stream(type(leaf), add_once(leaf, all_streams)))
            elif (array := as_array(leaf)) is not None:
                arrays.append(array)
                sharded.append(False)
                kinds.append(_ARRAY)
            else:
                kinds.append(_static(leaf))
        self.structure = Structure(tree, tuple(kinds))
        self.arrays, self.sharded, self.streams = arrays, sharded, all_streams


class Arguments(Parts):
    """The arguments of one call. Numbers and arrays of any library enter the program.

    NumPy arrays are copied, because the program may read them after the call has returned, when the user may write into them.

    Args:
      args: positional arguments.
      kwargs: keyword arguments.

    Attributes:
      key: structure, shapes and dtypes of the arguments, which select the program.

    Raises:
      InputError: JAX cannot represent an argument. The error names the argument.
    """

    __slots__ = ("key",)

    def __init__(self, args: PyTree, kwargs: PyTree) -> None:
        try:
            super().__init__((args, kwargs), _as_argument)
        except InputError:
            # The fast path does not know the name of the leaf. This slow one raises an error that has it.
            for nest, name in ((args, "args"), (kwargs, "kwargs")):
                map_named(as_number, nest, name, is_leaf=is_distributed)
            raise
        if settings.convert is not None:
            self._convert()
        self.key: Hashable = (self.structure, tuple(map(_spec, self.arrays)))

    def converted(self) -> "Arguments":
        """Returns these arguments as programs take them under the present `settings.convert`."""
        other = copy.copy(self)
        other._convert()
        return other

    def _convert(self) -> None:
        if (convert := settings.convert) is not None:
            pairs = zip(self.arrays, self.sharded, strict=True)
            self.arrays = [convert(x) if is_sharded else x for x, is_sharded in pairs]


def require_alive(args: PyTree, kwargs: PyTree) -> None:
    """Raises if an argument is a deleted array. Call it after a program has failed; a check before each step takes too long.

    Raises:
      InputError: an argument is a deleted array. The error names the argument.
    """
    for nest, name in ((args, "args"), (kwargs, "kwargs")):
        map_named(as_number, nest, name)


def with_values(result: PyTree, value_of: Callable[[keras.Variable], PyTree] = lambda v: v.value) -> PyTree:
    """Replaces the variables in the result of a step by their present values, because later steps change the variables.

    Those that the strategy updates after the step stay, and are replaced when it has ended.
    """

    def fixed(leaf: PyTree) -> PyTree:
        if isinstance(leaf, keras.Variable):
            try:
                return value_of(leaf)
            except VariableError:  # The strategy updates it after the step.
                return leaf
        return Mirrored(with_values(leaf.value)) if isinstance(leaf, Mirrored) else leaf

    return map_leaves(fixed, result)


def require_returnable(results: Parts) -> None:
    """Checks that a program can return the results of a step. Call it while the step is traced.

    Raises:
      InputError: a result is a deleted array.
      TraceError: a result is a `PerReplica` of Python objects, or an object that is not a pytree and holds arrays of the step.
    """
    for leaf in results.structure.static_leaves():
        if any(isinstance(x, jax.core.Tracer) for x in _content(leaf.value)):
            raise TraceError(
                f"a step returned {shown(leaf.value)}",
                "the object holds arrays that have no numbers yet, because JAX does not see them there.",
                f"return the arrays in a dict, a tuple or a NamedTuple; or jax.tree_util.register_dataclass({leaf.kind.__name__})",
            )
    for array in results.arrays:
        if isinstance(array, tuple):
            raise TraceError(
                f"a step returned PerReplica({shown(array)})",
                "its components are Python objects, but a program can return only arrays.",
                "return arrays, and create the objects from them outside the step",
            )
        as_number(array, "the result of a step")


def _content(value: object) -> list[object]:
    """Returns the objects that a container or an object holds, directly or in a dict, list or tuple of it."""
    # The trace restores the array of a variable when it ends, and a function refers to all globals of its module.
    if isinstance(value, (keras.Variable, type, FunctionType, ModuleType)):
        return []
    content = gc.get_referents(value)
    return content + gc.get_referents(*(x for x in content if isinstance(x, (dict, list, tuple))))


def _as_argument(leaf: Any) -> Any:
    """Returns the array or number that enters the program for a leaf. None if the leaf selects the program."""
    # The common types come first, without further calls, because this runs per leaf and step.
    kind = type(leaf)
    if kind in _NARROW_SCALARS or (kind is float and -_FITS < leaf < _FITS):
        return leaf
    if kind is np.ndarray and leaf.dtype in _NARROW:
        return copied(leaf)
    return copied(as_number(leaf))


_FITS = 2.0**31
_NARROW_SCALARS = frozenset((np.float32, np.float16, np.int32, np.int16, np.int8, np.uint8))
_NARROW = frozenset(map(np.dtype, _NARROW_SCALARS))
"""Types whose values all fit into JAX arrays without 64-bit types, so they need no check."""
_ARRAY, _EQUAL = _Array(), _PerReplica(None, None)


def _static(leaf: Any) -> _Static:
    """Returns the kind of a leaf that selects the program."""
    if isinstance(leaf, (set, bytearray)):  # They may change, and have no hash.
        items = frozenset((type(x), x) for x in leaf) if isinstance(leaf, set) else bytes(leaf)
        return _Static(type(leaf), items, leaf)
    try:
        hash(leaf)
    except Exception:  # Whatever a class of a user raises.
        # `value` keeps the object alive, so no other object can get its id while the program is cached.
        return _Static(type(leaf), id(leaf), leaf)
    return _Static(type(leaf), leaf, leaf)


def add_once(item: T, items: list[T]) -> int:
    """Appends an item to a list unless the list has it, compared by identity. Returns its index."""
    for number, other in enumerate(items):
        if other is item:
            return number
    items.append(item)
    return len(items) - 1


def refuse_outer_trace() -> TraceError:
    """Returns the error for a program that is called while JAX traces another function."""
    return TraceError(
        "a phalanx program was called on traced values",
        "the call is inside jax.jit or another JAX transformation, which cannot see the variables of the program.",
        "@phalanx.function instead of @jax.jit",
    )


def _spec(array: Any) -> Hashable:
    """Returns the properties of an array that select the program."""
    if isinstance(array, jax.core.Tracer):
        require_live(array)
        raise refuse_outer_trace()
    if isinstance(array, tuple):
        raise TraceError(
            f"PerReplica({shown(array)}) was passed to a step",
            "its components are Python objects, but all replicas run the same program.",
            "pass arrays, and let the replica function choose by replica_id_in_sync_group",
        )
    if isinstance(array, jax.Array):
        # Arrays of typed random keys have no `weak_type`: https://jax.readthedocs.io/en/latest/jep/9263-typed-keys.html
        return (array.shape, array.dtype, getattr(array, "weak_type", False))
    if isinstance(array, (np.ndarray, np.generic)):
        return (array.shape, array.dtype)
    # A Python number: it is an input with a weak type, so its value does not select the program.
    return type(array).__name__
