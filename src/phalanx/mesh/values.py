# SPDX-License-Identifier: Apache-2.0
"""Values that differ, or are known to be equal, between replicas. All are pytrees."""

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, final

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
        if isinstance(self.mask, jax.core.Tracer):
            raise ContextError(
                "the real rows of a padded batch in phalanx.function",
                "no program knows how many there are.",
                "strategy.run(fn, args=(batch,)), or strategy.reduce(op, value, axis=0)",
            )
        # In NumPy: while a function of jax is traced, jax would make a part of the program of it.
        return np.array([int(m.sum()) for shard in _local_shards(self.mask) for m in np.asarray(shard)])


class _ActsAsArray:
    """Arithmetic, comparisons, conversions and methods of the array that `__jax_array__` returns, or its error."""

    __slots__ = ()

    # NumPy leaves `array + self` to us, as to an array of jax.
    __array_priority__ = 100
    # By identity, though `==` compares element by element: a distributed value may be a key.
    __hash__ = object.__hash__

    def __jax_array__(self) -> Any:
        raise NotImplementedError

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.array(self.__jax_array__(), dtype=dtype, copy=copy)

    def __getattr__(self, name: str) -> Any:
        if name not in _OF_ARRAYS:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        return getattr(self.__jax_array__(), name)

    def numpy(self) -> np.ndarray:
        """Returns the array as one of NumPy, as a tensor of TensorFlow does."""
        return np.asarray(self)

    def __eq__(self, other: object) -> Any:
        return self.__jax_array__() == other

    def __ne__(self, other: object) -> Any:
        return self.__jax_array__() != other

    def __iter__(self) -> Iterator[Any]:
        return iter(self.__jax_array__())

    def __format__(self, spec: str) -> str:
        return format(self.__jax_array__(), spec) if spec else str(self)


# Methods of arrays; the last ones belong to concrete arrays alone.
_OF_ARRAYS = {name for name in dir(jax.Array) if not name.startswith("_")} | {
    "block_until_ready",
    "devices",
    "is_deleted",
    "is_ready",
    "tolist",
}


def _forward(function: Callable[..., Any]) -> Any:
    return lambda self, *others: function(self.__jax_array__(), *others)


def _reflected(function: Callable[..., Any]) -> Any:
    return lambda self, other: function(other, self.__jax_array__())


_BINARY = "add sub mul truediv floordiv mod divmod pow matmul and_ or_ xor lshift rshift"
for _name in _BINARY.split():
    _function = divmod if _name == "divmod" else getattr(operator, _name)
    setattr(_ActsAsArray, f"__{_name.rstrip('_')}__", _forward(_function))
    setattr(_ActsAsArray, f"__r{_name.rstrip('_')}__", _reflected(_function))
for _name in ("lt", "le", "gt", "ge", "neg", "pos", "abs", "invert", "index", "getitem", "contains"):
    setattr(_ActsAsArray, f"__{_name}__", _forward(getattr(operator, _name)))
for _function in (int, float, complex, bool, len, round):
    setattr(_ActsAsArray, f"__{_function.__name__}__", _forward(_function))


class DistributedValues(_ActsAsArray):
    """A value with one component per replica: `PerReplica` or `Mirrored`. May be made in any context.

    If it has one value, which all replicas or the one replica has, it acts as that array: operators, methods, `jnp`
    functions. Else all of these raise ContextError.
    """

    if TYPE_CHECKING:  # They are made above.

        def __add__(self, other: Any) -> Any: ...
        def __sub__(self, other: Any) -> Any: ...
        def __mul__(self, other: Any) -> Any: ...
        def __truediv__(self, other: Any) -> Any: ...
        def __getitem__(self, index: Any) -> Any: ...
        def __len__(self) -> int: ...
        def __float__(self) -> float: ...
        def __int__(self) -> int: ...

    __slots__ = ()

    @property
    def values(self) -> tuple[Any, ...]:
        """The components of this process's replicas, in replica order."""
        raise NotImplementedError

    def __repr__(self) -> str:
        lines = "".join(f"  {i}: {v!r},\n" for i, v in enumerate(self.values))
        return f"{type(self).__name__}:{{\n{lines}}}"


AS_ARRAY = "a PerReplica used as an array"
"""What the error says was asked, of a value with several components."""


@final
class PerReplica(DistributedValues):
    """One component a replica, which may differ.

    It comes from `Strategy.run`, from a distributed dataset, or from `experimental_distribute_values_from_function`,
    and goes into `Strategy.run`, `reduce`, `gather` and `experimental_local_results`. With one replica it acts as that
    replica's array. With several it has no value outside a replica function: whatever uses it as an array raises ContextError.

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
                AS_ARRAY,
                "outside a replica function it has one component per replica, not a value.",
                'strategy.reduce("SUM", value, axis=None) or strategy.gather(value, axis=0), then .numpy(); or strategy.experimental_local_results(value)',
            )
        return self.values[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the one component, if there is one."""
        return np.shape(self.__jax_array__())

    @property
    def dtype(self) -> Any:
        """The dtype of the components."""
        return self.data.dtype


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
        if not jax.tree_util.all_leaves([self.value]):
            raise ContextError(
                f"a Mirrored {type(self.value).__name__} used as an array",
                "it is a nest of values.",
                "mirrored.value, which is the nest",
            )
        return jnp.asarray(self.value)


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
    shards = _local_shards(array)
    if shards[0].shape == (1, *array.shape[1:]):
        return [shard[0] for shard in shards]
    return [array[i] for i in range(array.shape[0])]


def _local_shards(array: Any) -> list[Any]:
    """Returns the parts `(replicas, ...)` of this process's replicas, in their order."""
    if isinstance(array, np.ndarray):
        return [array]
    # Those of the first device of each replica: the others of a replica hold the same.
    first = {s.index[0].start or 0: s.data for s in reversed(array.addressable_shards)}
    return [first[start] for start in sorted(first)]


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


def stacked(results: Sequence[Any]) -> Any:
    """Returns what one `run` after the other returned as `run_steps` stacks it."""
    first = results[0]
    if isinstance(first, Mirrored):
        return Mirrored(jax.tree.map(lambda *xs: jnp.stack(xs), *(r.value for r in results)))
    if not isinstance(first, PerReplica):
        return jnp.stack(results)
    batch = first.batch and _stacked_masks([r.batch for r in results])
    return PerReplica(jnp.stack([r.data for r in results], axis=1), batch if first.rows else None, batch)


def first_steps(value: Any, count: int) -> Any:
    """Returns the first steps of what `run_steps` stacked."""
    if isinstance(value, Mirrored):
        return Mirrored(jax.tree.map(lambda x: x[:count], value.value))
    if not isinstance(value, PerReplica):
        return value[:count] if isinstance(value, jax.Array) else value
    batch = value.batch and RowMask(value.batch.mask[:, :count], value.batch.count[:count])
    return PerReplica(value.data[:, :count], batch if value.rows else None, batch)


def _stacked_masks(rows: Sequence[RowMask]) -> RowMask:
    return RowMask(jnp.stack([r.mask for r in rows], axis=1), jnp.stack([r.count for r in rows]))
