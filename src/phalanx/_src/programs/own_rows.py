# SPDX-License-Identifier: Apache-2.0
"""Runs the program of a replica on the rows that it has, if replicas have unequal shares of a batch.

All replicas run one program, whose arrays have room for the largest share. Up to the first collective, the program does not depend
on other replicas. This part is traced for each size of share, and each replica runs the trace that fits its rows.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback
from jax.extend import core as jex

from phalanx._src.collectives.primitives import communicates
from phalanx._src.mesh.layout import REPLICA_AXIS
from phalanx._src.mesh.shares import Shares
from phalanx._src.tracing.discovery import Discovery
from phalanx.errors import warn_of_slip
from phalanx.typing import PyTree


class StepObserver(Protocol):
    """Observes the steps of a program. Its methods are called while the program runs, in any thread."""

    def note_own_part(self, replica: int, rows: int) -> None:
        """Notes that a replica of this process has computed all that it can without other replicas, from `rows` rows."""

    def note_end(self, replica: int) -> None:
        """Notes that a step of a replica of this process has ended."""


listeners: list[StepObserver] = []
"""The observers of all training steps of programs that are traced from now on."""


class Inputs(NamedTuple):
    """The inputs of a replica's program.

    Args:
      values: the values of the variables.
      sharded: the arguments of this replica. If a batch is padded, the last one is the mask of its real rows, which come first: a bool
        array (places,).
      whole: the arguments that are equal on all replicas.
    """

    values: list[Any]
    sharded: list[Any]
    whole: list[Any]


def evaluate(discovery: Discovery, inputs: Inputs, padded: Sequence[bool], shares: Shares) -> PyTree:
    """Returns the outputs of a replica's program, computed from its real rows only if possible.

    Args:
      discovery: the trace for all places, with those for fewer rows in `shorter`.
      inputs: the inputs, with all places.
      padded: for each of `sharded`, whether it has one row per place.
      shares: the shares of the replicas, which may follow what is measured here.
    """

    def cut(size: int) -> Inputs:
        pairs = zip(inputs.sharded, padded, strict=True)
        return inputs._replace(sharded=[x[:size] if is_padded else x for x, is_padded in pairs])

    longest = _Parts(discovery, inputs)
    shorter = [_Parts(each, cut(size)) for size, each in discovery.shorter]
    if any(each.interface != longest.interface for each in shorter):
        warn_of_padding()
        outputs: PyTree = discovery.evaluate(inputs.values, [], inputs.sharded, inputs.whole)
        return outputs
    rows = inputs.sharded[-1].sum() if any(padded) else jnp.int32(_num_rows(inputs.sharded))
    residuals = (
        longest.before() if not shorter else _of_own_rows(longest, shorter, [n for n, _ in discovery.shorter], rows)
    )
    observers = [*listeners, *([shares] if shares.is_measured else [])]
    if observers:
        residuals = longest.sent_after(_report_own_part(observers, rows, residuals), residuals)
    results = longest.after(residuals)
    if observers:
        _report_end(observers, longest.of_others(results) or residuals)
    tree: PyTree = jax.tree.structure(discovery.outputs)
    return tree.unflatten(results)


def warn_of_padding() -> None:
    """Warns of a step whose traces for fewer rows cannot take the place of the one for all places."""
    warn_of_slip(
        "a step under replica_weights communicates before it has computed what depends on single rows, or does something else with "
        "fewer rows. So replicas with small shares compute their padding too.",
        "BatchNormalization(synchronized=False), and no branches on the number of rows",
    )


def _of_own_rows(longest: "_Parts", shorter: "list[_Parts]", sizes: list[int], rows: jax.Array) -> list[Any]:
    """Returns the residuals, computed from as few rows as hold the real ones."""

    def branch(part: "_Parts") -> Callable[[], list[Any]]:
        return lambda: [_grown(x, shape) for x, shape in zip(part.before(), longest.shapes, strict=True)]

    residuals: list[Any] = lax.switch((rows > jnp.asarray(sizes)).sum(), [*map(branch, shorter), longest.before])
    return residuals


def _num_rows(sharded: Sequence[jax.Array]) -> int:
    return int(sharded[0].shape[0]) if sharded and sharded[0].ndim else 1


def _report_own_part(observers: Sequence[StepObserver], rows: jax.Array, residuals: Sequence[jax.Array]) -> jax.Array:
    """Reports the end of the first part, when `residuals` is computed. Returns True, as an array that is computed after the report."""

    def note_own_part(replica: np.ndarray, rows: np.ndarray, *_: np.ndarray) -> np.bool:
        for observer in observers:
            observer.note_own_part(int(replica), int(rows))
        return np.True_

    token: jax.Array = io_callback(
        note_own_part, jax.typeof(jnp.bool(True)), lax.axis_index(REPLICA_AXIS), rows, *_elements(residuals)
    )
    return token


def _report_end(observers: Sequence[StepObserver], last: Sequence[jax.Array]) -> None:
    """Reports the end of the step, when `last` is computed."""

    def note_end(replica: np.ndarray, *_: np.ndarray) -> None:
        for observer in observers:
            observer.note_end(int(replica))

    jax.debug.callback(note_end, lax.axis_index(REPLICA_AXIS), *_elements(last))


def _elements(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns an element of each array of numbers."""
    return [x.ravel()[0] for x in arrays if x.size and not jnp.issubdtype(x.dtype, jax.dtypes.extended)]


class _Cut(NamedTuple):
    """A trace in two parts.

    Args:
      before: the equations that depend on no collective.
      after: the other equations.
      late: the variables that the second part computes.
      used: the variables that the second part reads.
      residuals: the variables of the first part that the second part reads, or that are outputs of the program.
    """

    before: list[jex.JaxprEqn]
    after: list[jex.JaxprEqn]
    late: set[jex.Var]
    used: set[jex.Var]
    residuals: list[jex.Var]


class _Parts:
    """A trace of the program of one replica, divided at the first collectives.

    Attributes:
      interface: the operations of the second part with their constants, and the types of the residuals. If two traces agree on these,
        the second part of one can run on the residuals of the other. Residuals that only leave the program may have fewer rows.
      shapes: the shapes of the residuals.
    """

    def __init__(self, discovery: Discovery, inputs: Inputs) -> None:
        tree: Any
        self._inputs, tree = jax.tree.flatten(inputs)

        def flat(*leaves: jax.Array) -> list[Any]:
            values, sharded, whole = tree.unflatten(leaves)
            return jax.tree.leaves(discovery.evaluate(values, [], sharded, whole))

        self._closed = jax.make_jaxpr(flat)(*self._inputs)
        self._cut = _divide(self._closed.jaxpr)
        avals: list[Any] = [v.aval for v in self._cut.residuals]
        operations = [_described(eqn) for eqn in self._cut.after]
        is_used = [v in self._cut.used for v in self._cut.residuals]
        types = [(x.dtype, x.shape if used else x.ndim) for x, used in zip(avals, is_used, strict=True)]
        self.interface = operations, types
        self.shapes = [tuple(aval.shape) for aval in avals]

    def before(self) -> list[Any]:
        """Runs the first part, and returns the residuals."""
        cut, jaxpr = self._cut, self._closed.jaxpr
        return _run(jaxpr.replace(eqns=cut.before, outvars=cut.residuals), self._closed.consts, *self._inputs)

    def sent_after(self, token: jax.Array, residuals: list[Any]) -> list[Any]:
        """Returns the residuals. None of them is sent to other replicas before `token` is computed.

        Otherwise XLA could begin to send metrics before it computes gradients, and would wait for other replicas in between.
        """
        sent = {v for eqn in self._cut.after if communicates(eqn) for v in eqn.invars if isinstance(v, jex.Var)}
        pairs = zip(self._cut.residuals, residuals, strict=True)
        return [jnp.where(token, x, jnp.zeros_like(x)) if v in sent else x for v, x in pairs]

    def of_others(self, results: list[Any]) -> list[Any]:
        """Returns those outputs of the program that depend on other replicas."""
        pairs = zip(self._closed.jaxpr.outvars, results, strict=True)
        return [x for v, x in pairs if isinstance(v, jex.Var) and v in self._cut.late]

    def after(self, residuals: list[Any]) -> list[Any]:
        """Runs the second part, and returns the outputs of the program."""
        jaxpr = self._closed.jaxpr
        inputs = [*jaxpr.invars, *self._cut.residuals]
        return _run(jaxpr.replace(eqns=self._cut.after, invars=inputs), self._closed.consts, *self._inputs, *residuals)


_run: Callable[..., list[Any]] = jax.core.eval_jaxpr


def _divide(jaxpr: jex.Jaxpr) -> _Cut:
    after: list[jex.JaxprEqn] = []
    before: list[jex.JaxprEqn] = []
    late: set[jex.Var] = set()
    for eqn in jaxpr.eqns:
        is_late = communicates(eqn) or any(isinstance(v, jex.Var) and v in late for v in eqn.invars)
        if is_late:
            late.update(eqn.outvars)
        (after if is_late else before).append(eqn)
    used = {v for eqn in after for v in eqn.invars if isinstance(v, jex.Var)}
    outputs = {v for v in jaxpr.outvars if isinstance(v, jex.Var)}
    return _Cut(before, after, late, used, [v for eqn in before for v in eqn.outvars if v in used or v in outputs])


def _described(eqn: jex.JaxprEqn) -> tuple[Any, ...]:
    """Returns what identifies an operation, apart from the names of its variables."""
    constants = [str(v.val) for v in eqn.invars if isinstance(v, jex.Literal)]
    return eqn.primitive.name, constants, [str(v.aval) for v in eqn.outvars]


def _grown(array: jax.Array, shape: Sequence[int]) -> jax.Array:
    """Returns an array with the last rows repeated up to a shape. A function that is finite on real rows is finite on these."""
    widths = [(0, target - size) for target, size in zip(shape, array.shape, strict=True)]
    return jnp.pad(array, widths, mode="edge") if any(map(any, widths)) else array
