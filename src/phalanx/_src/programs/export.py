# SPDX-License-Identifier: Apache-2.0
"""Exports traced functions as programs for other processes, which need neither Keras nor the function."""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from phalanx._src import compat
from phalanx._src.compat import Variable, dtype_of
from phalanx._src.mesh.arrays import require_live
from phalanx._src.programs.explain import explained
from phalanx._src.programs.trace import trace_program
from phalanx._src.tracing.discovery import Discovery
from phalanx._src.tracing.draws import refuse_draw
from phalanx._src.tracing.policy import describe
from phalanx._src.tracing.records import EITHER_WAY, noting_questions, recording_key
from phalanx._src.tracing.strategy import Update
from phalanx._src.tracing.structure import Parts, Structure, refuse_outer_trace, with_values
from phalanx._src.typed_jax import shape_dtype
from phalanx.errors import MissingDependencyError, TraceError
from phalanx.typing import PyTree


@dataclass(frozen=True)
class Exported:
    """A program that was traced here and runs in another process.

    Its first argument is the list of the values of `variables`, followed by the positions of the looked-up rows. Its second
    argument is the list of inputs. It returns `(results, increments, values, gradients)`. The arrays of records follow those of
    the return value among the results. A table is passed as the rows that the program looks up.

    Args:
      module: the program, serialized by `jax.export`.
      variables: the variables whose values the program takes, in order.
      added: indices of the variables that the program adds to. It returns the increments.
      set: indices of the variables that the program assigns. It returns the new values.
      seeds: indices of the states of random generators.
      updates: the updates that optimizers apply afterwards. The program returns a list of gradients for each, without None.
      output: what the function returns, without its arrays.
      records: what the function records for summaries, without its arrays.
      recording: selects the records. See `recording_key`.
      ids: a program that maps the inputs to the ids of the looked-up rows. Empty if no rows are looked up.
      lookups: index of the table of each lookup, in order.
      num_rows: number of rows that the program takes, by the index of the table.
    """

    module: bytes
    variables: tuple[Variable, ...]
    added: tuple[int, ...]
    set: tuple[int, ...]
    seeds: tuple[int, ...]
    updates: tuple[Update, ...]
    output: Structure
    records: jax.tree_util.PyTreeDef
    recording: Hashable
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
    """Traces `fn(inputs)` and exports it as a program.

    Args:
      fn: a function that reads and writes variables, and returns a nest of arrays.
      inputs: arrays, or objects with a shape and a dtype.
      platforms: the platforms that the program will run on, for example `("cpu",)`.
      adds: whether the program returns the increment of a variable that it only adds to, instead of the new value.
      clips: returns whether the program clips the gradients of an update, as the optimizer would.

    Raises:
      TraceError: `fn` cannot be traced, or calls back to Python while it runs.
      MissingDependencyError: `flatbuffers` is not installed.
    """
    specs = [shape_dtype(np.shape(x), x.dtype) for x in inputs]
    recording = recording_key()
    with noting_questions() as has_asked:
        discovery, rows = _traced(lambda inputs: Parts(with_values(fn(inputs))), specs)
        recording = recording if has_asked() else EITHER_WAY
    written = [i for i, w in enumerate(discovery.written) if w]
    is_seed = [any(v is s for s in discovery.seeds) for v in discovery.variables]
    is_added = [adds and x is not None for x in discovery.outputs.increments]
    changes = [(i, added) for i, added in zip(written, is_added, strict=True) if not is_seed[i]]

    def program(values: list[Any], inputs: list[Any]) -> PyTree:
        # These programs have one replica, so no variable has components.
        outputs = discovery.evaluate(values, [None] * len(values), inputs)
        pairs = dict(zip(written, zip(outputs.values, outputs.increments, strict=True), strict=True))
        # The caller pairs the gradients with the variables that `_drop_missing_gradients` leaves.
        gradients = [[g for g in of_update if g is not None] for of_update in outputs.gradients]
        pairs_of = zip(discovery.updates, gradients, strict=True)
        gradients = [list(compat.clipped(u.optimizer, g)) if clips(u) else g for u, g in pairs_of]
        results = [*outputs.result, *jax.tree.leaves(outputs.records)]
        return results, [pairs[i][1] for i, a in changes if a], [pairs[i][0] for i, a in changes if not a], gradients

    # Inside, a table has the shape of the rows that the step looks up, as during the trace.
    with compat.shapes(rows):
        values = [shape_dtype(tuple(v.shape), dtype_of(v)) for v in discovery.variables]
    values += [shape_dtype(shape, np.int32) for _, shape in discovery.lookups]
    tables = [next(i for i, v in enumerate(discovery.variables) if v is table) for table, _ in discovery.lookups]
    for i, _ in changes:
        if i in tables:
            raise TraceError(
                f"assign to {describe(discovery.variables[i])} in a scheduled step",
                "the variable is a table, and a step has only the rows that it looks up.",
                "optimizer.apply_gradients(...) in the step, or assign to the table at the coordinator",
            )
    return Exported(
        module=_serialized(program, platforms, values, specs),
        ids=_ids_program(discovery, platforms, values, specs) if tables else b"",
        lookups=tuple(tables),
        num_rows={i: values[i].shape[0] for i in tables},
        variables=tuple(discovery.variables),
        added=tuple(i for i, a in changes if a),
        set=tuple(i for i, a in changes if not a),
        seeds=tuple(i for i, s in enumerate(is_seed) if s),
        updates=tuple(
            _drop_missing_gradients(u, g) for u, g in zip(discovery.updates, discovery.outputs.gradients, strict=True)
        ),
        output=discovery.outputs.structure,
        records=jax.tree.structure(discovery.outputs.records),
        recording=recording,
    )


def _traced(
    call: Callable[[list[Any]], Parts], specs: list[Any]
) -> tuple[Discovery, list[tuple[Variable, tuple[int, ...]]]]:
    """Traces a scheduled step, in which each table has as many rows as the step looks up.

    Returns:
      The trace, and the tables with the shapes of the rows that the step takes.

    Raises:
      TraceError: the step cannot be sent to another process.
      ContextError: the step draws a batch.
    """
    rows: list[tuple[Variable, tuple[int, ...]]] = []
    while True:
        with explained(prints=False), compat.shapes(rows):
            discovery = trace_program(call, specs)
        looked_up = _rows(discovery)
        if [shape for _, shape in looked_up] == [shape for _, shape in rows]:
            break
        if looked_up and any(isinstance(x, jax.core.Tracer) for x in discovery.jaxpr.consts):
            # The ids were computed in an inner trace, and leaked out of it.
            raise TraceError(
                f"rows of {describe(looked_up[0][0])} looked up in a scheduled step",
                "the ids are computed inside the body of a loop or branch, or inside another JAX transformation.",
                "look up the rows before the loop or branch, and pass them in",
            )
        # A trace with whole tables shows how many rows the step looks up. The next trace has that many.
        rows = looked_up
    for const in discovery.jaxpr.consts:
        require_live(const)
        if isinstance(const, jax.core.Tracer):
            raise refuse_outer_trace()
    if discovery.draws:
        raise refuse_draw()
    if discovery.has_callback:
        raise TraceError(
            "a scheduled step that calls back to Python (jax.debug.print, io_callback, pure_callback)",
            "workers get the step as a compiled program, which cannot call Python.",
            "return the value from the step, and print it at the coordinator",
        )
    return discovery, rows


def _rows(discovery: Discovery) -> list[tuple[Variable, tuple[int, ...]]]:
    """Returns each table with the shape of the rows that the program looks up."""
    totals: dict[int, int] = {}
    for table, shape in discovery.lookups:
        totals[id(table)] = totals.get(id(table), 0) + math.prod(shape)
    return [(v, (totals[id(v)], *v.shape[1:])) for v in discovery.variables if id(v) in totals]


def _ids_program(discovery: Discovery, platforms: Sequence[str], values: list[Any], specs: list[Any]) -> bytes:
    """Returns the program that computes the ids of the looked-up rows from the inputs alone.

    Raises:
      TraceError: the ids depend on variables.
    """

    def program(values: list[Any], inputs: list[Any]) -> PyTree:
        return discovery.evaluate(values, [None] * len(values), inputs).ids

    # An export keeps only the inputs that its results depend on, and names them by position.
    used_inputs = jax.export.export(jax.jit(program), platforms=tuple(platforms))(values, specs).module_kept_var_idx
    if any(i < len(values) for i in used_inputs):
        raise TraceError(
            "rows looked up in a scheduled step",
            "the ids depend on a variable, or on other rows.",
            "compute the ids from the batch alone",
        )
    # Zeros stand for the values, on which no id depends. A worker computes the ids before it pulls any value.
    return _serialized(lambda inputs: program([jnp.zeros(x.shape, x.dtype) for x in values], inputs), platforms, specs)


def _serialized(program: Callable[..., Any], platforms: Sequence[str], *specs: Any) -> bytes:
    try:
        return bytes(jax.export.export(jax.jit(program), platforms=tuple(platforms))(*specs).serialize())
    except ModuleNotFoundError as e:
        raise MissingDependencyError(
            "a program for other processes", f"{e.name} is not installed.", 'pip install ".[ps]" in a clone of Phalanx'
        ) from e


def _drop_missing_gradients(update: Update, gradients: Sequence[Any]) -> Update:
    """Returns the update without the variables that have no gradient."""
    pairs = [(v, g) for v, g in zip(update.variables, gradients, strict=True) if g is not None]
    return Update(update.optimizer, tuple(v for v, _ in pairs), [g for _, g in pairs])
