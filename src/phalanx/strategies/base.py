# SPDX-License-Identifier: Apache-2.0
"""`Strategy`: the public verbs, over a few hooks that a strategy overrides."""

import itertools
from collections.abc import Callable, Sequence
from types import NoneType
from typing import Any, NoReturn, Self, final
from weakref import WeakSet

import jax
import jax.numpy as jnp
from jax import lax

from phalanx import compat
from phalanx.collectives import primitives
from phalanx.collectives.cross_device import CrossDeviceOps
from phalanx.errors import ContextError, InvalidArgumentError, arguments, shown
from phalanx.errors.frames import boundary, hide
from phalanx.input.iterator import DistributedIterator, check_steps
from phalanx.mesh.devices import Held, device_name
from phalanx.mesh.layout import REPLICA_AXIS
from phalanx.mesh.topology import Topology
from phalanx.mesh.values import (
    Mirrored,
    first_steps,
    is_distributed,
    map_leaves,
    stacked,
)
from phalanx.options import CommunicationOptions, ReduceOp, RunOptions
from phalanx.programs.cache import Programs
from phalanx.programs.replicas import trace_run
from phalanx.strategies.extended import StrategyExtended
from phalanx.strategies.inputs import AbstractInputs
from phalanx.strategies.results import AbstractResults
from phalanx.strategies.scope import Scope
from phalanx.tracing import context
from phalanx.tracing.context import Mode
from phalanx.tracing.policy import check_variable
from phalanx.tracing.scope import innermost
from phalanx.tracing.strategy import Update

_numbers = itertools.count()
_living: "WeakSet[Strategy]" = WeakSet()

_DEFAULT_OPTIONS = RunOptions()


class Strategy(AbstractInputs, AbstractResults):
    """Where variables live and where replicas run.

    The verbs below are the same for all strategies. A strategy of your own overrides `topology`, and where it differs
    `storage` and `apply_update`, `cross_device_ops`, `communication_options`, `cluster_resolver`, `aggregate_gradients` and
    `execute`.
    """

    def __init__(self) -> None:
        self._programs = Programs()
        self._cross_replica = Mode(self, None)
        self._number = next(_numbers)
        _living.add(self)

    @property
    @final
    def number(self) -> int:
        """Which strategy of this process it is: variables know the one in whose scope they were made. In any context."""
        return self._number

    # Hooks.

    @property
    def storage(self) -> Topology:
        """Where variables live between programs: on the devices of the replicas, unless a strategy has another place."""
        return self.topology

    @property
    def cross_device_ops(self) -> CrossDeviceOps | None:
        """How gradients cross devices; None where there is one replica."""
        return None

    @property
    def communication_options(self) -> CommunicationOptions | None:
        """Hints for the all-reduce of gradients."""
        return None

    @property
    def cluster_resolver(self) -> Any:
        """The resolver of the cluster; None on one machine. May be called in any context."""
        return None

    @property
    def requires_static_shapes(self) -> bool:
        """Whether `extended.experimental_require_static_shapes` says that shapes must not depend on values. In any context."""
        return False

    @property
    def tasks(self) -> tuple[str, ...]:
        """Where else than on this process's devices it computes and holds variables. May be called in any context."""
        return ()

    def held(self, variable: compat.Variable) -> list[Held]:
        """Returns who holds which part of a variable, as far as this process knows. May be called in any context.

        Raises:
          InvalidArgumentError: it is not a variable.
        """
        check_variable("variable", variable, "strategy.held(variable)")
        value = compat.raw_value(variable)
        shards = value.addressable_shards if isinstance(value, jax.Array) else []
        return [Held(device_name(s.device), s.index, s.data.nbytes) for s in sorted(shards, key=lambda s: s.device.id)]

    def aggregate_gradients(self, grads: Sequence[Any]) -> list[Any]:
        """Sums gradients over the replicas, inside a program; None stays None."""
        assert self.cross_device_ops is not None
        given = [g for g in grads if g is not None]
        pairs = [(g, g) for g in given]
        summed = iter(self.cross_device_ops.batch_reduce(ReduceOp.SUM, pairs, self.communication_options))
        return [None if g is None else next(summed) for g in grads]

    @final
    def divide_gradients(self, grads: Sequence[Any], dims: Sequence[int | None]) -> list[Any]:
        """Sums gradients over the replicas, inside a program; each replica gets its part along a dim, or where that is None the whole."""
        if self._merging_ops is not None:
            sums = self.aggregate_gradients(grads)
            return [x if dim is None else self._part_of_replica(x, dim) for x, dim in zip(sums, dims, strict=True)]
        whole = self.aggregate_gradients([g if dim is None else None for g, dim in zip(grads, dims, strict=True)])
        part = lambda g, dim: lax.psum_scatter(g, REPLICA_AXIS, scatter_dimension=dim, tiled=True)  # noqa: E731
        return [w if dim is None else part(g, dim) for w, g, dim in zip(whole, grads, dims, strict=True)]

    def _part_of_replica(self, value: jax.Array, dim: int) -> jax.Array:
        parts = jnp.split(value, self.num_replicas_in_sync, dim)
        return lax.select_n(lax.axis_index(REPLICA_AXIS), *parts)

    def apply_update(self, update: Update) -> None:
        """Does an optimizer's update that a program has left, where `storage` is another place. Outside all programs, in any context."""
        raise NotImplementedError

    def execute(self, fn: Callable[..., Any], args: Any, kwargs: dict[str, Any], options: RunOptions) -> Any:
        """Runs a replica function outside all programs."""

        def program(*args: Any, **kwargs: Any) -> Any:
            scope = innermost()
            assert scope is not None
            return trace_run(self, fn, args, kwargs or {}, scope)

        if options.eager and self.topology.axes:
            raise InvalidArgumentError(
                "RunOptions(eager=True), or run_eagerly=True of Keras",
                f"a replica has {self.topology.devices_per_replica} devices, and only a compiled program is divided between them.",
                "phalanx.OneDeviceStrategy(...) to look into a step; jax.debug.print to print in it",
            )
        return context.call_in(self._cross_replica, self._programs.call, fn, program, args, kwargs, eager=options.eager)

    # Verbs.

    @property
    @final
    def num_replicas_in_sync(self) -> int:
        """Over how many replicas gradients are aggregated. May be called in any context."""
        return self.topology.num_replicas

    @property
    @final
    def defers_updates(self) -> bool:
        """Whether optimizers update variables when all replicas have done their part of a step. May be called in any context."""
        return self.lends_variables or self.topology.divides_over_replicas

    @property
    @final
    def lends_variables(self) -> bool:
        """Whether the replicas get copies of variables for a step, which live elsewhere. May be called in any context."""
        # Not whether they differ now: a strategy may make its topology anew each time it is asked.
        return type(self).storage is not Strategy.storage

    @property
    @final
    def extended(self) -> StrategyExtended:
        """More methods, under the names of tf.distribute. May be called in any context."""
        return StrategyExtended(self)

    def scope(self) -> Scope[Self]:
        """Returns a context manager in which this strategy is current and new Keras variables are its own.

        Must be called in cross-replica context or outside all scopes; the same strategy's scopes nest.

        Raises:
          MixedStrategyError: another strategy is current.
          ContextError: entered inside a replica function.

        Example:
          >>> import keras, phalanx
          >>> strategy = phalanx.MirroredStrategy(["cpu:0", "cpu:1"])
          >>> with strategy.scope():
          ...     v = keras.Variable(1.0)
          >>> len(v.value.devices())
          2
        """
        return Scope(self)

    @final
    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> Any:
        """Runs `fn` once for every replica, as one compiled program. In cross-replica context or outside all scopes.

        `fn` may read and assign Keras variables. A `PerReplica` among its arguments gives each replica its own component;
        a `Mirrored` is unwrapped; other arrays and numbers are the same on all replicas.

        Args:
          fn: the replica function.
          args: its arguments: pytrees.
          kwargs: its keyword arguments.
          options: how to execute it.

        Returns:
          What `fn` returns, with a `PerReplica` for every array in it, and a `Mirrored` for every `Mirrored`. With one
          replica, what `fn` returns.

        Raises:
          InvalidArgumentError: `args` is neither a list nor a tuple.
          ContextError: called in replica context.

        Example:
          >>> import phalanx
          >>> strategy = phalanx.MirroredStrategy(["cpu:0", "cpu:1"])
          >>> def fn(x):
          ...     return x * phalanx.get_replica_context().replica_id_in_sync_group
          >>> [float(x) for x in strategy.run(fn, args=(10.0,)).values]
          [0.0, 10.0]
        """
        # What `boundary` does, less the call, and checks that are looked at here: a step has few calls to spare.
        try:
            if not isinstance(args, (list, tuple)) or kwargs is not None:
                args, kwargs = arguments.of_call(args, kwargs)
            if not callable(fn):
                raise InvalidArgumentError(f"fn={shown(fn)}", "is not callable.", "strategy.run(step, args=(batch,))")
            if not isinstance(options, (RunOptions, NoneType)):
                raise InvalidArgumentError(
                    f"options={shown(options)}", "must be RunOptions or None.", "options=RunOptions(eager=True)"
                )
            if context.depth():
                context.require_cross_replica(
                    "Strategy.run", self, "call the function itself: you are inside a replica already"
                )
                context.require_not_running("Strategy.run", "strategy.reduce or strategy.extended.update")
            scope = innermost()
            if scope is None:
                return self.execute(fn, tuple(args), kwargs or {}, options or _DEFAULT_OPTIONS)
            if options is not None and options.eager:
                raise ContextError(
                    "RunOptions(eager=True) in phalanx.function",
                    "the step around it is compiled.",
                    "call strategy.run outside phalanx.function",
                )
            return trace_run(self, fn, args, kwargs or {}, scope)
        except Exception as e:
            hide(e)
            raise

    @final
    @boundary
    def run_steps(self, fn: Callable[..., Any], iterator: DistributedIterator, steps: int) -> Any:
        """Runs `fn(batch)` for the next `steps` batches, as one compiled program. In cross-replica context or outside all scopes.

        It does what as many calls of `run` do, with one dispatch. Where fewer batches are left it does those, with the same
        program. Under the default strategy the calls are made one by one, and end before a batch of another size.

        Args:
          fn: the replica function of one step. As in `run`, it may read and assign Keras variables.
          iterator: of a dataset that this strategy distributed.
          steps: how many steps.

        Returns:
          What `fn` returns, stacked: a `PerReplica` whose components are `[steps, ...]` for every array.

        Raises:
          OutOfRangeError: the iterator has no further batch.
          InvalidArgumentError: `steps` is no positive integer, or `iterator` no distributed iterator.
          ContextError: called in replica context, or while a step is traced.

        Example:
          >>> import numpy as np, phalanx
          >>> strategy = phalanx.MirroredStrategy(["cpu:0", "cpu:1"])
          >>> iterator = iter(strategy.experimental_distribute_dataset(np.arange(8.0), batch_size=2))
          >>> sums = strategy.run_steps(lambda batch: batch.sum(), iterator, 4)
          >>> strategy.reduce("SUM", sums, axis=None).tolist()
          [1.0, 5.0, 9.0, 13.0]
        """
        context.require_cross_replica("Strategy.run_steps", self, "phalanx.scan inside the replica function")
        context.require_not_running("Strategy.run_steps", "strategy.run_steps outside merge_call")
        if not isinstance(iterator, DistributedIterator):
            raise InvalidArgumentError(
                f"iterator={shown(iterator)}",
                "must be an iterator of a distributed dataset.",
                "iter(strategy.experimental_distribute_dataset(dataset))",
            )
        arguments.function("fn", fn, "strategy.run_steps(step, iterator, 16)")
        check_steps(steps)
        if not self.topology.has_devices or self.defers_updates:
            results = [self.run(fn, args=(batch,)) for batch in iterator.next_alike(steps)]
            return jax.tree.map(lambda *xs: stacked(xs), *results, is_leaf=is_distributed)
        batches, count = iterator.next_steps(steps)

        def program(batches: Any, count: Any) -> Any:
            scope = innermost()
            assert scope is not None
            return trace_run(self, fn, (batches,), {}, scope, steps=count)

        results = context.call_in(
            self._cross_replica, self._programs.call, fn, program, (batches, count), {}, key="run_steps"
        )
        return results if count == steps else map_leaves(lambda x: first_steps(x, count), results)

    @final
    def replicate(self, tree: Any) -> Mirrored:
        """Places a pytree of arrays on all replicas, for functions that take and return their state.

        In cross-replica context or outside all scopes.

        Args:
          tree: a pytree of arrays, for example the parameters and the optimizer state of optax.

        Returns:
          A `Mirrored` of it, to pass to `run`.

        Raises:
          ContextError: called in replica context.
        """
        context.require_cross_replica(
            "Strategy.replicate", self, "return phalanx.Mirrored(tree) from the replica function"
        )
        context.require_not_running("Strategy.replicate", "place the tree outside the step")
        tree = primitives.checked_arrays(tree)
        return Mirrored(self.topology.put_replicated(tree))

    def in_program(self, key: Any, fn: Callable[[Any], Any], value: Any) -> Any:
        """Returns `fn(value)`, computed in the program that is traced, or in one of its own under that key. In cross-replica context."""
        on_all = lambda v: self.on_all_workers(fn(v))  # noqa: E731
        if innermost() is not None:
            return on_all(value)
        return context.call_in(self._cross_replica, self._programs.call, self._programs, on_all, (value,), {}, key=key)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Strategy":
        """Returns a strategy over the same devices, with programs of its own."""
        other = object.__new__(type(self))
        other.__dict__.update(
            self.__dict__, _programs=Programs(), _cross_replica=Mode(other, None), _number=next(_numbers)
        )
        return other

    def __reduce__(self) -> NoReturn:
        raise ContextError(
            f"pickle of {self!r}", "it holds devices of this process.", "make the strategy in the process that uses it"
        )

    def __copy__(self) -> NoReturn:
        raise ContextError(
            f"copy.copy({self!r})", "two strategies would share the same programs.", "make another strategy"
        )

    def __repr__(self) -> str:
        names = list(map(device_name, self.topology.devices))
        return f"{type(self).__name__}({names})"


def living_strategies() -> tuple[Strategy, ...]:
    """Returns all strategies of this process that somebody holds."""
    return tuple(_living)
