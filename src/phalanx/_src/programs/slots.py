# SPDX-License-Identifier: Apache-2.0
"""The state of variables between programs: their arrays, and whether the next program may consume them."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from phalanx._src import compat
from phalanx._src.compat import Variable, raw_value
from phalanx._src.mesh.topology import Topology
from phalanx._src.programs.identity import IdentityMap
from phalanx.typing import PyTree


class Shelf:
    """Holds the arrays that a program wrote last, so that storing all of them is one assignment.

    Attributes:
      arrays: the arrays. None for a variable that the user has assigned since, or that has left for another shelf.
      home: the devices of the arrays.
      has_lent: whether the slot of an array may not be owned.
      is_whole: whether the arrays of all variables of the program have come here, and none has left.
    """

    __slots__ = ("arrays", "has_lent", "home", "is_whole")

    def __init__(self, arrays: list[Any], home: Topology | None) -> None:
        self.arrays, self.home, self.has_lent, self.is_whole = arrays, home, True, False


class Slot:
    """The state of one variable between programs.

    Attributes:
      owned: whether a Phalanx program made the array, and no reader shares its memory, so that the next program may consume it.
      components: the replicas' own values that belong to `array`, (num_replicas, ...), if the variable is on-read.
    """

    __slots__ = ("_at", "components", "owned")

    def __init__(self) -> None:
        self._at, self.owned = (Shelf([None], None), 0), False
        self.components: jax.Array | None = None

    @property
    def array(self) -> jax.Array | None:
        """The array that was stored or placed last. If the variable holds another one, the user has assigned it.

        None after an assignment, so that the slot keeps no memory alive.
        """
        shelf, place = self._at
        array: jax.Array | None = shelf.arrays[place]
        return array

    @array.setter
    def array(self, array: jax.Array | None) -> None:
        shelf, place = self._at
        shelf.arrays[place] = array

    @property
    def home(self) -> Topology | None:
        """The devices of the array."""
        return self._at[0].home

    def lend(self) -> None:
        """Stops the next program from consuming the array. May be called in any thread, so each line is one assignment."""
        self.owned = False
        self._at[0].has_lent = True

    def store(self, array: jax.Array | None, home: Topology | None) -> None:
        """Records that `array`, which no Phalanx program made, is what the variable holds."""
        if array is not None:
            # JAX does not export the class of its arrays, so the first array shows it.
            kind: Any = type(array)
            _note_parts_of(kind)
        self.owned = False
        self.move(Shelf([array], home), 0)
        self.components = None

    def move(self, shelf: Shelf, place: int) -> None:
        """Makes the array that stands on a place of another shelf the one of this variable."""
        before, at = self._at
        if before is not shelf:
            before.is_whole = False
            self._at = shelf, place
            # The old shelf would keep the array alive, and its reference count would be that of a shared one.
            before.arrays[at] = None


_slots: IdentityMap[Slot] = IdentityMap()


def slot_of(variable: Variable) -> Slot:
    """Returns the slot of `variable`."""
    slot = _slots.get(variable)
    if slot is None:
        slot = _slots[variable] = Slot()
    return slot


def components_of(variable: Variable) -> jax.Array | None:
    """Returns the replicas' own values of an on-read variable. None if the user has assigned it since."""
    slot = slot_of(variable)
    return slot.components if slot.array is raw_value(variable) else None


restored: IdentityMap[Any] = IdentityMap()
"""Components from a checkpoint, until a program uses them or the variable is assigned."""

parted: IdentityMap[bool] = IdentityMap()
"""Arrays over several devices whose shards the user has read. A shard shares the memory of its array."""


def forget(variable: Variable) -> None:
    """Notes that a variable gets another value than that of its slot, so that the slot keeps no memory alive."""
    if not compat.is_new(variable):  # A variable that a step makes gets its first value after its restored components.
        restored.discard(variable)
    slot = _slots.get(variable)
    if slot is not None:
        slot.array = slot.components = None


compat.on_assign(forget)


def _lend(variable: Variable) -> None:
    """Stops an array on one device from being donated after its variable was read.

    `jax.device_put` may return an array that shares the memory, and no reference count shows that it exists.
    """
    slot = _slots.get(variable)
    if slot is not None and slot.owned and (slot.home is None or slot.home.is_single):
        slot.lend()


compat.on_read(_lend)


@functools.cache
def _note_parts_of(arrays: Any) -> None:
    """Extends the type of JAX's arrays, so that it records the arrays whose shards are read."""

    def noting(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def parts(array: jax.Array, *args: PyTree) -> Any:
            parted[array] = True
            return original(array, *args)

        return parts

    arrays.addressable_data = noting(arrays.addressable_data)
    # jax.device_put to one device reads addressable_shards.
    for name in ("addressable_shards", "global_shards"):
        shards = getattr(arrays, name)
        setattr(arrays, name, property(noting(shards.fget), doc=shards.__doc__))
