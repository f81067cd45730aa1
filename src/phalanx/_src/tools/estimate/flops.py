# SPDX-License-Identifier: Apache-2.0
"""Counts the multiplications and additions of a traced program, for compilers that do not report them."""

import math
from typing import Any

from jax.extend import core as jex

_MOVES = frozenset(
    [
        "broadcast_in_dim",
        "concatenate",
        "convert_element_type",
        "copy",
        "dynamic_slice",
        "dynamic_update_slice",
        "gather",
        "iota",
        "pad",
        "reshape",
        "rev",
        "select_n",
        "slice",
        "split",
        "squeeze",
        "transpose",
        "stop_gradient",
    ]
)


def count(jaxpr: jex.Jaxpr) -> float:
    """Returns the number of floating-point operations of a jaxpr.

    A product of matrices counts 2 m n k. Elementwise operations and reductions count one per element. Loops count as often as
    they run, or once if their length is an input of the program.
    """
    return sum(map(_count, jaxpr.eqns))


def _count(eqn: Any) -> float:
    name, params = eqn.primitive.name, eqn.params
    inner: list[float] = [count(j) for j in jex.jaxprs_in_params(params)]
    if name == "scan":
        return float(params["length"] * sum(inner))
    if name == "cond":
        # The branch is chosen when the program runs, so the costliest one counts.
        return max(inner)
    # The jaxpr of a reduction or scatter is that of its scalar function, whose count says nothing of the size.
    if inner and not name.startswith(("reduce", "scatter", "cum")):
        return sum(inner)
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        length: int = math.prod(eqn.invars[0].aval.shape[d] for d in contracted)
        return 2.0 * _size(eqn.outvars[0]) * length
    if name == "conv_general_dilated":
        kernel, spec = eqn.invars[1].aval.shape, params["dimension_numbers"].rhs_spec
        # An output reads the kernel of its own channel.
        places: float = math.prod(kernel) / kernel[spec[0]]
        return 2.0 * _size(eqn.outvars[0]) * places
    if name.startswith(("reduce", "arg", "cum", "scatter")):
        # The last operand of a scatter is the updates, one operation each.
        return float(_size(eqn.invars[-1 if name.startswith("scatter") else 0]))
    return 0.0 if name in _MOVES else float(sum(map(_size, eqn.outvars)))


def _size(variable: Any) -> int:
    return math.prod(getattr(variable.aval, "shape", ()))
