# SPDX-License-Identifier: Apache-2.0
"""Follows the rows of a batch through a function: whether a result is one value per row, or the mean over rows.

Values would not tell: a mask such as `labels != -100` never hides a row of made-up samples. So the function is traced
twice, with other numbers of rows, and both traces are read side by side. Dims and numbers that differ come from the rows. Each
operation that may mix rows, and that is not known here, makes its result one that depends on all of them.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import keras
import numpy as np
from jax.typing import ArrayLike

from phalanx._src.typed_jax import shape_dtype
from phalanx.typing import PyTree

# This number and its double also fit functions that work on pairs or quarters of a batch.
SOME = (8,)


class Flow(NamedTuple):
    """How a value depends on rows.

    Args:
      name: "constant" if it does not; "rows" if it has one dim of rows, and depends on each in its place; "sum" if it is a sum over
        rows of such values; "mixed" for all others.
      growth: the factor by which it grows if the number of rows doubles and all rows are alike.
      is_shifted: whether a constant has been added to it.
    """

    name: str
    growth: float = 1.0
    is_shifted: bool = False


CONSTANT, ROWS, SUM = Flow("constant"), Flow("rows"), Flow("sum", 2.0)
MEAN, _SHIFTED_MEAN, _MIXED = Flow("sum"), Flow("sum", is_shifted=True), Flow("mixed")

_Flows = list[Flow]
_Numbers = tuple[Any, Any]
"""A number that is known in both traces."""
_Atom = jex.Var | jex.Literal
_Shapes = tuple[tuple[int, ...], tuple[int, ...]]

# Operations whose name is in none of these mix rows, for all that is known. So does what a later version of JAX brings, until it is here.
_ELEMENTWISE = frozenset(
    {
        "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh", "bitcast_convert_type", "cbrt", "ceil", "clamp", "complex",
        "conj", "convert_element_type", "copy", "copy_p", "cos", "cosh", "digamma", "div", "eq", "erf", "erf_inv", "erfc", "exp", "exp2",
        "expm1", "floor", "ge", "gt", "igamma", "igammac", "imag", "integer_pow", "is_finite", "le", "lgamma", "log", "log1p", "logistic",
        "lt", "max", "min", "mul", "ne", "neg", "nextafter", "not", "or", "pow", "real", "reduce_precision",
        "regularized_incomplete_beta", "rem", "reshard", "round", "rsqrt", "select_n", "shift_left", "shift_right_arithmetic", "shift_right_logical",
        "sign", "sin", "sinh", "sqrt", "square", "stop_gradient", "sub", "tan", "tanh", "xor",
    }
)  # fmt: skip
_CALLS = frozenset(
    {
        "checkpoint", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "jit", "pjit", "remat",
        "remat2",
    }
)  # fmt: skip
"""Operations that compute what another trace says, and nothing else."""
_LINEAR = frozenset(
    {
        "broadcast_in_dim", "convert_element_type", "copy", "expand_dims", "neg", "real", "reduce_precision", "reshape", "reshard", "squeeze",
        "transpose",
    }
)  # fmt: skip
_REDUCTIONS = frozenset(
    {
        "argmax", "argmin", "reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_prod", "reduce_sum", "reduce_xor",
    }
)  # fmt: skip
_SIZED = frozenset({"broadcast_in_dim", "gather", "iota", "reshape", "slice"})
"""Operations that are told the sizes of their results, or of parts of them."""
_ALONG = {"cumlogsumexp": "axis", "cummax": "axis", "cummin": "axis", "cumprod": "axis", "cumsum": "axis"}
_ALONG |= {"sort": "dimension", "concatenate": "dimension", "split": "axis", "top_k": "axis"}
_FOLDS: dict[str, Callable[..., Any]] = {
    "convert_element_type": lambda params, x: x.astype(params["new_dtype"]),
    "eq": lambda _, x, y: x == y,
    "gt": lambda _, x, y: x > y,
    "max": lambda _, x, y: np.maximum(x, y),
    "reduce_prod": lambda params, x: x.prod(axis=params["axes"]),
    "select_n": lambda _, which, *cases: np.choose(which.astype(int), cases),
}
"""Operations that Keras does with numbers of values, before it divides by them."""
_ALIKE = _REDUCTIONS - {"reduce_prod", "reduce_sum", "reduce_xor"}
"""Reductions of equal values that do not depend on their number."""


def kind_of(fn: Callable[..., Any], *args: PyTree, sizes: Sequence[int] = SOME) -> Flow:
    """Returns how the result of a function depends on the rows of its arguments, whose dim 0 they are. `MEAN` also with a constant added.

    Rows are mixed, too, if a variable without an aggregation gets another value than a mean over rows, as the replicas average it.

    Args:
      fn: the function. What it assigns is forgotten.
      *args: pytrees of arrays (rows, ...).
      sizes: numbers of rows to call it with. It may do another thing with many rows than with few, such as to take the first ten.
    """
    traced = functools.cache(lambda rows: _traced(fn, args, rows))
    kinds = {_kind(fn, args, rows, traced) for rows in sizes}
    return kinds.pop() if len(kinds) == 1 else _MIXED


def _kind(fn: Callable[..., Any], args: PyTree, rows: int, traced: Callable[[int], jex.ClosedJaxpr]) -> Flow:
    """Returns the kind of the result for a number of rows and its double."""
    try:
        few, many = traced(rows), traced(2 * rows)
        kinds = [ROWS if v.aval.shape else CONSTANT for v in few.jaxpr.invars]
        kind, *assigned = _followed(few, many, kinds, rows)
        if not {*assigned} <= {CONSTANT, MEAN, _SHIFTED_MEAN}:
            return _MIXED
        if kind == ROWS and _dim(_shape(few.jaxpr.outvars[0]), _shape(many.jaxpr.outvars[0]), rows) != 0:
            return _MIXED
        if _has_own_gradient(few.jaxpr) and not _is_gradient_of_rows(fn, args, rows):
            return _MIXED
    except Exception:  # It wants another number of rows, or reads values. Nobody knows what it does with them.
        return _MIXED
    return MEAN if kind == _SHIFTED_MEAN else kind


def adds_up(
    update: Callable[..., Sequence[jax.Array]], state: Sequence[jax.Array], *args: PyTree, sizes: Sequence[int] = SOME
) -> bool:
    """Returns whether a function adds sums over rows to a state, so that the states of parts of a batch may be added up.

    Args:
      update: returns the new state, given the state and the arguments.
      state: arrays.
      *args: pytrees of arrays (rows, ...).
      sizes: numbers of rows, the largest first. See `kind_of`.
    """
    traced = functools.cache(lambda rows: _traced(update, args, rows, state))
    try:
        traced(sizes[0])
    except Exception:  # Its arguments are not rows, but for example one value per class.
        return True

    def is_sum(rows: int) -> bool:
        few, many = traced(rows), traced(2 * rows)
        kinds = [ROWS if v.aval.shape else CONSTANT for v in few.jaxpr.invars[len(state) :]]
        # What is linear in the state and in sums over rows may be computed from parts.
        return all(kind == SUM for kind in _followed(few, many, [SUM] * len(state) + kinds, rows))

    try:
        return all(map(is_sum, sizes))
    except Exception:  # See `_kind`.
        return False


def _has_own_gradient(jaxpr: jex.Jaxpr) -> bool:
    """Whether a trace calls a function that says itself what its gradient is."""
    return any(
        eqn.primitive.name.startswith(("custom_jvp", "custom_vjp"))
        or (eqn.primitive.name in _CALLS and _has_own_gradient(_inner(eqn).jaxpr))
        for eqn in jaxpr.eqns
    )


def _is_gradient_of_rows(fn: Callable[..., Any], args: PyTree, rows: int) -> bool:
    """Whether the gradient for each row depends on that row alone, and is divided by the number of rows if the function is a mean."""
    leaves, tree = jax.tree.flatten(args)
    has_gradient = [jnp.issubdtype(jnp.result_type(x), jnp.inexact) for x in leaves]

    def gradient(leaves: list[jax.Array], cotangent: jax.Array) -> list[jax.Array]:
        def of(differentiated: list[jax.Array]) -> jax.Array:
            rest = iter(differentiated)
            mixed = [next(rest) if has else x for has, x in zip(has_gradient, leaves, strict=True)]
            result: jax.Array = fn(*jax.tree.unflatten(tree, mixed))
            return result

        value, pull = jax.vjp(of, [x for has, x in zip(has_gradient, leaves, strict=True) if has])
        gradients: list[jax.Array] = pull(cotangent.astype(value.dtype))[0]
        return gradients

    with keras.StatelessScope():
        value = jax.eval_shape(fn, *args)
    few, many = (_traced(gradient, (leaves, value), count) for count in (rows, 2 * rows))
    # What the number of rows has multiplied, a mean divides by it.
    kinds = [ROWS if v.aval.shape else CONSTANT for v in few.jaxpr.invars[:-1]]
    kinds.append(ROWS if value.shape else Flow("constant", 2.0))
    return all(kind in (ROWS, CONSTANT) for kind in _followed(few, many, kinds, rows))


def sized(args: PyTree, rows: int) -> PyTree:
    """Returns the shapes of arrays with another number of rows."""

    def of(x: ArrayLike) -> jax.ShapeDtypeStruct:
        return shape_dtype((rows, *jnp.shape(x)[1:]) if jnp.ndim(x) else (), jnp.result_type(x))

    return jax.tree.map(of, args)


class _Assignments(keras.StatelessScope):
    """Remembers the values that variables without an aggregation get."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[int, jax.Array] = {}

    def add_update(self, update: tuple[keras.Variable, jax.Array]) -> None:
        super().add_update(update)
        if update[0].aggregation == "none":
            self.values[id(update[0])] = update[1]


def _traced(
    fn: Callable[..., Any], args: PyTree, rows: int, state: Sequence[jax.Array] | None = None
) -> jex.ClosedJaxpr:
    """Returns the trace of a function, whose results are followed by the values that it assigns."""
    first = () if state is None else ([shape_dtype(x.shape, x.dtype) for x in state],)
    with _Assignments() as scope:
        return jax.make_jaxpr(lambda *args: (fn(*args), [*scope.values.values()]))(*first, *sized(args, rows))


def _followed(
    few: jex.ClosedJaxpr, many: jex.ClosedJaxpr, inputs: _Flows, rows: int, numbers: Sequence[_Numbers | None] = ()
) -> _Flows:
    """Returns the kinds of the results of two traces that differ in the number of rows.

    Args:
      few: the trace of fewer rows.
      many: the trace of twice as many.
      inputs: the kinds of their inputs.
      rows: the number of fewer rows.
      numbers: the inputs that are known numbers.
    """
    consts = map(_constant, few.consts, many.consts)
    kinds: dict[_Atom, Flow] = dict(zip((*few.jaxpr.constvars, *few.jaxpr.invars), (*consts, *inputs), strict=True))
    known: dict[_Atom, _Numbers] = {v: x for v, x in zip(few.jaxpr.invars, numbers, strict=False) if x is not None}
    pairs = zip(few.jaxpr.constvars, few.consts, many.consts, strict=True)
    known |= {v: (a, b) for v, a, b in pairs if _is_number(a) and _is_number(b)}

    def read(one: _Atom, other: _Atom) -> Flow:
        if isinstance(one, jex.Literal) and isinstance(other, jex.Literal):
            return _constant(one.val, other.val)
        return kinds[one]

    def number(one: _Atom, other: _Atom) -> _Numbers | None:
        if isinstance(one, jex.Literal) and isinstance(other, jex.Literal):
            return one.val, other.val
        return known.get(one)

    for one, other in zip(few.jaxpr.eqns, many.jaxpr.eqns, strict=True):
        if one.primitive is not other.primitive:
            return [_MIXED] * len(few.jaxpr.outvars)
        operands = list(map(read, one.invars, other.invars))
        values = list(map(number, one.invars, other.invars))
        if (folded := _folded(one, other, values)) is not None:
            known[one.outvars[0]] = folded
            kinds[one.outvars[0]] = _constant(*folded)
            continue
        if one.primitive.name == "select_n" and values[0] is not None and values[0][0] == values[0][1]:
            kinds[one.outvars[0]] = operands[1 + int(values[0][0])]
            continue
        shapes = [(_shape(a), _shape(b)) for a, b in zip(one.outvars, other.outvars, strict=True)]
        if one.primitive.name in _CALLS:
            results = _followed(_inner(one), _inner(other), operands, rows, values)
        else:
            results = [_result(one, other, operands, shape, rows) for shape in shapes]
        checked = (_checked(kind, shape, rows) for kind, shape in zip(results, shapes, strict=True))
        kinds |= zip(one.outvars, checked, strict=True)
    return list(map(read, few.jaxpr.outvars, many.jaxpr.outvars))


def _inner(eqn: jex.JaxprEqn) -> jex.ClosedJaxpr:
    """Returns the trace that a call runs."""
    jaxpr = next(eqn.params[name] for name in ("jaxpr", "call_jaxpr", "fun_jaxpr") if name in eqn.params)
    return jaxpr if isinstance(jaxpr, jex.ClosedJaxpr) else jex.ClosedJaxpr(jaxpr, [])


def _constant(one: ArrayLike, other: ArrayLike) -> Flow:
    """Returns the kind of an array that the traces contain."""
    if one is other or (np.shape(one) == np.shape(other) and np.array_equal(one, other)):
        return CONSTANT
    is_growing = np.shape(one) == np.shape(other) == () and one
    return Flow("constant", float(np.asarray(other)) / float(np.asarray(one))) if is_growing else _MIXED


def _is_number(const: ArrayLike) -> bool:
    return np.size(const) == 1 and not isinstance(const, jax.core.Tracer)


def _folded(few: jex.JaxprEqn, many: jex.JaxprEqn, values: Sequence[_Numbers | None]) -> _Numbers | None:
    """Returns the result of an operation on known numbers, such as sizes, in both traces. None if it is not known."""
    if not values or None in values:
        return None
    fold = _FOLDS.get(few.primitive.name)
    if fold is None:
        return None
    operands = [[np.asarray(pair[side]) for pair in values if pair] for side in (0, 1)]
    return np.asarray(fold(few.params, *operands[0])), np.asarray(fold(many.params, *operands[1]))


def _checked(kind: Flow, shapes: _Shapes, rows: int) -> Flow:
    """Returns a kind, or that rows are mixed, as where a value has two dims of rows."""
    return _MIXED if kind.name == "rows" and _dim(*shapes, rows) is None else kind


def _shape(atom: _Atom) -> tuple[int, ...]:
    return tuple(getattr(atom.aval, "shape", ()))


def _dim(few: Sequence[int], many: Sequence[int], rows: int) -> int | None:
    """Returns the dim that rows have in a value. None if they have not exactly one."""
    dims = [dim for dim, sizes in enumerate(zip(few, many, strict=True)) if sizes[0] != sizes[1]]
    is_one = len(dims) == 1 and many[dims[0]] == 2 * few[dims[0]] and few[dims[0]] % rows == 0
    return dims[0] if is_one else None


def _result(few: jex.JaxprEqn, many: jex.JaxprEqn, operands: _Flows, shapes: _Shapes, rows: int) -> Flow:
    """Returns the kind of a result of an operation."""
    name, names = few.primitive.name, {kind.name for kind in operands}
    # Numbers of rows differ from row to row, and from one part of the batch to the next.
    if name == "iota":
        dim = few.params["dimension"]
        return CONSTANT if shapes[0][dim] == shapes[1][dim] else _MIXED
    # The number of rows may also be an exponent, or in the body of a loop.
    if "mixed" in names or not operands or (name not in _SIZED and few.params != many.params):
        return _MIXED
    if _is_rounding(few) and any(kind.name == "sum" or kind.growth != 1.0 for kind in operands):
        return _MIXED
    if names == {"constant"}:
        return _of_constants(few, many, operands, shapes, rows)
    if "sum" in names:
        return _of_sums(few, operands, is_spread=shapes[0] != shapes[1])
    if any(kind.growth != 1.0 for kind in operands):
        return _of_growing_rows(name, operands, is_sum=shapes[0] == shapes[1])
    if name in _ELEMENTWISE or name in ("broadcast_in_dim", "expand_dims", "squeeze", "transpose"):
        return ROWS
    places = [_dim(_shape(a), _shape(b), rows) for a, b in zip(few.invars, many.invars, strict=True)]
    dims = [dim for dim, kind in zip(places, operands, strict=True) if kind.name == "rows"]
    if None in dims:
        return _MIXED
    return _of_rows(few, operands, dims, shapes, rows)


def _is_rounding(eqn: jex.JaxprEqn) -> bool:
    """Whether an operation rounds to integers, so that a sum of results is not the result of the sum."""
    name, before, after = eqn.primitive.name, *(getattr(x.aval, "dtype", None) for x in (eqn.invars[0], eqn.outvars[0]))
    if before is None or after is None:  # It is a token.
        return False
    is_narrowing = name == "convert_element_type" and (
        jnp.issubdtype(before, jnp.inexact) or jnp.issubdtype(after, jnp.bool_)
    )
    return not jnp.issubdtype(after, jnp.inexact) and (is_narrowing or name == "div")


def _of_growing_rows(name: str, operands: _Flows, *, is_sum: bool) -> Flow:
    """Returns the kind of a result of values per row that have been multiplied, or are, by what the number of rows decides."""
    if name in _LINEAR and name != "reshape":
        return operands[0]
    if name == "reduce_sum":
        return Flow("sum" if is_sum else "rows", operands[0].growth * (2.0 if is_sum else 1.0))
    is_product = name == "mul" or (name == "div" and operands[1].name == "constant")
    return Flow("rows", _product(name, operands)) if is_product else _MIXED


def _of_rows(eqn: jex.JaxprEqn, operands: _Flows, dims: list[int | None], shapes: _Shapes, rows: int) -> Flow:
    """Returns the kind of a result of values per row, of which each has one dim of rows."""
    name, params, dim = eqn.primitive.name, eqn.params, dims[0]
    if name in _REDUCTIONS:
        if dim not in params["axes"]:
            return ROWS
        return SUM if name == "reduce_sum" else _MIXED
    if name in _ALONG:
        return _MIXED if dim == params[_ALONG[name]] else ROWS
    if name == "rev":
        return _MIXED if dim in params["dimensions"] else ROWS
    place = _dim(*shapes, rows)
    # Rows stay in their order if they are outside of what is joined with them or divided from them, and none is divided itself.
    if name == "reshape":
        before = _shape(eqn.invars[0])[:dim]
        return ROWS if place is not None and math.prod(before) == math.prod(shapes[0][:place]) else _MIXED
    if name in ("slice", "pad") and place == dim and shapes[0][place or 0] == _shape(eqn.invars[0])[dim or 0]:
        if name == "pad":
            is_moved = params["padding_config"][dim or 0] != (0, 0, 0)
        else:
            is_moved = params["strides"] is not None and params["strides"][dim or 0] != 1
        return _MIXED if is_moved else ROWS
    if name == "dot_general":
        return _of_product(eqn, operands, dims)
    if name == "gather":
        return _of_gather(eqn, operands, dims)
    return _MIXED


def _of_product(eqn: jex.JaxprEqn, operands: _Flows, dims: list[int | None]) -> Flow:
    """Returns the kind of a product of matrices."""
    contracting, batch = eqn.params["dimension_numbers"]
    # With a constant, each row gives one of the result, unless the rows are added up with the weights of their places.
    if len(dims) == 1:
        side = [kind.name for kind in operands].index("rows")
        return _MIXED if dims[0] in contracting[side] else ROWS
    # Rows of both sides meet in pairs of the same row, which are kept or added up. Otherwise each row meets all.
    pairs = (*zip(*batch, strict=True),), (*zip(*contracting, strict=True),)
    if tuple(dims) in pairs[0]:
        return ROWS
    return SUM if tuple(dims) in pairs[1] else _MIXED


def _of_gather(eqn: jex.JaxprEqn, operands: _Flows, dims: list[int | None]) -> Flow:
    """Returns the kind of elements that are taken by their numbers."""
    # Rows may choose from a constant, and each of them from its own values.
    numbers = eqn.params["dimension_numbers"]
    if [kind.name for kind in operands] == ["constant", "rows"]:
        return ROWS
    pairs = (*zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True),)
    return ROWS if len(dims) > 1 and tuple(dims) in pairs else _MIXED


def _of_constants(few: jex.JaxprEqn, many: jex.JaxprEqn, operands: _Flows, shapes: _Shapes, rows: int) -> Flow:
    """Returns the kind of a result of constants, whose dims may nevertheless be those of rows, as of `ones_like(labels)`."""
    name, growths = few.primitive.name, [kind.growth for kind in operands]
    sizes = [(_shape(a), _shape(b)) for a, b in zip(few.invars, many.invars, strict=True)]
    is_alike = all(growth == 1.0 for growth in growths)
    if name in _REDUCTIONS and _dim(*sizes[0], rows) in few.params["axes"]:
        if name == "reduce_sum":
            return Flow("constant", 2.0 * growths[0])
        return CONSTANT if is_alike and name in _ALIKE else _MIXED
    if is_alike and (name in _ELEMENTWISE | _LINEAR or all(a == b for a, b in (*sizes, shapes))):
        return CONSTANT
    if name in _LINEAR:
        return operands[0]
    return Flow("constant", _product(name, operands)) if name in ("mul", "div") else _MIXED


def _of_sums(eqn: jex.JaxprEqn, operands: _Flows, *, is_spread: bool) -> Flow:
    """Returns the kind of a result of sums over rows, and of constants."""
    name, first = eqn.primitive.name, operands[0]
    # A row that is compared with a sum over rows depends on all of them.
    if is_spread or any(kind.name == "rows" for kind in operands):
        return _MIXED
    if len(operands) == 1:
        return first if name in _LINEAR or name == "reduce_sum" else _MIXED
    # Keras adds up losses that it has joined.
    if name == "concatenate" and all(kind.growth == 1.0 for kind in operands):
        return MEAN if all(kind == MEAN for kind in operands) else _SHIFTED_MEAN
    # Sums may be weighed, and added up if they grow alike. The mean of parts stays the mean of all if a constant is added.
    are_sums = [kind.name == "sum" for kind in operands]
    if name in ("mul", "div") and (are_sums == [True, False] or (name == "mul" and are_sums == [False, True])):
        is_shifted = any(kind.is_shifted for kind in operands)
        growth = _product(name, operands)
        return _MIXED if is_shifted and growth != 1.0 else Flow("sum", growth, is_shifted)
    if name in ("add", "add_any", "sub") and first.growth == operands[1].growth:
        # A number of rows is a sum over them too.
        is_shifted = any(kind.is_shifted or (kind.name == "constant" and kind.growth == 1.0) for kind in operands)
        return _MIXED if is_shifted and first.growth != 1.0 else Flow("sum", first.growth, is_shifted)
    return _MIXED


def _product(name: str, operands: _Flows) -> float:
    return operands[0].growth * (operands[1].growth if name == "mul" else 1 / operands[1].growth)
