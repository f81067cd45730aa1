# SPDX-License-Identifier: Apache-2.0
"""Lifted functions as programs for other processes, which need neither Keras nor the function."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.export
import numpy as np

from phalanx.compat import Variable, dtype_of
from phalanx.errors import MissingDependencyError, TraceError
from phalanx.lifting import Update
from phalanx.programs import explained
from phalanx.replicate import trace_program
from phalanx.structure import Structure, take_apart


@dataclass(frozen=True)
class Exported:
    """A program that was traced here and runs elsewhere.

    It is called with the values of `variables` and the inputs, and returns `(results, increments, values, gradients)`.

    Args:
      module: the program, as `jax.export` writes it.
      variables: whose values it takes, in order.
      added: numbers of the variables that it adds to; the program returns the increments.
      set: numbers of those that it assigns; the program returns the values.
      seeds: numbers of the states of random generators.
      updates: of whose gradients it returns a list each, without those that are None.
      output: what the function returns, without its arrays.
    """

    module: bytes
    variables: tuple[Variable, ...]
    added: tuple[int, ...]
    set: tuple[int, ...]
    seeds: tuple[int, ...]
    updates: tuple[Update, ...]
    output: Structure


def export(
    fn: Callable[[list[Any]], Any], inputs: Sequence[Any], platforms: Sequence[str], *, adds: bool = True
) -> Exported:
    """Traces `fn(inputs)` and returns it as a program.

    Args:
      fn: reads and writes variables, and returns a nest of arrays.
      inputs: arrays, or their shapes and dtypes.
      platforms: on what it is to run, as in `("cpu",)`.
      adds: whether it returns increments, where nothing but increments was written.

    Raises:
      TraceError: it cannot be traced, or calls back to Python while it runs.
      MissingDependencyError: `flatbuffers` is not installed.
    """
    output: list[Structure] = []

    def call(inputs: list[Any]) -> list[Any]:
        parts = take_apart(fn(inputs), lambda x: isinstance(x, jax.Array))
        output.append(parts.structure)
        return parts.arrays

    specs = [jax.ShapeDtypeStruct(np.shape(x), x.dtype) for x in inputs]
    with explained():
        found = trace_program(call, specs)
    if found.has_callback:
        raise TraceError(
            "a scheduled step that calls back to Python (jax.debug.print, io_callback, pure_callback)",
            "it is sent to workers as a program, which has no Python.",
            "return the value from the step, and print it at the coordinator",
        )
    *_, gradients, increments = found.outputs
    written = [i for i, w in enumerate(found.written) if w]
    is_seed = [any(v is s for s in found.seeds) for v in found.variables]
    is_added = [adds and x is not None for x in increments]
    kept = [(i, added) for i, added in zip(written, is_added, strict=True) if not is_seed[i]]

    def program(values: list[Any], inputs: list[Any]) -> Any:
        results, new, _, gradients, increments = found.evaluate(values, [None] * len(values), inputs)
        pairs = dict(zip(written, zip(new, increments, strict=True), strict=True))
        given = [[g for g in of_update if g is not None] for of_update in gradients]
        return results, [pairs[i][1] for i, a in kept if a], [pairs[i][0] for i, a in kept if not a], given

    values = [jax.ShapeDtypeStruct(tuple(v.shape), dtype_of(v)) for v in found.variables]
    return Exported(
        module=_serialized(program, platforms, values, specs),
        variables=tuple(found.variables),
        added=tuple(i for i, a in kept if a),
        set=tuple(i for i, a in kept if not a),
        seeds=tuple(i for i, s in enumerate(is_seed) if s),
        updates=tuple(_given(u, g) for u, g in zip(found.updates, gradients, strict=True)),
        output=output[-1],
    )


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
