# SPDX-License-Identifier: Apache-2.0
"""`Strategy.run` inside a program: one `shard_map` for all replicas; and how whole programs are traced."""

import copy
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import keras
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import PartitionSpec

from phalanx import compat
from phalanx.mesh.arrays import as_array, is_array
from phalanx.mesh.layout import REPLICA_AXIS
from phalanx.mesh.values import Mirrored, PerReplica, RowMask, check_size, differs, flatten, is_equal_everywhere
from phalanx.programs import explain
from phalanx.tracing import context, markers, slips
from phalanx.tracing.boundary import combine, first_component
from phalanx.tracing.context import Mode, ReplicaContext
from phalanx.tracing.discovery import Discovery, DiscoveryMismatch, Entry, Executing, Tracing
from phalanx.tracing.policy import policy_of
from phalanx.tracing.scope import LiftScope, program_scope
from phalanx.tracing.strategy import AbstractStrategy, Updates
from phalanx.typing import PyTree


def trace_run(
    strategy: AbstractStrategy, fn: Callable[..., Any], args: PyTree, kwargs: PyTree, *, steps: jax.Array | None = None
) -> PyTree:
    """Traces `fn` for all replicas of `strategy` into the program that is being traced.

    Args:
      strategy: the strategy.
      fn: the replica function.
      args: its arguments.
      kwargs: its keyword arguments.
      steps: for how many steps to call it, at most as many as the arguments are stacked for; None calls it once, with the
        arguments as they are.

    Returns:
      What `fn` returns: arrays as `PerReplica`, `Mirrored` trees as such, everything else as it is. With one replica,
      what `fn` returns.
    """
    scope = program_scope()
    scope.note_read()
    if not any(s is strategy for s in scope.pass_.found.strategies):
        scope.pass_.found.strategies.append(strategy)
    run = _Run(strategy, fn, (tuple(args), dict(kwargs)), steps)
    return run.inline() if run.is_plain else run.mapped(scope)


class _Run:
    """One `Strategy.run` inside the trace of a program."""

    def __init__(
        self, strategy: AbstractStrategy, fn: Callable[..., Any], args: PyTree, steps: jax.Array | None
    ) -> None:
        self._strategy, self._fn, self._steps = strategy, fn, steps
        leaves, self._tree = flatten(args)
        self._leaves = [x if (array := as_array(x)) is None else array for x in leaves]
        for value in self._of(differs):
            check_size(value, strategy.num_replicas_in_sync)
        self._rows = list({id(x.rows): x.rows for x in self._leaves if differs(x) and x.rows}.values())
        # Per-replica arrays and masks go in sharded; what all replicas share goes in whole; the rest stays Python.
        self._sharded = [x.data for x in self._of(differs)] + [r.mask for r in self._rows]
        self._whole = (
            [x.value for x in self._of(is_equal_everywhere)] + [r.count for r in self._rows] + self._of(is_array)
        )
        self._result: tuple[list[Any], Any] = ([], None)
        self._padding: RowMask | None = None

    @property
    def is_plain(self) -> bool:
        """Whether it is one call for one replica on one device, whose batch has no padding."""
        topology = self._strategy.topology
        return topology.is_single and not self._rows and self._steps is None

    def inline(self) -> PyTree:
        """One replica: calls the function in the program's own scope."""
        results, mirrored = self._call([x[0] for x in self._sharded], self._whole, jnp.int32(0))
        return self._rebuild(results, [Mirrored(m) for m in mirrored])

    def mapped(self, scope: LiftScope) -> PyTree:
        """Several replicas: calls it under `shard_map`."""
        topology = self._strategy.topology
        found = scope.pass_.next_run(self._trace)
        entries = [scope.entry(v) for v in found.variables]
        parts = [scope.components(v, self._strategy.num_replicas_in_sync) for v in found.variables]
        whole = self._whole if self._steps is None else [self._steps, *self._whole]
        body = functools.partial(self._body, found)
        of_updates = [[PartitionSpec() if d is None else _along(d) for d in u.dims] for u in found.updates]
        replicas = self._shard_map(body, (False, True, True, False), (True, False, False, True, of_updates))
        outputs = replicas([e.value for e in entries], parts, self._sharded, whole)
        results, mirrored, values, parts, gradients = outputs
        if topology.axes:
            # Of a result each device of a replica has the whole: what leaves a program is read by replicas.
            results = lax.with_sharding_constraint(results, topology.per_replica)
        kept = iter(parts)
        scope.values_change()
        for entry, value in zip(itertools.compress(entries, found.written), values, strict=True):
            entry.written = True
            entry.replace(value, next(kept) if entry.policy.on_read else None)
        for update, of_update in zip(found.updates, gradients, strict=True):
            left = dataclasses.replace(update, gradients=of_update)
            if self._strategy.updates is Updates.AFTER_PROGRAM:
                scope.leave(left)
            else:
                scope.apply_update(self._strategy, left)
        rows = self._rows[0] if self._rows else None
        masks = [rows.repeated(each) if rows and each else None for each in found.rows_each]
        wrapped = (self._wrapped(x, mask) for x, mask in zip(results, masks, strict=True))
        return self._rebuild(wrapped, map(Mirrored, mirrored))

    def _wrapped(self, array: jax.Array, rows: RowMask | None) -> PyTree:
        """Returns a result as it leaves `Strategy.run`: of one replica alone as the array that it is."""
        if self._strategy.num_replicas_in_sync == 1 and rows is None and self._steps is None:
            return array[0]
        return PerReplica(array, rows, self._rows[0] if len(self._rows) == 1 else None)

    def _trace(self) -> Discovery:
        """Traces one call for one replica."""
        inputs = self._one_step()
        found = self._trace_replica(*inputs)
        self._warn_of_slips(found)
        found.rows_each = self._find_rows(found.outputs[0], *inputs)
        return found

    def _warn_of_slips(self, found: Discovery) -> None:
        """Warns of mistakes that the trace of one replica shows."""
        num_replicas, num_batches = self._strategy.num_replicas_in_sync, len(self._of(differs))
        # Keras's trainer weighs means; and what no optimizer gets may be anything.
        if num_replicas > 1 and not context.current().averaging and (found.optimizers or found.updates):
            first = len(found.inputs)
            slips.warn_of_whole_batch(found.jaxpr, num_replicas, self._sharded, self._whole)
            slips.warn_of_mean(found.jaxpr, num_replicas, slice(first, first + num_batches))

    @property
    def _num_steps(self) -> int:
        """For how many steps the arguments are stacked."""
        return int(self._sharded[0].shape[1])

    def _one_step(self) -> tuple[list[Any], list[Any]]:
        """Returns the arguments of one call, abstract where they are stacked."""
        if self._steps is None:
            return self._sharded, self._whole
        one = lambda x, dim: jax.ShapeDtypeStruct(x.shape[:dim] + x.shape[dim + 1 :], x.dtype)  # noqa: E731
        return [one(x, 1) for x in self._sharded], [one(x, 0) for x in self._whole]

    def _trace_replica(self, sharded: list[Any], whole: list[Any]) -> Discovery:
        seen: list[Discovery] = []

        def body(sharded: PyTree, whole: PyTree) -> PyTree:
            seen.append(_traced(self._replica, _first(sharded), whole, named=self._fn, mapped=True))
            return jnp.zeros((1,))

        jax.eval_shape(self._shard_map(body, (True, False), True), sharded, whole)
        return seen[0]

    def _find_rows(self, results: list[Any], sharded: list[Any], whole: list[Any]) -> list[int]:
        """Returns how many rows results have for each row of a padded batch: those that grow with the batch."""
        if len(self._rows) != 1:
            return [0] * len(results)
        rows = self._rows[0]
        places = rows.mask.shape[-1]
        lengths = [x.shape[1] if len(x.shape) > 1 else -1 for x in results]
        each = [n // places if n >= 0 and n % places == 0 else 0 for n in lengths]
        if not any(each):
            return each
        padded = [x.rows is rows for x in self._of(differs)] + [True]
        longer = [
            jax.ShapeDtypeStruct((x.shape[0], places + 1, *x.shape[2:]), x.dtype) if p else x
            for x, p in zip(sharded, padded, strict=True)
        ]
        try:
            # By a copy, for it notes what the function returned.
            grown = copy.copy(self)._trace_replica(longer, whole).outputs[0]
        except Exception:  # The function is written for this size of batch: the shape alone must tell.
            return [int(n == 1) for n in each]
        grows = [len(g.shape) > 1 and g.shape[1] == n * (places + 1) for n, g in zip(each, grown, strict=True)]
        return [n if g else 0 for n, g in zip(each, grows, strict=True)]

    def _body(self, found: Discovery, values: list[Any], parts: list[Any], sharded: PyTree, whole: PyTree) -> PyTree:
        """The program of one replica: its results, the mirrored results, new values, components of its own, and gradients."""
        own = [
            first_component(policy_of(variable), value) if part is None else part[0]
            for variable, value, part in zip(found.variables, values, parts, strict=True)
        ]
        sharded = _first(sharded)
        if self._steps is not None:
            return self._loop(found, own, sharded, whole)
        if found.eager:
            return self._replica(_executing(found, own, [], sharded, whole, mapped=True), sharded, whole)
        return found.evaluate(own, [], sharded, whole)

    def _loop(self, found: Discovery, own: list[Any], sharded: list[Any], whole: list[Any]) -> PyTree:
        """Does as many steps as there are; returns what one returns, the results stacked.

        On-read variables are combined once, after the last step.
        """
        count, arguments = whole[0], (sharded, whole[1:])
        at = lambda i: jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, keepdims=False), arguments)  # noqa: E731
        written = [v for v, w in zip(found.variables, found.written, strict=True) if w]

        def body(i: jax.Array, carry: PyTree) -> PyTree:
            own, outputs = carry
            results, mirrored, values, parts, _ = found.evaluate(own, [], *at(i))
            put = lambda buffer, x: lax.dynamic_update_index_in_dim(buffer, x, i, 0)  # noqa: E731
            outputs = jax.tree.map(put, outputs, ([x[0] for x in results], mirrored))
            mine = iter(parts)
            new = iter([next(mine)[0] if policy_of(v).on_read else x for v, x in zip(written, values, strict=True)])
            return [next(new) if w else x for w, x in zip(found.written, own, strict=True)], outputs

        room = lambda x: jnp.zeros((self._num_steps, *x.shape), x.dtype)  # noqa: E731
        results, mirrored, *_ = found.outputs
        outputs = ([room(jax.ShapeDtypeStruct(x.shape[1:], x.dtype)) for x in results], jax.tree.map(room, mirrored))
        own, (results, mirrored) = lax.fori_loop(0, count, body, (own, outputs))
        ends = [x for w, x in zip(found.written, own, strict=True) if w]
        entries = [Entry(v, x, x) for v, x in zip(written, ends, strict=True)]
        values = _combine_at_boundary(entries, self._padding_at(count - 1, sharded, whole))
        return [x[None] for x in results], mirrored, values, [e.value[None] for e in entries if e.policy.on_read], []

    def _padding_at(self, step: jax.Array, sharded: list[Any], whole: list[Any]) -> RowMask | None:
        """Returns which rows of this replica are real at one of several steps."""
        if len(self._rows) != 1:
            return None
        count = whole[1 + len(self._of(is_equal_everywhere))]
        at = functools.partial(lax.dynamic_index_in_dim, index=step, keepdims=False)
        return RowMask(at(sharded[-1]), at(count))

    def _replica(self, scope: LiftScope, sharded: PyTree, whole: PyTree) -> PyTree:
        """Calls the function for one replica, in `scope`; returns what `_body` does."""
        with scope:
            results, mirrored = self._call(sharded, whole, lax.axis_index(REPLICA_AXIS))
        written = _written(scope)
        parts = [e.value[None] for e in written if e.policy.on_read]
        # Of several steps, the last one's are combined.
        now = [e for e in written if self._steps is None or not e.policy.on_read]
        combined = dict(zip(map(id, now), _combine_at_boundary(now, self._padding), strict=True))
        values = [combined.get(id(e)) for e in written]
        return [x[None] for x in results], mirrored, values, parts, [u.gradients for u in scope.updates]

    def _call(self, sharded: list[Any], whole: list[Any], replica_id: jax.Array) -> tuple[list[Any], list[Any]]:
        """Calls the user's function with one replica's arguments; returns its arrays and its mirrored trees."""
        own, same = iter(sharded), iter(whole)
        leaves = list(self._leaves)
        self._fill(leaves, differs, own)
        self._fill(leaves, is_equal_everywhere, same)
        masks = tuple(RowMask(next(own), next(same)) for _ in self._rows)
        self._fill(leaves, is_array, same)
        args, kwargs = self._tree.unflatten(leaves)
        replica = ReplicaContext(self._strategy, replica_id, masks)
        self._padding = replica.padding
        with context.enter(Mode(self._strategy, replica)):
            result = explain.call(self._fn, args, kwargs)
        self._result = leaves, _ = flatten(result)
        return [x for x in leaves if _is_traced(x)], [x.value for x in leaves if is_equal_everywhere(x)]

    def _fill(self, leaves: list[Any], kind: Callable[[Any], bool], values: Iterable[Any]) -> None:
        places = (i for i, x in enumerate(self._leaves) if kind(x))
        for place, value in zip(places, values, strict=False):
            leaves[place] = value

    def _of(self, kind: Callable[[Any], bool]) -> list[Any]:
        return [x for x in self._leaves if kind(x)]

    def _rebuild(self, results: Iterable[Any], mirrored: Iterable[Any]) -> PyTree:
        leaves, tree = self._result
        arrays, same = iter(results), iter(mirrored)
        pick = lambda x: next(arrays) if _is_traced(x) else next(same) if is_equal_everywhere(x) else x  # noqa: E731
        return tree.unflatten([pick(x) for x in leaves])

    def _shard_map(self, body: Callable[..., Any], ins: Sequence[bool], outs: Any) -> Callable[..., Any]:
        spec = lambda x: (_along(0) if x else PartitionSpec()) if isinstance(x, bool) else x  # noqa: E731
        return jax.shard_map(
            body,
            mesh=self._strategy.topology.mesh,
            in_specs=tuple(map(spec, ins)),
            out_specs=spec(outs) if isinstance(outs, bool) else tuple(map(spec, outs)),
            # Further axes of the mesh stay automatic: XLA divides a replica's program over them.
            axis_names={REPLICA_AXIS},
            # Gradients inside stay local, and a scan with a constant carry (Keras's LSTM) traces.
            check_vma=False,
        )


def trace_program(
    fn: Callable[..., Any], inputs: PyTree, *, named: Callable[..., Any] | None = None, eager: bool = False
) -> Discovery:
    """Traces a whole program: calls `fn(inputs)`, which returns arrays.

    Args:
      fn: what it does.
      inputs: its arguments.
      named: the function of the user's that it calls, which JAX names if a value leaks.
      eager: whether it will be executed with real values.

    Raises:
      DiscoveryMismatch: each time it is traced it makes another variable.
    """
    random_states = slips.random_states()
    found, made = _traced_whole(fn, inputs, named)
    if made or slips.random_states() != random_states:
        # What makes variables, or the global generator, with random seeds of their own, is not what is called again.
        random_states = slips.random_states()
        found, made = _traced_whole(fn, inputs, named)
    if made:
        raise DiscoveryMismatch(made[0])
    slips.warn_of_random_numbers(random_states)
    slips.warn_of_constant_keys(found.jaxpr)
    for each in (found, *found.runs):
        each.eager = eager
    return found


def _traced_whole(
    fn: Callable[..., Any], inputs: PyTree, named: Callable[..., Any] | None
) -> tuple[Discovery, list[keras.Variable]]:
    """Traces a whole program; returns the variables that were made meanwhile too."""
    # They get their first values when this outer scope closes, outside the trace.
    with keras.StatelessScope():
        found = _traced(functools.partial(_program, fn), inputs, named=named)
        return found, [v for v in found.variables if compat.is_new(v)]


class ProgramOutputs(NamedTuple):
    """What a whole program returns: arrays, or their shapes if the program was only traced.

    Args:
      result: what the function returns.
      values: new values of the variables that it writes, in order.
      parts: the replicas' components of each of them; None for variables that have none.
      gradients: one list per update that it leaves.
      increments: what was added to each of the written variables; None if it was assigned otherwise.
      ids: the ids of the rows of tables that it looks up, in order.
    """

    result: PyTree
    values: list[Any]
    parts: list[Any]
    gradients: list[list[Any]]
    increments: list[Any]
    ids: list[Any]


def execute_program(
    fn: Callable[..., Any], inputs: PyTree, found: Discovery, values: list[Any], parts: list[Any]
) -> ProgramOutputs:
    """Returns what `fn(inputs)` does with real values of the variables, and components."""
    return _program(fn, _executing(found, values, parts, inputs), inputs)


def _program(fn: Callable[..., Any], scope: LiftScope, inputs: PyTree) -> ProgramOutputs:
    with scope:
        result = fn(inputs)
    written = _written(scope)
    gradients = [u.gradients for u in scope.updates]
    values, parts = [e.value for e in written], [e.components for e in written]
    ids = scope.pass_.ids if isinstance(scope.pass_, Tracing) else []
    return ProgramOutputs(result, values, parts, gradients, [e.increment for e in written], ids)


def _traced(
    fn: Callable[..., Any], *args: PyTree, named: Callable[..., Any] | None = None, mapped: bool = False
) -> Discovery:
    """Traces `fn(scope, *args)`; once more where a tape was asked for a gradient that is none.

    Args:
      fn: what to trace.
      *args: its arguments, behind the scope.
      named: the function of the user's that it calls, which JAX names if a value leaks.
      mapped: whether it is the program of one of several replicas.
    """
    found = _traced_once(fn, None, *args, named=named, mapped=mapped)
    if all(map(all, found.connected)):
        return found
    return _traced_once(fn, found.connected, *args, named=named, mapped=mapped)


def _traced_once(
    fn: Callable[..., Any],
    connected: Sequence[tuple[bool, ...]] | None,
    *args: PyTree,
    named: Callable[..., Any] | None,
    mapped: bool,
) -> Discovery:
    passes: list[Tracing] = []
    scopes: list[LiftScope] = []

    def lifted(*args: PyTree) -> PyTree:
        passes.append(Tracing(connected))
        scopes.append(LiftScope(passes[0], mapped=mapped))
        return fn(scopes[0], *args)

    if named is not None:
        functools.update_wrapper(lifted, named)
    jaxpr, outputs = jax.make_jaxpr(lifted, return_shape=True)(*args)
    found = passes[0].found
    found.take(list(scopes[0].entries.values()), scopes[0].updates, passes[0].inputs, jaxpr, outputs)
    return found


def _executing(found: Discovery, values: list[Any], parts: list[Any], *args: PyTree, mapped: bool = False) -> LiftScope:
    """Returns the scope in which a function is executed with real values."""
    gradients = markers.gradient_values(found.jaxpr, *found.flat(values, parts, *args)) if found.has_tapes else []
    return LiftScope(Executing(found, values, parts, gradients), mapped=mapped)


def _written(scope: LiftScope) -> list[Entry]:
    """Returns the entries of the variables that are written, in the order of the program's outputs.

    Raises:
      DiscoveryMismatch: another one was written than when the function was traced before.
    """
    now = [e for e in scope.entries.values() if e.written]
    if not isinstance(scope.pass_, Executing):
        return now
    found = scope.pass_.found
    known = list(itertools.compress(found.variables, found.written))
    for entry in now:
        if not any(entry.variable is v for v in known):
            raise DiscoveryMismatch(entry.variable)
    return [scope.entry(v) for v in known]


def _combine_at_boundary(entries: list[Entry], padding: RowMask | None) -> list[Any]:
    """Returns the values that a program stores: one for all replicas of each variable, None for those on demand."""
    diverged = [e for e in entries if (e.diverged or e.policy.on_read) and not e.policy.on_demand]
    combined = dict(zip(map(id, diverged), combine(diverged, padding) if diverged else (), strict=True))
    return [None if e.policy.on_demand else combined.get(id(e), e.value) for e in entries]


def _along(dim: int) -> PartitionSpec:
    """Returns the spec of an array of which each replica has its part along a dim."""
    return PartitionSpec(*(None,) * dim, REPLICA_AXIS)


def _first(tree: PyTree) -> PyTree:
    """Returns what one replica holds of arrays whose leading dim is the replica."""
    return jax.tree.map(_first_of_array, tree)


def _first_of_array(array: jax.Array) -> jax.Array:
    own = lax.squeeze(array, (0,))
    if own.ndim < 2 or jnp.issubdtype(own.dtype, jax.dtypes.extended):
        return own
    # The layout it has anyway. Where it is stated, XLA for CPUs does not fuse the squeeze with a transpose that follows
    # (the first thing a recurrent layer does): together they copy the batch once more, apart they cost nothing.
    return with_layout_constraint(own, Layout(tuple(range(own.ndim))))


def _is_traced(leaf: object) -> bool:
    return isinstance(leaf, jax.core.Tracer)
