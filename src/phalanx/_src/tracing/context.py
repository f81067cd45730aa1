# SPDX-License-Identifier: Apache-2.0
"""The current strategy, and whether this code runs for one replica or for all. No other state of Phalanx is ambient.

The state is in a context variable, so a scope that one thread enters does not affect other threads.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, TypeVar, final

import jax
import jax.numpy as jnp
import numpy as np

from phalanx._src import compat
from phalanx._src.collectives import packing, primitives
from phalanx._src.collectives.cross_device import checked_options
from phalanx._src.collectives.dtypes import term
from phalanx._src.mesh.devices import device_name
from phalanx._src.mesh.nowhere import NOWHERE
from phalanx._src.mesh.values import ReplicaLocal, flatten
from phalanx._src.options import CommunicationOptions, ReduceOp
from phalanx._src.tracing.rows import ReplicaRows
from phalanx._src.tracing.strategy import AbstractStrategy, check_strategy
from phalanx.errors import ContextError, InputError, InvalidArgumentError, MixedStrategyError, arguments, shown
from phalanx.typing import PyTree

T = TypeVar("T")


@final
class ReplicaContext:
    """Describes the replica that a replica function runs for. `get_replica_context()` returns it.

    Args:
      strategy: the strategy that runs the function.
      replica_id_in_sync_group: int32 scalar, traced. Number of this replica, from 0.
      batches: this replica's rows of each argument whose batch has different numbers of rows per replica.

    Raises:
      InvalidArgumentError: `strategy` is not a strategy, the number is out of range, or `batches` is not a tuple of rows of a replica.

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
        self, strategy: AbstractStrategy, replica_id_in_sync_group: Any, batches: tuple[ReplicaRows, ...] = ()
    ) -> None:
        check_strategy("strategy", strategy, "phalanx.get_replica_context()")
        rank = replica_id_in_sync_group
        if not isinstance(rank, jax.Array) or rank.shape or not jnp.issubdtype(rank.dtype, jnp.integer):
            arguments.integer(
                "replica_id_in_sync_group",
                replica_id_in_sync_group,
                least=0,
                most=strategy.num_replicas_in_sync - 1,
                kind=f"the number of a replica, from 0 to {strategy.num_replicas_in_sync - 1}",
            )
        if not isinstance(batches, tuple) or not all(isinstance(batch, ReplicaRows) for batch in batches):
            raise InvalidArgumentError(
                f"batches={shown(batches)}", "must be a tuple of the rows of this replica.", "leave `batches` out"
            )
        self._strategy, self._id, self._batches = strategy, replica_id_in_sync_group, batches

    @property
    def strategy(self) -> AbstractStrategy:
        """The strategy that runs this replica."""
        return self._strategy

    @property
    def replica_id_in_sync_group(self) -> Any:
        """Number of this replica among the replicas in sync, from 0. A traced int32 scalar."""
        return self._id

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas in sync."""
        return self._strategy.num_replicas_in_sync

    @property
    def devices(self) -> tuple[str, ...]:
        """Names of the devices that run the replicas, in replica order. If a replica spans several devices, its first one."""
        topology = self._strategy.topology
        return tuple(map(device_name, topology.first_devices))

    @property
    def example_mask(self) -> jax.Array | None:
        """Bool array (per_replica_batch,). True for real rows of this replica's batch. None if the replica sees its rows only.

        A replica sees padding only in a step for which there was a warning, and in one that is not compiled.

        Raises:
          InputError: several batches with different padding were passed to `Strategy.run`.
        """
        if all(rows.mask is None for rows in self._batches):
            return None
        return self._only_rows.mask if self._only_rows else None

    @property
    def num_examples(self) -> int | None:
        """Number of rows of the global batch. None if all replicas have as many rows as this one.

        Raises:
          InputError: several batches with different numbers of rows per replica were passed to `Strategy.run`.
        """
        return self._only_rows.total if self._only_rows else None

    @property
    def weight(self) -> jax.Array | float:
        """This replica's fraction of the rows of the global batch, a scalar. The fractions of all replicas add up to 1."""
        return 1 / self.num_replicas_in_sync if self.rows is None else self.rows.weight

    @property
    def rows(self) -> ReplicaRows | None:
        """The rows of this replica. None if all replicas have equally many, or if there are several batches with different numbers."""
        return self._batches[0] if len(self._batches) == 1 else None

    @property
    def _only_rows(self) -> ReplicaRows | None:
        if len(self._batches) > 1:
            raise InputError(
                "the rows of a replica",
                f"{len(self._batches)} batches with different numbers of rows per replica were passed to run.",
                "call strategy.run once per dataset",
            )
        return self._batches[0] if self._batches else None

    def all_reduce(
        self, reduce_op: ReduceOp | str, value: PyTree, options: CommunicationOptions | None = None
    ) -> PyTree:
        """Sums or averages `value` over the replicas and returns the result on every replica. Call it in replica context.

        A replica without rows adds nothing, and does not count in a mean. Sums have the dtypes of `jnp.sum`, and means those of `jnp.mean`.

        The gradient is the all-reduce of the incoming gradient with the same operation, as in tf.distribute. So if a loss
        is all-reduced before it is differentiated, the gradients count the loss of every replica.

        All replicas must reach the call. Inside `lax.cond`, the predicate must therefore be equal on all replicas.

        Args:
          reduce_op: SUM or MEAN.
          value: pytree of arrays. The shapes must be equal on all replicas.
          options: `bytes_per_pack` is the size of the buffers that leaves share. `wire_dtype` is the dtype in which values
            and their gradients are sent.

        Returns:
          A pytree like `value`.

        Raises:
          ContextError: called outside the replica function of this context.
          ReduceOpError: the operation is unknown, or a leaf cannot be summed.
          InvalidArgumentError: `options` is not a `CommunicationOptions`.

        Example:
          >>> import jax.numpy as jnp, phalanx
          >>> context = phalanx.get_replica_context()
          >>> float(context.all_reduce("SUM", jnp.float32(3.0)))
          3.0
        """
        self._require("all_reduce")
        op, num_replicas = ReduceOp.parse(reduce_op), self.num_replicas_in_sync
        options = checked_options(options)
        ops = self._strategy.cross_device_ops
        if ops is not None and not ops.adds:
            # The user chose collectives that accumulate with another function, so a sum would give a different result.
            leaves, tree = flatten(value)
            return tree.unflatten(ops.batch_reduce(op, [(x, x) for x in leaves], options))
        # A replica without rows has nothing to contribute.
        counts = None if self.rows is None else self.rows.has_rows
        value = value if self.rows is None else self.rows.staged(value)

        def reduce(tree: PyTree) -> PyTree:
            return primitives.all_reduce(op, tree, num_replicas, counts=counts, wire_dtype=options.wire_dtype)

        if not options.bytes_per_pack:
            return reduce(value)
        leaves, tree = flatten(value)
        arrays = [primitives.to_array(x) for x in leaves]
        sizes = [term(op, x).nbytes for x in arrays]
        packs = packing.by_bytes([str(x.dtype) for x in arrays], sizes, options.bytes_per_pack)
        return tree.unflatten(primitives.packed(reduce, arrays, packs))

    def all_gather(self, value: PyTree, axis: int, options: CommunicationOptions | None = None) -> PyTree:
        """Concatenates `value` over the replicas along dim `axis`, in replica order. Call it in replica context.

        Gradients flow through the call.

        Args:
          value: pytree of arrays. If replicas have different numbers of rows, those of all replicas are concatenated.
          axis: dim along which to concatenate.
          options: hints, as for `all_reduce`. They have no effect on how arrays are gathered.

        Returns:
          A pytree like `value`. Dim `axis` has the rows of all replicas.

        Raises:
          ContextError: called outside the replica function of this context.
          ReduceOpError: a leaf does not have dim `axis`.

        Example:
          >>> import jax.numpy as jnp, phalanx
          >>> context = phalanx.get_replica_context()
          >>> context.all_gather(jnp.ones((2, 3)), axis=0).shape
          (2, 3)
        """
        self._require("all_gather")
        checked_options(options)
        sizes_of = self._batches[0].gathered if self._batches else None
        return primitives.all_gather(value, axis, self.num_replicas_in_sync, sizes_of)

    def merge_call(
        self, merge_fn: Callable[..., Any], args: PyTree = (), kwargs: dict[str, Any] | None = None
    ) -> PyTree:
        """Calls `merge_fn(strategy, *args, **kwargs)` once for all replicas, in cross-replica context.

        Call it in replica context. It works inside `jax.jit`, `lax.cond` and `lax.scan` too.

        Args:
          merge_fn: function of the strategy and the arguments. It receives each array as a per-replica value, which
            `strategy.reduce` and `strategy.extended` accept.
          args: positional arguments of `merge_fn`.
          kwargs: keyword arguments of `merge_fn`.

        Returns:
          The result of `merge_fn`. If it contains a per-replica value, each replica gets its own component.

        Raises:
          ContextError: called outside the replica function of this context.
          InvalidArgumentError: `merge_fn` is not callable.

        Example:
          >>> import jax.numpy as jnp, phalanx
          >>> def merge_fn(strategy, x):
          ...     return strategy.reduce("SUM", x, axis=None)
          >>> float(phalanx.get_replica_context().merge_call(merge_fn, args=(jnp.float32(3.0),)))
          3.0
        """
        self._require("merge_call")
        arguments.function(
            "merge_fn", merge_fn, "merge_call(lambda strategy, x: strategy.reduce(op, x, axis=None), args=(x,))"
        )
        args, kwargs = jax.tree.map(self._as_per_replica, arguments.of_call(args, kwargs))
        # `merging` makes `Strategy.run` fail in `merge_fn`, where the replicas are already running.
        with enter(Mode(self._strategy, None, merging=True)):
            result = merge_fn(self._strategy, *args, **kwargs)
        return jax.tree.map(_content, result, is_leaf=lambda x: isinstance(x, ReplicaLocal))

    def _as_per_replica(self, leaf: Any) -> Any:
        """Wraps an array, so that a merge function sees that it may differ between replicas."""
        if self.num_replicas_in_sync == 1 or not isinstance(leaf, (jax.Array, np.ndarray)):
            return leaf
        rows = self.rows
        if rows is None:
            return ReplicaLocal(leaf)
        # `reduce(axis=0)` skips padding only if it knows the mask. Only an array with one entry per row can have it.
        is_padded = rows.is_padded and leaf.ndim > 0 and leaf.shape[0] == rows.places
        return ReplicaLocal(leaf, rows.mask if is_padded else None, jnp.asarray(rows.number > 0))

    def _require(self, method: str) -> None:
        """Raises unless this context is current: a context that outlives its function would hold leaked tracers."""
        if current().replica is not self:
            raise ContextError(
                f"ReplicaContext.{method} was called outside the replica function of its context",
                "a replica context works only inside the function call that it was created for.",
                f"phalanx.get_replica_context().{method}(...) inside the replica function",
            )


@dataclass(frozen=True)
class Mode:
    """One entry of the context stack.

    Args:
      strategy: the current strategy.
      replica: the replica context in a replica function; None in cross-replica context.
      was_set: whether `experimental_set_strategy` added this entry.
      merging: whether this code runs in a merge function, so the replicas are already running.
      averaging: whether losses are means over the replica's own rows. Gradients are then weighted by the replica's share of
        the global batch.
      whole: whether this replica computes with the rows of all replicas, so that nothing is a share.
    """

    strategy: AbstractStrategy
    replica: "ReplicaContext | None"
    was_set: bool = False
    merging: bool = False
    averaging: bool = False
    whole: bool = False


# A tuple, because a mutable stack in a context variable would be shared with contexts that were copied from this one.
_stack: ContextVar[tuple[Mode, ...]] = ContextVar("phalanx_context", default=())
# The default strategy registers itself here, because this package must not import `phalanx._src.strategies`. Empty until then.
_default: list[Mode] = []


def register_default(strategy: AbstractStrategy, replica: "ReplicaContext") -> None:
    """Makes `strategy` current outside all scopes. The default strategy calls it once."""
    _default[:] = [Mode(strategy, replica)]


def current() -> Mode:
    """Returns the innermost mode."""
    stack = _stack.get()
    return stack[-1] if stack else _default[0]


def depth() -> int:
    """Returns how many modes are open in this thread; 0 outside all scopes."""
    return len(_stack.get())


def call_in(mode: Mode, fn: Callable[..., T], *args: PyTree, **kwargs: PyTree) -> T:
    """Calls `fn(*args, **kwargs)` with `mode` as the innermost mode, and returns the result.

    Unlike `enter`, it restores the stack even if a signal handler raises while the stack changes. A generator-based context
    manager has a gap between its `yield` and the `with` block, in which Python may run a signal handler.
    https://github.com/python/cpython/issues/75569
    """
    before = _stack.get()
    try:
        _stack.set((*before, mode))
        return fn(*args, **kwargs)
    finally:
        _stack.set(before)


@contextmanager
def averaging() -> Iterator[None]:
    """Marks the losses inside the block as means over the replica's own rows, as Keras's trainer computes them."""
    with enter(replace(current(), averaging=True)):
        yield


@contextmanager
def enter(mode: Mode) -> Iterator[None]:
    """Makes `mode` the innermost mode inside the block."""
    try:
        _stack.set((*_stack.get(), mode))
        yield
    finally:
        # With what was entered inside and is not left yet. A generator that waits there leaves it later, perhaps in another thread.
        stack = _stack.get()
        entered = [i for i, each in enumerate(stack) if each is mode]
        if entered:
            _stack.set(stack[: entered[-1]])


def get_strategy() -> AbstractStrategy:
    """Returns the current strategy, or the default strategy outside all scopes. May be called in any context.

    Example:
      >>> import phalanx
      >>> strategy = phalanx.OneDeviceStrategy("cpu:0")
      >>> with strategy.scope():
      ...     phalanx.get_strategy() is strategy
      True
    """
    # A function that jax.jit has cached for one strategy must be traced again for another strategy.
    compat.note_read()
    return current().strategy


def has_strategy() -> bool:
    """Returns whether a strategy other than the default strategy is current. May be called in any context.

    Example:
      >>> import phalanx
      >>> with phalanx.OneDeviceStrategy("cpu:0").scope():
      ...     phalanx.has_strategy()
      True
    """
    return get_strategy() is not _default[0].strategy


def in_cross_replica_context() -> bool:
    """Returns whether this code runs for all replicas, in a scope or in a merge function. May be called in any context.

    Example:
      >>> import phalanx
      >>> phalanx.in_cross_replica_context()
      False
    """
    compat.note_read()
    return current().replica is None


def get_replica_context() -> "ReplicaContext | None":
    """Returns the context of this replica, or None in cross-replica context. May be called in any context.

    Example:
      >>> import phalanx
      >>> phalanx.get_replica_context().num_replicas_in_sync
      1
    """
    compat.note_read()
    return current().replica


def require_replica() -> ReplicaContext:
    """Returns the context of the replica function that is being traced. Call it only in replica context."""
    replica = get_replica_context()
    assert replica is not None
    return replica


def experimental_set_strategy(strategy: AbstractStrategy | None) -> None:
    """Makes `strategy` current for the rest of the program, without a `with` block. Call it outside all scopes.

    Args:
      strategy: the strategy, or None for the default strategy.

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
            "experimental_set_strategy was called in a scope or a replica function",
            "it must be called outside all scopes and replica functions.",
            "call it at the top of the script",
        )
    if strategy is not None:
        check_strategy("strategy", strategy, "phalanx.experimental_set_strategy(phalanx.MirroredStrategy())")
    storage = NOWHERE if strategy is None else strategy.storage
    # Keras creates variables without calling the strategy, so their placement is set for the whole process.
    placement = storage.of_new_variables if storage.has_devices else None
    if placement is None:
        compat.unset_variable_layout()
    else:
        compat.set_variable_layout(placement.sharding_of_new, placement.mesh)
    # A strategy without devices is the default strategy, which the empty stack stands for.
    _stack.set(() if strategy is None or not storage.has_devices else (Mode(strategy, None, was_set=True),))


def require_cross_replica(method: str, strategy: AbstractStrategy, hint: str) -> None:
    """Raises unless this code runs in cross-replica context of `strategy`, or outside all scopes.

    Args:
      method: name of the public method that was called, for the message.
      strategy: the strategy whose method was called.
      hint: what to write instead in replica context.

    Raises:
      ContextError: called in replica context.
      MixedStrategyError: another strategy is current.
    """
    mode = current()
    if mode.replica is not None and depth():
        raise ContextError(f"{method} was called in replica context", "it works only in cross-replica context.", hint)
    require_same(mode.strategy, strategy, method)


def _content(leaf: PyTree) -> PyTree:
    return leaf.value if isinstance(leaf, ReplicaLocal) else leaf


def require_not_running(method: str, hint: str) -> None:
    """Raises if the replicas are already running, that is, in a merge function.

    Args:
      method: name of the public method that was called, for the message.
      hint: what to write instead.

    Raises:
      ContextError: called in a merge function.
    """
    if current().merging:
        raise ContextError(f"{method} was called in merge_call", "the replicas are already running.", hint)


def require_same(active: AbstractStrategy, requested: AbstractStrategy, method: str) -> None:
    """Raises unless `requested` may be used while `active` is current.

    Args:
      active: the current strategy.
      requested: the strategy whose method was called.
      method: name of the public method that was called, for the message.

    Raises:
      MixedStrategyError: another strategy is current.
    """
    # The default strategy places nothing, so it does not conflict with another strategy.
    if depth() and active is not requested and active is not _default[0].strategy:
        raise MixedStrategyError(
            f"{method} of {requested!r} was called inside the scope of {active!r}",
            "only one strategy can be current.",
            "leave the scope of the other strategy first",
        )
