# SPDX-License-Identifier: Apache-2.0
"""Gradients of tables that replicas exchange as rows.

The gradient of a lookup is zero except in the rows that were looked up. If these are few, each replica gathers the rows of all, and adds
them up itself: to the gradient of the table, or to its shard if the replicas share the update. The sum is the same.

Source: tf.IndexedSlices, which tf.distribute gathers likewise.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as jex

from phalanx._src.collectives.primitives import joined, split
from phalanx._src.kernels import platforms
from phalanx._src.kernels.rewriting import all_equations, equations_of
from phalanx._src.mesh.layout import REPLICA_AXIS
from phalanx._src.mesh.topology import Topology
from phalanx._src.tracing.discovery import Discovery
from phalanx._src.typed_jax import psum, shape_dtype
from phalanx.typing import PyTree

_Atom: TypeAlias = jex.Var | jex.Literal
_Makers: TypeAlias = Mapping[jex.Var, jex.JaxprEqn]

_CALLS = frozenset({"jit", "pjit"})

# Measured on two CPU cores with tables of 0.2 to 26 MB, 2 and 4 replicas, SGD and Adam. From here on, a step was up to 1.8 times as fast.
# With twice as many rows it was as fast as before, and with smaller tables a little slower.
_SHARE = 16
"""How many times as large as the rows of all replicas a table must be."""

_LARGE_BYTES = 3 << 19
"""The size that it must have."""


def are_of_interest(discovery: Discovery, topology: Topology) -> bool:
    """Returns whether a trace looks up few rows of a table, so that its gradient may be rows."""
    # Along a model axis, XLA divides a table and its gradient.
    if topology.num_replicas == 1 or topology.axes or not platforms.are_cpus(topology.devices):
        return False
    lookups = (eqn for eqn in all_equations(discovery.jaxpr.jaxpr) if eqn.primitive.name == "gather")
    return any(_are_few(eqn.outvars[0], eqn.invars[0], topology.num_replicas) for eqn in lookups)


def with_rows(eqns: Sequence[jex.JaxprEqn]) -> list[jex.JaxprEqn]:
    """Returns the equations of a trace with sums of rows, where gradients of lookups are summed over the replicas."""
    makers = {v: eqn for eqn in eqns for v in eqn.outvars}
    return [new for eqn in eqns for new in _equations(eqn, makers)]


def is_sum(eqn: jex.JaxprEqn) -> bool:
    """Returns whether an operation sums one array over all replicas."""
    params = eqn.params
    if len(eqn.invars) != 1 or params.get("axis_index_groups") is not None:
        return False
    if eqn.primitive.name == "reduce_scatter":
        return bool(params["axis_name"] == (REPLICA_AXIS,) and params["tiled"])
    return bool(eqn.primitive.name == "psum" and params["axes"] == (REPLICA_AXIS,))


def shape_of(atom: _Atom) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of a value of a trace."""
    aval: PyTree = atom.aval
    return shape_dtype(aval.shape, aval.dtype)


def _are_few(rows: _Atom, table: _Atom, num_replicas: int) -> bool:
    """Returns whether the rows of all replicas are few enough for a table, given those of one replica."""
    size = math.prod(shape_of(table).shape)
    is_large: bool = size * shape_of(table).dtype.itemsize >= _LARGE_BYTES
    return is_large and _SHARE * num_replicas * math.prod(shape_of(rows).shape) <= size


class _Lookup(NamedTuple):
    """A lookup, by its gradient.

    Args:
      scatter: the operation that adds rows to zeros.
      ids: the variable of the ids of the rows.
      rows: the variable of the rows.
    """

    scatter: jex.JaxprEqn
    ids: jex.Var
    rows: jex.Var

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the table."""
        shape: tuple[int, ...] = shape_of(self.scatter.outvars[0]).shape
        return shape

    def total(self, ids: jax.Array, rows: jax.Array, dim: int | None) -> jax.Array:
        """Returns the gradient of lookups of all replicas, or this replica's shard of it along a dim."""
        shape, params = list(self.shape), self.scatter.params
        numbers, mode = params["dimension_numbers"], params["mode"]
        if dim is not None:
            shape[dim] //= lax.axis_size(REPLICA_AXIS)
            start = lax.axis_index(REPLICA_AXIS) * shape[dim]
            if dim == 0:
                # Ids of other shards are out of bounds.
                ids, mode = ids - start, lax.GatherScatterMode.FILL_OR_DROP
            else:
                rows = lax.dynamic_slice_in_dim(rows, start, shape[dim], numbers.update_window_dims[dim - 1])
        return lax.scatter_add(jnp.zeros(shape, rows.dtype), ids, rows, numbers, mode=mode)


def _equations(eqn: jex.JaxprEqn, makers: _Makers) -> list[jex.JaxprEqn]:
    """Returns the equations that stand for one: a sum of rows, if it is a sum of gradients of lookups over the replicas.

    Args:
      eqn: the equation.
      makers: by variable of its trace, the equation that computes it.
    """
    if not is_sum(eqn):
        return [eqn]
    # Between processes, the gradients of all variables travel in one flat array.
    source, whole_shape = _maker(eqn.invars[0], makers), shape_of(eqn.invars[0]).shape
    is_joined = source is not None and source.primitive.name == "concatenate" and len(whole_shape) == 1
    parts = source.invars if source is not None and is_joined else eqn.invars
    lookups = [_lookup(part, makers) for part in parts]
    tables = [lookup for lookup in lookups if lookup is not None]
    if not tables:
        return [eqn]
    dense = [part for part, lookup in zip(parts, lookups, strict=True) if lookup is None]
    (summed,), dim = eqn.outvars, eqn.params.get("scatter_dimension")
    if dim is not None and whole_shape != tables[0].shape:
        return [eqn]  # Shards of a table that was reshaped, or of several.

    def total(*arrays: jax.Array) -> jax.Array:
        whole = list(arrays[: len(dense)])
        ids, rows = arrays[len(dense) :: 2], arrays[len(dense) + 1 :: 2]
        sums = iter(split(psum(joined(whole), REPLICA_AXIS), whole) if whole else [])
        totals = map(_Lookup.total, tables, _gathered(ids), _gathered(rows), [dim] * len(tables))
        results = [next(sums) if lookup is None else next(totals) for lookup in lookups]
        return joined(results) if is_joined else results[0].reshape(shape_of(summed).shape)

    inputs = [*dense, *(v for lookup in tables for v in (lookup.ids, lookup.rows))]
    return equations_of(total, inputs, eqn.outvars, eqn.source_info)


def _gathered(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns arrays, each concatenated over the replicas along its first dim. They travel in one array."""
    of_replicas: jax.Array = lax.all_gather(joined(list(arrays)), REPLICA_AXIS)
    parts = zip(*(split(each, list(arrays)) for each in of_replicas), strict=True)
    return [jnp.concatenate(part) for part in parts]


def _lookup(atom: _Atom, makers: _Makers) -> _Lookup | None:
    """Returns the lookup that a value, perhaps reshaped, is the gradient of. None if there is no such lookup."""
    eqn = _maker(atom, makers)
    if eqn is None:
        return None
    if eqn.primitive.name == "reshape":
        return _lookup(eqn.invars[0], makers)
    if eqn.primitive.name == "scatter-add":
        return _of_scatter(eqn, makers)
    if eqn.primitive.name not in _CALLS or len(eqn.outvars) != 1:
        return None
    # `jnp.take` is a call, and so is its gradient.
    (inner,) = jex.jaxprs_in_params(eqn.params)
    lookup = _lookup(inner.outvars[0], {v: each for each in inner.eqns for v in each.outvars})
    outer = dict(zip(inner.invars, eqn.invars, strict=True))
    inputs = [] if lookup is None else [outer.get(lookup.ids), outer.get(lookup.rows)]
    known = [v for v in inputs if isinstance(v, jex.Var)]
    return lookup._replace(ids=known[0], rows=known[1]) if lookup is not None and len(known) == 2 else None


def _of_scatter(eqn: jex.JaxprEqn, makers: _Makers) -> _Lookup | None:
    """Returns the lookup whose gradient a scatter computes, if it adds few rows to zeros."""
    base, ids, rows = eqn.invars
    zeros = _maker(base, makers)
    if zeros is None or zeros.primitive.name != "broadcast_in_dim" or not isinstance(zeros.invars[0], jex.Literal):
        return None
    if not isinstance(ids, jex.Var) or not isinstance(rows, jex.Var):
        return None
    numbers: lax.ScatterDimensionNumbers = eqn.params["dimension_numbers"]
    is_of_rows = (
        not np.any(zeros.invars[0].val)
        and numbers.inserted_window_dims == numbers.scatter_dims_to_operand_dims == (0,)
        and not numbers.operand_batching_dims
        and eqn.params["mode"] != lax.GatherScatterMode.CLIP
        # The rows of other replicas follow along the first dim of both.
        and len(shape_of(ids).shape) > 1
        and 0 not in numbers.update_window_dims
    )
    return _Lookup(eqn, ids, rows) if is_of_rows and _are_few(rows, base, lax.axis_size(REPLICA_AXIS)) else None


def _maker(atom: _Atom, makers: _Makers) -> jex.JaxprEqn | None:
    return makers.get(atom) if isinstance(atom, jex.Var) else None  # Literals have no hash.
