# SPDX-License-Identifier: Apache-2.0
"""One call of a replica function: the arguments of each replica, the rows that they hold, and the result."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax import lax

from phalanx._src.mesh.arrays import as_array, as_number, is_array
from phalanx._src.mesh.layout import REPLICA_AXIS
from phalanx._src.mesh.values import Mirrored, check_size, differs, flatten, is_equal_everywhere, map_leaves, unwrapped
from phalanx._src.programs import explain, own_rows
from phalanx._src.tracing import context
from phalanx._src.tracing.context import Mode, ReplicaContext
from phalanx._src.tracing.policy import Write, policy_of
from phalanx._src.tracing.rows import ReplicaRows
from phalanx._src.tracing.strategy import AbstractStrategy
from phalanx._src.tracing.structure import Parts, Structure, with_values
from phalanx._src.typed_jax import shape_dtype
from phalanx.typing import PyTree


@jax.tree_util.register_static
class Nest:
    """The nest that a replica function returned, without its arrays. A pytree without leaves, so that a traced function can return it.

    Args:
      returned: the nest.
    """

    def __init__(self, returned: PyTree) -> None:
        leaves, self._tree = flatten(returned)
        self._leaves = [
            _RESULT if _is_traced(x) else _content(x).structure if is_equal_everywhere(x) else x for x in leaves
        ]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Nest) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._tree)

    @property
    def _key(self) -> PyTree:
        # Objects that compare element by element are equal only to themselves.
        return self._tree, [(type(x), x) if isinstance(x, (*_NUMBERS, str, Structure)) else id(x) for x in self._leaves]

    def other_numbers(self, other: "Nest") -> list[int]:
        """Returns the places of numbers that are not those of another nest of equal structure."""
        if self._tree != other._tree:
            return []
        pairs = enumerate(zip(self._leaves, other._leaves, strict=True))
        return [i for i, (x, y) in pairs if isinstance(x, _NUMBERS) and isinstance(y, _NUMBERS) and x != y]

    def join(self, results: Iterable[Any], mirrored: Iterable[Any]) -> PyTree:
        """Returns the nest with these arrays and those of its `Mirrored` values."""
        arrays, shared = iter(results), iter(mirrored)

        def pick(leaf: PyTree) -> PyTree:
            if leaf is _RESULT:
                return next(arrays)
            return Mirrored(leaf.join(shared)) if isinstance(leaf, Structure) else leaf

        return self._tree.unflatten(map(pick, self._leaves))


_RESULT = object()
_NUMBERS = (bool, int, float, complex, np.generic)


class Returned(NamedTuple):
    """The result of one call of a replica function.

    Args:
      results: its arrays that may differ between replicas, in order.
      mirrored: the arrays and numbers of its `Mirrored` values, in order.
      nest: what the function returned, without its arrays.
      rows: the rows of the replica. None if all replicas have equally many.
    """

    results: list[jax.Array]
    mirrored: list[Any]
    nest: Nest
    rows: ReplicaRows | None


class ReplicaCall:
    """One call of a replica function, for all replicas.

    Args:
      strategy: the strategy of the replicas.
      fn: the replica function.
      args: its positional and keyword arguments.
      is_stacked: whether arguments are those of several calls, stacked along a dim for steps.

    Attributes:
      fn: the replica function.
      sharded: the arrays that differ between replicas, (num_replicas, ...).
      whole: the arrays that are equal on all replicas.
      sizes: for each sharded array, the sizes of its components. None if they are equal.
      batches: the sizes of the batches that have unequal ones.
      shares: the different shares that replicas have of the batches; empty if all are equal.
      is_empty: for each replica, whether it has no rows.
    """

    def __init__(self, strategy: AbstractStrategy, fn: Callable[..., Any], args: PyTree, *, is_stacked: bool) -> None:
        self._strategy, self.fn, self._is_stacked = strategy, fn, is_stacked
        leaves, self._tree = flatten(map_leaves(unwrapped, args))
        self._leaves = [x if (array := as_array(x)) is None else array for x in leaves]
        for value in self._of(differs):
            check_size(value, strategy.num_replicas_in_sync)
        of_replicas = self._of(differs)
        # Per-replica arrays are sharded inputs, other arrays are replicated inputs, and the rest stays in Python.
        self.sharded = [x.data for x in of_replicas]
        self.whole = self._of(is_array)
        # The sizes of the arguments of one step, and the batches that they belong to.
        first_dim = 1 if is_stacked else 0
        self.sizes = [x.rows and x.rows.without_dims(first_dim) for x in of_replicas]
        self.batches = list(dict.fromkeys(x.batch.without_dims(first_dim) for x in of_replicas if x.rows))
        num_replicas = strategy.num_replicas_in_sync
        self.shares = own_rows.shares_of([*self.sizes, *self.batches], num_replicas) if self.batches else []
        self.is_empty = [all(batch.counts[i] == 0 for batch in self.batches) for i in range(num_replicas)]

    @property
    def num_steps(self) -> int:
        """The number of steps that the arguments are stacked for."""
        return int(self.sharded[0].shape[1])

    def one_step(self) -> tuple[list[Any], list[Any]]:
        """Returns the arguments of one call. Stacked arrays are replaced by the shape of one step."""
        if not self._is_stacked:
            return self.sharded, self.whole

        def one(x: jax.Array, dim: int) -> jax.ShapeDtypeStruct:
            return shape_dtype(x.shape[:dim] + x.shape[dim + 1 :], x.dtype)

        return [one(x, 1) for x in self.sharded], [one(x, 0) for x in self.whole]

    @property
    def num_rows(self) -> PyTree:
        """The number of rows of this replica, in a replica function."""
        if len(self.batches) == 1:
            return jnp.asarray(self.batches[0].counts)[lax.axis_index(REPLICA_AXIS)]
        sharded = self.one_step()[0]
        return sharded[0].shape[1] if sharded and sharded[0].ndim > 1 else 1

    def run(
        self, sharded: list[Any], whole: list[Any], replica_id: jax.Array, gathered: own_rows.Gathered | None = None
    ) -> Returned:
        """Calls the user's function with the arguments of one replica."""
        leaves = list(self._leaves)
        self._fill(leaves, differs, sharded)
        self._fill(leaves, is_array, whole)
        args, kwargs = self._tree.unflatten(leaves)
        replica = ReplicaContext(self._strategy, replica_id, self.rows_of(replica_id, gathered))
        with context.enter(Mode(self._strategy, replica)):
            result = with_values(explain.call(self.fn, args, kwargs), self._value_of)
        leaves, tree = flatten(result)
        if gathered is not None and gathered.numbers:
            # A replica without rows has traced another number than its own.
            leaves = [_number(x, replica.rows) if i in gathered.numbers else x for i, x in enumerate(leaves)]
            result = tree.unflatten(leaves)
        results = [x for x in leaves if _is_traced(x)]
        mirrored = [array for x in leaves if is_equal_everywhere(x) for array in _content(x).arrays]
        return Returned(results, mirrored, Nest(result), replica.rows)

    def rows_of(self, replica_id: jax.Array, gathered: own_rows.Gathered | None = None) -> tuple[ReplicaRows, ...]:
        """Returns the rows that a replica has of each batch.

        Args:
          replica_id: the number of the replica.
          gathered: what the replicas gather, if the arguments are the rows of a share and nothing else. None if they may be padded.
        """
        if gathered is None:
            return tuple(ReplicaRows(x.counts, replica_id, max(1, *x.counts), is_padded=True) for x in self.batches)
        sizes = gathered.share.sizes[len(self.sizes) :]
        return tuple(
            ReplicaRows(x.counts, replica_id, size[0], is_padded=gathered.is_padded, gathered=gathered.sizes)
            for x, size in zip(self.batches, sizes, strict=True)
            if size is not None
        )

    def _value_of(self, variable: keras.Variable) -> PyTree:
        """Returns the value of a variable that the function returned: one for all replicas, if they hold equal ones in a step."""
        may_differ = policy_of(variable).write is Write.AT_BOUNDARY or self._strategy.num_replicas_in_sync == 1
        return variable.value if may_differ else Mirrored(variable.value)

    def _fill(self, leaves: list[Any], kind: Callable[[Any], bool], values: Iterable[Any]) -> None:
        places = (i for i, x in enumerate(self._leaves) if kind(x))
        for place, value in zip(places, values, strict=True):
            leaves[place] = value

    def _of(self, kind: Callable[[Any], bool]) -> list[Any]:
        return [x for x in self._leaves if kind(x)]


def _number(value: PyTree, rows: ReplicaRows | None) -> jax.Array:
    return jnp.asarray(value) if rows is None else rows.with_rows(jnp.asarray(value))


def _content(mirrored: Mirrored) -> Parts:
    return Parts(mirrored.value, lambda x: x if isinstance(x, bool) else as_number(x))


def _is_traced(leaf: object) -> bool:
    return isinstance(leaf, jax.core.Tracer)
