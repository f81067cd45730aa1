# SPDX-License-Identifier: Apache-2.0
"""The parts of a checkpoint that have values: how each kind is saved, compared with a file, and restored."""

import copy
import enum
import functools
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, final

import jax
import jax.numpy as jnp
import keras
import numpy as np
from numpy.typing import DTypeLike
from typing_extensions import override

from phalanx._src import compat
from phalanx._src.checkpoint import text
from phalanx._src.checkpoint.shards import Division, box_of, pieces_here
from phalanx._src.checkpoint.store import CheckpointFile
from phalanx._src.compat import Variable
from phalanx._src.mesh.arrays import put_shards, spans_processes
from phalanx._src.mesh.topology import Topology
from phalanx._src.mesh.values import PerReplica
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
        self.divisions: dict[str, Division] = {}
        self.pieces: dict[str, np.ndarray] = {}
        self.values: dict[str, Any] = {}
        self.names: dict[str, str] = {}
        self.aliases: dict[str, str] = {}
        self.models: dict[str, str] = {}
        self.optimizers: dict[str, str] = {}
        self.accumulation: dict[str, int] = {}
        self.chosen: dict[str, str] = {}
        self.states: list[str] = []
        self.taken: set[str] = set()

    def put(self, path: str, array: Any) -> str:
        """Stores a copy of an array as `path`. The chief keeps it, but of an array that spans processes each one keeps what it has."""
        if spans_processes(array):
            self.divisions[path] = division = Division.of(array)
            self.pieces.update(pieces_here(path, array, division))
            return path
        if self.topology.is_chief:
            self.arrays[path] = to_host(array)
        return path

    def notes(self) -> dict[str, Any]:
        """Returns everything but the arrays."""
        return {
            "values": self.values,
            "names": self.names,
            "aliases": self.aliases,
            "models": self.models,
            "optimizers": self.optimizers,
            "accumulation": self.accumulation,
            "chosen": self.chosen,
            "states": self.states,
            "divided": self.divisions,
        }

    @property
    def ranks(self) -> list[int]:
        """The processes that have pieces of arrays."""
        return sorted(set().union(*(division.ranks for division in self.divisions.values())))


class Part(ABC):
    """A part of a checkpoint that has a value.

    Attributes:
      changes: the object that `put` changes in place. None if it returns another one.
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
        """Returns the names in a checkpoint that `read` reads; empty if the checkpoint does not contain this part.

        Raises:
          ValueError: the checkpoint contains another kind of value, or another shape.
        """

    @abstractmethod
    def read(self, path: str, stored: CheckpointFile) -> Any:
        """Returns the value in a checkpoint as this part has it. Called only if `find` found something.

        Raises:
          ValueError: this part cannot have the value.
        """

    @abstractmethod
    def put(self, value: Any) -> tuple[bool, Any]:
        """Returns whether what `read` returned is the value of this part from now on, and the object to use then."""


class VariablePart(Part):
    """A Keras variable."""

    def __init__(self, variable: Variable) -> None:
        self.variable = self.changes = variable

    @override
    def save(self, path: str, snapshot: Snapshot) -> None:
        variable, parts = self.variable, components_of(self.variable)
        snapshot.names[path] = variable.path
        if parts is not None and parts.shape[0] > 1:  # One replica's own value is the combined one.
            snapshot.put(path + REPLICAS, parts)
        # Reading `value` fetches it from parameter servers, and combines what is combined only on demand.
        value = compat.raw_value(variable)
        snapshot.put(path, variable.value if value is None else value)

    @override
    def find(self, path: str, stored: CheckpointFile) -> set[str]:
        if path not in stored.names:
            if path in stored.notes["values"]:
                raise ValueError(f"{self.variable.path!r} is a variable, and a value of another type in the checkpoint")
            return set()
        (shape, dtype), variable_dtype = stored.spec(path), np.dtype(compat.dtype_of(self.variable))
        if shape != tuple(self.variable.shape):
            raise ValueError(
                f"{self.variable.path!r} has the shape {tuple(self.variable.shape)}, and {shape} in the checkpoint"
            )
        # A dtype of a lower kind is refused whatever the values are. For other dtypes, `read` compares each value.
        if dtype != variable_dtype and _kind(dtype) > _kind(variable_dtype):
            raise ValueError(f"{self.variable.path!r} has the dtype {variable_dtype}, and {dtype} in the checkpoint")
        if _kind(dtype) < _kind(variable_dtype) and f"{path}_scale" in stored.names:
            raise ValueError(
                f"{self.variable.path!r} has the dtype {variable_dtype}, and is quantized in the checkpoint"
            )
        return {path, path + REPLICAS} & stored.names

    @override
    def read(self, path: str, stored: CheckpointFile) -> Any:
        dtype, layout = np.dtype(compat.dtype_of(self.variable)), compat.divided_layout(self.variable)
        if layout is not None:
            return _placed(path, stored, dtype, tuple(self.variable.shape), layout), None
        replicas = stored.array(path + REPLICAS) if path + REPLICAS in stored.names else None
        return exactly(stored.array(path), dtype), None if replicas is None else exactly(replicas, dtype)

    @override
    def put(self, value: Any) -> tuple[bool, Any]:
        whole, replicas = value
        done = compat.set_first_value(self.variable, whole)
        # After the assignment, which discards earlier components. The policy may be another one than in the program that saved.
        if done and replicas is not None and policy_of(self.variable).on_read:
            keep_components(self.variable, replicas)
        return done, self.variable


@final
class ArrayPart(Part):
    """A NumPy or JAX array, or random keys of JAX. A NumPy array is restored in place."""

    def __init__(self, array: Any) -> None:
        self.array = array
        # In place, because the program may hold the array under another name too.
        self.changes = array if isinstance(array, np.ndarray) and array.flags.writeable else None

    @override
    def save(self, path: str, snapshot: Snapshot) -> None:
        encoded = text.encode_array(self.array, functools.partial(snapshot.put, path))
        if set(encoded) != {"__array__"}:  # Random keys, whose kind is a value.
            snapshot.values[path] = encoded

    @override
    def find(self, path: str, stored: CheckpointFile) -> set[str]:
        if path not in stored.names:
            value = stored.notes["values"].get(path)
            is_number = isinstance(value, _NUMBERS) and not np.shape(self.array) and not text.is_key(self.array)
            if path in stored.notes["values"] and not is_number:
                raise ValueError("it is an array, and a value of another type in the checkpoint")
            return {path} & set(stored.notes["values"])
        (shape, dtype), kind = stored.spec(path), text.kind_of_keys(stored.notes["values"].get(path))
        ours = str(jax.random.key_impl(self.array)) if text.is_key(self.array) else None
        if kind != ours:
            raise ValueError(f"it has {_keys(ours)}, and {_keys(kind)} in the checkpoint")
        shape = shape if kind is None else shape[:-1]  # Key data has one dim more than the keys.
        if shape != tuple(np.shape(self.array)):
            raise ValueError(f"the array has the shape {np.shape(self.array)}, and {shape} in the checkpoint")
        if kind is None and _kind(dtype) > _kind(self.array.dtype):
            raise ValueError(f"the array has the dtype {self.array.dtype}, and {dtype} in the checkpoint")
        return {path}

    @override
    def read(self, path: str, stored: CheckpointFile) -> Any:
        if path in stored.notes["values"]:
            value = stored.value(path)
            return value if path in stored.names else _as_result(value, self.array.dtype)  # Of random keys.
        if spans_processes(self.array):
            return _placed(path, stored, self.array.dtype, self.array.shape, self.array.sharding)
        return exactly(stored.array(path), self.array.dtype)

    @override
    def put(self, value: Any) -> tuple[bool, Any]:
        array = self.array
        if isinstance(array, jax.Array):
            return True, put_shards(value, array.sharding)
        if self.changes is not None:
            array[...] = value
            return True, array
        return True, value[()] if isinstance(array, np.generic) else value


def _placed(
    path: str, stored: CheckpointFile, dtype: np.dtype, shape: tuple[int, ...], sharding: jax.sharding.Sharding
) -> jax.Array:
    """Returns an array of which this process reads only its shards.

    Raises:
      ValueError: a value does not fit into the dtype.
    """
    read = lambda index: exactly(stored.part(path, box_of(index, shape)), dtype)  # noqa: E731
    return jax.make_array_from_callback(shape, sharding, read)


def _keys(kind: str | None) -> str:
    return "numbers" if kind is None else f"random keys {kind!r}"


@final
class PlainPart(Part):
    """Numbers, text, and containers of these. Lists and dicts are restored in place, whatever their current length.

    The checkpoint may have an array for a number, and arrays among the items of a list, because a program that saves replaces what
    it began with by results of steps.
    """

    def __init__(self, value: Any) -> None:
        self.value = value
        self.changes = value if isinstance(value, (list, dict)) else None

    @override
    def save(self, path: str, snapshot: Snapshot) -> None:
        snapshot.values[path] = text.encode(self.value)

    @override
    def find(self, path: str, stored: CheckpointFile) -> set[str]:
        if path in stored.notes["states"]:
            raise ValueError(
                f"it is a value of type {type(self.value).__name__}, and the state of an object in the checkpoint"
            )
        if path in stored.notes["values"]:
            if text.kind_of_keys(stored.notes["values"][path]) is not None and self.value is not None:
                raise ValueError(
                    f"it is a value of type {type(self.value).__name__}, and random keys in the checkpoint"
                )
            return {path}
        if path in stored.names:
            is_variable = path in stored.notes["names"]
            if self.value is None:
                return set() if is_variable else {path}  # A variable may take its place.
            if is_variable or not isinstance(self.value, _NUMBERS) or stored.spec(path)[0]:
                what = "a variable" if is_variable else "an array"
                raise ValueError(f"it is a value of type {type(self.value).__name__}, and {what} in the checkpoint")
            return {path}
        return set(self._items(path, stored))

    @override
    def read(self, path: str, stored: CheckpointFile) -> Any:
        if items := self._items(path, stored):
            return [_value_of(item, stored) for item in items]
        return _value_of(path, stored)

    def _items(self, path: str, stored: CheckpointFile) -> list[str]:
        """Returns the names of the items of a list that has arrays in the checkpoint; an empty list for anything else."""
        if not isinstance(self.value, list):
            return []
        below = {name for name in {*stored.names, *stored.notes["values"]} if name.startswith(f"{path}/")}
        items = [f"{path}/{i}" for i in range(len(below))]
        # Variables are restored when they are there.
        return items if below == {*items} and not below & set(stored.notes["names"]) else []

    @override
    def put(self, value: Any) -> tuple[bool, Any]:
        if isinstance(self.value, list) and isinstance(value, list):
            self.value[:] = value
            return True, self.value
        if isinstance(self.value, dict) and isinstance(value, dict):
            self.value.clear()
            self.value.update(value)
            return True, self.value
        return True, type(self.value)(value) if isinstance(self.value, enum.Enum) else value


_NUMBERS = (bool, int, float, complex)


def _as_result(value: PyTree, dtype: np.dtype) -> np.ndarray:
    """Returns a number as an array.

    Raises:
      ValueError: it does not fit into the dtype.
    """
    try:
        return exactly(np.asarray(value), dtype)
    except (OverflowError, TypeError) as e:  # Integers that are longer than those of NumPy.
        raise ValueError(f"the value {value} does not fit into the dtype {dtype}") from e


def _value_of(path: str, stored: CheckpointFile) -> PyTree:
    """Returns a value in a checkpoint, of an array without dims the number."""
    if path in stored.notes["values"]:
        return stored.value(path)
    array = stored.array(path)
    return array if array.ndim else _converted(array, array.dtype if array.dtype.kind != "V" else np.float32).item()


@final
class StatePart(Part):
    """An object with `get_state` and `set_state`, such as an iterator. The state may contain arrays."""

    def __init__(self, get: Callable[[], Any], set_: Callable[[Any], object], owner: object) -> None:
        self._get, self._set, self.changes = get, set_, owner

    @override
    def save(self, path: str, snapshot: Snapshot) -> None:
        count = itertools.count()
        snapshot.states.append(path)
        snapshot.values[path] = text.encode(self._get(), lambda array: snapshot.put(f"{path}#{next(count)}", array))

    @override
    def find(self, path: str, stored: CheckpointFile) -> set[str]:
        values = stored.notes["values"]
        if path not in values:
            return set()
        # The old format does not say which values are states.
        if not (stored.is_old or path in stored.notes["states"]):
            raise ValueError(f"it is an object of type {type(self.changes).__name__}, and a value in the checkpoint")
        return {path, *text.references(values[path])}

    @override
    def read(self, path: str, stored: CheckpointFile) -> Any:
        return stored.value(path)

    @override
    def put(self, value: Any) -> tuple[bool, Any]:
        self._set(value)
        return True, self.changes

    def undo(self) -> Callable[[], object]:
        """Returns a function that puts the present state back."""
        state = copy.deepcopy(self._get())  # `set_state` may change the containers that `get_state` returned.
        return lambda: self._set(state)


def exactly(array: np.ndarray, dtype: np.typing.DTypeLike) -> np.ndarray:
    """Returns an array in another dtype.

    Raises:
      ValueError: a value does not survive it.
    """
    if array.dtype == dtype:
        return array
    with np.errstate(all="ignore"):  # The comparison below reports overflows, by value.
        converted = _converted(array, dtype)
        # Within a kind only: for NumPy, int64 to float64 is safe too, although it loses digits. "V" are dtypes that NumPy lacks.
        if array.dtype.kind == np.dtype(dtype).kind != "V" and np.can_cast(array.dtype, dtype):
            return converted
        for values, others in zip(_pieces(array), _pieces(converted), strict=True):
            differ = (values != others) & ~(np.isnan(values) & np.isnan(others))
            if differ.any():
                i = int(differ.argmax())
                raise ValueError(
                    f"the value {values[i]} of dtype {array.dtype} would become {others[i]} of dtype {np.dtype(dtype)}"
                )
    return converted


_PIECE = 1 << 20  # Values, each of which is compared as 16 or 32 bytes.


def _pieces(array: np.ndarray) -> Iterator[np.ndarray]:
    """Yields the values of an array piece by piece, in a dtype that has all values of the others."""
    flat = array.reshape(-1)
    # float64 does not have all integers of 64 bits.
    widest = np.clongdouble if jnp.issubdtype(array.dtype, jnp.complexfloating) else np.longdouble
    for begin in range(0, flat.size, _PIECE):
        yield _converted(flat[begin : begin + _PIECE], widest)


def _converted(array: np.ndarray, dtype: DTypeLike) -> np.ndarray:
    # Dtypes that NumPy lacks, such as bfloat16 and int4, do not convert themselves into all others. float32 has all of their values.
    return (array.astype(np.float32) if array.dtype.kind == "V" else array).astype(dtype)


def _kind(dtype: np.dtype) -> int:
    """Returns a number that is larger for dtypes whose values do not fit into others."""
    kinds = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)
    return next((i for i, kind in enumerate(kinds) if jnp.issubdtype(dtype, kind)), len(kinds))


def part_of(value: object) -> Part | None:
    """Returns how a value is saved; None if it is not one value, or cannot be saved."""
    if isinstance(value, Variable):
        return VariablePart(value)
    if isinstance(value, np.ma.MaskedArray):
        return None  # A file has no place for the mask.
    if text.is_array(value):
        return ArrayPart(value)
    if isinstance(value, np.random.Generator):
        source = value.bit_generator
        return StatePart(lambda: source.state, lambda state: setattr(source, "state", state), value)
    if isinstance(value, np.random.RandomState):
        return StatePart(lambda: value.get_state(legacy=False), value.set_state, value)
    get, set_ = getattr(value, "get_state", None), getattr(value, "set_state", None)
    if callable(get) and callable(set_) and not isinstance(value, type):  # A class has the methods, but no state.
        return StatePart(get, set_, value)
    return PlainPart(value) if text.is_plain(value) else None


def kind_of_optimizer(value: object) -> str | None:
    """Returns the class of an optimizer. None for other objects, and for a loss scale, which may be around any optimizer."""
    is_optimizer = isinstance(value, compat.BaseOptimizer) and not isinstance(
        value, keras.optimizers.LossScaleOptimizer
    )
    return type(value).__name__ if is_optimizer else None


def refuse_object(path: str, value: object, cause: Exception | None = None) -> CheckpointError:
    """Returns the error for an object that cannot be saved."""
    hint = "give it the methods get_state() and set_state(state), or pass the arrays, numbers and Keras objects that it consists of"
    why = f": {cause}" if cause is not None else ""
    if isinstance(value, PerReplica):
        hint = "strategy.gather(value, axis=0), which has the rows of all replicas"
    if callable(getattr(value, "get_state", None)):
        hint = "get_state() that returns arrays, numbers, text, and lists and dicts of these"
    if isinstance(cause, RecursionError):
        why = ": it contains itself, or too many containers within each other"
    elif cause is not None and not isinstance(cause, (TypeError, ValueError)):
        why = f": {type(cause).__name__}: {cause}"
    return CheckpointError(
        f"a checkpoint with the object {path!r}",
        f"an object of type {type(value).__name__} cannot be saved{why}.",
        hint,
    )
