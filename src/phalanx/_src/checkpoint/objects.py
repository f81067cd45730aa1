# SPDX-License-Identifier: Apache-2.0
"""The objects of a checkpoint: which parts they consist of, and how each part is saved and restored.

The path of a part depends only on the program that creates the objects: on arguments of `Checkpoint`, on attributes, on positions,
and on the names that layers give their own variables. It depends neither on the strategy nor on names that Keras generates.
"""

import copy
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, final

import jax
import jax.numpy as jnp
import numpy as np
from typing_extensions import override

from phalanx._src import compat
from phalanx._src.checkpoint import text
from phalanx._src.checkpoint.store import CheckpointFile
from phalanx._src.compat import Variable
from phalanx._src.mesh.topology import Topology
from phalanx._src.programs.slots import components_of
from phalanx._src.programs.values import keep_components, to_host
from phalanx._src.tracing.policy import policy_of
from phalanx.errors import CheckpointError
from phalanx.typing import PyTree

REPLICAS = "@replicas"
"""Suffix of the array with the replicas' own values of an on-read variable."""


class Snapshot:
    """What a checkpoint contains, copied to this process."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.arrays: dict[str, np.ndarray] = {}
        self.values: dict[str, Any] = {}
        self.names: dict[str, str] = {}
        self.aliases: dict[str, str] = {}
        self.models: dict[str, str] = {}

    def put(self, path: str, array: Any) -> str:
        """Stores a copy of an array as `path`. With several workers, all must call it, and the chief keeps the copy."""
        host = to_host(array, self.topology)
        if self.topology.is_chief:
            self.arrays[path] = host
        return path

    def notes(self) -> dict[str, Any]:
        """Returns everything but the arrays."""
        return {"values": self.values, "names": self.names, "aliases": self.aliases, "models": self.models}


class Part(ABC):
    """A part of a checkpoint that has a value.

    Attributes:
      changes: the object that `restore` changes in place. None if it returns another one.
    """

    changes: Any = None

    @abstractmethod
    def save(self, path: str, snapshot: Snapshot) -> None:
        """Copies the value into a snapshot.

        Raises:
          TypeError: the value cannot be saved.
        """

    @abstractmethod
    def find(self, path: str, stored: CheckpointFile) -> set[str]:
        """Returns the names in a checkpoint that `restore` reads; empty if the checkpoint does not contain this part.

        Raises:
          ValueError: the checkpoint contains another kind of value, or another shape.
        """

    @abstractmethod
    def restore(self, path: str, stored: CheckpointFile) -> tuple[bool, Any]:
        """Returns whether the value has been restored, and the object to use from now on. Called only if `find` found something."""


@final
class VariablePart(Part):
    """A Keras variable."""

    def __init__(self, variable: Variable) -> None:
        self.variable = self.changes = variable

    @override
    def save(self, path: str, snapshot: Snapshot) -> None:
        variable, parts = self.variable, components_of(self.variable)
        snapshot.names[path] = variable.path
        if parts is not None and parts.shape[0] > 1:
            snapshot.put(path + REPLICAS, parts)
        # Reading `value` fetches it from parameter servers, and combines what is combined only on demand.
        value = compat.raw_value(variable)
        snapshot.put(path, variable.value if value is None else value)

    @override
    def find(self, path: str, stored: CheckpointFile) -> set[str]:
        if path not in stored.names:
            return set()
        (shape, dtype), variable_dtype = stored.spec(path), np.dtype(compat.dtype_of(self.variable))
        if shape != tuple(self.variable.shape):
            raise ValueError(
                f"{self.variable.path!r} has the shape {tuple(self.variable.shape)}, and {shape} in the checkpoint"
            )
        if _kind(dtype) > _kind(variable_dtype):
            raise ValueError(f"{self.variable.path!r} has the dtype {variable_dtype}, and {dtype} in the checkpoint")
        return {path, path + REPLICAS} & stored.names

    @override
    def restore(self, path: str, stored: CheckpointFile) -> tuple[bool, Any]:
        value = stored.array(path).astype(compat.dtype_of(self.variable), copy=False)
        done = compat.set_first_value(self.variable, value)
        if done and path + REPLICAS in stored.names and policy_of(self.variable).on_read:
            keep_components(self.variable, stored.array(path + REPLICAS))
        return done, self.variable


@final
class ArrayPart(Part):
    """An array of NumPy or JAX, or random keys of JAX. A NumPy array is restored in place."""

    def __init__(self, array: Any) -> None:
        self.array = array
        self.changes = array if isinstance(array, np.ndarray) and array.flags.writeable else None

    @override
    def save(self, path: str, snapshot: Snapshot) -> None:
        encoded = text.encode_array(self.array, functools.partial(snapshot.put, path))
        if set(encoded) != {"__array__"}:
            snapshot.values[path] = encoded

    @override
    def find(self, path: str, stored: CheckpointFile) -> set[str]:
        if path not in stored.names:
            return set()
        if path not in stored.notes["values"] and stored.spec(path)[0] != tuple(np.shape(self.array)):
            raise ValueError(
                f"the array has the shape {np.shape(self.array)}, and {stored.spec(path)[0]} in the checkpoint"
            )
        return {path, *({path} & set(stored.notes["values"]))}

    @override
    def restore(self, path: str, stored: CheckpointFile) -> tuple[bool, Any]:
        array, value = self.array, text.decode(stored.notes["values"].get(path), stored.array)
        value = stored.array(path) if value is None else value
        if isinstance(array, jax.Array):
            return True, jax.device_put(value, array.sharding) if isinstance(value, jax.Array) else jax.device_put(
                value.astype(array.dtype), array.sharding
            )
        if self.changes is not None:
            array[...] = value
            return True, array
        return True, array.dtype.type(value) if isinstance(array, np.generic) else value


@final
class PlainPart(Part):
    """Numbers, text, and containers of these. Lists and dicts are restored in place, whatever their current length."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.changes = value if isinstance(value, (list, dict)) else None

    @override
    def save(self, path: str, snapshot: Snapshot) -> None:
        snapshot.values[path] = text.encode(self.value)

    @override
    def find(self, path: str, stored: CheckpointFile) -> set[str]:
        return {path} & set(stored.notes["values"])

    @override
    def restore(self, path: str, stored: CheckpointFile) -> tuple[bool, Any]:
        value = text.decode(stored.notes["values"][path], stored.array)
        if isinstance(self.value, list) and isinstance(value, list):
            self.value[:] = value
            return True, self.value
        if isinstance(self.value, dict) and isinstance(value, dict):
            self.value.clear()
            self.value.update(value)
            return True, self.value
        return True, value


@final
class StatePart(Part):
    """An object with `get_state` and `set_state`, such as an iterator. The state may contain arrays."""

    def __init__(self, get: Callable[[], Any], set_: Callable[[Any], object], owner: object) -> None:
        self._get, self._set, self.changes = get, set_, owner

    @override
    def save(self, path: str, snapshot: Snapshot) -> None:
        count = iter(range(1 << 30))
        snapshot.values[path] = text.encode(self._get(), lambda array: snapshot.put(f"{path}#{next(count)}", array))

    @override
    def find(self, path: str, stored: CheckpointFile) -> set[str]:
        values = stored.notes["values"]
        return {path} | text.references(values[path]) if path in values else set()

    @override
    def restore(self, path: str, stored: CheckpointFile) -> tuple[bool, Any]:
        self._set(text.decode(stored.notes["values"][path], stored.array))
        return True, self.changes


def _kind(dtype: np.dtype) -> int:
    """Returns a number that is larger for dtypes whose values do not fit into others."""
    kinds = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)
    return next((i for i, kind in enumerate(kinds) if jnp.issubdtype(dtype, kind)), len(kinds))


def part_of(value: object) -> Part | None:
    """Returns how a value is saved; None if it is not one value, or cannot be saved."""
    if isinstance(value, Variable):
        return VariablePart(value)
    if text.is_array(value):
        return ArrayPart(value)
    if isinstance(value, np.random.Generator):
        source = value.bit_generator
        return StatePart(lambda: source.state, lambda state: setattr(source, "state", state), value)
    if isinstance(value, np.random.RandomState):
        return StatePart(lambda: value.get_state(legacy=False), value.set_state, value)
    get, set_ = getattr(value, "get_state", None), getattr(value, "set_state", None)
    if callable(get) and callable(set_) and not isinstance(value, type):
        return StatePart(get, set_, value)
    return PlainPart(value) if text.is_plain(value) else None


class Flat(NamedTuple):
    """A value flattened into what is saved on its own.

    Args:
      items: the path of each item within the value, and the item.
      join: returns the value from its items. Lists and dicts are changed in place, unless they were met before.
    """

    items: list[tuple[str, Any]]
    join: Callable[[list[Any]], Any]


def flatten(value: PyTree, met: set[int]) -> Flat:
    """Flattens lists, tuples, dicts and registered pytrees. Containers of plain values stay whole.

    Args:
      value: the value.
      met: ids of the containers that were flattened before. One that was met gets a copy for its new items: in the program that
        saved them, they may have become two, as the average of the weights that begins as the weights.
    """
    children = None if text.is_plain(value) else _children(value, met)
    if children is None:
        return Flat([("", value)], lambda items: items[0])
    names, values, join = children
    parts = [flatten(v, met) for v in values]

    def joined(items: list[Any]) -> Any:
        rest = iter(items)
        return join([part.join([next(rest) for _ in part.items]) for part in parts])

    items = [(under(name, inner), item) for name, part in zip(names, parts, strict=True) for inner, item in part.items]
    return Flat(items, joined)


_Children = tuple[list[str], list[Any], Callable[[list[Any]], Any]]


def _children(value: Any, met: set[int]) -> _Children | None:
    """Returns names and values of the children of a container, and a function that replaces the children."""
    if isinstance(value, (dict, list)):
        container: Any = copy.copy(value) if id(value) in met else value
        met.add(id(value))
    if isinstance(value, dict):

        def fill_dict(items: list[Any]) -> Any:
            container.update(zip(list(container), items, strict=True))
            return container

        return [quoted(k) for k in value], list(value.values()), fill_dict
    if isinstance(value, list):

        def fill_list(items: list[Any]) -> Any:
            container[:] = items
            return container

        return [str(i) for i in range(len(value))], list(value), fill_list
    if isinstance(value, tuple):
        fields = getattr(value, "_fields", None)
        make = None if fields is None else type(value)
        return (
            list(fields or map(str, range(len(value)))),
            list(value),
            lambda items: make(*items) if make else tuple(items),
        )
    is_leaf = (
        isinstance(value, (Variable, *compat.OWNERS)) or part_of(value) is not None or jax.tree_util.all_leaves([value])
    )
    if is_leaf:
        return None
    pairs, structure = jax.tree_util.tree_flatten_with_path(value, is_leaf=lambda x: x is not value)
    names = [quoted(jax.tree_util.keystr(path, simple=True)) for path, _ in pairs]
    return names, [child for _, child in pairs], functools.partial(jax.tree.unflatten, structure)


def parts_of(owner: Any) -> Iterator[tuple[str, Any]]:
    """Yields the paths and objects of the variables of a Keras object, and of the Keras objects inside it."""
    variables = compat.own_variables(owner)
    used: dict[str, int] = {}
    for i, variable in enumerate(variables):
        # The names of an optimizer's slots contain names that Keras generates.
        name = f"variables/{i}" if isinstance(owner, compat.BaseOptimizer) else quoted(variable.name)
        used[name] = used.get(name, 0) + 1
        yield (name if used[name] == 1 else f"{name}_{used[name] - 1}"), variable
    ids = set(map(id, variables))
    for name, value in compat.parts_of(owner):
        for path, child in flatten_owners(name, value):
            if id(child) not in ids:
                yield path, child


def flatten_owners(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yields the Keras objects and variables in nested lists, tuples and dicts."""
    if isinstance(value, (Variable, *compat.OWNERS)):
        yield name, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from flatten_owners(under(name, quoted(key)), item)
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from flatten_owners(under(name, str(i)), item)


def quoted(name: object) -> str:
    """Returns a name as one step of a path."""
    return str(name).replace("%", "%25").replace("/", "%2F").replace("@", "%40").replace("#", "%23")


def under(path: str, name: str) -> str:
    """Returns the path of the child `name` of what has the path `path`."""
    return "/".join(filter(None, (path, name)))


def refuse_object(path: str, value: object, cause: Exception | None = None) -> CheckpointError:
    """Returns the error for an object that cannot be saved."""
    why = f": {cause}" if cause is not None else ""
    return CheckpointError(
        f"a checkpoint with the object {path!r}",
        f"an object of type {type(value).__name__} cannot be saved{why}.",
        "give it the methods get_state() and set_state(state), or pass the arrays, numbers and Keras objects that it consists of",
    )
