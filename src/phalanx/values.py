# SPDX-License-Identifier: Apache-2.0
"""Values that differ, or are known to be equal, between replicas. All are pytrees."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from phalanx.errors import ContextError, InvalidArgumentError


@dataclass(frozen=True, eq=False)
class RowMask:
    """Which rows of a padded batch are real.

    Compared by identity: the leaves of one batch share one mask.

    Args:
      mask: `(num_replicas, per_replica_batch)` bools; of several steps `(num_replicas, steps, per_replica_batch)`.
      count: how many rows of the global batch are real, a scalar; of several steps `(steps,)`.
      each: how many rows a value has for each row of the batch.
    """

    mask: Any
    count: Any
    each: int = 1

    def repeated(self, each: int) -> "RowMask":
        """Returns the mask of values with `each` rows for each of these."""
        if each == 1:
            return self
        if each not in self._repeated:
            self._repeated[each] = RowMask(jnp.repeat(self.mask, each, axis=-1), self.count * each, each)
        return self._repeated[each]

    @cached_property
    def _repeated(self) -> "dict[int, RowMask]":
        return {}

    @property
    def row_dim(self) -> int:
        """Which dim of a replica's component are the rows: 1 where dim 0 are the steps."""
        return len(self.mask.shape) - 2

    @property
    def has_rows(self) -> Any:
        """Inside a replica's program: whether it has a real row."""
        return self.mask.any()

    @cached_property
    def per_replica_counts(self) -> np.ndarray:
        """How many rows of each of this process's replicas are real; real rows come first."""
        return np.array([int(np.asarray(m).sum()) for m in _local_components(self.mask)])


class DistributedValues:
    """A value with one component a replica: `PerReplica` or `Mirrored`. May be made in any context."""

    @property
    def values(self) -> tuple[Any, ...]:
        """The components of this process's replicas, in replica order."""
        raise NotImplementedError

    def __repr__(self) -> str:
        lines = "".join(f"  {i}: {v!r},\n" for i, v in enumerate(self.values))
        return f"{type(self).__name__}:{{\n{lines}}}"


@final
class PerReplica(DistributedValues):
    """One component a replica, which may differ.

    It comes from `Strategy.run`, from a distributed dataset, or from `experimental_distribute_values_from_function`,
    and goes into `Strategy.run`, `reduce`, `gather` and `experimental_local_results`. Outside a replica function it has
    no value of its own, so it has no arithmetic; but with one replica it acts as that replica's array.

    Args:
      data: one global array `(num_replicas, ...)`; or a tuple of Python objects, one a replica.
      rows: which rows of a padded batch are real, if it is one.
      batch: which rows are real of the batch that it was computed from.

    Example:
      >>> import phalanx
      >>> strategy = phalanx.MirroredStrategy(["cpu:0", "cpu:1"])
      >>> strategy.run(lambda: phalanx.get_replica_context().replica_id_in_sync_group + 1).values
      (Array(1, dtype=int32), Array(2, dtype=int32))
    """

    __slots__ = ("batch", "data", "rows")

    def __init__(self, data: Any, rows: RowMask | None = None, batch: RowMask | None = None) -> None:
        self.data, self.rows, self.batch = data, rows, batch or rows

    @property
    def values(self) -> tuple[Any, ...]:
        """The components of this process's replicas, without padded rows."""
        if isinstance(self.data, tuple):
            return self.data
        if isinstance(self.data, jax.core.Tracer):
            parts = [self.data[i] for i in range(self.data.shape[0])]
        else:
            parts = _local_components(self.data)
        if self.rows is None or self.rows.row_dim:
            return tuple(parts)
        return tuple(p[:n] for p, n in zip(parts, self.rows.per_replica_counts, strict=True))

    def __jax_array__(self) -> Any:
        if len(self.data) > 1:
            raise ContextError(
                "a PerReplica used as an array",
                "outside a replica function it has one component a replica, not a value.",
                "strategy.reduce(...), strategy.gather(...) or strategy.experimental_local_results(value)",
            )
        return self.values[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.asarray(self.__jax_array__(), dtype=dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the one component, where there is one."""
        return np.shape(self.__jax_array__())

    @property
    def dtype(self) -> Any:
        """The dtype of the components."""
        return self.data.dtype

    def __len__(self) -> int:
        return len(self.__jax_array__())

    def __getitem__(self, index: Any) -> Any:
        return self.__jax_array__()[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.__jax_array__())

    def __float__(self) -> float:
        return float(self.__jax_array__())

    def __int__(self) -> int:
        return int(self.__jax_array__())

    def __add__(self, other: Any) -> Any:
        return self.__jax_array__() + other

    def __sub__(self, other: Any) -> Any:
        return self.__jax_array__() - other

    def __rsub__(self, other: Any) -> Any:
        return other - self.__jax_array__()

    def __mul__(self, other: Any) -> Any:
        return self.__jax_array__() * other

    def __truediv__(self, other: Any) -> Any:
        return self.__jax_array__() / other

    __radd__, __rmul__ = __add__, __mul__


@final
class Mirrored(DistributedValues):
    """A value that is equal on all replicas.

    A replica function that returns `Mirrored(tree)` states that all replicas computed the same tree; `Strategy.run` then
    returns one `Mirrored` instead of a `PerReplica` for every leaf. As an argument of `Strategy.run` it is unwrapped.

    Args:
      value: a pytree of arrays.

    Example:
      >>> import jax, phalanx
      >>> strategy = phalanx.MirroredStrategy(["cpu:0", "cpu:1"])
      >>> strategy.run(lambda: phalanx.Mirrored({"w": jax.numpy.float32(1)})).value
      {'w': Array(1., dtype=float32)}
    """

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    @property
    def values(self) -> tuple[Any, ...]:
        """The equal components of this process's replicas."""
        leaves, tree = flatten(self.value)
        parts = [_copies(leaf) for leaf in leaves]
        return tuple(tree.unflatten(p) for p in zip(*parts, strict=True)) if parts else (self.value,)

    def __jax_array__(self) -> Any:
        return jnp.asarray(self.value)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.asarray(self.value, dtype=dtype)


@final
class ReplicaLocal(DistributedValues):
    """Inside `merge_call`: a value of which each replica of the running program holds its own component.

    Args:
      value: this replica's component, a traced array.
      rows: which rows of it are real, `(per_replica_batch,)`, if it belongs to a padded batch.
    """

    __slots__ = ("rows", "value")

    def __init__(self, value: Any, rows: RowMask | None = None) -> None:
        self.value, self.rows = value, rows

    @property
    def values(self) -> tuple[Any, ...]:
        """Not to be had: the components live in one program each."""
        raise ContextError(
            "the components of a value inside merge_call",
            "all replicas are one program here, which sees only its own component.",
            "strategy.reduce(op, value, axis=None), or get_replica_context().all_gather(value, axis=0) before merge_call",
        )

    def __jax_array__(self) -> Any:
        raise ContextError(
            "a value inside merge_call used as an array",
            "each replica holds its own component of it.",
            "strategy.reduce(op, value, axis=None), or strategy.extended.reduce_to(op, value, variable)",
        )

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return self.__jax_array__()

    def __repr__(self) -> str:
        return f"ReplicaLocal({self.value!r})"


def check_size(value: PerReplica, num_replicas: int) -> None:
    """Raises for a value of another strategy.

    Raises:
      InvalidArgumentError: it has not as many components as there are replicas.
    """
    size = len(value.data)
    if size != num_replicas:
        raise InvalidArgumentError(
            f"a PerReplica of {size} components",
            f"the strategy that is to take it has {num_replicas} replicas.",
            "make the value with the strategy that uses it",
        )


is_distributed: Callable[[object], bool] = DistributedValues.__instancecheck__
"""Whether a value has one component a replica; no function of Python, for it is asked of each node of each step's arguments."""


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """`jax.tree.flatten` in which a distributed value is one leaf."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_distributed)
    return leaves, structure


def map_leaves(fn: Callable[[Any], Any], tree: Any) -> Any:
    """`jax.tree.map` in which a distributed value is one leaf."""
    return jax.tree.map(fn, tree, is_leaf=is_distributed)


def _local_components(array: Any) -> list[Any]:
    if isinstance(array, np.ndarray):
        return list(array)
    # Those of the first device of each replica: the others of a replica hold the same.
    first = {s.index[0].start or 0: s for s in reversed(array.addressable_shards)}
    shards = [first[start] for start in sorted(first)]
    if shards[0].data.shape == (1, *array.shape[1:]):
        return [s.data[0] for s in shards]
    return [array[i] for i in range(array.shape[0])]


def _copies(array: Any) -> list[Any]:
    if isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer):
        if not isinstance(array.sharding, NamedSharding):
            return [s.data for s in array.addressable_shards]
        # The first device of each replica.
        mesh = array.sharding.mesh.devices
        order = {device: i for i, device in enumerate(mesh.reshape(len(mesh), -1)[:, 0])}
        first = sorted((s for s in array.addressable_shards if s.device in order), key=lambda s: order[s.device])
        return [s.data for s in first] if array.is_fully_replicated else [array] * len(first)
    return [array]


def _flatten_per_replica(value: PerReplica) -> tuple[tuple[Any, ...], Any]:
    if isinstance(value.data, tuple):
        return (), (value.data, value.rows, value.batch)
    return (value.data,), (None, value.rows, value.batch)


jax.tree_util.register_pytree_node(
    PerReplica, _flatten_per_replica, lambda aux, children: PerReplica(children[0] if children else aux[0], *aux[1:])
)
jax.tree_util.register_pytree_node(Mirrored, lambda m: ((m.value,), None), lambda _, c: Mirrored(c[0]))
jax.tree_util.register_pytree_node(
    ReplicaLocal, lambda m: ((m.value,), m.rows), lambda rows, c: ReplicaLocal(c[0], rows)
)
