# SPDX-License-Identifier: Apache-2.0
"""Which strategy is current, and whether this code runs for one replica or for all: the one ambient thing.

A context variable, so that a scope entered in one thread is not seen in another.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, TypeVar, final

import jax
import jax.numpy as jnp
import numpy as np

from phalanx import compat
from phalanx.collectives import packing, primitives
from phalanx.collectives.cross_device import checked_options
from phalanx.errors import ContextError, InputError, InvalidArgumentError, MixedStrategyError, arguments, shown
from phalanx.mesh.devices import device_name
from phalanx.mesh.topology import NOWHERE
from phalanx.mesh.values import ReplicaLocal, RowMask, flatten
from phalanx.options import CommunicationOptions, ReduceOp
from phalanx.tracing.strategy import AbstractStrategy, check_strategy
from phalanx.typing import PyTree

T = TypeVar("T")


@final
class ReplicaContext:
    """What a replica function can know about the replica it runs for. `get_replica_context()` returns it.

    Args:
      strategy: the strategy that runs the function.
      replica_id_in_sync_group: this replica's number, a traced int32 scalar (0 outside a mapped program).
      masks: the row masks of the padded batches among the arguments.

    Raises:
      InvalidArgumentError: an argument is something else.

    Example:
      >>> import phalanx
      >>> strategy = phalanx.MirroredStrategy(["cpu:0", "cpu:1"])
      >>> def replica_fn():
      ...     context = phalanx.get_replica_context()
      ...     return context.all_reduce("SUM", context.replica_id_in_sync_group + 1)
      >>> strategy.run(replica_fn).values
      (Array(3, dtype=int32), Array(3, dtype=int32))
    """

    def __init__(
        self, strategy: AbstractStrategy, replica_id_in_sync_group: Any, masks: tuple[RowMask, ...] = ()
    ) -> None:
        check_strategy("strategy", strategy, "phalanx.get_replica_context()")
        is_id = isinstance(replica_id_in_sync_group, jax.Array) and not replica_id_in_sync_group.shape
        if not is_id:
            arguments.integer(
                "replica_id_in_sync_group",
                replica_id_in_sync_group,
                least=0,
                most=strategy.num_replicas_in_sync - 1,
                kind=f"a number of a replica from 0 to {strategy.num_replicas_in_sync - 1}",
            )
        if not isinstance(masks, tuple) or not all(isinstance(mask, RowMask) for mask in masks):
            raise InvalidArgumentError(f"masks={shown(masks)}", "must be a tuple of row masks.", "leave masks out")
        self._strategy, self._id, self._masks = strategy, replica_id_in_sync_group, masks

    @property
    def strategy(self) -> AbstractStrategy:
        """The strategy that runs this replica."""
        return self._strategy

    @property
    def replica_id_in_sync_group(self) -> Any:
        """This replica's number among those in sync, from 0: a traced int32 scalar."""
        return self._id

    @property
    def num_replicas_in_sync(self) -> int:
        """How many replicas are in sync."""
        return self._strategy.num_replicas_in_sync

    @property
    def devices(self) -> tuple[str, ...]:
        """The names of the devices over which the replicas of this program run, in replica order: of each replica the first."""
        topology = self._strategy.topology
        return tuple(map(device_name, topology.first_devices))

    @property
    def example_mask(self) -> jax.Array | None:
        """Which rows of this replica's batch are real, `(per_replica_batch,)` bools; None for a batch without padding.

        Raises:
          InputError: several padded batches with different masks were passed.
        """
        return self._rows.mask if self._rows else None

    @property
    def num_examples(self) -> jax.Array | None:
        """How many rows of the global batch are real, a scalar; None for a batch without padding.

        Raises:
          InputError: several padded batches with different masks were passed.
        """
        return self._rows.count if self._rows else None

    @property
    def weight(self) -> jax.Array | float:
        """Which part of the rows of the global batch this replica has: a scalar; the parts of all add up to 1."""
        if self.padding is None:
            return 1 / self.num_replicas_in_sync
        return self.padding.mask.sum() / jnp.maximum(self.padding.count, 1)

    @property
    def padding(self) -> RowMask | None:
        """Which rows of this replica are real; None where nothing tells, or several batches tell different things."""
        return self._masks[0] if len(self._masks) == 1 else None

    @property
    def _rows(self) -> RowMask | None:
        if len(self._masks) > 1:
            raise InputError(
                "the example mask",
                f"{len(self._masks)} batches with different padding were passed to run.",
                "one run for each dataset",
            )
        return self._masks[0] if self._masks else None

    def all_reduce(
        self, reduce_op: ReduceOp | str, value: PyTree, options: CommunicationOptions | None = None
    ) -> PyTree:
        """Sums or averages `value` over the replicas; every replica gets the result. In replica context.

        A mean is over the replicas that have a real row of a padded batch.

        Its gradient is the all-reduce of the gradient with the same operation: a loss that is all-reduced before it is
        differentiated gives gradients that count every replica's loss, as in tf.distribute. All replicas must reach the
        call: inside `lax.cond` the predicate must agree between them.

        Args:
          reduce_op: SUM or MEAN.
          value: a pytree of arrays, with equal shapes on all replicas.
          options: with `bytes_per_pack`, leaves share buffers of that many bytes; with `wire_dtype`, the gradient
            crosses in that dtype too.

        Returns:
          A pytree like `value`.

        Raises:
          ContextError: called outside the replica function this context belongs to.
          ReduceOpError: an unknown operation, or a leaf that has no sum.
          InvalidArgumentError: `options` is something else.
        """
        self._require("all_reduce")
        op, n = ReduceOp.parse(reduce_op), self.num_replicas_in_sync
        options = checked_options(options)
        ops = self._strategy.cross_device_ops
        if ops is not None and not ops.adds:
            leaves, tree = flatten(value)
            return tree.unflatten(ops.batch_reduce(op, [(x, x) for x in leaves], options))
        counts = None if self.padding is None else self.padding.has_rows
        reduce = lambda tree: primitives.all_reduce(op, tree, n, counts=counts, wire_dtype=options.wire_dtype)  # noqa: E731
        if not options.bytes_per_pack:
            return reduce(value)
        leaves, tree = flatten(value)
        arrays = [primitives.to_array(x) for x in leaves]
        packs = packing.by_bytes([str(x.dtype) for x in arrays], [x.nbytes for x in arrays], options.bytes_per_pack)
        return tree.unflatten(primitives.packed(reduce, arrays, packs))

    def all_gather(self, value: PyTree, axis: int, options: CommunicationOptions | None = None) -> PyTree:
        """Concatenates `value` over the replicas along dim `axis`, in replica order. In replica context; differentiable.

        Args:
          value: a pytree of arrays, with equal shapes on all replicas. Padded rows of a short batch are among them.
          axis: the dim along which to concatenate.
          options: hints for this call; none of them changes how arrays are gathered.

        Returns:
          A pytree like `value`, with dim `axis` as many times longer as there are replicas.

        Raises:
          ContextError: called outside the replica function this context belongs to.
          ReduceOpError: a leaf has no such dim.
        """
        self._require("all_gather")
        checked_options(options)
        return primitives.all_gather(value, axis, self.num_replicas_in_sync)

    def merge_call(
        self, merge_fn: Callable[..., Any], args: PyTree = (), kwargs: dict[str, Any] | None = None
    ) -> PyTree:
        """Calls `merge_fn(strategy, *args, **kwargs)` in cross-replica context, for all replicas at once. In replica context.

        Works inside `jax.jit`, `lax.cond` and `lax.scan` too.

        Args:
          merge_fn: gets arrays as values that `strategy.reduce` and `strategy.extended` understand.
          args: arguments for it.
          kwargs: keyword arguments for it.

        Returns:
          What `merge_fn` returns; of a value that differs between replicas each gets its own.

        Raises:
          ContextError: called outside the replica function this context belongs to.
        """
        self._require("merge_call")
        arguments.function(
            "merge_fn", merge_fn, "merge_call(lambda strategy, x: strategy.reduce(op, x, axis=None), args=(x,))"
        )
        args, kwargs = jax.tree.map(self._local, arguments.of_call(args, kwargs))
        with enter(Mode(self._strategy, None, merging=True)):
            result = merge_fn(self._strategy, *args, **kwargs)
        is_local = lambda x: isinstance(x, ReplicaLocal)  # noqa: E731
        return jax.tree.map(lambda x: x.value if is_local(x) else x, result, is_leaf=is_local)

    def _local(self, leaf: Any) -> Any:
        if self.num_replicas_in_sync == 1 or not isinstance(leaf, (jax.Array, np.ndarray)):
            return leaf
        rows = self._masks[0] if len(self._masks) == 1 else None
        fits = rows is not None and leaf.ndim > 0 and leaf.shape[0] == rows.mask.shape[0]
        return ReplicaLocal(leaf, rows if fits else None)

    def _require(self, method: str) -> None:
        if current().replica is not self:
            raise ContextError(
                f"ReplicaContext.{method}",
                "called outside the replica function this context belongs to.",
                f"phalanx.get_replica_context().{method}(...) inside the replica function",
            )


@dataclass(frozen=True)
class Mode:
    """One entry of the stack.

    Args:
      strategy: the current strategy.
      replica: the replica context, if this code runs for one replica.
      was_set: whether `experimental_set_strategy` made it.
      merging: whether it is a merge function, which replicas that run have called.
      averaging: whether replicas compute means over their own rows, of which gradients make one over the global batch.
    """

    strategy: AbstractStrategy
    replica: "ReplicaContext | None"
    was_set: bool = False
    merging: bool = False
    averaging: bool = False


_stack: ContextVar[tuple[Mode, ...]] = ContextVar("phalanx_context", default=())
_default: list[Mode] = []


def register_default(strategy: AbstractStrategy, replica: "ReplicaContext") -> None:
    """Makes `strategy` the one outside all scopes; the default strategy calls it once."""
    _default[:] = [Mode(strategy, replica)]


def current() -> Mode:
    """Returns the innermost mode."""
    stack = _stack.get()
    return stack[-1] if stack else _default[0]


def depth() -> int:
    """Returns how many modes are open in this thread; 0 outside all scopes."""
    return len(_stack.get())


def call_in(mode: Mode, fn: Callable[..., T], *args: PyTree, **kwargs: PyTree) -> T:
    """Returns `fn(*args, **kwargs)`, called with `mode` as the innermost one.

    Unlike `enter` it restores the modes also if a signal handler raises while they change, because no bytecode of Python runs
    between an exception and the call that restores them.
    """
    before = _stack.get()
    try:
        _stack.set((*before, mode))
        return fn(*args, **kwargs)
    finally:
        _stack.set(before)


@contextmanager
def averaging() -> Iterator[None]:
    """Lets the replica function compute means over its own rows, as Keras's trainer does."""
    with enter(replace(current(), averaging=True)):
        yield


@contextmanager
def enter(mode: Mode) -> Iterator[None]:
    """Makes `mode` the innermost one."""
    before = _stack.get()
    try:
        _stack.set((*before, mode))
        yield
    finally:
        _stack.set(before)


def get_strategy() -> AbstractStrategy:
    """Returns the current strategy; outside all scopes the default one."""
    compat.note_read()
    return current().strategy


def has_strategy() -> bool:
    """Returns whether a strategy other than the default one is current. May be called in any context.

    Example:
      >>> import phalanx
      >>> with phalanx.OneDeviceStrategy("cpu:0").scope():
      ...     phalanx.has_strategy()
      True
    """
    return get_strategy() is not _default[0].strategy


def in_cross_replica_context() -> bool:
    """Returns whether this code runs for all replicas: in a scope or a merge function. May be called in any context.

    Example:
      >>> import phalanx
      >>> phalanx.in_cross_replica_context()
      False
    """
    compat.note_read()
    return current().replica is None


def get_replica_context() -> "ReplicaContext | None":
    """Returns the replica's context inside a replica function, None in cross-replica context. May be called in any context.

    Example:
      >>> import phalanx
      >>> phalanx.get_replica_context().num_replicas_in_sync
      1
    """
    compat.note_read()
    return current().replica


def require_replica() -> ReplicaContext:
    """Returns the context of the replica function that is being traced. Called only while one is."""
    replica = get_replica_context()
    assert replica is not None
    return replica


def experimental_set_strategy(strategy: AbstractStrategy | None) -> None:
    """Makes `strategy` current from here on, without a `with`; None goes back to the default one.

    Must be called outside all scopes.

    Raises:
      ContextError: called inside a `strategy.scope()` or a replica function.
      InvalidArgumentError: `strategy` is neither a strategy nor None.

    Example:
      >>> import phalanx
      >>> phalanx.experimental_set_strategy(phalanx.OneDeviceStrategy("cpu:0"))
      >>> phalanx.get_strategy()
      OneDeviceStrategy(['cpu:0'])
      >>> phalanx.experimental_set_strategy(None)
    """
    if any(not mode.was_set for mode in _stack.get()):
        raise ContextError(
            "experimental_set_strategy",
            "must be called outside all scopes and replica functions.",
            "call it at the top of the script",
        )
    if strategy is not None:
        check_strategy("strategy", strategy, "phalanx.experimental_set_strategy(phalanx.MirroredStrategy())")
    storage = NOWHERE if strategy is None else strategy.storage
    home = storage.of_new_variables if storage.has_devices else None
    compat.unset_variable_layout() if home is None else compat.set_variable_layout(home.sharding_of, home.mesh)
    _stack.set(() if strategy is None or not storage.has_devices else (Mode(strategy, None, was_set=True),))


def require_cross_replica(method: str, strategy: AbstractStrategy, hint: str) -> None:
    """Raises unless this code runs for all replicas of `strategy`, or outside all scopes.

    Raises:
      ContextError: in replica context.
      MixedStrategyError: another strategy is current.
    """
    mode = current()
    if mode.replica is not None and depth():
        raise ContextError(f"{method} in replica context", "it is for cross-replica context.", hint)
    require_same(mode.strategy, strategy, method)


def require_not_running(method: str, hint: str) -> None:
    """Raises in a merge function.

    Raises:
      ContextError: the replicas are running.
    """
    if current().merging:
        raise ContextError(f"{method} in merge_call", "the replicas are running already.", hint)


def require_same(inside: AbstractStrategy, asked: AbstractStrategy, what: str) -> None:
    """Raises unless `asked` may be used where `inside` is current.

    Raises:
      MixedStrategyError: another strategy is current.
    """
    if depth() and inside is not asked and inside is not _default[0].strategy:
        raise MixedStrategyError(
            f"{what} of {asked!r}",
            f"inside the scope of {inside!r}; one strategy at a time.",
            "leave the other strategy's scope first",
        )
