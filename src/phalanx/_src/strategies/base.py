# SPDX-License-Identifier: Apache-2.0
"""`Strategy`: the public methods, built on a few hooks that each strategy overrides."""

import difflib
import inspect
import itertools
import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from types import MappingProxyType, NoneType
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self, final
from weakref import WeakSet

import jax
import jax.numpy as jnp
from jax import lax

from phalanx._src import compat
from phalanx._src.cluster.resolvers.base import ClusterResolver
from phalanx._src.collectives import primitives
from phalanx._src.collectives.cross_device import CrossDeviceOps
from phalanx._src.input.iterator import DistributedIterator, check_steps
from phalanx._src.mesh.arrays import copied
from phalanx._src.mesh.devices import Held, device_name
from phalanx._src.mesh.layout import REPLICA_AXIS
from phalanx._src.mesh.topology import Topology
from phalanx._src.mesh.values import Mirrored, PerReplica, first_steps, flatten, is_distributed, map_leaves, stacked
from phalanx._src.options import ReduceOp, RunOptions
from phalanx._src.programs.explain import explained
from phalanx._src.programs.profile import follow
from phalanx._src.programs.program import Programs
from phalanx._src.programs.replicas import trace_run
from phalanx._src.programs.slots import components_of
from phalanx._src.runtime.notes import note
from phalanx._src.runtime.observers import observers
from phalanx._src.strategies.arguments import explaining
from phalanx._src.strategies.extended import StrategyExtended
from phalanx._src.strategies.inputs import AbstractInputs
from phalanx._src.strategies.results import AbstractResults
from phalanx._src.strategies.scope import Scope
from phalanx._src.tracing import context
from phalanx._src.tracing.context import Mode
from phalanx._src.tracing.policy import check_variable
from phalanx._src.tracing.records import counting_from
from phalanx._src.tracing.scope import innermost
from phalanx._src.tracing.strategy import Update, Updates
from phalanx._src.tracing.structure import add_once
from phalanx._src.typed_jax import psum_scatter
from phalanx.errors import ContextError, InvalidArgumentError, arguments, shown
from phalanx.errors.frames import boundary, hide
from phalanx.typing import PyTree

# A variable records the number of its strategy: a reference would keep the strategy alive.
_numbers = itertools.count()
# Checkpoints and `fit` ask which strategies exist, and must not keep one alive.
_living: "WeakSet[Strategy]" = WeakSet()

_DEFAULT_OPTIONS = RunOptions()


class Strategy(AbstractInputs, AbstractResults):
    """Decides where variables live and runs replica functions. The base class of all strategies.

    All strategies share the public methods. A custom strategy must override `topology`. It may also override
    `cross_device_ops`, `communication_options`, `cluster_resolver`, `aggregate_gradients`, `execute`, and `storage`
    together with `apply_update`.

    May be created outside all scopes.

    Source: tf.distribute.Strategy.

    Example:
      >>> import keras, phalanx
      >>> strategy = phalanx.MirroredStrategy(["cpu:0", "cpu:1"])
      >>> with strategy.scope():
      ...     scale = keras.Variable(3.0)
      >>> products = strategy.run(lambda x: x * scale, args=(2.0,))
      >>> float(strategy.reduce("SUM", products, axis=None))
      12.0
    """

    _explanation: ClassVar[str] = ""
    """How the strategy trains, for the error about an argument that only other strategies take."""
    _instead: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """What to write instead of such an argument. Without an entry, the error names the strategies that take it."""

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" in vars(cls):
            cls.__init__ = explaining(cls.__init__, Strategy)  # type: ignore[method-assign]

    def __init__(self) -> None:
        follow(os.environ)
        self._programs = Programs()
        self._cross_replica = Mode(self, None)  # Each step enters it, so it is made once.
        self._number = next(_numbers)
        self._is_noted = False
        _living.add(self)

    @property
    @final
    def number(self) -> int:
        """The number of this strategy in this process. May be called in any context.

        Each variable records the number of the strategy in whose scope it was created.
        """
        return self._number

    # Hooks.

    @property
    def storage(self) -> Topology:
        """The devices that hold variables between programs. The default is the devices of the replicas."""
        return self.topology

    @property
    def cross_device_ops(self) -> CrossDeviceOps | None:
        """The algorithm that reduces gradients across devices. None if there is one replica."""
        return None

    @property
    def cluster_resolver(self) -> ClusterResolver | None:
        """The resolver that describes the cluster. None on one machine. May be called in any context."""
        return None

    @property
    def requires_static_shapes(self) -> bool:
        """The value of `extended.experimental_require_static_shapes`. May be called in any context."""
        return False

    @property
    def tasks(self) -> tuple[str, ...]:
        """The cluster tasks that run steps or hold variables outside this process. May be called in any context."""
        return ()

    def held(self, variable: compat.Variable) -> list[Held]:
        """Returns which devices or tasks hold which part of a variable. May be called in any context.

        Only the parts that this process knows about are listed.

        Raises:
          InvalidArgumentError: `variable` is not a variable.
        """
        check_variable("variable", variable, "strategy.held(variable)")
        value, parts = compat.raw_value(variable), components_of(variable)
        # Each replica has its own value, whose first dim in the array of all is the replica.
        array, first = (value, 0) if parts is None else (parts, 1)
        # The array does not exist yet if the scope in which the variable was created is still open.
        shards = array.addressable_shards if isinstance(array, jax.Array) else []
        return [
            Held(device_name(s.device), s.index[first:], s.data.nbytes)
            for s in sorted(shards, key=lambda s: s.device.id)
        ]

    def aggregate_gradients(self, grads: Sequence[Any]) -> list[Any]:
        """Sums gradients over the replicas. Called inside a program. None stays None."""
        assert self.cross_device_ops is not None
        gradients = [g for g in grads if g is not None]
        # A destination only completes the pair of tf.distribute: every replica gets the sum.
        pairs = [(g, g) for g in gradients]
        summed = iter(self.cross_device_ops.batch_reduce(ReduceOp.SUM, pairs, self.communication_options))
        return [None if g is None else next(summed) for g in grads]

    @final
    def divide_gradients(self, grads: Sequence[Any], dims: Sequence[int | None]) -> list[Any]:
        """Sums gradients over the replicas and gives each replica its shard. Called inside a program.

        Args:
          grads: one gradient per variable, or None.
          dims: the dim along which each gradient is sharded. With None, every replica gets the whole sum.
        """
        # `psum_scatter` can only add, and these operations compute something else of the gradients.
        if self._merging_ops is not None:
            sums = self.aggregate_gradients(grads)
            return [x if dim is None else self._part_of_replica(x, dim) for x, dim in zip(sums, dims, strict=True)]
        # One call, so that all gradients that are not sharded can share buffers.
        whole = self.aggregate_gradients([g if dim is None else None for g, dim in zip(grads, dims, strict=True)])
        return [
            w if dim is None or g is None else psum_scatter(g, REPLICA_AXIS, dim=dim)
            for w, g, dim in zip(whole, grads, dims, strict=True)
        ]

    def _part_of_replica(self, value: jax.Array, dim: int) -> jax.Array:
        parts = jnp.split(value, self.num_replicas_in_sync, dim)
        return lax.select_n(lax.axis_index(REPLICA_AXIS), *parts)

    def apply_update(self, update: Update) -> None:
        """Applies an optimizer update that a program deferred because `storage` is not on its devices.

        Called outside all programs, in any context.
        """
        raise NotImplementedError

    def execute(self, fn: Callable[..., Any], args: PyTree, kwargs: dict[str, Any], options: RunOptions) -> PyTree:
        """Runs a replica function outside all programs."""

        def program(*args: PyTree, **kwargs: PyTree) -> PyTree:
            return trace_run(self, fn, args, kwargs)

        # JAX 0.10.2 cannot execute a `shard_map` over a mesh with automatic axes operation by operation, nor read such shards.
        if options.eager and (self.topology.axes or self.topology.divides_over_workers):
            num_devices = self.topology.devices_per_replica
            where = f"a replica has {num_devices} devices" if self.topology.axes else "no process has a whole variable"
            raise InvalidArgumentError(
                "RunOptions(eager=True), or run_eagerly=True in Keras",
                f"{where}; XLA partitions only compiled programs.",
                "phalanx.OneDeviceStrategy(...) to debug a step, or jax.debug.print(...) inside the step",
            )
        # The user may call `run` outside all scopes, but the cache selects a program by the current strategy.
        return context.call_in(self._cross_replica, self._programs.call, fn, program, args, kwargs, eager=options.eager)

    # Public methods.

    @property
    @final
    def num_replicas_in_sync(self) -> int:
        """The number of replicas over which gradients are aggregated. May be called in any context."""
        return self.topology.num_replicas

    @property
    @final
    def updates(self) -> Updates:
        """The stage of a step at which optimizer updates run. May be called in any context."""
        # Compares the properties, not their values: a custom `topology` may return a new object at each access.
        if type(self).storage is not Strategy.storage:
            return Updates.AFTER_PROGRAM
        return Updates.AFTER_REPLICAS if self.topology.divides_over_replicas else Updates.IN_REPLICAS

    @property
    @final
    def extended(self) -> StrategyExtended:
        """Further methods, with the names that they have in tf.distribute. May be called in any context."""
        return StrategyExtended(self)

    def scope(self) -> Scope[Self]:
        """Returns a context manager that makes this strategy current, so that new Keras variables belong to it.

        Must be called in cross-replica context or outside all scopes. Scopes of the same strategy may be nested.

        Raises:
          MixedStrategyError: another strategy is current.
          ContextError: the scope is entered inside a replica function.

        Example:
          >>> import keras, phalanx
          >>> strategy = phalanx.MirroredStrategy(["cpu:0", "cpu:1"])
          >>> with strategy.scope():
          ...     v = keras.Variable(1.0)
          >>> len(v.value.devices())
          2
        """
        self._note_devices()
        return Scope(self)

    def _note_devices(self) -> None:
        """Writes the strategy's notes, once."""
        if not self._is_noted:
            self._is_noted = True
            for line in self._notes():
                note(line)

    def _notes(self) -> Sequence[str]:
        """Returns the lines that the user sees at the first scope or step: the devices that train."""
        return [self.topology.summary] if self.topology.has_devices else []

    @final
    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> PyTree:
        """Runs `fn` once per replica, as one compiled program. Call it in cross-replica context or outside all scopes.

        `fn` may read and assign Keras variables. A `PerReplica` among its arguments gives each replica its own
        component. A `Mirrored` is unwrapped. Other arrays and numbers are the same on all replicas.

        Args:
          fn: the replica function.
          args: positional arguments of `fn`: pytrees.
          kwargs: keyword arguments of `fn`: pytrees.
          options: how to execute `fn`.

        Returns:
          The return value of `fn`, with each array as a `PerReplica` and each `Mirrored` as a `Mirrored`. With one
          replica, the return value of `fn` unchanged.

        Raises:
          InvalidArgumentError: `fn` is not callable, or another argument has the wrong type.
          ContextError: called in replica context.

        Example:
          >>> import phalanx
          >>> strategy = phalanx.MirroredStrategy(["cpu:0", "cpu:1"])
          >>> def fn(x):
          ...     return x * phalanx.get_replica_context().replica_id_in_sync_group
          >>> [float(x) for x in strategy.run(fn, args=(10.0,)).values]
          [0.0, 10.0]
        """
        # Inlines `boundary` and the argument checks, because each Python call adds to the time of a step.
        try:
            if not isinstance(args, (list, tuple)) or kwargs is not None:
                args, kwargs = arguments.of_call(args, kwargs)
            if not callable(fn):
                raise InvalidArgumentError(f"fn={shown(fn)}", "is not callable.", "strategy.run(step, args=(batch,))")
            if not isinstance(options, (RunOptions, NoneType)):
                raise InvalidArgumentError(
                    f"options={shown(options)}", "must be RunOptions or None.", "options=RunOptions(eager=True)"
                )
            # Outside all contexts both checks would pass, so a step saves the calls.
            if context.depth():
                context.require_cross_replica(
                    "Strategy.run", self, "call fn(...) directly, because this code already runs in a replica"
                )
                context.require_not_running("Strategy.run", "strategy.reduce or strategy.extended.update")
            if not self._is_noted:
                self._note_devices()
            # Inside `phalanx.function` there is a program already, and this run becomes a part of it.
            if innermost() is None:
                for observer in observers.of_steps:
                    observer.before_step((args, kwargs))
                return self.execute(fn, tuple(args), kwargs or {}, options or _DEFAULT_OPTIONS)
            if options is not None and options.eager:
                raise ContextError(
                    "strategy.run(..., options=RunOptions(eager=True)) in phalanx.function",
                    "phalanx.function compiles everything inside it.",
                    "call strategy.run outside phalanx.function",
                )
            return trace_run(self, fn, args, kwargs or {})
        except Exception as e:
            hide(e)
            raise

    @final
    @boundary
    def run_steps(self, fn: Callable[..., Any], iterator: DistributedIterator, steps: int) -> PyTree:
        """Runs `fn(batch)` for the next `steps` batches, as one compiled program.

        Call it in cross-replica context or outside all scopes. The result is that of `steps` calls of `run`, but there
        is only one dispatch. If fewer batches remain, the same program runs those. The default strategy, and strategies
        whose updates run outside the replicas, call `run` once per batch and stop before a batch of another size.

        Args:
          fn: the replica function of one step. As in `run`, it may read and assign Keras variables.
          iterator: an iterator of a dataset that this strategy distributed.
          steps: number of steps, at least 1.

        Returns:
          The stacked return values of `fn`: for each array, a `PerReplica` with components `(steps, ...)`.

        Raises:
          OutOfRangeError: the iterator has no more batches.
          InvalidArgumentError: `steps` is not a positive integer, or `iterator` is not a distributed iterator.
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
        if not self.topology.has_devices or self.updates is not Updates.IN_REPLICAS:
            results = []
            for i, batch in enumerate(iterator.next_alike(steps)):
                # The user sets the default step of summaries once per call of `run_steps`, so it is counted on here.
                with counting_from(i):
                    results.append(self.run(fn, args=(batch,)))
            return jax.tree.map(stacked, *results, is_leaf=is_distributed)
        self._note_devices()
        for observer in observers.of_steps:
            # Before `next_steps`, so that the positions that a preemption handler saves are those before these batches.
            observer.before_step(None)
        batches, count = iterator.next_steps(steps)

        def program(batches: PyTree, count: jax.Array) -> PyTree:
            return trace_run(self, fn, (batches,), {}, steps=count)

        # The key keeps these programs apart from those that `run` has of the same function.
        results = context.call_in(
            self._cross_replica, self._programs.call, fn, program, (batches, count), {}, key="run_steps"
        )
        # A shorter last group runs the same program, whose results have room for all `steps`.
        return results if count == steps else map_leaves(lambda x: first_steps(x, count), results)

    @final
    def replicate(self, tree: PyTree) -> Mirrored:
        """Places a pytree of arrays on all replicas, for step functions that take and return their state.

        Call it in cross-replica context or outside all scopes.

        Args:
          tree: a pytree of arrays, for example parameters and an optax optimizer state.

        Returns:
          A `Mirrored` that holds the tree, to pass to `run`.

        Raises:
          ContextError: called in replica context.
          InputError: JAX cannot hold an array of `tree`.
          TraceError: `tree` was kept from another step.
        """
        context.require_cross_replica(
            "Strategy.replicate", self, "return phalanx.Mirrored(tree) from the replica function"
        )
        context.require_not_running("Strategy.replicate", "place the tree outside the step")
        tree = primitives.checked_arrays(tree)
        with explained():
            # A CPU device would share the memory of the caller, who may write to it again.
            return Mirrored(self.topology.put_replicated(jax.tree.map(copied, tree)))

    def in_program(self, key: Hashable, fn: Callable[[Any], Any], value: PyTree) -> PyTree:
        """Returns `fn(value)`, computed in the current trace or else in a separate program. In cross-replica context.

        Args:
          key: identifies the separate program in the cache. It must determine what `fn` computes.
          fn: the function to compile.
          value: the argument of `fn`: a pytree.
        """

        def on_all(argument: PyTree) -> PyTree:
            return self.on_all_workers(fn(argument))

        scope = innermost()
        if scope is not None:
            # A function that only reduces has no `run` to tell on which devices its program runs, and that workers must compare it.
            add_once(self, scope.pass_.notes.reducing)
            for x in flatten(value)[0]:
                if isinstance(x, PerReplica):
                    # JAX cannot compile an array of several processes into a program as a constant, so it becomes an input.
                    scope.pass_.notes.used_per_replica.extend([x.data] if x.rows is None else [x.data, x.rows.mask])
            return on_all(value)
        # A program is dropped with its owner. `on_all` is new at each call, so the cache itself is the owner.
        return context.call_in(self._cross_replica, self._programs.call, self._programs, on_all, (value,), {}, key=key)

    if not TYPE_CHECKING:  # With `__getattr__`, type checkers would accept any name.

        def __getattr__(self, name: str) -> Any:
            if hasattr(type(self), name):
                # A property raised an AttributeError, which Python dropped. This raises it again.
                return object.__getattribute__(self, name)
            message = f"{type(self).__name__!r} object has no attribute {name!r}"
            if not name.startswith("_"):
                # Python suggests only names that differ in a few letters, not `experimental_distribute_dataset` for `distribute_dataset`.
                names = [n for n in dir(type(self)) if not n.startswith("_")]
                near = difflib.get_close_matches(name, names, n=1) or [n for n in names if len(name) > 3 and name in n]
                if near:
                    # Without `name` and `obj`, from which Python would add a second suggestion.
                    raise AttributeError(f"{message}. Did you mean: {near[0]!r}?")
            raise AttributeError(message, name=name, obj=self)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Strategy":
        """Returns a strategy over the same devices, with its own compiled programs."""
        # The attributes are shared, because Python cannot copy a `jax.Device`.
        other = object.__new__(type(self))
        other.__dict__.update(
            self.__dict__, _programs=Programs(), _cross_replica=Mode(other, None), _number=next(_numbers)
        )
        _living.add(other)
        return other

    def __reduce__(self) -> NoReturn:
        raise ContextError(
            f"pickle.dumps({self!r})",
            "a strategy holds devices of this process.",
            "create the strategy in the process that uses it",
        )

    def __copy__(self) -> NoReturn:
        raise ContextError(
            f"copy.copy({self!r})", "two strategies would share the same programs.", "create another strategy"
        )

    def __repr__(self) -> str:
        names = list(map(device_name, self.topology.devices))
        return f"{type(self).__name__}({names})"


# Python's own errors about arguments then name the class that users know.
for _method in (*vars(AbstractInputs).values(), *vars(AbstractResults).values()):
    if inspect.isfunction(_method):
        inspect.unwrap(_method).__qualname__ = f"{Strategy.__name__}.{_method.__name__}"


def living_strategies() -> tuple[Strategy, ...]:
    """Returns all strategies of this process that are still referenced."""
    return tuple(_living)


def strategy_on(topology: Topology) -> Strategy | None:
    """Returns the strategy that uses a topology. None if it no longer exists."""
    # By identity, because two strategies over the same devices have equal topologies.
    return next((s for s in living_strategies() if s.topology is topology), None)
