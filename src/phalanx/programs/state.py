# SPDX-License-Identifier: Apache-2.0
"""Takes the arrays of a program's variables before it runs, and stores the new arrays afterwards."""

import functools
import gc
from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain, compress, repeat
from operator import is_, itemgetter
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding

from phalanx import compat
from phalanx.compat import Variable, raw_value
from phalanx.errors import StateLostError, VariableError
from phalanx.mesh.annotated import shape_dtype, with_sharding_constraint
from phalanx.mesh.topology import Topology
from phalanx.programs.identity import IdentityMap
from phalanx.tracing.boundary import combined
from phalanx.tracing.policy import Combine, describe, initial_components, policy_of
from phalanx.tracing.structure import refuse_outer_trace
from phalanx.typing import PyTree

Group = tuple[list[Any], list[Any]]
"""Values of some variables, and the replicas' components of the on-read variables among them."""


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
    """What is known about one variable between programs.

    Attributes:
      owned: whether a program of Phalanx made the array, and no reader shares its memory, so that the next program may consume it.
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
        """Records that `array`, which no program of Phalanx made, is what the variable holds."""
        if array is not None:
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


_restored: IdentityMap[Any] = IdentityMap()
"""Components from a checkpoint, until a program uses them or the variable is assigned."""


def keep_components(variable: Variable, components: np.ndarray) -> None:
    """Makes `components`, (num_replicas, ...), those with which the next program of as many replicas begins.

    Together they must make the value of the variable. With another number of replicas, a program begins with that value.
    """
    _restored[variable] = components


def to_host(array: Any, topology: Topology) -> np.ndarray:
    """Returns a copy of an array on the host. With several workers, all must call it if no worker has the whole array.

    Args:
      array: an array of NumPy or JAX, on any devices.
      topology: the devices of all workers.
    """
    if not isinstance(array, jax.Array):
        return np.array(array, order="C")
    was_parted = _parted.get(array)
    host = np.asarray(array) if array.is_fully_addressable or array.is_fully_replicated else topology.whole(array)
    # On CPUs the result shares the memory of the array, which the next program may consume.
    host = host if host.flags.owndata else host.copy()
    if not was_parted:
        _parted.discard(array)
    return host


def _forget(variable: Variable) -> None:
    if not compat.is_new(variable):  # A variable that a step makes gets its first value after its restored components.
        _restored.discard(variable)
    slot = _slots.get(variable)
    if slot is not None:
        slot.array = slot.components = None


compat.on_assign(_forget)


class Share(NamedTuple):
    """The part of one process in a variable that is combined on demand.

    Args:
      value: the combined value, which all processes have; or what the replicas of this process have, (local_replicas, ...).
      is_whole: whether it is the combined value.
    """

    value: np.ndarray
    is_whole: bool


def share_of(variable: Variable, home: Topology) -> Share | None:
    """Returns a copy of what this process has of a variable. None if a program that failed has consumed it.

    Args:
      variable: the variable.
      home: the devices of the replicas.
    """
    slot, array = slot_of(variable), raw_value(variable)
    if slot.home is home and slot.components is not None and slot.array is array:
        if slot.components.is_deleted():
            return None
        return Share(np.concatenate([np.array(s.data) for s in slot.components.addressable_shards]), False)
    # No program has used it yet, or it was read or assigned since.
    if isinstance(array, jax.Array) and not array.is_deleted():
        return Share(np.array(array), True)
    return Share(np.zeros((1, *variable.shape), compat.dtype_of(variable)), False)


def put_share(variable: Variable, share: Share | None, home: Topology) -> None:
    """Gives the replicas of this process what `share_of` returned. All processes must call it.

    Args:
      variable: the variable.
      share: the values. Of a whole sum, the first process takes care. None in a process that had none: its replicas add nothing to a
        sum. A mean that is whole, or that this process had none of, begins with the value that the variable has: a process that joins
        has taken it over from the others.
      home: the devices of the replicas, which may be others than before.
    """
    rows = np.zeros((len(home.local_replicas), *variable.shape), compat.dtype_of(variable))
    if policy_of(variable).combine is Combine.MEAN:
        rows[:] = np.asarray(raw_value(variable)) if share is None or share.is_whole else share.value
    elif share is not None and (not share.is_whole or home.worker_index == 0):
        rows[0] = share.value if share.is_whole else share.value.sum(0)
    if home.num_replicas == 1:
        put_values([(variable, rows[0])], home)
        return
    compat.set_raw_values([variable], [None])
    slot = slot_of(variable)
    slot.store(None, home)
    slot.components = home.put_per_replica([rows])[0]


def put_values(values: Sequence[tuple[Variable, np.ndarray]], home: Topology | None = None) -> None:
    """Stores values.

    Args:
      values: the variables and their values.
      home: devices on which to place them, if all workers have the same values. With None, the next program broadcasts them first.
    """
    for variable, value in values:
        _forget(variable)
        if home is None:
            compat.set_raw_values([variable], [jax.device_put(value)])
            continue
        array = home.put_variable(value, compat.layout_path(variable))
        compat.set_raw_values([variable], [array])
        slot = slot_of(variable)
        slot.store(array, home)
        # On CPUs the array may share the memory of `value`. XLA does not write into memory that it has not allocated.
        slot.owned = True


def combine_on_demand(variables: Sequence[Variable]) -> None:
    """Computes the values that some variables have outside the replicas, if they are not known yet.

    With several workers, all must call it, unless all these variables have outer ones. An outer variable without a value begins
    with the combined one.
    """
    pairs = [(v, slot_of(v)) for v in variables if raw_value(v) is None]
    pairs = [(v, slot) for v, slot in pairs if slot.components is not None and slot.home is not None]
    values = [_outer_value(v) for v, _ in pairs]
    for home in {id(slot.home): slot.home for _, slot in pairs}.values():
        here = [i for i, (_, slot) in enumerate(pairs) if values[i] is None and slot.home is home]
        how = tuple(policy_of(pairs[i][0]).combine for i in here)
        assert home is not None
        for i, value in zip(here, _combined([pairs[i][1].components for i in here], how, home.replicated), strict=True):
            values[i] = value
    for (variable, slot), value in zip(pairs, values, strict=True):
        # The variable first: an interrupt between the two leaves a value without components, which is still the right one.
        compat.set_raw_values([variable], [value])
        if not isinstance(value, jax.core.Tracer):
            slot.array = value


def _outer_value(variable: Variable) -> Any:
    outer = compat.outer_of(variable)
    return None if outer is None else raw_value(outer)


def _combine_for_read(variable: Variable) -> bool:
    slot = _slots.get(variable)
    if slot is not None and slot.home is not None:
        with slot.home.dispatching(is_step=False):
            combine_on_demand([variable])
    # Keras reads all variables of an optimizer in a step. The value must not stay when the trace has ended.
    return isinstance(raw_value(variable), jax.core.Tracer)


def _lend(variable: Variable) -> None:
    """Stops an array on one device from being donated after its variable was read.

    `jax.device_put` may return an array that shares the memory, and no reference count shows that it exists.
    """
    slot = _slots.get(variable)
    if slot is not None and slot.owned and (slot.home is None or slot.home.is_single):
        slot.lend()


compat.on_read(_lend)

_parted: IdentityMap[bool] = IdentityMap()
"""Arrays over several devices whose shards the user has read. A shard shares the memory of its array."""


@functools.cache
def _note_parts_of(arrays: Any) -> None:
    """Extends the type of JAX's arrays, so that it records the arrays whose shards are read."""

    def noting(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def parts(array: jax.Array, *args: PyTree) -> Any:
            _parted[array] = True
            return original(array, *args)

        return parts

    arrays.addressable_data = noting(arrays.addressable_data)
    # jax.device_put to one device reads addressable_shards.
    for name in ("addressable_shards", "global_shards"):
        shards = getattr(arrays, name)
        setattr(arrays, name, property(noting(shards.fget), doc=shards.__doc__))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _combined(components: list[jax.Array], how: Sequence[Combine], place: NamedSharding) -> list[jax.Array]:
    return [with_sharding_constraint(combined(c, x), place) for c, x in zip(how, components, strict=True)]


compat.on_first_read(_combine_for_read)


def _follow(variable: Variable) -> None:
    """Makes replicas go on from a value that the user has assigned, and not from the outer weights before."""
    outer = compat.outer_of(variable)
    if outer is not None and not compat.is_new(variable):
        outer.assign(raw_value(variable))


compat.on_assign(_follow)


_VALUES, _VALUES_AS_LIST, _COMPONENTS = itemgetter(0), itemgetter(slice(1)), itemgetter(1)
"""Select from the outputs of a program: the values; a list of the list of values, for the shelf; and the components."""
_NOTHING: Group = ([], [])


class State:
    """The variables of one program.

    An array is donated to the program only if a program of Phalanx made it and nobody else holds it. Otherwise a copy is donated.

    Args:
      variables: all variables that the program uses.
      written: for each variable, whether the program writes it.
      topology: the devices of the program.
      storage: the devices of the variables between programs.
    """

    def __init__(
        self,
        variables: Sequence[Variable],
        written: Sequence[bool],
        topology: Topology,
        storage: Topology,
    ) -> None:
        self._storage, self._is_lent = storage, storage is not topology
        self._order = list(written)
        writes = [v for v, w in zip(variables, written, strict=True) if w]
        reads = [v for v, w in zip(variables, written, strict=True) if not w]
        self._shelf = Shelf([None] * len(writes), storage)
        self._written = _Variables(writes, topology, storage, self._shelf)
        self._read = _Variables(reads, topology, storage, None)
        on_read = [slot_of(v) for v in writes if policy_of(v).on_read]
        self._owners: list[Any] = [*writes, self._shelf, *on_read]
        self._names = [compat.RAW_VALUE] * len(writes) + ["arrays"] + ["components"] * len(on_read)

    def take(self) -> tuple[Group, Group]:
        """Returns the arrays of the variables that the program writes, which it may consume, and of those that it only reads."""
        return self._written.take(own=True), self._read.take(own=False) if self._read.variables else _NOTHING

    def shapes(self) -> tuple[Group, Group]:
        """Returns the shapes, dtypes and shardings of what `take` returns. Changes nothing, and needs no values."""
        return self._written.shapes(), self._read.shapes() if self._read.variables else _NOTHING

    def merge(self, donated: Group, kept: Group) -> Group:
        """Returns values and components in the order of the variables. A variable without components has None."""
        parts = self._written.spread(donated[1]), self._read.spread(kept[1])
        return self._merged(donated[0], kept[0]), self._merged(*parts)

    def of_on_read(self, parts: Sequence[Any]) -> list[Any]:
        """Returns the components of the on-read variables, from those of all variables that the program writes."""
        return list(compress(parts, self._written.is_on_read))

    def run(
        self, execute: Callable[..., tuple[Any, ...]], donated: Group, kept: Group, inputs: list[Any]
    ) -> tuple[Any, ...]:
        """Executes a program and stores the values that it wrote, within one bytecode of Python.

        A signal handler runs between two bytecodes and may raise there. It finds either the state before the step or the whole
        state after it, because one call consumes the iterators below, and no bytecode runs inside that call. Garbage collection
        is disabled for the same reason: Python ignores an exception that a handler raises in a callback of the collector.

        Args:
          execute: the program. If it consumes `donated`, it must not run any bytecode.
          donated: its first argument.
          kept: its second argument.
          inputs: its third argument.

        Returns:
          The outputs of the program, beginning with values and components of the variables that it writes.
        """
        if self._is_lent:
            execute = functools.partial(self._run_elsewhere, execute)
        outputs: list[tuple[Any, ...]] = []
        # All of these are lazy. `deque` below consumes `executed` first, which fills `outputs`, and then `stored`, which reads it.
        executed = map(outputs.extend, [map(execute, [donated], [kept], [inputs])])
        values = chain.from_iterable(map(_VALUES, outputs))
        arrays = chain.from_iterable(map(_VALUES_AS_LIST, outputs))
        components = chain.from_iterable(map(_COMPONENTS, outputs))
        # Nobody else can hold what the program made from a copy.
        fields = chain(values, arrays, components, repeat(True))
        owners, names, copied = self._owners, self._names, self._written.copied
        if copied:
            owners, names = owners + copied, names + ["owned"] * len(copied)
        stored = map(setattr, owners, names, fields)
        collects = gc.isenabled()
        try:
            gc.disable()
            deque(chain(executed, stored), maxlen=0)
        finally:
            if collects:
                gc.enable()
        return outputs[0]

    def _run_elsewhere(self, execute: Callable[..., tuple[Any, ...]], *args: PyTree) -> tuple[Any, ...]:
        """Executes a program that works on copies, and moves the values that it wrote to the devices of the variables."""
        values, *others = execute(*args)
        return (self._storage.take_back(values), *others)

    def fields(self) -> list[Any]:
        """Returns all values that `run` overwrites, for `reset`."""
        return list(map(getattr, self._owners, self._names))

    def reset(self, fields: list[Any]) -> None:
        """Restores values that `run` has overwritten. Only for programs that work on copies, because others consume the old values."""
        deque(map(setattr, self._owners, self._names, fields), maxlen=0)

    def put_back(self, donated: Group) -> None:
        """Restores the values that a program was called with, after JAX traced the program instead of executing it."""
        values, components = donated
        self.reset([*values, [*values], *components])

    def raise_if_lost(self, donated: Group, cause: Exception) -> None:
        """Checks whether a program that failed has consumed values of variables.

        Raises:
          StateLostError: it has.
        """
        triples = zip(self._written.variables, donated[0], self._written.spread(donated[1]), strict=True)
        lost = [v.path for v, x, parts in triples if raw_value(v) is x and _is_lost(parts if x is None else x)]
        if not lost:
            return
        names = ", ".join(lost[:3]) + (", ..." if len(lost) > 3 else "")
        raise StateLostError(
            f"a step that writes {len(donated[0])} variables",
            f"a program failed while it ran ({type(cause).__name__}), after it had taken the values of {len(lost)} of them ({names}).",
            "load the last checkpoint, for example model.load_weights(path)",
        ) from cause

    def _merged(self, written: Sequence[Any], read: Sequence[Any]) -> list[Any]:
        w, r = iter(written), iter(read)
        return [next(w) if is_written else next(r) for is_written in self._order]


class _Variables:
    """The variables that a program writes, or the variables that it only reads.

    Args:
      variables: the variables.
      topology: the devices of the program.
      storage: the devices of the variables between programs.
      shelf: where the program stores the arrays that it writes. None for variables that it only reads.
    """

    def __init__(self, variables: list[Variable], topology: Topology, storage: Topology, shelf: Shelf | None) -> None:
        self.variables, self._topology, self._storage, self._shelf = variables, topology, storage, shelf
        self._is_lent = storage is not topology
        self._slots = [slot_of(v) for v in variables]
        # Slots whose arrays `take` has copied. The program's result for them is owned.
        self.copied: list[Slot] = []
        rows = [policy_of(v) for v in variables]
        # A program that only reads what is combined on demand gets the combined value.
        self.is_on_read = [row.on_read and not (row.on_demand and shelf is None) for row in rows]
        self._combined = [v for v, row in zip(variables, rows, strict=True) if row.on_demand and shelf is None]
        mapped = topology.num_replicas > 1
        self._on_read = [i for i, on_read in enumerate(self.is_on_read) if mapped and on_read]
        self._on_demand = [i for i in self._on_read if policy_of(variables[i]).on_demand]
        self._have_values = [i not in self._on_demand for i in range(len(variables))]

    def take(self, *, own: bool) -> Group:
        """Returns arrays on the program's devices, and components of the on-read variables.

        Args:
          own: whether the program consumes the arrays.
        """
        if not self.variables:
            return [], []
        arrays = self._placed()
        if self._is_lent:
            arrays = jax.device_put(arrays, self._topology.replicated, may_alias=False if own else None)
        elif own and self._shelf is not None:
            self.copied = []
            given = compress(arrays, self._have_values) if self._on_demand else arrays
            counts = compat.reference_counts(given)
            parted = _parted.ids()
            is_parted = bool(parted) and not parted.isdisjoint(map(id, arrays))
            if self._shelf.has_lent or is_parted or max(counts, default=0) > compat.UNSHARED:
                arrays = self._consumable(arrays, self._shelf)
        if not self._on_read:
            return arrays, []
        components = self._components(arrays)
        if own and self._is_lent:
            # A program that works on copies can be undone, so its components are copies too.
            components = [jax.device_put(x, x.sharding, may_alias=False) for x in components]
        if self._on_demand:
            arrays = list(arrays)
            for i in self._on_demand:
                arrays[i] = None
        return arrays, components

    def spread(self, components: Sequence[Any]) -> list[Any]:
        """Returns the components of all variables, from those of the on-read variables. The others have None."""
        parts: list[Any] = [None] * len(self.variables)
        for i, own in zip(self._on_read, components, strict=True):
            parts[i] = own
        return parts

    def shapes(self) -> Group:
        """Returns what describes the arrays and components that `take` returns."""
        topology = self._topology
        arrays: list[Any] = [self._shape(v) for v in self.variables]
        parts = [
            shape_dtype((topology.num_replicas, *arrays[i].shape), arrays[i].dtype, sharding=topology.per_replica)
            for i in self._on_read
        ]
        for i in self._on_demand:
            arrays[i] = None
        return arrays, parts

    def _shape(self, variable: Variable) -> jax.ShapeDtypeStruct:
        shape, sharding = tuple(variable.shape), None
        if self._topology.has_devices:
            path = compat.layout_path(variable)
            sharding = self._topology.replicated if self._is_lent else self._topology.sharding_of(path, shape)
        return shape_dtype(shape, compat.dtype_of(variable), sharding=sharding)

    def _placed(self) -> list[Any]:
        """Returns the stored arrays. Those that the user assigned, or that other devices hold, are placed on the storage first."""
        if self._combined:
            combine_on_demand(self._combined)
        arrays, shelf = list(map(compat.value_of, self.variables)), self._shelf
        # This runs at every step, for every variable, so it runs no bytecode per variable.
        if shelf is not None and shelf.is_whole and all(map(is_, arrays, shelf.arrays)):
            return shelf.arrays
        for i, (slot, array) in enumerate(zip(self._slots, arrays, strict=True)):
            if slot.array is not array or slot.home is not self._storage:
                if slot.home is not self._storage and array is None and slot.components is not None:
                    # Replicas of another strategy have values of their own.
                    pairs = zip(self.variables, self._slots, strict=True)
                    combine_on_demand([v for v, slot in pairs if slot.home is not self._storage])
                    return self._placed()
                if slot.home is not self._storage and self._topology.num_workers > 1:
                    self._take_from_source(self._topology)
                    return self._placed()
                arrays[i] = self._adopt(self.variables[i], slot, array)
        if shelf is not None:
            shelf.arrays = arrays
            for i, slot in enumerate(self._slots):
                slot.move(shelf, i)
            shelf.has_lent = shelf.is_whole = True
        return arrays

    def _consumable(self, arrays: list[Any], shelf: Shelf) -> list[Any]:
        """Returns the arrays of the shelf, with copies of those that others may hold."""
        parted = _parted.ids()
        # Without a variable that would still hold the last array when references are counted.
        for slot in compress(self._slots, [id(array) in parted for array in arrays]):
            slot.lend()
        counts, taken = list(compat.reference_counts(arrays)), list(arrays)
        shelf.has_lent = False  # Before the loop, so that what another thread lends during it counts.
        for i, (slot, array, count) in enumerate(zip(self._slots, arrays, counts, strict=True)):
            if array is None or (slot.owned and count <= compat.UNSHARED) or array.is_deleted():
                continue  # The program says which variable has lost its value.
            if not slot.owned:
                shelf.has_lent = True  # Until the program has stored its result, because it may fail.
            # Unlike jnp.copy it compiles nothing.
            taken[i] = jax.device_put(array, array.sharding, may_alias=False)
            self.copied.append(slot)
        return taken

    def _take_from_source(self, topology: Topology) -> None:
        """Sets variables that no program has used yet to the values of the chief, or of the worker that has made the most steps."""
        fresh = [i for i, slot in enumerate(self._slots) if slot.home is not topology]
        variables = [self.variables[i] for i in fresh]
        for i, variable, value in zip(
            fresh, variables, topology.from_source(compat.raw_values(variables)), strict=True
        ):
            array = topology.put_replicated(value)
            compat.set_raw_values([variable], [array])
            self._slots[i].store(array, topology)

    def _components(self, arrays: Sequence[Any]) -> list[Any]:
        """Returns the replicas' own values of the on-read variables."""
        parts: list[Any] = []
        for i in self._on_read:
            own = self._slots[i].components
            if own is None:
                variable, count = self.variables[i], self._topology.num_replicas
                first = _restored.get(variable)
                _restored.discard(variable)
                if first is None or len(first) != count:
                    first = initial_components(variable, arrays[i], count)
                rows = self._topology.local_replicas
                own = self._topology.put_per_replica([first[rows.start : rows.stop]])[0]
            parts.append(own)
        return parts

    def _adopt(self, variable: Variable, slot: Slot, array: jax.Array) -> jax.Array:
        """Places a value that the user assigned, or created outside the scope, on the program's devices."""
        if array is None and compat.is_hollow(variable):
            array = variable.value
        if array is None:
            raise VariableError(
                f"{describe(variable)} in a program of this process",
                "the variable lives on parameter servers, and only workers run steps that use it.",
                "coordinator.schedule(step, args=(...)), or strategy.run(fn)",
            )
        if isinstance(array, jax.Array) and array.weak_type:
            # The value was a Python number. Programs return strongly typed arrays, so the next call would compile again.
            array = jax.lax.convert_element_type(array, array.dtype)
        array = self._storage.put_variable(array, compat.layout_path(variable))
        if isinstance(array, jax.core.Tracer):
            raise refuse_outer_trace()
        compat.set_raw_values([variable], [array])
        slot.store(array, self._storage)
        return array


def _is_lost(array: jax.Array) -> bool:
    if array.is_deleted():
        return True
    try:
        array.block_until_ready()
    except Exception:  # The program that computes the array failed after the call had returned.
        return True
    return False
