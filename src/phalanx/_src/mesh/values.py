# SPDX-License-Identifier: Apache-2.0
"""Distributed values: values that differ between replicas, or that are known to be equal. All are pytrees."""

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, TypeGuard, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from numpy.typing import DTypeLike
from typing_extensions import override

from phalanx._src.mesh.arrays import flattened, require_live, uncommitted
from phalanx._src.typed_jax import shape_dtype
from phalanx.errors import ContextError, InvalidArgumentError
from phalanx.typing import PyTree


@dataclass(frozen=True)
class ComponentSizes:
    """The sizes of the components of a value, if they are not equal.

    Arrays have room for the largest component. What is real comes first, and the rest is padding.

    Args:
      sizes: for each replica of all processes, the sizes of the leading dims of its component, up to the last dim in which the
        components differ. Most often this is the number of its rows.
      first: number of the first replica of an array that has those of this process only.
    """

    sizes: tuple[tuple[int, ...], ...]
    first: int = field(default=0, compare=False)  # Processes differ in it, and must select the same program.

    @staticmethod
    def of_counts(counts: "Sequence[int]", first: int = 0) -> "ComponentSizes | None":
        """Returns the sizes of the components of a batch with these numbers of rows. None if they are equal, and not 0."""
        return None if len({*counts}) == 1 and counts[0] else ComponentSizes(tuple((count,) for count in counts), first)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """The size of dim 0 of each component."""
        return tuple(size[0] for size in self.sizes)

    @cached_property
    def dims(self) -> tuple[int, ...]:
        """The dims in which the components differ, or have no elements."""
        return tuple(d for d, sizes in enumerate(zip(*self.sizes, strict=True)) if len({*sizes}) > 1 or 0 in sizes)

    def mask(self, shape: Sequence[int]) -> jax.Array:
        """Returns where the components of an array (num_replicas, ...) are real, as a bool array that broadcasts to its leading dims.

        Args:
          shape: the shape of the array.
        """
        num_dims = len(self.sizes[0])
        real = jnp.ones((1,) * (1 + num_dims), bool)
        for dim in self.dims:
            places = jnp.arange(shape[1 + dim]).reshape([-1 if d == dim else 1 for d in range(num_dims)])
            real &= places < np.asarray(self.sizes)[:, dim].reshape(-1, *(1,) * num_dims)
        return real

    def cut(self, component: PyTree, replica: int) -> PyTree:
        """Returns the real rows of the component of a replica."""
        return component[tuple(map(slice, self.sizes[replica]))]

    def without_dims(self, count: int) -> "ComponentSizes":
        """Returns the sizes without the first `count` dims."""
        return replace(self, sizes=tuple(size[count:] for size in self.sizes))

    def of_steps(self, steps: int) -> "ComponentSizes":
        """Returns the sizes of values that are stacked over as many steps, each of which has these sizes."""
        return replace(self, sizes=tuple((steps, *size) for size in self.sizes))


class _ActsAsArray:
    """Forwards operators, conversions and methods to the array that `__jax_array__` returns, or raises its error."""

    __slots__ = ()

    # NumPy then leaves `array + self` to this class, as it does for JAX arrays.
    __array_priority__ = 100
    # By identity, although `==` compares element by element, so that a distributed value can be a dict key.
    __hash__ = object.__hash__

    def __jax_array__(self) -> jax.Array:
        raise NotImplementedError

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.__jax_array__(), dtype=dtype, copy=copy)

    def __getattr__(self, name: str) -> Any:
        # Libraries ask any object for their special names, and expect an AttributeError, not a ContextError.
        if name not in _OF_ARRAYS:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        return getattr(self.__jax_array__(), name)

    def numpy(self) -> np.ndarray:
        """Returns the array as a NumPy array, like `numpy` of a TensorFlow tensor."""
        return np.asarray(self)

    def __eq__(self, other: object) -> Any:
        return self.__jax_array__() == other

    def __ne__(self, other: object) -> Any:
        return self.__jax_array__() != other

    def __iter__(self) -> Iterator[Any]:
        return iter(self.__jax_array__())

    def __format__(self, spec: str) -> str:
        return format(self.__jax_array__(), spec) if spec else str(self)


# Names of array methods. `jax.Array` lacks those in the second set, which only concrete arrays have.
_OF_ARRAYS = {name for name in dir(jax.Array) if not name.startswith("_")} | {
    "block_until_ready",
    "devices",
    "is_deleted",
    "is_ready",
    "tolist",
}


def _forward(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *others: function(self.__jax_array__(), *others)


def _reflected(function: Callable[..., Any]) -> Callable[..., Any]:
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
    """A value with one component per replica: `PerReplica` or `Mirrored`. May be created in any context.

    With one replica, or if all components are equal, it acts as an array in operators, methods and `jnp` functions.
    Otherwise all of these raise ContextError.

    Source: tf.distribute.DistributedValues.

    Example:
      >>> import phalanx
      >>> strategy = phalanx.MirroredStrategy(["cpu:0", "cpu:1"])
      >>> value = strategy.run(lambda: phalanx.get_replica_context().replica_id_in_sync_group)
      >>> isinstance(value, phalanx.DistributedValues), len(value.values)
      (True, 2)
    """

    if TYPE_CHECKING:  # The loops above define these methods at run time.

        def __add__(self, other: object) -> jax.Array: ...
        def __sub__(self, other: object) -> jax.Array: ...
        def __mul__(self, other: object) -> jax.Array: ...
        def __truediv__(self, other: object) -> jax.Array: ...
        def __getitem__(self, index: object) -> jax.Array: ...
        def __len__(self) -> int: ...
        def __float__(self) -> float: ...
        def __int__(self) -> int: ...

    __slots__ = ()

    differs: ClassVar[bool] = True
    """Whether the components may differ."""

    rows: ComponentSizes | None = None
    """The sizes of the components. None if they are equal."""

    @property
    def values(self) -> tuple[Any, ...]:
        """The components of this process's replicas, in replica order.

        Each array is on the device of its replica, but not committed to it: an operation on several components copies them
        to the device where it runs, which is JAX's default device unless another argument is committed.
        """
        raise NotImplementedError

    @property
    def spec(self) -> jax.ShapeDtypeStruct:
        """The shape and dtype of one component."""
        raise NotImplementedError

    def stacked(self, others: Sequence[Any]) -> "DistributedValues":
        """Returns this value and the values of later steps as one value, stacked like the results of `run_steps`."""
        raise NotImplementedError

    def first_steps(self, count: int) -> "DistributedValues":
        """Returns the first `count` steps of a stacked value."""
        raise NotImplementedError

    def __repr__(self) -> str:
        if isinstance(shapes := getattr(self, "data", None), jax.ShapeDtypeStruct):  # Of jax.eval_shape.
            return f"{type(self).__name__}({shapes})"
        lines = "".join(f"  {i}: {v!r},\n" for i, v in enumerate(self.values))
        return f"{type(self).__name__}:{{\n{lines}}}"


AS_ARRAY = "a PerReplica used as an array"
"""The first part of the error message for a value with several components."""


@final
class PerReplica(DistributedValues):
    """A value with one component per replica. The components may differ. May be created in any context.

    `Strategy.run`, distributed datasets and `experimental_distribute_values_from_function` return it. `Strategy.run`,
    `reduce`, `gather` and `experimental_local_results` accept it. With one replica it acts as the array of that
    replica. With several replicas, using it as an array outside a replica function raises ContextError.

    Args:
      data: a global array `(num_replicas, ...)`, or a tuple with one Python object per replica.
      rows: the sizes of the components, of which `data` holds padding after the real rows. None if they are equal.
      batch: the sizes of the components of the batch from which the value was computed.

    Example:
      >>> import phalanx
      >>> strategy = phalanx.MirroredStrategy(["cpu:0", "cpu:1"])
      >>> strategy.run(lambda: phalanx.get_replica_context().replica_id_in_sync_group + 1).values
      (Array(1, dtype=int32), Array(2, dtype=int32))
    """

    __slots__ = ("batch", "data", "rows")

    def __init__(self, data: PyTree, rows: ComponentSizes | None = None, batch: ComponentSizes | None = None) -> None:
        # A value with rows is a batch itself unless it was computed from one.
        self.data, self.rows, self.batch = data, rows, batch or rows

    @property
    def values(self) -> tuple[Any, ...]:
        """The components of this process's replicas, without padded rows."""
        return tuple(map(uncommitted, self._components))

    @property
    def _components(self) -> tuple[Any, ...]:
        if isinstance(self.data, tuple) or not self.num_components:
            return self.data if isinstance(self.data, tuple) else ()
        if isinstance(self.data, jax.core.Tracer):
            require_live(self.data)
            parts = [self.data[i] for i in range(self.data.shape[0])]
        else:
            parts = _local_components(self.data)
        if self.rows is None:
            return tuple(parts)
        return tuple(map(self.rows.cut, parts, _local_replicas(self.data, self.rows.first)))

    @property
    def __jax_array__(self) -> Callable[[], jax.Array]:  # type: ignore[override]
        # A property, because JAX may ask whether it exists and not call it, and then raise a TypeError.
        if self.num_components != 1:
            raise ContextError(
                AS_ARRAY,
                "outside a replica function it has one component per replica, not a single value.",
                'float(strategy.reduce("SUM", value, axis=None)), np.asarray(strategy.gather(value, axis=0)), or '
                "strategy.experimental_local_results(value)",
            )
        return lambda: self._components[0]

    @property
    def num_components(self) -> int:
        """The number of components, of all processes. 0 in a function that JAX maps over them, by `vmap`, `scan` or `tree.map`."""
        return len(self.data) if isinstance(self.data, tuple) or np.ndim(self.data) else 0

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the component, if there is only one replica."""
        return np.shape(self.__jax_array__())

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the components."""
        dtype: np.dtype = self.data.dtype
        return dtype

    @property
    @override
    def spec(self) -> jax.ShapeDtypeStruct:
        return shape_dtype(self.data.shape[1:], self.data.dtype)

    @override
    def stacked(self, others: Sequence["PerReplica"]) -> "PerReplica":
        steps = [self, *others]
        rows, batch = (x and x.of_steps(len(steps)) for x in (self.rows, self.batch))
        return PerReplica(jnp.stack([s.data for s in steps], axis=1), rows, batch)

    @override
    def first_steps(self, count: int) -> "PerReplica":
        rows, batch = (x and x.without_dims(1).of_steps(count) for x in (self.rows, self.batch))
        return PerReplica(self.data[:, :count], rows, batch)


@final
class Mirrored(DistributedValues):
    """A value that is equal on all replicas. May be created in any context.

    A replica function that returns `Mirrored(tree)` states that all replicas computed the same tree. `Strategy.run`
    then returns one `Mirrored` instead of one `PerReplica` per leaf. As an argument of `Strategy.run` it is unwrapped.

    Args:
      value: a pytree of arrays. Other objects in it come back as they are.

    Example:
      >>> import jax, phalanx
      >>> strategy = phalanx.MirroredStrategy(["cpu:0", "cpu:1"])
      >>> strategy.run(lambda: phalanx.Mirrored({"w": jax.numpy.float32(1)})).value
      {'w': Array(1., dtype=float32)}
    """

    __slots__ = ("value",)

    differs = False

    def __init__(self, value: PyTree) -> None:
        self.value = value

    @property
    @override
    def spec(self) -> jax.ShapeDtypeStruct:
        return shape_dtype(np.shape(self.value), self.value.dtype)

    @override
    def stacked(self, others: Sequence["Mirrored"]) -> "Mirrored":
        return Mirrored(jax.tree.map(lambda *xs: jnp.stack(xs), self.value, *(o.value for o in others)))

    @override
    def first_steps(self, count: int) -> "Mirrored":
        return Mirrored(jax.tree.map(lambda x: x[:count], self.value))

    @property
    def values(self) -> tuple[Any, ...]:
        """The equal components of this process's replicas."""
        leaves, tree = flatten(self.value)
        copies = [_copies(leaf) for leaf in leaves]
        count = max(map(len, copies), default=1)
        # Text and objects have no copies on devices.
        parts = [map(uncommitted, each if len(each) == count else each * count) for each in copies]
        return tuple(tree.unflatten(p) for p in zip(*parts, strict=True)) if parts else (self.value,)

    def __jax_array__(self) -> jax.Array:
        is_leaf = jax.tree_util.all_leaves([self.value])
        try:
            # JAX would make an array of a list of numbers too.
            copy: jax.Array = one_copy(jnp.asarray(self.value if is_leaf else object()))
        except TypeError:
            raise ContextError(
                f"a Mirrored {type(self.value).__name__} used as an array",
                "it is not an array.",
                "mirrored.value, which is what it holds",
            ) from None
        return copy


@final
class ReplicaLocal(DistributedValues):
    """A value inside `merge_call`. Each replica of the running program holds its own component.

    Args:
      value: the component of this replica, a traced array.
      mask: which rows of the component are real, a bool array (rows,). None if all are.
      has_rows: whether this replica has rows of its batch, a traced bool. None if all replicas have equally many.
    """

    __slots__ = ("has_rows", "mask", "value")

    def __init__(self, value: PyTree, mask: jax.Array | None = None, has_rows: jax.Array | None = None) -> None:
        self.value, self.mask, self.has_rows = value, mask, has_rows

    @property
    def values(self) -> tuple[Any, ...]:
        """Not available: each replica sees only its own component inside `merge_call`."""
        raise ContextError(
            "the components of a value inside merge_call",
            "each replica sees only its own component there.",
            "strategy.reduce(op, value, axis=None), "
            "or get_replica_context().all_gather(value, axis=0) before merge_call",
        )

    def __jax_array__(self) -> jax.Array:
        raise ContextError(
            "a value inside merge_call used as an array",
            "each replica holds its own component of it.",
            "strategy.reduce(op, value, axis=None), or strategy.extended.reduce_to(op, value, variable)",
        )

    def __repr__(self) -> str:
        return f"ReplicaLocal({self.value!r})"


def check_size(value: PerReplica, num_replicas: int) -> None:
    """Checks that a value has one component per replica of a strategy.

    Raises:
      InvalidArgumentError: the number of components differs from `num_replicas`.
    """
    size = value.num_components
    if size != num_replicas:
        raise InvalidArgumentError(
            f"a PerReplica of {size} components",
            f"the strategy that uses it has {num_replicas} replicas.",
            "create the value with the strategy that uses it",
        )


is_distributed: Callable[[object], bool] = DistributedValues.__instancecheck__
"""Returns whether a value is distributed. Not written in Python: each step calls it on every node of its arguments."""


def differs(value: object) -> bool:
    """Returns whether a value has components that may differ between replicas."""
    return isinstance(value, DistributedValues) and value.differs


def is_equal_everywhere(value: object) -> TypeGuard["Mirrored"]:
    """Returns whether a value is distributed and equal on all replicas."""
    return isinstance(value, DistributedValues) and not value.differs


def unwrapped(value: PyTree) -> PyTree:
    """Returns the content of a `Mirrored`, and other values unchanged."""
    return value.value if is_equal_everywhere(value) else value


def spec_of(leaf: DistributedValues | jax.Array | np.ndarray) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of the component of one replica."""
    return leaf.spec if isinstance(leaf, DistributedValues) else shape_dtype(np.shape(leaf), leaf.dtype)


def stacked(first: DistributedValues | jax.Array, *others: Any) -> PyTree:
    """Stacks the results of several steps, like `run_steps`."""
    return first.stacked(others) if isinstance(first, DistributedValues) else jnp.stack([first, *others])


def first_steps(value: object, count: int) -> PyTree:
    """Returns the first `count` steps of a stacked result. Values that are not arrays are returned unchanged."""
    if isinstance(value, DistributedValues):
        return value.first_steps(count)
    return value[:count] if isinstance(value, jax.Array) else value


flatten = functools.partial(flattened, is_leaf=is_distributed)
"""Returns the result of `flattened`, with distributed values as leaves. Not a function: each step of `run` would call it."""


def map_leaves(fn: Callable[[Any], Any], tree: PyTree) -> PyTree:
    """Calls `jax.tree.map` with distributed values as leaves. Raises what `flattened` raises."""
    leaves, structure = flatten(tree)
    return structure.unflatten(map(fn, leaves))


def one_copy(value: PyTree) -> PyTree:
    """Returns an array that several devices of this process hold whole as one that JAX moves to wherever an operation needs it.

    Other values are returned unchanged.
    """
    is_array = isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer)
    is_copied = is_array and value.is_fully_replicated and value.is_fully_addressable
    return uncommitted(value.addressable_data(0)) if is_copied else value


def _local_components(array: jax.Array | np.ndarray) -> list[Any]:
    if isinstance(array, np.ndarray):
        return list(array)
    shards = _local_shards(array)
    if shards[0].shape == (1, *array.shape[1:]):
        return [shard[0] for shard in shards]
    # An array that is not divided by replica, such as one that the user has passed to `PerReplica`.
    return [array[i] for i in range(array.shape[0])]


def _local_replicas(array: jax.Array | np.ndarray, first: int) -> list[int]:
    """Returns the numbers of the replicas of this process, of which `first` is the first one in a NumPy array."""
    if isinstance(array, np.ndarray | jax.core.Tracer):
        return list(range(first, first + len(array)))
    return sorted({i for shard in array.addressable_shards for i in range(len(array))[shard.index[0]]})


def _local_shards(array: jax.Array | np.ndarray) -> list[Any]:
    """Returns the shards `(replicas, ...)` of the replicas of this process, in replica order."""
    if isinstance(array, np.ndarray):
        return [array]
    # Keeps one shard per replica, because all devices of a replica hold the same shard.
    first = {s.index[0].start or 0: s.data for s in reversed(array.addressable_shards)}
    return [first[start] for start in sorted(first)]


def _copies(array: object) -> list[Any]:
    if isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer):
        if not isinstance(array.sharding, NamedSharding):
            return [s.data for s in array.addressable_shards]
        # Keeps the copy on the first device of this process in each replica.
        mesh, shards = array.sharding.mesh.devices, {s.device: s.data for s in array.addressable_shards}
        local = [[shards[d] for d in replica if d in shards] for replica in mesh.reshape(len(mesh), -1)]
        first = [replica[0] for replica in local if replica]
        # If a value is sharded over the devices of a replica, only the array itself is whole.
        return first if array.is_fully_replicated else [array] * len(first)
    return [array]


def _flatten_per_replica(value: PerReplica) -> tuple[tuple[Any, ...], Any]:
    if isinstance(value.data, tuple):
        # JAX would take Python objects that are leaves for arrays.
        return (), (value.data, value.rows, value.batch)
    # Sizes are part of the type of a value, so that values with other sizes have another structure.
    return (value.data,), (None, value.rows, value.batch)


jax.tree_util.register_pytree_node(
    PerReplica, _flatten_per_replica, lambda aux, children: PerReplica(children[0] if children else aux[0], *aux[1:])
)
jax.tree_util.register_pytree_with_keys(
    Mirrored,
    lambda m: (((jax.tree_util.GetAttrKey("value"), m.value),), None),
    lambda _, children: Mirrored(*children),
    # Without keys, for the calls of JAX that do not name leaves.
    lambda m: ((m.value,), None),
)
jax.tree_util.register_pytree_node(
    ReplicaLocal, lambda m: ((m.value, m.mask, m.has_rows), None), lambda _, children: ReplicaLocal(*children)
)
