# SPDX-License-Identifier: Apache-2.0
"""Reads and sets variables between programs, including those whose replicas have their own values."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding

from phalanx._src import compat
from phalanx._src.compat import Variable, raw_value
from phalanx._src.mesh.arrays import put_parts, spans_processes
from phalanx._src.mesh.topology import Topology, whole
from phalanx._src.programs.slots import forget, parted, restored, slot_of
from phalanx._src.tracing.boundary import combined
from phalanx._src.tracing.policy import Combine, policy_of
from phalanx._src.tracing.update_sharding import sharding_of
from phalanx._src.typed_jax import with_sharding_constraint

PartOf = Callable[[Any], np.ndarray]
"""Returns the part of a value that has an index, as JAX describes the index."""


def to_host(array: Any) -> np.ndarray:
    """Returns a copy of a NumPy or JAX array on the host. If no process has the whole array, all must call it."""
    if not isinstance(array, jax.Array):
        return np.array(array, order="C")
    was_parted = parted.get(array)
    host = whole(array, f"an array {array.dtype}{list(array.shape)}") if spans_processes(array) else np.asarray(array)
    # On CPUs the result shares the memory of the array, which the next program may consume.
    host = host if host.flags.owndata else host.copy()
    # Only this function has read the shards, and its copy shares no memory with them.
    if not was_parted:
        parted.discard(array)
    return host


def keep_components(variable: Variable, components: np.ndarray) -> None:
    """Makes `components`, (num_replicas, ...), those with which the next program of as many replicas begins.

    Together they must make the value of the variable. With another number of replicas, a program begins with that value.
    """
    restored[variable] = components


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


def put_values(values: Sequence[tuple[Variable, np.ndarray | PartOf]], home: Topology | None = None) -> None:
    """Stores values.

    Args:
      values: the variables and their values; of a variable that is sharded over workers, a function that returns a part of it.
      home: devices on which to place them, if all workers have the same values. With None, the next program broadcasts them first.
    """
    for variable, value in values:
        forget(variable)
        if home is None:
            compat.set_raw_values([variable], [jax.device_put(value)])
            continue
        sharding = sharding_of(home, variable)
        placed = put_parts(variable.shape, sharding, value) if callable(value) else home.put_variable(value, sharding)
        array: jax.Array = placed
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
    slot = slot_of(variable)
    if slot.home is not None:
        with slot.home.dispatching(is_step=False):
            combine_on_demand([variable])
    # The value of a trace must not stay when the trace has ended.
    return isinstance(raw_value(variable), jax.core.Tracer)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _combined(components: list[jax.Array], how: Sequence[Combine], place: NamedSharding) -> list[jax.Array]:
    return [with_sharding_constraint(combined(c, x), place) for c, x in zip(how, components, strict=True)]


compat.on_first_read(_combine_for_read)


def _follow(variable: Variable) -> None:
    """Makes replicas continue from a value that the user has assigned, and not from the outer weights before."""
    outer = compat.outer_of(variable)
    if outer is not None and not compat.is_new(variable):
        outer.assign(raw_value(variable))


compat.on_assign(_follow)
