# SPDX-License-Identifier: Apache-2.0
"""Lifted functions as programs for other processes, which need neither Keras nor the function."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from phalanx import compat
from phalanx.compat import Variable, dtype_of
from phalanx.errors import MissingDependencyError, TraceError
from phalanx.programs.explain import explained
from phalanx.programs.trace import trace_program
from phalanx.tracing.discovery import Discovery
from phalanx.tracing.draws import refuse_draw
from phalanx.tracing.policy import describe
from phalanx.tracing.strategy import Update
from phalanx.tracing.structure import Parts, Structure
from phalanx.typing import PyTree


@dataclass(frozen=True)
class Exported:
    """A program that was traced here and runs elsewhere.

    It is called with the values of `variables`, followed by the positions of what is looked up, and with the inputs, and
    returns `(results, increments, values, gradients)`. Of a table it gets as many rows as it looks up.

    Args:
      module: the program, as `jax.export` writes it.
      variables: whose values it takes, in order.
      added: numbers of the variables that it adds to; the program returns the increments.
      set: numbers of those that it assigns; the program returns the values.
      seeds: numbers of the states of random generators.
      updates: of whose gradients it returns a list each, without those that are None.
      output: what the function returns, without its arrays.
      ids: what is looked up, as a program of no values and the inputs; empty where nothing is.
      lookups: the numbers of the tables, in order.
      num_rows: of each table, how many rows it takes.
    """

    module: bytes
    variables: tuple[Variable, ...]
    added: tuple[int, ...]
    set: tuple[int, ...]
    seeds: tuple[int, ...]
    updates: tuple[Update, ...]
    output: Structure
    ids: bytes
    lookups: tuple[int, ...]
    num_rows: dict[int, int]


def export(
    fn: Callable[[list[Any]], Any],
    inputs: Sequence[Any],
    platforms: Sequence[str],
    *,
    adds: bool = True,
    clips: Callable[[Update], bool] = lambda update: False,
) -> Exported:
    """Traces `fn(inputs)` and returns it as a program.

    Args:
      fn: reads and writes variables, and returns a nest of arrays.
      inputs: arrays, or their shapes and dtypes.
      platforms: on what it is to run, as in `("cpu",)`.
      adds: whether it returns increments, where nothing but increments was written.
      clips: of which updates it clips the gradients, as their optimizers do.

    Raises:
      TraceError: it cannot be traced, or calls back to Python while it runs.
      MissingDependencyError: `flatbuffers` is not installed.
    """
    specs = [jax.ShapeDtypeStruct(np.shape(x), x.dtype) for x in inputs]
    found, rows = _traced(lambda inputs: Parts(fn(inputs)), specs)
    written = [i for i, w in enumerate(found.written) if w]
    is_seed = [any(v is s for s in found.seeds) for v in found.variables]
    is_added = [adds and x is not None for x in found.outputs.increments]
    kept = [(i, added) for i, added in zip(written, is_added, strict=True) if not is_seed[i]]

    def program(values: list[Any], inputs: list[Any]) -> PyTree:
        outputs = found.evaluate(values, [None] * len(values), inputs)
        pairs = dict(zip(written, zip(outputs.values, outputs.increments, strict=True), strict=True))
        given = [[g for g in of_update if g is not None] for of_update in outputs.gradients]
        pairs_of = zip(found.updates, given, strict=True)
        given = [list(compat.clipped(u.optimizer, g)) if clips(u) else g for u, g in pairs_of]
        return outputs.result, [pairs[i][1] for i, a in kept if a], [pairs[i][0] for i, a in kept if not a], given

    with compat.shapes(rows):
        values = [jax.ShapeDtypeStruct(tuple(v.shape), dtype_of(v)) for v in found.variables]
    values += [jax.ShapeDtypeStruct(shape, np.int32) for _, shape in found.lookups]
    tables = [next(i for i, v in enumerate(found.variables) if v is table) for table, _ in found.lookups]
    for i, _ in kept:
        if i in tables:
            raise TraceError(
                f"assign to {describe(found.variables[i])} in a scheduled step",
                "it is a table, of which a step has the rows that it looks up.",
                "an optimizer's apply_gradients; or assign to it at the coordinator",
            )
    return Exported(
        module=_serialized(program, platforms, values, specs),
        ids=_ids_program(found, platforms, values, specs) if tables else b"",
        lookups=tuple(tables),
        num_rows={i: values[i].shape[0] for i in tables},
        variables=tuple(found.variables),
        added=tuple(i for i, a in kept if a),
        set=tuple(i for i, a in kept if not a),
        seeds=tuple(i for i, s in enumerate(is_seed) if s),
        updates=tuple(_given(u, g) for u, g in zip(found.updates, found.outputs.gradients, strict=True)),
        output=found.outputs.structure,
    )


def _traced(
    call: Callable[[list[Any]], Parts], specs: list[Any]
) -> tuple[Discovery, list[tuple[Variable, tuple[int, ...]]]]:
    """Traces a scheduled step, with as many rows of each table as it looks up.

    Returns:
      What was found, and the shapes of the tables' rows.

    Raises:
      TraceError: it cannot be sent to another process.
      ContextError: it draws a batch.
    """
    rows: list[tuple[Variable, tuple[int, ...]]] = []
    while True:
        with explained(prints=False), compat.shapes(rows):
            found = trace_program(call, specs)
        looked_up = _rows(found)
        if [shape for _, shape in looked_up] == [shape for _, shape in rows]:
            break
        if looked_up and any(isinstance(x, jax.core.Tracer) for x in found.jaxpr.consts):
            # What was computed in an inner trace got out of it.
            raise TraceError(
                f"rows of {describe(looked_up[0][0])} looked up in a scheduled step",
                "the ids are computed inside the body of a loop or branch, or another transformation of jax.",
                "look the rows up before it, and pass them in",
            )
        # The number of rows that it needs of a table is known after it has been traced with all rows.
        rows = looked_up
    if found.draws:
        raise refuse_draw()
    if found.has_callback:
        raise TraceError(
            "a scheduled step that calls back to Python (jax.debug.print, io_callback, pure_callback)",
            "it is sent to workers as a program, which has no Python.",
            "return the value from the step, and print it at the coordinator",
        )
    return found, rows


def _rows(found: Discovery) -> list[tuple[Variable, tuple[int, ...]]]:
    """Returns what a program has of tables: as many rows as it looks up."""
    totals: dict[int, int] = {}
    for table, shape in found.lookups:
        totals[id(table)] = totals.get(id(table), 0) + math.prod(shape)
    return [(v, (totals[id(v)], *v.shape[1:])) for v in found.variables if id(v) in totals]


def _ids_program(found: Discovery, platforms: Sequence[str], values: list[Any], specs: list[Any]) -> bytes:
    """Returns the program of what is looked up, which must follow from the inputs alone."""

    def program(values: list[Any], inputs: list[Any]) -> PyTree:
        return found.evaluate(values, [None] * len(values), inputs).ids

    kept = jax.export.export(jax.jit(program), platforms=tuple(platforms))(values, specs).module_kept_var_idx
    if any(i < len(values) for i in kept):
        raise TraceError(
            "rows looked up in a scheduled step",
            "which ones depends on a variable, or on other rows.",
            "ids that are computed from the batch",
        )
    return _serialized(lambda inputs: program([jnp.zeros(x.shape, x.dtype) for x in values], inputs), platforms, specs)


def _serialized(program: Callable[..., Any], platforms: Sequence[str], *specs: Any) -> bytes:
    try:
        return bytes(jax.export.export(jax.jit(program), platforms=tuple(platforms))(*specs).serialize())
    except ModuleNotFoundError as e:
        raise MissingDependencyError(
            "a program for other processes", f"{e.name} is not installed.", 'pip install "phalanx[ps]"'
        ) from e


def _given(update: Update, gradients: Sequence[Any]) -> Update:
    """Returns the update of the variables that have a gradient."""
    pairs = [(v, g) for v, g in zip(update.variables, gradients, strict=True) if g is not None]
    return Update(update.optimizer, tuple(v for v, _ in pairs), [g for _, g in pairs])
