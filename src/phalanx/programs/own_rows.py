# SPDX-License-Identifier: Apache-2.0
"""Runs the program of a replica on the rows that it has, if replicas have unequal shares of a batch.

All replicas run one program, whose arrays have room for the largest share. Up to the first collective, the program does not depend
on other replicas. This part is traced for each size of share, and each replica runs the trace that fits its rows.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex

from phalanx.errors import warn_of_slip
from phalanx.programs.signature import communicates
from phalanx.tracing.discovery import Discovery
from phalanx.typing import PyTree


def sizes_of(weights: Sequence[float], places: int) -> list[int]:
    """Returns the numbers of rows for which to trace a program whose batch has room for the largest share, in ascending order.

    Example:
      >>> sizes_of([4.0, 1.0], 40)
      [11, 40]
    """
    # Shares are less than one row away from the weights.
    needed = {min(places, int(-(-places * weight // max(weights))) + 1) for weight in weights}
    return sorted(needed | {places})


class Inputs(NamedTuple):
    """The inputs of a replica's program.

    Args:
      own: the values of the variables.
      sharded: the arguments of this replica. The last one is the mask of the real rows, which come first: a bool array (places,).
      whole: the arguments that are equal on all replicas.
    """

    own: list[Any]
    sharded: list[Any]
    whole: list[Any]


def evaluate(found: Discovery, inputs: Inputs, padded: Sequence[bool]) -> PyTree:
    """Returns the outputs of a replica's program, computed from its real rows only if possible.

    Args:
      found: the trace for all places, with those for fewer rows in `shorter`.
      inputs: the inputs, with all places.
      padded: for each of `sharded`, whether it has one row per place.
    """

    def cut(size: int) -> Inputs:
        pairs = zip(inputs.sharded, padded, strict=True)
        return inputs._replace(sharded=[x[:size] if is_padded else x for x, is_padded in pairs])

    longest = _Parts(found, inputs)
    others = [_Parts(each, cut(size)) for size, each in found.shorter]
    if any(each.operations != longest.operations for each in others):
        warn_of_slip(
            "a step under replica_weights does something else with fewer rows, so replicas with small shares compute their padding too.",
            "do not branch on the number of rows in a step",
        )
        outputs: PyTree = found.evaluate(inputs.own, [], inputs.sharded, inputs.whole)
        return outputs
    shapes = longest.shapes
    branches = [lambda part=part: [_grown(x, s) for x, s in zip(part.before(), shapes, strict=True)] for part in others]
    sizes = jnp.asarray([size for size, _ in found.shorter])
    results = lax.switch((inputs.sharded[-1].sum() > sizes).sum(), [*branches, longest.before])
    tree: PyTree = jax.tree.structure(found.outputs)
    return tree.unflatten(longest.after(results))


class _Cut(NamedTuple):
    """A trace in two parts.

    Args:
      before: the equations that depend on no collective.
      after: the others.
      handed: the variables that the first part hands to the second one, and the outputs among its variables.
    """

    before: list[jex.JaxprEqn]
    after: list[jex.JaxprEqn]
    handed: list[jex.Var]


class _Parts:
    """A trace of the program of one replica, divided at the first collectives.

    Attributes:
      operations: the names of all operations, by part.
      shapes: the shapes of what the first part hands to the second one.
    """

    def __init__(self, found: Discovery, inputs: Inputs) -> None:
        tree: Any
        self._inputs, tree = jax.tree.flatten(inputs)

        def flat(*leaves: jax.Array) -> list[Any]:
            own, sharded, whole = tree.unflatten(leaves)
            return jax.tree.leaves(found.evaluate(own, [], sharded, whole))

        self._closed = jax.make_jaxpr(flat)(*self._inputs)
        self._cut = _divide(self._closed.jaxpr)
        self.operations = [[eqn.primitive.name for eqn in part] for part in (self._cut.before, self._cut.after)]
        avals: list[Any] = [v.aval for v in self._cut.handed]
        self.operations.append([str(aval.dtype) for aval in avals])
        self.shapes = [tuple(aval.shape) for aval in avals]

    def before(self) -> list[Any]:
        """Runs the first part, and returns what it hands to the second one."""
        jaxpr = self._closed.jaxpr
        return _run(jaxpr.replace(eqns=self._cut.before, outvars=self._cut.handed), self._closed.consts, *self._inputs)

    def after(self, handed: list[Any]) -> list[Any]:
        """Runs the second part, and returns the outputs of the program."""
        jaxpr = self._closed.jaxpr
        inputs = [*jaxpr.invars, *self._cut.handed]
        return _run(jaxpr.replace(eqns=self._cut.after, invars=inputs), self._closed.consts, *self._inputs, *handed)


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
    used |= {v for v in jaxpr.outvars if isinstance(v, jex.Var)}
    return _Cut(before, after, [v for eqn in before for v in eqn.outvars if v in used])


def _grown(array: jax.Array, shape: Sequence[int]) -> jax.Array:
    """Returns an array with the last rows repeated up to a shape. A function that is finite on real rows is finite on these."""
    widths = [(0, wanted - has) for wanted, has in zip(shape, array.shape, strict=True)]
    return jnp.pad(array, widths, mode="edge") if any(map(any, widths)) else array
