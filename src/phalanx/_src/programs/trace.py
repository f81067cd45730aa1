# SPDX-License-Identifier: Apache-2.0
"""Traces whole programs, and the functions in them, with their variables as inputs and outputs."""

import functools
import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import keras

from phalanx._src import compat
from phalanx._src.tracing import equality, markers, slips
from phalanx._src.tracing.discovery import Discovery, DiscoveryMismatch, Executing, Tracing
from phalanx._src.tracing.entry import Entry
from phalanx._src.tracing.policy import policy_of, refuse_write
from phalanx._src.tracing.records import Record
from phalanx._src.tracing.scope import LiftScope
from phalanx._src.tracing.structure import Parts, Structure
from phalanx._src.typed_jax import shape_dtype
from phalanx.typing import PyTree


def trace_program(
    fn: Callable[[PyTree], Parts], inputs: PyTree, *, named: Callable[..., Any] | None = None, eager: bool = False
) -> Discovery:
    """Traces a whole program.

    Args:
      fn: the program. Returns a nest, split into `Parts`.
      inputs: the argument of `fn`.
      named: the user's function that `fn` calls. JAX names it if a value leaks.
      eager: whether `fn` will be executed with real values.

    Raises:
      DiscoveryMismatch: `fn` creates another variable each time it is traced.
    """
    inputs = jax.tree.map(_without_explicit_axes, inputs)
    random_states = slips.random_states()
    discovery, made = _traced_whole(fn, inputs, named, is_eager=eager)
    if made or slips.random_states() != random_states:
        # Creating a variable draws a seed, and the first random number creates the global generator. The second trace does neither.
        random_states = slips.random_states()
        discovery, made = _traced_whole(fn, inputs, named, is_eager=eager)
    if made:
        raise DiscoveryMismatch(made[0])
    slips.warn_of_random_numbers(random_states)
    return replace(discovery, eager=eager, runs=[replace(run, eager=eager) for run in discovery.runs])


def _without_explicit_axes(x: PyTree) -> PyTree:
    """Returns the type of an array. The mesh of `jax.make_mesh` is part of it, and the replicas have another one, on which the array is placed."""
    if not isinstance(x, jax.Array):
        return x
    aval = jax.typeof(x)
    is_explicit = jax.sharding.AxisType.Explicit in aval.sharding.mesh.axis_types
    return shape_dtype(aval.shape, aval.dtype, weak_type=aval.weak_type) if is_explicit else x


def _traced_whole(
    fn: Callable[[PyTree], Parts], inputs: PyTree, named: Callable[..., Any] | None, *, is_eager: bool
) -> tuple[Discovery, list[keras.Variable]]:
    """Traces a whole program. Returns the trace, and the variables that were created while tracing."""
    # New variables get their first values when this outer scope closes, outside the trace.
    with keras.StatelessScope():
        discovery = trace(functools.partial(_program, fn), inputs, named=named, is_eager=is_eager)
        return discovery, [v for v in discovery.variables if compat.is_new(v)]


class ProgramOutputs(NamedTuple):
    """What a whole program returns: arrays, or their shapes if the program was only traced.

    Args:
      result: the arrays that the function returns.
      structure: what the function returns, without its arrays.
      values: new values of the variables that the program writes, in order.
      parts: the replicas' components of each of these variables. None for variables without components.
      gradients: one list per update that is applied after the program.
      increments: the sum of what was added to each written variable. None if the variable was assigned.
      ids: the ids of the table rows that the program looks up, in order.
      records: what the program records for summaries.
    """

    result: list[Any]
    structure: Structure
    values: list[Any]
    parts: list[Any]
    gradients: list[list[Any]]
    increments: list[Any]
    ids: list[Any]
    records: list[Record]


def execute_program(
    fn: Callable[[PyTree], Parts], inputs: PyTree, discovery: Discovery, values: list[Any], parts: list[Any]
) -> ProgramOutputs:
    """Executes `fn(inputs)` with these values of the variables, and these components."""
    return _program(fn, executing_scope(discovery, values, parts, inputs), inputs)


def _program(fn: Callable[[PyTree], Parts], scope: LiftScope, inputs: PyTree) -> ProgramOutputs:
    with scope:
        returned = fn(inputs)
    written = written_entries(scope)
    gradients = [u.gradients for u in scope.updates]
    values, parts = [e.value for e in written], [e.components for e in written]
    ids = scope.pass_.ids if isinstance(scope.pass_, Tracing) else []
    return ProgramOutputs(
        returned.arrays,
        returned.structure,
        values,
        parts,
        gradients,
        [e.increment for e in written],
        ids,
        scope.records or [],
    )


def trace(
    fn: Callable[..., Any],
    *args: PyTree,
    named: Callable[..., Any] | None = None,
    mapped: bool = False,
    is_eager: bool = False,
    refused: Collection[str] = (),
) -> Discovery:
    """Traces `fn(scope, *args)`.

    Traces it a second time if a tape computes the gradient of a target that does not depend on the source, or if a replica assigns
    weights that may differ between replicas, so that the error comes from the assignment.

    Args:
      fn: the function to trace.
      *args: the arguments after the scope.
      named: the user's function that `fn` calls. JAX names it if a value leaks.
      mapped: whether `fn` is the program of one of several replicas, whose arguments are those that differ, and those that do not.
      is_eager: whether `fn` will be executed with real values.
      refused: descriptions of weights of which it is known that replicas assign them different values.

    Raises:
      AggregationError: a replica assigns weights that may differ between replicas.
    """
    discovery = _traced_once(fn, None, *args, named=named, mapped=mapped, is_eager=is_eager)
    if mapped and discovery.equal and (refused := refused or _unequal(discovery, *args)):
        _traced_once(fn, None, *args, named=named, mapped=mapped, is_eager=is_eager, refused=refused)
        raise refuse_write(min(refused))
    if all(map(all, discovery.connected)):
        return discovery
    return _traced_once(fn, discovery.connected, *args, named=named, mapped=mapped, is_eager=is_eager)


def _traced_once(
    fn: Callable[..., Any],
    connected: Sequence[tuple[bool, ...]] | None,
    *args: PyTree,
    named: Callable[..., Any] | None,
    mapped: bool,
    is_eager: bool,
    refused: Collection[str] = (),
) -> Discovery:
    passes: list[Tracing] = []
    scopes: list[LiftScope] = []

    def lifted(*args: PyTree) -> PyTree:
        passes.append(Tracing(connected, refused, mapped=mapped, is_eager=is_eager))
        scopes.append(LiftScope(passes[0], mapped=mapped))
        return fn(scopes[0], *args)

    if named is not None:
        functools.update_wrapper(lifted, named)
    jaxpr, outputs = jax.make_jaxpr(lifted, return_shape=True)(*args)
    return Discovery.of(passes[0], list(scopes[0].entries.values()), scopes[0].updates, jaxpr, outputs)


def _unequal(discovery: Discovery, differing: PyTree, *others: PyTree) -> set[str]:
    """Returns the descriptions of the variables that a replica assigns values that may differ between replicas."""
    variables = discovery.variables
    are_equal = [
        i < len(variables) and discovery.dims[i] is None and not policy_of(variables[i]).is_local
        for i, _ in discovery.inputs
    ]
    are_equal += [False] * len(jax.tree.leaves(differing)) + [True] * len(jax.tree.leaves(others))
    return equality.unequal(discovery.jaxpr, are_equal)


def executing_scope(
    discovery: Discovery, values: list[Any], parts: list[Any], *args: PyTree, mapped: bool = False
) -> LiftScope:
    """Returns a scope in which a function is executed with real values."""
    gradients = (
        markers.gradient_values(discovery.jaxpr, *discovery.flat(values, parts, *args)) if discovery.has_tapes else []
    )
    return LiftScope(Executing(discovery, values, parts, gradients), mapped=mapped)


def written_entries(scope: LiftScope) -> list[Entry]:
    """Returns the entries of the variables that are written, in the order of the program's outputs.

    Raises:
      DiscoveryMismatch: the function wrote a variable that it did not write when it was traced.
    """
    now = [e for e in scope.entries.values() if e.written]
    if not isinstance(scope.pass_, Executing):
        return now
    # The outputs of the program were fixed when it was traced: values for these variables, and no others.
    discovery = scope.pass_.discovery
    known = list(itertools.compress(discovery.variables, discovery.written))
    for entry in now:
        if not any(entry.variable is v for v in known):
            raise DiscoveryMismatch(entry.variable)
    return [scope.entry(v) for v in known]
