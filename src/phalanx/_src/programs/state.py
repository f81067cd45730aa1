# SPDX-License-Identifier: Apache-2.0
"""Takes the arrays of a program's variables before it runs, and stores the new arrays afterwards."""

import functools
import gc
from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain, compress, repeat
from operator import is_, itemgetter
from typing import Any

import jax

from phalanx._src import compat
from phalanx._src.compat import Variable, raw_value
from phalanx._src.mesh.arrays import put_small, spans_processes, uncommitted
from phalanx._src.mesh.topology import Topology
from phalanx._src.programs.slots import Shelf, Slot, parted, restored, slot_of
from phalanx._src.programs.values import combine_on_demand
from phalanx._src.tracing.policy import describe, initial_components, policy_of
from phalanx._src.tracing.structure import refuse_outer_trace
from phalanx._src.tracing.update_sharding import sharding_of
from phalanx._src.typed_jax import shape_dtype
from phalanx.errors import StateLostError, VariableError
from phalanx.typing import PyTree

Group = tuple[list[Any], list[Any]]
"""Values of some variables, and the replicas' components of the on-read variables among them."""


_VALUES, _VALUES_AS_LIST, _COMPONENTS = itemgetter(0), itemgetter(slice(1)), itemgetter(1)
"""Select from the outputs of a program: the values; a list of the list of values, for the shelf; and the components."""
_NOTHING: Group = ([], [])


class State:
    """The variables of one program.

    An array is donated to the program only if a Phalanx program made it and nobody else holds it. Otherwise a copy is donated.

    Args:
      variables: all variables that the program uses.
      written: for each variable, whether the program writes it.
      topology: the devices of the program.
      storage: the devices of the variables between programs.

    Attributes:
      is_lent: whether these are other devices, so that the program works on copies.
    """

    def __init__(
        self, variables: Sequence[Variable], written: Sequence[bool], topology: Topology, storage: Topology
    ) -> None:
        self._storage, self.is_lent = storage, storage is not topology
        self._order = list(written)
        writes = [v for v, w in zip(variables, written, strict=True) if w]
        reads = [v for v, w in zip(variables, written, strict=True) if not w]
        self._shelf = Shelf([None] * len(writes), storage)
        self._written = _Variables(writes, topology, storage, self._shelf)
        self._read = _Variables(reads, topology, storage, None)
        on_read = [slot_of(v) for v in writes if policy_of(v).on_read]
        # In the order of `fields` in `run`: the values, the list of them for the shelf, the components.
        self._owners: list[Any] = [*writes, self._shelf, *on_read]
        self._names = [compat.RAW_VALUE] * len(writes) + ["arrays"] + ["components"] * len(on_read)

    def take(self) -> tuple[Group, Group]:
        """Returns the arrays of the variables that the program writes, which it may consume, and the arrays that it only reads."""
        return self._written.take(donates=True), self._read.take(donates=False) if self._read.variables else _NOTHING

    def shapes(self) -> tuple[Group, Group]:
        """Returns the shapes, dtypes and shardings of what `take` returns. Changes nothing, and needs no values."""
        return self._written.shapes(), self._read.shapes() if self._read.variables else _NOTHING

    def merge(self, donated: Group, read_only: Group) -> Group:
        """Returns values and components in the order of the variables. A variable without components has None."""
        parts = self._written.spread(donated[1]), self._read.spread(read_only[1])
        return self._merged(donated[0], read_only[0]), self._merged(*parts)

    def of_on_read(self, parts: Sequence[Any]) -> list[Any]:
        """Returns the components of the on-read variables, from those of all variables that the program writes."""
        return list(compress(parts, self._written.is_on_read))

    def run(
        self, execute: Callable[..., tuple[Any, ...]], donated: Group, read_only: Group, inputs: list[Any]
    ) -> tuple[Any, ...]:
        """Executes a program and stores the values that it wrote, within one bytecode of Python.

        A signal handler runs between two bytecodes and may raise there. It finds either the state before the step or the whole
        state after it, because one call consumes the iterators below, and no bytecode runs inside that call. Garbage collection
        is disabled for the same reason: Python ignores an exception that a handler raises in a callback of the collector.

        Args:
          execute: the program. If it consumes `donated`, it must not run any bytecode.
          donated: its first argument.
          read_only: its second argument.
          inputs: its third argument.

        Returns:
          The outputs of the program, beginning with values and components of the variables that it writes.
        """
        if self.is_lent:
            # This runs bytecode between the program and the store. An interrupt there loses only copies.
            execute = functools.partial(self._run_elsewhere, execute)
        outputs: list[tuple[Any, ...]] = []
        # All of these are lazy. `deque` below consumes `executed` first, which fills `outputs`, and then `stored`, which reads it.
        executed = map(outputs.extend, [map(execute, [donated], [read_only], [inputs])])
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
        values, *rest = execute(*args)
        return (self._storage.take_back(values), *rest)

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

    def take(self, *, donates: bool) -> Group:
        """Returns arrays on the program's devices, and components of the on-read variables.

        Args:
          donates: whether the program consumes the arrays.
        """
        if not self.variables:
            return [], []
        arrays = self._placed()
        if self._is_lent:
            # A donated array must be a copy, or the program would consume the variable itself. One that is only read may share its memory.
            arrays = jax.device_put(arrays, self._topology.replicated, may_alias=False if donates else None)
        elif donates and self._shelf is not None:
            self.copied = []
            donated = compress(arrays, self._have_values) if self._on_demand else arrays
            counts = compat.reference_counts(donated)
            in_parts = parted.ids()
            is_parted = bool(in_parts) and not in_parts.isdisjoint(map(id, arrays))
            if self._shelf.has_lent or is_parted or max(counts, default=0) > compat.UNSHARED:
                arrays = self._consumable(arrays, self._shelf)
        if not self._on_read:
            return arrays, []
        components = self._components(arrays)
        if donates and self._is_lent:
            # A program that works on copies can be undone, so its components are copies too.
            components = [jax.device_put(x, x.sharding, may_alias=False) for x in components]
        if self._on_demand:
            arrays = list(arrays)
            for i in self._on_demand:
                arrays[i] = None
        return arrays, components

    def spread(self, components: Sequence[Any]) -> list[Any]:
        """Returns the components of all variables, given the components of the on-read variables. All other variables have None."""
        parts: list[Any] = [None] * len(self.variables)
        for i, array in zip(self._on_read, components, strict=True):
            parts[i] = array
        return parts

    def shapes(self) -> Group:
        """Returns the description of the arrays and components that `take` returns."""
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
            sharding = self._topology.replicated if self._is_lent else sharding_of(self._topology, variable)
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
                    # Replicas of another strategy have their own values.
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
        in_parts = parted.ids()
        # Without a variable that would still hold the last array when references are counted.
        for slot in compress(self._slots, [id(array) in in_parts for array in arrays]):
            slot.lend()
        counts, taken = list(compat.reference_counts(arrays)), list(arrays)
        shelf.has_lent = False  # Before the loop, so that what another thread lends during it counts.
        for i, (slot, array, count) in enumerate(zip(self._slots, arrays, counts, strict=True)):
            if array is None or (slot.owned and count <= compat.UNSHARED) or array.is_deleted():
                continue  # The program says which variable has lost its value.
            if not slot.owned:
                shelf.has_lent = True  # Until the program has stored its result, because it may fail.
            # Unlike jnp.copy it compiles nothing. But it commits the copy, and the program may read variables on other devices.
            copy = put_small(array, array.sharding)
            if copy is None:
                copy = jax.device_put(array, array.sharding, may_alias=False)
            if isinstance(copy, jax.core.Tracer):
                shelf.has_lent = True  # The slots that come later may be lent.
                raise refuse_outer_trace()
            taken[i] = copy if array.committed else uncommitted(copy)
            self.copied.append(slot)
        return taken

    def _take_from_source(self, topology: Topology) -> None:
        """Sets variables that no program has used yet to the values of the chief, or of the worker that has made the most steps.

        What is divided over the processes was computed or assigned by all of them.
        """
        fresh = [i for i, slot in enumerate(self._slots) if slot.home is not topology]
        arrays = compat.raw_values([self.variables[i] for i in fresh])
        divided = [(i, array) for i, array in zip(fresh, arrays, strict=True) if spans_processes(array)]
        local = [i for i, array in zip(fresh, arrays, strict=True) if not spans_processes(array)]
        unread = [array for _, array in divided if not parted.get(array)]
        topology.require_equal([(self.variables[i].path, array) for i, array in divided])
        # The comparison has read the shards, and not the user: the program may still consume the arrays.
        for array in unread:
            parted.discard(array)
        values = topology.from_source([compat.raw_value(self.variables[i]) for i in local])
        placed = [
            topology.put_variable(x, sharding_of(topology, self.variables[i]))
            for i, x in zip(local, values, strict=True)
        ]
        for i, array in [*divided, *zip(local, placed, strict=True)]:
            compat.set_raw_values([self.variables[i]], [array])
            self._slots[i].store(array, topology)
        for i, _ in divided:
            # Nobody but this variable holds it. A copy of each would be twice the memory.
            self._slots[i].owned = True

    def _components(self, arrays: Sequence[Any]) -> list[Any]:
        """Returns the replicas' own values of the on-read variables."""
        parts: list[Any] = []
        for i in self._on_read:
            components = self._slots[i].components
            if components is None:
                variable, count = self.variables[i], self._topology.num_replicas
                first = restored.get(variable)
                restored.discard(variable)
                # Without a checkpoint of as many replicas, the components follow from the value of the variable.
                if first is None or len(first) != count:
                    first = initial_components(variable, arrays[i], count)
                rows = self._topology.local_replicas
                components = self._topology.put_per_replica([first[rows.start : rows.stop]])[0]
            parts.append(components)
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
        array = self._storage.put_variable(array, sharding_of(self._storage, variable))
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
