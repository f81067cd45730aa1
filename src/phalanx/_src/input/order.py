# SPDX-License-Identifier: Apache-2.0
"""What decides the order in which data is read: the global generators of random numbers, and what a dataset keeps for itself.

A dataset may have `get_state()` and `set_state(state)`. Of another one, the attributes count that have changed since it was fresh:
generators, indices (1-dim arrays of integers, lists of numbers or text), numbers and text.
"""

import hashlib
import math
import random
import sys
from collections.abc import Iterator
from typing import Any, final

import jax
import keras
import numpy as np

from phalanx._src import compat
from phalanx._src.input.sources.base import State
from phalanx._src.input.sources.rows import ChosenRows
from phalanx._src.programs.identity import IdentityMap
from phalanx.typing import PyTree

_PLAIN = (type(None), bool, int, float, str)
_LIBRARIES = {"datasets", "grain", "jax", "jaxlib", "keras", "numpy", "pandas", "phalanx", "tensorflow", "torch"}
_NO_PARTS = (keras.Layer, keras.callbacks.Callback, keras.optimizers.Optimizer)
_DEPTH = 2
"""How far below a dataset attributes of attributes count, such as the generator of the sampler of a torch `DataLoader`."""
_MOST_BYTES = 1 << 20


def generators() -> State:
    """Returns the states of the global generators of Python, NumPy, Keras and torch."""
    numpy = np.random.get_state(legacy=False)  # noqa: NPY002
    states: dict[str, Any] = {"python": random.getstate(), "numpy": numpy, "keras": compat.global_seed()}
    if (torch := sys.modules.get("torch")) is not None:
        states["torch"] = torch.get_rng_state().numpy()
    return states


def set_generators(states: State) -> None:
    """Sets the global generators to states that `generators` has returned, perhaps in another process."""
    compat.set_global_seed(states["keras"])  # First, because to make the generator draws from that of Python.
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])  # noqa: NPY002
    torch = sys.modules.get("torch")
    if torch is not None and "torch" in states:
        torch.set_rng_state(torch.from_numpy(np.array(states["torch"])))


def digest_of(batch: PyTree) -> bytes:
    """Returns 8 bytes that differ if batches do, as far as their first megabytes show."""
    digest = hashlib.blake2b(digest_size=8)
    for leaf in jax.tree.leaves(batch):
        array = np.asarray(_first_rows(leaf))
        # The bytes of an array of objects are their addresses, which differ between processes.
        digest.update(repr(array.tolist()).encode() if array.dtype.kind == "O" else array.tobytes())
    return digest.digest()


def _first_rows(leaf: Any) -> Any:
    """Returns about a megabyte of a leaf, without a copy of the rest from its device."""
    if not isinstance(leaf, (np.ndarray, jax.Array, ChosenRows)) or not leaf.shape:
        return leaf
    num_bytes = max(1, math.prod(leaf.shape[1:]) * leaf.dtype.itemsize)
    count = min(leaf.shape[0], max(1, _MOST_BYTES // num_bytes))
    return (leaf[:count] if isinstance(leaf, ChosenRows) else ChosenRows(leaf, slice(0, count))).read()


@final
class Order:
    """What decides the order of a dataset, at one moment or another.

    Args:
      data: the dataset. None if it is unknown.
      fresh: attributes of datasets when they were fresh. That of `data` is added.

    Attributes:
      before_epoch: what `take` returned before the present epoch.
    """

    def __init__(self, data: PyTree, fresh: IdentityMap[State] | None = None) -> None:
        self._data = data
        self.before_epoch: State = {}
        fresh = IdentityMap() if fresh is None else fresh
        self._fresh = fresh.get(data)
        if self._fresh is None:
            self._fresh = {path: _copied(value) for path, _, _, value in _attributes(data)}
            if self._fresh:
                fresh[data] = self._fresh

    @property
    def _has_state(self) -> bool:
        return all(callable(getattr(self._data, name, None)) for name in ("get_state", "set_state"))

    def take(self) -> State:
        """Returns the state that determines the order now. Nothing may be read at the same time."""
        if self._has_state:
            return {"generators": generators(), "state": self._data.get_state()}
        assert self._fresh is not None
        changes = {
            path: _copied(value)
            for path, _, _, value in _attributes(self._data)
            if path not in self._fresh or not _are_same(value, self._fresh[path])
        }
        return {"generators": generators(), "attributes": changes}

    def begin_epoch(self) -> None:
        """Notes what decides the order of an epoch that begins."""
        self.before_epoch = self.take()

    def restore(self, state: State) -> None:
        """Goes back to what `take` has returned, perhaps in another process."""
        set_generators(state["generators"])
        if "state" in state and self._has_state:
            self._data.set_state(state["state"])
        elif "attributes" in state:
            self._set_attributes(state["attributes"])

    def _set_attributes(self, changes: State) -> None:
        assert self._fresh is not None
        values = {**self._fresh, **changes}
        # What has not changed elsewhere becomes fresh again: a process that joins has tried a step before.
        for path, owner, name, value in list(_attributes(self._data)):
            if path in values and not _are_same(value, values[path]):
                _set(owner, name, values[path])
        for path in changes.keys() - self._fresh.keys():
            if "." not in path:  # The owner of another new attribute may not exist here.
                setattr(self._data, path, _copied(changes[path]))


def _attributes(owner: PyTree, before: str = "", depth: int = _DEPTH) -> Iterator[tuple[str, PyTree, str, PyTree]]:
    """Yields path, owner, name and value of the attributes of a dataset that may decide its order."""
    is_of_library = _library(owner) in _LIBRARIES
    for name, attribute in list(getattr(owner, "__dict__", {}).items()):
        if is_of_library and name.startswith("_"):
            continue
        for value in _values(attribute):
            yield before + name, owner, name, value
        if (
            depth
            and not isinstance(attribute, (*_NO_PARTS, type))
            and _library(attribute) not in sys.stdlib_module_names
        ):
            yield from _attributes(attribute, f"{before}{name}.", depth - 1)


def _library(value: PyTree) -> str:
    return type(value).__module__.partition(".")[0]


def _values(attribute: PyTree) -> Iterator[PyTree]:
    """Yields the value of an attribute, unless it is of a kind that does not decide an order."""
    if isinstance(attribute, np.random.Generator):
        yield attribute.bit_generator.state
    elif isinstance(attribute, np.random.RandomState):
        yield attribute.get_state(legacy=False)
    elif isinstance(attribute, random.Random):
        yield attribute.getstate()
    elif _is_of_torch(attribute):
        yield attribute.get_state().numpy()
    elif isinstance(attribute, keras.random.SeedGenerator):
        yield np.asarray(attribute.state.value)
    elif isinstance(attribute, np.ndarray):
        if attribute.ndim == 1 and attribute.dtype.kind in "iu":
            yield attribute
    elif type(attribute) in (list, tuple):
        if all(type(item) in _PLAIN for item in attribute):
            yield attribute
    elif type(attribute) in _PLAIN:
        yield attribute


def _is_of_torch(attribute: PyTree) -> bool:
    return _library(attribute) == "torch" and type(attribute).__name__ == "Generator"


def _set(owner: PyTree, name: str, value: PyTree) -> None:
    """Sets an attribute to a value that `_values` has yielded."""
    attribute = vars(owner)[name]
    if isinstance(attribute, np.random.Generator):
        attribute.bit_generator.state = value
    elif isinstance(attribute, np.random.RandomState):
        attribute.set_state(value)
    elif isinstance(attribute, random.Random):
        attribute.setstate(value)
    elif _is_of_torch(attribute):
        attribute.set_state(sys.modules["torch"].from_numpy(np.array(value)))
    elif isinstance(attribute, keras.random.SeedGenerator):
        attribute.state.assign(value)
    elif isinstance(attribute, list) and isinstance(value, list):
        attribute[:] = value  # Other objects may hold the same list.
    else:
        setattr(owner, name, _copied(value))


def _copied(value: PyTree) -> PyTree:
    return value.copy() if isinstance(value, (np.ndarray, list, dict)) else value


def _are_same(a: PyTree, b: PyTree) -> bool:
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return type(a) is type(b) and a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_are_same(a[key], b[key]) for key in a)
    return type(a) is type(b) and bool(a == b)
