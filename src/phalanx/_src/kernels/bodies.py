# SPDX-License-Identifier: Apache-2.0
"""Convolutions in the bodies of loops and branches, written as XLA on CPUs computes them fast.

XLA's compiler for CPUs has fast convolutions for one order of dims: rows first and channels last. It transposes others, among them most
gradients, but "top-level convolutions" only (xla/service/cpu/conv_canonicalization.h). Those in loops and branches become plain loops,
which take up to 20 times as long.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
from jax import lax
from jax.extend import core as jex

from phalanx._src.typed_jax import shape_dtype

T = TypeVar("T")

_CONVOLUTION = "conv_general_dilated"
_BODIES = {"cond", "scan", "while"}


def are_of_interest(jaxpr: jex.Jaxpr) -> bool:
    """Whether a trace has convolutions, and loops or branches."""
    names = {eqn.primitive.name for eqn in all_equations(jaxpr)}
    return _CONVOLUTION in names and bool(names & _BODIES)


def all_equations(jaxpr: jex.Jaxpr) -> Iterator[jex.JaxprEqn]:
    """Yields the equations of a trace, and those of the traces inside it."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jex.jaxprs_in_params(eqn.params):
            yield from all_equations(inner)


def with_fast_convolutions(fn: Callable[..., T], *args: Any) -> T:
    """Calls a function while it is traced, with convolutions in loops and branches in the order of dims that is fast on CPUs."""
    closed, result = jax.make_jaxpr(fn, return_shape=True)(*args)
    rewritten = _rewritten(closed, is_body=False)
    tree: Any = jax.tree.structure(result)
    outputs: T = tree.unflatten(jex.jaxpr_as_fun(rewritten)(*jax.tree.leaves(args)))
    return outputs


def _rewritten(value: Any, *, is_body: bool) -> Any:
    """Returns a parameter of an operation, in whose traces convolutions of bodies are rewritten.

    Args:
      value: the parameter.
      is_body: whether it belongs to a loop or branch, or to something inside one.
    """
    # First, because both are one class since JAX 0.12.
    if isinstance(value, jex.Jaxpr):
        jaxpr: Any = value
        return jaxpr.replace(eqns=[new for eqn in value.eqns for new in _equations(eqn, is_body=is_body)])
    if isinstance(value, jex.ClosedJaxpr):
        return jex.ClosedJaxpr(_rewritten(value.jaxpr, is_body=is_body), value.consts)
    if type(value) is tuple:  # Not a namedtuple such as ConvDimensionNumbers, whose fields JAX reads.
        return tuple(_rewritten(each, is_body=is_body) for each in value)
    return value


def _equations(eqn: jex.JaxprEqn, *, is_body: bool) -> list[jex.JaxprEqn]:
    """Returns the equations that stand for one."""
    if eqn.primitive.name == _CONVOLUTION:
        return _transposed(eqn) if is_body and not _is_fast(eqn.params["dimension_numbers"]) else [eqn]
    # jit and shard_map are not bodies: XLA inlines them, so that their convolutions are at the top level.
    is_body = is_body or eqn.primitive.name in _BODIES
    params = {name: _rewritten(value, is_body=is_body) for name, value in eqn.params.items()}
    return [eqn.replace(params=params)]


def _is_fast(numbers: lax.ConvDimensionNumbers) -> bool:
    """Whether rows are first and channels last in both arrays, and the kernel has its channels last."""
    lhs_dims, rhs_dims, out_dims = numbers
    return _last(lhs_dims) == _last(out_dims) == _kernel_last(rhs_dims) == tuple(range(len(lhs_dims)))


def _transposed(eqn: jex.JaxprEqn) -> list[jex.JaxprEqn]:
    """Returns the equations of a convolution in the fast order, with transposes of arguments and result."""
    params: Any = eqn.params
    lhs_dims, rhs_dims, out_dims = params["dimension_numbers"]
    rank = len(lhs_dims)
    spatial = "0123456789"[: rank - 2]
    names = "window_strides", "padding", "lhs_dilation", "rhs_dilation", "feature_group_count", "batch_group_count"
    settings = {name: params[name] for name in (*names, "precision", "preferred_element_type")}

    def convolve(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        result = lax.conv_general_dilated(
            lhs.transpose(_last(lhs_dims)),
            rhs.transpose(_kernel_last(rhs_dims)),
            dimension_numbers=(f"N{spatial}C", f"{spatial}IO", f"N{spatial}C"),
            **settings,
        )
        order = _last(out_dims)
        return result.transpose([order.index(dim) for dim in range(rank)])

    return equations_of(convolve, eqn.invars, eqn.outvars, eqn.source_info)


def equations_of(
    fn: Callable[..., Any], inputs: Sequence[Any], outputs: Sequence[jex.Var], source_info: object
) -> list[jex.JaxprEqn]:
    """Returns the equations of a function, to replace others of a trace.

    Args:
      fn: the function. It has no arrays as constants.
      inputs: what its arguments are in the trace: variables and literals.
      outputs: the variables of its results.
      source_info: the line of the user that profiles name, as an equation has it.
    """
    avals: list[Any] = [v.aval for v in inputs]
    inner = jax.make_jaxpr(fn)(*(shape_dtype(aval.shape, aval.dtype) for aval in avals)).jaxpr
    outer = dict(zip([*inner.invars, *inner.outvars], [*inputs, *outputs], strict=True))
    return [
        each.replace(
            invars=[outer.get(v, v) if isinstance(v, jex.Var) else v for v in each.invars],  # Literals have no hash.
            outvars=[outer.get(v, v) for v in each.outvars],
            source_info=source_info,
        )
        for each in inner.eqns
    ]


def _last(dims: Sequence[int]) -> tuple[int, ...]:
    """Returns the order of dims in which channels are last, given rows, channels and spatial dims."""
    return dims[0], *dims[2:], dims[1]


def _kernel_last(dims: Sequence[int]) -> tuple[int, ...]:
    """Returns the order of a kernel's dims in which its channels are last, given its output channels, input channels and spatial dims."""
    return *dims[2:], dims[1], dims[0]
