# SPDX-License-Identifier: Apache-2.0
"""Takes the arrays of a program's variables before it runs, and stores the new arrays afterwards."""

import functools
import gc
from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain, compress, repeat
from operator import itemgetter
from typing import Any

import jax
import numpy as np

from phalanx import compat
from phalanx.compat import Variable, raw_value
from phalanx.errors import StateLostError, VariableError
from phalanx.mesh.annotated import shape_dtype
from phalanx.mesh.topology import Topology
from phalanx.programs.identity import IdentityMap
from phalanx.tracing.policy import describe, initial_components, policy_of
from phalanx.tracing.structure import refuse_outer_trace
from phalanx.typing import PyTree

Group = tuple[list[Any], list[Any]]
"""Values of some variables, and the replicas' components of the on-read variables among them (None for the others)."""


class Slot:
    """What is known about one variable between programs.

    Attributes:
      array: the array that was stored or placed last. If the variable holds another one, the user has assigned it. None
        after an assignment, so that the slot keeps no memory alive.
      home: the devices of that array.
      owned: whether a program of Phalanx made that array, so that the next one may consume it.
      components: the replicas' own values that belong to that array, (num_replicas, ...), if the variable is on-read.
    """

    __slots__ = ("array", "components", "home", "owned")

    def __init__(self) -> None:
        self.array: jax.Array | None = None
        self.home: Topology | None = None
        self.owned = False
        self.components: jax.Array | None = None

    def store(
        self, array: jax.Array | None, home: Topology | None, components: jax.Array | None = None, *, owned: bool
    ) -> None:
        """Records that `array` is what the variable holds."""
        if array is not None:
            kind: Any = type(array)
            _note_parts_of(kind)
        self.array, self.home, self.owned, self.components = array, home, owned, components


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
    _restored.discard(variable)
    slot = _slots.get(variable)
    if slot is not None:
        slot.array = slot.components = None


compat.on_assign(_forget)


def _combine_on_demand(variable: Variable) -> bool:
    slot = _slots.get(variable)
    if slot is not None and slot.components is not None and slot.home is not None:
        with slot.home.dispatching(is_step=False):
            total = _sum_of_components(slot.components)
        # The variable first: an interrupt between the two leaves a value without components, which is still the right total.
        compat.set_raw_values([variable], [total])
        slot.array = total
    return False


def _lend(variable: Variable) -> None:
    """Stops an array on one device from being donated after its variable was read.

    `jax.device_put` may return an array that shares the memory, and no reference count shows that it exists.
    """
    slot = _slots.get(variable)
    if slot is not None and slot.owned and (slot.home is None or slot.home.is_single):
        slot.owned = False


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


@jax.jit
def _sum_of_components(components: jax.Array) -> jax.Array:
    return components.sum(0)


compat.on_first_read(_combine_on_demand)


_HELD_BY_VARIABLE_AND_SLOT = compat.UNSHARED + 1
_VALUES_TWICE, _COMPONENTS = itemgetter(0, 0), itemgetter(1)
"""Select from the outputs of a program: the values, once for the variables and once for the slots; and the components."""
_OWNED = ["owned"]
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
        self._written = _Variables([v for v, w in zip(variables, written, strict=True) if w], topology, storage)
        self._read = _Variables([v for v, w in zip(variables, written, strict=True) if not w], topology, storage)
        slots = self._written.slots
        self._is_on_read = [policy_of(v).on_read for v in self._written.variables]
        on_read = list(compress(slots, self._is_on_read))
        self._has_on_read = bool(on_read)
        self._owners: list[Any] = [*self._written.variables, *slots, *on_read]
        self._names = [compat.RAW_VALUE] * len(slots) + ["array"] * len(slots) + ["components"] * len(on_read)

    def take(self) -> tuple[Group, Group]:
        """Returns the arrays of the variables that the program writes, which it may consume, and of those that it only reads."""
        return self._written.take(own=True), self._read.take(own=False) if self._read.variables else _NOTHING

    def shapes(self) -> tuple[Group, Group]:
        """Returns the shapes, dtypes and shardings of what `take` returns. Changes nothing, and needs no values."""
        return self._written.shapes(), self._read.shapes() if self._read.variables else _NOTHING

    def merge(self, donated: Group, kept: Group) -> Group:
        """Returns values and components in the order of the variables."""
        return self._merged(donated[0], kept[0]), self._merged(donated[1], kept[1])

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
        fields = chain.from_iterable(chain.from_iterable(map(_VALUES_TWICE, outputs)))
        owners, names, copied = self._owners, self._names, self._written.copied
        if self._has_on_read or copied:
            components = compress(chain.from_iterable(map(_COMPONENTS, outputs)), self._is_on_read)
            fields = chain(fields, components, repeat(True))
            owners, names = owners + copied, names + _OWNED * len(copied)
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
        self.reset([*values, *values, *compress(components, self._is_on_read)])

    def raise_if_lost(self, donated: Group, cause: Exception) -> None:
        """Checks whether a program that failed has consumed values of variables.

        Raises:
          StateLostError: it has.
        """
        triples = zip(self._written.variables, *donated, strict=True)
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
    """The variables that a program writes, or the variables that it only reads."""

    def __init__(self, variables: list[Variable], topology: Topology, storage: Topology) -> None:
        self.variables, self._topology, self._storage = variables, topology, storage
        self._is_lent = storage is not topology
        self.slots = [slot_of(v) for v in variables]
        # Slots whose arrays `take` has copied. The program's result for them is owned, because nobody else can hold it.
        self.copied: list[Slot] = []
        mapped = topology.num_replicas > 1
        self._on_read = [i for i, v in enumerate(variables) if mapped and policy_of(v).on_read]
        self._on_demand = [i for i in self._on_read if policy_of(variables[i]).on_demand]

    def take(self, *, own: bool) -> Group:
        """Returns arrays on the program's devices, and components.

        Args:
          own: whether the program consumes the arrays.
        """
        if not self.variables:
            return [], []
        arrays = self._arrays(own=own and not self._is_lent)
        if self._is_lent:
            arrays = jax.device_put(arrays, self._topology.replicated, may_alias=False if own else None)
        if not self._on_read:
            return arrays, [None] * len(arrays)
        components = self._components(arrays)
        if own and self._is_lent:
            # A program that works on copies can be undone, so its components are copies too.
            for i in self._on_read:
                components[i] = jax.device_put(components[i], components[i].sharding, may_alias=False)
        for i in self._on_demand:
            arrays[i] = None
        return arrays, components

    def shapes(self) -> Group:
        """Returns what describes the arrays and components that `take` returns."""
        topology = self._topology
        arrays: list[Any] = [self._shape(v) for v in self.variables]
        parts: list[Any] = [None] * len(arrays)
        for i in self._on_read:
            own = arrays[i]
            parts[i] = shape_dtype((topology.num_replicas, *own.shape), own.dtype, sharding=topology.per_replica)
        for i in self._on_demand:
            arrays[i] = None
        return arrays, parts

    def _shape(self, variable: Variable) -> jax.ShapeDtypeStruct:
        shape, sharding = tuple(variable.shape), None
        if self._topology.has_devices:
            path = compat.layout_path(variable)
            sharding = self._topology.replicated if self._is_lent else self._topology.sharding_of(path, shape)
        return shape_dtype(shape, compat.dtype_of(variable), sharding=sharding)

    def _arrays(self, *, own: bool) -> list[Any]:
        arrays, counts = compat.shared_values(self.variables)
        self.copied = []
        if own and (parted := _parted.ids()):
            for slot in self.slots:
                if id(slot.array) in parted:
                    slot.owned = False
        # This loop runs at every step, for every variable. In the steady state its body does nothing.
        for i, (slot, array, count) in enumerate(zip(self.slots, arrays, counts, strict=True)):
            if slot.array is not array or slot.home is not self._storage:
                if slot.home is not self._storage and self._topology.num_workers > 1:
                    self._take_from_chief(self._topology)
                    return self._arrays(own=own)
                arrays[i] = self._adopt(self.variables[i], slot, array)
            elif array is None or not own or (slot.owned and count == _HELD_BY_VARIABLE_AND_SLOT):
                continue
            if own:
                # Unlike jnp.copy it compiles nothing.
                arrays[i] = jax.device_put(arrays[i], arrays[i].sharding, may_alias=False)
                self.copied.append(slot)
        return arrays

    def _take_from_chief(self, topology: Topology) -> None:
        """Sets variables that no program has used yet to the chief's values."""
        fresh = [i for i, slot in enumerate(self.slots) if slot.home is not topology]
        variables = [self.variables[i] for i in fresh]
        for i, variable, value in zip(fresh, variables, topology.from_chief(compat.raw_values(variables)), strict=True):
            array = topology.put_replicated(value)
            compat.set_raw_values([variable], [array])
            self.slots[i].store(array, topology, owned=False)

    def _components(self, arrays: Sequence[Any]) -> list[Any]:
        """Returns the replicas' own values of on-read variables, and None for the others."""
        parts: list[Any] = [None] * len(arrays)
        for i in self._on_read:
            parts[i] = self.slots[i].components
            if parts[i] is None:
                variable, count = self.variables[i], self._topology.num_replicas
                first = _restored.get(variable)
                _restored.discard(variable)
                if first is None or len(first) != count:
                    first = initial_components(variable, arrays[i], count)
                own = self._topology.local_replicas
                parts[i] = self._topology.put_per_replica([first[own.start : own.stop]])[0]
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
        slot.store(array, self._storage, owned=False)
        return array


def _is_lost(array: jax.Array) -> bool:
    if array.is_deleted():
        return True
    try:
        array.block_until_ready()
    except Exception:  # The program that computes the array failed after the call had returned.
        return True
    return False
