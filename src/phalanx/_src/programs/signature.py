# SPDX-License-Identifier: Apache-2.0
"""Compares a program between processes before its first run, because all of them must run the same one."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.extend import core as jex

from phalanx._src import compat
from phalanx._src.cluster.watch import watch
from phalanx._src.collectives import primitives
from phalanx._src.compat import Variable
from phalanx._src.mesh.topology import Topology
from phalanx._src.programs.slots import slot_of
from phalanx._src.tracing.discovery import Discovery
from phalanx._src.tracing.structure import Arguments
from phalanx.errors import TraceError
from phalanx.errors.frames import user_place

_HINTS = {
    "argument": "use the same shapes and dtypes on all workers; strategy.experimental_distribute_dataset(...) pads batches to one shape",
    "variable": "create the same model, in the same order and with the same layout=, on all workers",
    "result": "return results of the same shapes and dtypes on all workers",
    "program": "make the same calls, with arguments of the same shapes and dtypes, on all workers",
    "operation": "run the same code on all workers, and pass values that differ as arguments",
}


def require_equal(discovery: Discovery, inputs: Sequence[Arguments], topology: Topology) -> None:
    """Waits until all processes of the cluster are about to run the same program, if this program communicates.

    Args:
      discovery: the trace of the program.
      inputs: the arguments of the program, and the batches that it takes from iterators.
      topology: the devices of the program.

    Raises:
      TraceError: the processes have traced different programs.
    """
    local_watch = watch.own()
    if local_watch is None or topology.num_workers == 1:
        return
    # Any other program may differ between processes: one that only the chief runs, for example.
    if not (_places_variables(discovery, topology) or _communicates(discovery, inputs[0])):
        return
    topology.require_agreement()
    difference = local_watch.agree(_signature(discovery, inputs))
    if difference is None:
        return
    index, name = difference.index, ""
    # This process may have fewer variables than the one that differs.
    if difference.part == "variable" and index is not None and index < len(discovery.variables):
        name = f" ({discovery.variables[index].path!r} here)"
    raise TraceError(
        f"the program that {user_place() or 'this process'} runs",
        f"all processes must run the same program, but {difference}{name}.",
        _HINTS[difference.part],
    )


def _signature(discovery: Discovery, inputs: Sequence[Arguments]) -> dict[str, list[str]]:
    """Returns the signature that the processes compare: the types of arguments, variables and results, and all operations."""
    operations = list(_operations(discovery.jaxpr.jaxpr))
    return {
        "argument": [_of_argument(*x) for i in inputs for x in zip(i.arrays, i.sharded, strict=True)],
        "variable": list(map(_of_variable, discovery.variables)),
        "result": [_typed(x.aval.shape, x.aval.dtype) for x in discovery.jaxpr.jaxpr.outvars],
        "operation": operations,
    }


def _of_argument(array: jax.Array, is_parted: bool) -> str:
    if is_parted:
        return f"{_typed(array.shape[1:], array.dtype)} per replica"
    # The class of a Python number does not matter: an int on one process and a float on another select different programs.
    return _typed(array.shape, array.dtype) if hasattr(array, "shape") else "a number"


def _of_variable(variable: Variable) -> str:
    # Values are placed, and XLA partitions programs, according to the layout.
    sharding = compat.layout_of(variable)
    spec = sharding.spec if isinstance(sharding, jax.sharding.NamedSharding) else ()
    return _typed(variable.shape, variable.dtype) + (f" with the layout {(*spec,)}" if any(spec) else "")


def _typed(shape: Sequence[int], dtype: Any) -> str:
    return f"{dtype}[{','.join(map(str, shape))}]"


def _operations(jaxpr: jex.Jaxpr) -> Iterator[str]:
    """Yields each operation with the types of its results. Constants are skipped, because they may differ between processes."""
    for eqn in jaxpr.eqns:
        yield f"{eqn.primitive.name} of {', '.join(str(v.aval) for v in eqn.outvars)}"
        for inner in jex.jaxprs_in_params(eqn.params):
            yield from _operations(inner)


def _places_variables(discovery: Discovery, topology: Topology) -> bool:
    """Returns whether the program is the first to use some variable. The chief then broadcasts the value of that variable."""
    return any(slot_of(v).home is not topology for v in discovery.variables)


def _communicates(discovery: Discovery, arguments: Arguments) -> bool:
    """Returns whether a process that runs the program may wait for another process.

    In a replica function, collectives wait. Outside, so does any operation on arrays that are sharded over replicas, because XLA
    adds collectives to it.
    """
    jaxpr, num_variables = discovery.jaxpr.jaxpr, len(discovery.variables)
    # Inputs with higher numbers are batches.
    first = [is_own or i >= num_variables for i, is_own in discovery.inputs]
    rest = [
        is_sharded or (isinstance(x, jax.Array) and not x.is_fully_replicated)
        for x, is_sharded in zip(arguments.arrays, arguments.sharded, strict=True)
    ]
    closed_over = set(map(id, discovery.closed_over()))
    constants = [id(x) in closed_over for x in discovery.jaxpr.consts]
    inputs = zip([*jaxpr.constvars, *jaxpr.invars], constants + first + rest, strict=True)
    parted = {id(v) for v, is_parted in inputs if is_parted}
    for eqn in jaxpr.eqns:
        if any(map(_has_collective, jex.jaxprs_in_params(eqn.params))):
            return True
        if eqn.primitive.name == "shard_map":
            parted |= set(map(id, eqn.outvars))
        elif any(id(v) in parted for v in eqn.invars):
            return True
    return False


def _has_collective(jaxpr: jex.Jaxpr) -> bool:
    return any(map(primitives.communicates, jaxpr.eqns))
