# SPDX-License-Identifier: Apache-2.0
"""Traces in which some operations are replaced by others that compute the same."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import jax
from jax.extend import core as jex

from phalanx._src.typed_jax import shape_dtype

T = TypeVar("T")

BODIES = frozenset({"cond", "scan", "while"})
"""The operations that are loops or branches."""


class Rule(Protocol):
    """Returns the equations that stand for one. None if it stays.

    Args:
      eqn: the equation.
      is_body: whether it is in a loop or branch, or in something inside one.
    """

    def __call__(self, eqn: jex.JaxprEqn, *, is_body: bool) -> list[jex.JaxprEqn] | None: ...


def all_equations(jaxpr: jex.Jaxpr) -> Iterator[jex.JaxprEqn]:
    """Yields the equations of a trace, and those of the traces inside it."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jex.jaxprs_in_params(eqn.params):
            yield from all_equations(inner)


def rewritten(fn: Callable[..., T], rules: Sequence[Rule], *args: Any) -> T:
    """Calls a function while it is traced, with other operations in place of those that rules replace."""
    closed, result = jax.make_jaxpr(fn, return_shape=True)(*args)
    tree: Any = jax.tree.structure(result)
    changed = _rewritten(closed, rules, is_body=False)
    outputs: T = tree.unflatten(jex.jaxpr_as_fun(changed)(*jax.tree.leaves(args)))
    return outputs


def _rewritten(value: Any, rules: Sequence[Rule], *, is_body: bool) -> Any:
    """Returns a parameter of an operation, in whose traces rules are followed.

    Args:
      value: the parameter.
      rules: the rules.
      is_body: whether it belongs to a loop or branch, or to something inside one.
    """
    # First, because both are one class since JAX 0.12.
    if isinstance(value, jex.Jaxpr):
        jaxpr: Any = value
        return jaxpr.replace(eqns=[new for eqn in value.eqns for new in _equations(eqn, rules, is_body=is_body)])
    if isinstance(value, jex.ClosedJaxpr):
        return jex.ClosedJaxpr(_rewritten(value.jaxpr, rules, is_body=is_body), value.consts)
    if type(value) is tuple:  # Not a namedtuple such as ConvDimensionNumbers, whose fields JAX reads.
        return tuple(_rewritten(each, rules, is_body=is_body) for each in value)
    return value


def _equations(eqn: jex.JaxprEqn, rules: Sequence[Rule], *, is_body: bool) -> list[jex.JaxprEqn]:
    for rule in rules:
        if (replacement := rule(eqn, is_body=is_body)) is not None:
            return replacement
    # jit and shard_map are not bodies: XLA inlines them, so that their operations are at the top level.
    is_body = is_body or eqn.primitive.name in BODIES
    params = {name: _rewritten(value, rules, is_body=is_body) for name, value in eqn.params.items()}
    return [eqn.replace(params=params)]


def equations_of(
    fn: Callable[..., Any],
    inputs: Sequence[Any],
    outputs: Sequence[jex.Var],
    source_info: object,
    axes: Sequence[tuple[str, int]] = (),
) -> list[jex.JaxprEqn]:
    """Returns the equations of a function, to replace others of a trace.

    Args:
      fn: the function. It has no arrays as constants.
      inputs: what its arguments are in the trace: variables and literals.
      outputs: the variables of its results.
      source_info: the line of the user that profiles name, as an equation has it.
      axes: names and sizes of the mesh axes of the trace, unless the caller is traced over them.
    """
    avals: list[Any] = [v.aval for v in inputs]
    trace = jax.make_jaxpr(fn, axis_env=axes) if axes else jax.make_jaxpr(fn)
    inner = trace(*(shape_dtype(aval.shape, aval.dtype) for aval in avals)).jaxpr
    outer = dict(zip([*inner.invars, *inner.outvars], [*inputs, *outputs], strict=True))
    return [
        each.replace(
            invars=[outer.get(v, v) if isinstance(v, jex.Var) else v for v in each.invars],  # Literals have no hash.
            outvars=[outer.get(v, v) for v in each.outvars],
            source_info=source_info,
        )
        for each in inner.eqns
    ]
