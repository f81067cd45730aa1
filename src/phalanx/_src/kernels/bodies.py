# SPDX-License-Identifier: Apache-2.0
"""Convolutions in the bodies of loops and branches, written as XLA on CPUs computes them fast.

XLA's compiler for CPUs has fast convolutions for one order of dims: rows first and channels last. It transposes others, among them most
gradients, but "top-level convolutions" only (xla/service/cpu/conv_canonicalization.h). Those in loops and branches become plain loops,
which take up to 20 times as long.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.extend import core as jex

from phalanx._src.kernels.rewriting import BODIES, all_equations, equations_of

_CONVOLUTION = "conv_general_dilated"


def are_of_interest(jaxpr: jex.Jaxpr) -> bool:
    """Whether a trace has convolutions, and loops or branches."""
    names = {eqn.primitive.name for eqn in all_equations(jaxpr)}
    return _CONVOLUTION in names and bool(names & BODIES)


def in_fast_order(eqn: jex.JaxprEqn, *, is_body: bool) -> list[jex.JaxprEqn] | None:
    """The rule that writes a convolution in a loop or branch in the order of dims that is fast on CPUs."""
    is_slow = is_body and eqn.primitive.name == _CONVOLUTION and not _is_fast(eqn.params["dimension_numbers"])
    return _transposed(eqn) if is_slow else None


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


def _last(dims: Sequence[int]) -> tuple[int, ...]:
    """Returns the order of dims in which channels are last, given rows, channels and spatial dims."""
    return dims[0], *dims[2:], dims[1]


def _kernel_last(dims: Sequence[int]) -> tuple[int, ...]:
    """Returns the order of a kernel's dims in which its channels are last, given its output channels, input channels and spatial dims."""
    return *dims[2:], dims[1], dims[0]
