# SPDX-License-Identifier: Apache-2.0
"""Finds out which values in the trace of a replica are equal on all replicas.

A value is equal if it is computed from equal values only, or if all replicas get it from a collective, such as an all-reduce. So the
trace itself shows whether replicas would still hold the same weights after an assignment.
"""

import itertools
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex

from phalanx._src.collectives.primitives import communicates
from phalanx._src.tracing import markers
from phalanx._src.typed_jax import checkpoint_name
from phalanx.typing import PyTree

_MARK = "phalanx_equal: "
_ADDRESS = re.compile(r"0x[0-9a-f]+")

_EQUALIZING = ("psum", "pmax", "pmin", "all_gather")
"""Collectives that give every replica the same result. Names of variants begin with one of these."""

_DIFFERING = ("axis_index", "ppermute", "all_to_all", "reduce_scatter", "psum_scatter", "pgather", "rng_uniform")
"""Operations whose result differs between replicas, whatever their inputs are."""

_BODIES = ("jaxpr", "call_jaxpr", "callee", "fun_jaxpr")
"""Parameters that hold the body of an operation that calls it once."""


def marked(value: jax.Array, description: str) -> jax.Array:
    """Returns `value`, with a mark in the trace that it must be equal on all replicas.

    Args:
      value: what is assigned.
      description: the variable that is assigned.
    """
    return checkpoint_name(value, _MARK + description)


def unequal(closed: jex.ClosedJaxpr, are_equal: Sequence[bool]) -> set[str]:
    """Returns the descriptions of the variables that a replica assigns a marked value that may not be equal.

    Args:
      closed: the trace of one replica.
      are_equal: per input of the trace, whether all replicas have the same one.
    """
    walk = _EqualityWalk()
    walk.outputs(closed, are_equal, everywhere=True)
    return walk.unequal


def differing(traces: Sequence[jex.ClosedJaxpr]) -> set[str]:
    """Returns the descriptions of the variables that replicas assign marked values that differ between their traces.

    In each trace, `unequal` holds for none of them: they depend on literals, on what is equal on all replicas, and on collectives.

    Args:
      traces: the traces of replicas that have different numbers of rows.
    """
    marks = [_computed(closed)[0] for closed in traces]
    pairs = itertools.pairwise(marks)
    return {name for one, other in pairs for name in one.keys() | other.keys() if one.get(name) != other.get(name)}


def differing_results(one: jex.ClosedJaxpr, other: jex.ClosedJaxpr) -> list[bool]:
    """Returns for each result of a trace whether another one, for another number of rows, computes it in another way.

    The rows themselves, and what the replicas exchange, count as equal.
    """
    return [own != others for own, others in zip(_computed(one)[1], _computed(other)[1], strict=True)]


def _computed(closed: jex.ClosedJaxpr) -> tuple[dict[str, list[object]], list[object]]:
    """Returns, for each description, what computes each of the values that are assigned; and what computes each result."""
    assigned: dict[str, list[object]] = {}
    jaxpr, exchanges = closed.jaxpr, itertools.count()
    keys: dict[object, object] = dict(zip(jaxpr.invars, itertools.count(), strict=False))
    keys.update(zip(jaxpr.constvars, map(_literal, closed.consts), strict=True))

    def key(atom: PyTree) -> object:
        return _literal(atom.val) if isinstance(atom, jex.Literal) else keys[atom]

    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        ins = list(map(key, eqn.invars))
        if name == "name" and eqn.params["name"].startswith(_MARK):
            assigned.setdefault(eqn.params["name"].removeprefix(_MARK), []).append(ins[0])
        # All replicas take part in the same exchanges, and what depends on their results is equal if it is so in each trace.
        of_all = (next(exchanges),) if communicates(eqn) else (name, _text(eqn.params), *ins)
        keys.update((v, hash((of_all, i))) for i, v in enumerate(eqn.outvars))
    return assigned, list(map(key, jaxpr.outvars))


def _literal(value: Any) -> object:
    """Returns the key of a constant in all traces."""
    if isinstance(value, jax.core.Tracer) or jnp.issubdtype(jnp.result_type(value), jax.dtypes.extended):
        return id(value)
    array = np.asarray(value)
    return array.dtype, array.shape, array.tobytes()


def _text(params: dict[str, Any]) -> str:
    """Returns the text of parameters, without addresses of objects."""
    return _ADDRESS.sub("", str(params))


class _EqualityWalk:
    """A walk over a trace and all traces inside it.

    Attributes:
      unequal: descriptions of the variables whose marked values may differ.
    """

    def __init__(self) -> None:
        self.unequal: set[str] = set()

    def outputs(
        self, traced: jex.ClosedJaxpr | jex.Jaxpr, are_equal: Sequence[bool], *, everywhere: bool
    ) -> list[bool]:
        """Returns which outputs of a trace are equal.

        Args:
          traced: the trace.
          are_equal: per input, whether it is equal.
          everywhere: whether all replicas run this code equally often.
        """
        jaxpr = traced.jaxpr if isinstance(traced, jex.ClosedJaxpr) else traced
        env: dict[object, bool] = dict.fromkeys(jaxpr.constvars, True)
        env.update(zip(jaxpr.invars, are_equal, strict=True))
        for eqn in jaxpr.eqns:
            ins = [isinstance(x, jex.Literal) or env[x] for x in eqn.invars]
            outs = self._of_operation(eqn, ins, everywhere=everywhere)
            env.update(zip(eqn.outvars, outs, strict=True))
        return [isinstance(x, jex.Literal) or env[x] for x in jaxpr.outvars]

    def _of_operation(self, eqn: jex.JaxprEqn, ins: list[bool], *, everywhere: bool) -> list[bool]:
        name, params, count = eqn.primitive.name, eqn.params, len(eqn.outvars)
        if name == "name" and params["name"].startswith(_MARK) and not (ins[0] and everywhere):
            self.unequal.add(params["name"].removeprefix(_MARK))
        if name.startswith(_DIFFERING) or "callback" in name or eqn.primitive is markers.gradient_p:
            # The gradient of an equal value differs if the value was all-reduced: each replica gets its own part.
            return [False] * count
        # With groups of replicas, each group gets another result.
        if name.startswith(_EQUALIZING) and params.get("axis_index_groups") is None:
            return [everywhere] * count
        if eqn.primitive is markers.enter_p or name == "optimization_barrier":
            return ins
        if name == "scan":
            return self._of_scan(eqn, ins, everywhere=everywhere)
        if name == "while":
            return self._of_while(params, ins, everywhere=everywhere)
        if name == "cond":
            # Replicas that take different branches also run different assignments.
            everywhere = everywhere and ins[0]
            branches = [self.outputs(branch, ins[1:], everywhere=everywhere) for branch in params["branches"]]
            return [ins[0] and all(outs) for outs in zip(*branches, strict=True)]
        body = next((params[key] for key in _BODIES if key in params), None)
        if body is not None:
            return self.outputs(body, ins, everywhere=everywhere)
        # Of the body of another kind of operation nothing is known.
        return [all(ins) and not list(jex.jaxprs_in_params(params))] * count

    def _of_scan(self, eqn: jex.JaxprEqn, ins: list[bool], *, everywhere: bool) -> list[bool]:
        params, body = eqn.params, eqn.params["jaxpr"].jaxpr
        # Versions of JAX note in different ways which values are constants and carries. Both have one shape outside and inside.
        carries = _number_of_equal_ranks(eqn.outvars, body.outvars)
        consts = _number_of_equal_ranks(eqn.invars, body.invars) - carries
        state = ins[consts : consts + carries]
        # A value that is equal in the first iteration may depend on others in the next. Flags change to False only, so this ends.
        while True:
            outs = self.outputs(
                params["jaxpr"], [*ins[:consts], *state, *ins[consts + carries :]], everywhere=everywhere
            )
            if (after := _both(state, outs[:carries])) == state:
                return [*state, *outs[carries:]]
            state = after

    def _of_while(self, params: PyTree, ins: list[bool], *, everywhere: bool) -> list[bool]:
        of_test, of_body = params["cond_nconsts"], params["body_nconsts"]
        test_consts, consts = ins[:of_test], ins[of_test : of_test + of_body]
        state = ins[of_test + of_body :]
        while True:
            goes_on = self.outputs(params["cond_jaxpr"], [*test_consts, *state], everywhere=everywhere)[0]
            outs = self.outputs(params["body_jaxpr"], [*consts, *state], everywhere=everywhere and goes_on)
            if (after := _both(state, [x and goes_on for x in outs])) == state:
                return state
            state = after


def _both(first: Sequence[bool], second: Sequence[bool]) -> list[bool]:
    return [a and b for a, b in zip(first, second, strict=True)]


def _number_of_equal_ranks(outside: Sequence[Any], inside: Sequence[Any]) -> int:
    return sum(x.aval.ndim == y.aval.ndim for x, y in zip(outside, inside, strict=True))
