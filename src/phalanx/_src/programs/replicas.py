# SPDX-License-Identifier: Apache-2.0
"""`Strategy.run` inside a program: one `shard_map` for all replicas."""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout
from jax.sharding import PartitionSpec

from phalanx._src.compat import dtype_of, is_new
from phalanx._src.mesh.arrays import as_array, is_array
from phalanx._src.mesh.layout import REPLICA_AXIS
from phalanx._src.mesh.values import (
    ComponentSizes,
    Mirrored,
    PerReplica,
    check_size,
    differs,
    flatten,
    is_equal_everywhere,
)
from phalanx._src.programs import explain, gathering, own_rows
from phalanx._src.programs.gathering import GatheredLater
from phalanx._src.programs.stages import IndivisibleError
from phalanx._src.programs.trace import executing_scope, trace, written_entries
from phalanx._src.runtime.observers import observers
from phalanx._src.tracing import context, equality, slips
from phalanx._src.tracing.boundary import combine, first_component
from phalanx._src.tracing.context import Mode, ReplicaContext
from phalanx._src.tracing.discovery import Discovery
from phalanx._src.tracing.entry import Entry
from phalanx._src.tracing.policy import policy_of
from phalanx._src.tracing.records import Record
from phalanx._src.tracing.rows import ReplicaRows
from phalanx._src.tracing.scope import LiftScope, program_scope
from phalanx._src.tracing.strategy import AbstractStrategy, Updates
from phalanx._src.tracing.structure import add_once
from phalanx._src.typed_jax import partition_spec, shape_dtype, with_layout_constraint, with_sharding_constraint
from phalanx.errors import PhalanxError
from phalanx.typing import PyTree


def trace_run(
    strategy: AbstractStrategy, fn: Callable[..., Any], args: PyTree, kwargs: PyTree, *, steps: jax.Array | None = None
) -> PyTree:
    """Traces `fn` for all replicas of `strategy` into the program that is being traced.

    Args:
      strategy: the strategy.
      fn: the replica function.
      args: positional arguments of `fn`.
      kwargs: keyword arguments of `fn`.
      steps: int32 array (). How often to call `fn`, with arguments that are stacked along a dim for steps. None to call it
        once, with arguments that are not stacked.

    Returns:
      The nest that `fn` returns, with each array that replicas compute as a `PerReplica`. `Mirrored` values, constants and
      Python objects are returned unchanged. With one replica, exactly what `fn` returns.
    """
    scope = program_scope()
    scope.note_read()
    add_once(strategy, scope.pass_.notes.strategies)
    run = _Run(strategy, fn, (tuple(args), dict(kwargs)), steps)
    return run.inline() if run.is_plain else run.mapped(scope)


@jax.tree_util.register_static
class _Nest:
    """What a replica function returned, without its arrays. A pytree without leaves, so that a traced function can return it.

    Args:
      returned: the nest.
    """

    def __init__(self, returned: PyTree) -> None:
        leaves, self._tree = flatten(returned)
        self._leaves = [_RESULT if _is_traced(x) else _MIRRORED if is_equal_everywhere(x) else x for x in leaves]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Nest) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._tree)

    @property
    def _key(self) -> PyTree:
        # Objects that compare element by element are equal only to themselves.
        return self._tree, [(type(x), x) if isinstance(x, (*_NUMBERS, str)) else id(x) for x in self._leaves]

    def other_numbers(self, other: "_Nest") -> list[int]:
        """Returns the places of numbers that are not those of another nest of equal structure."""
        if self._tree != other._tree:
            return []
        pairs = enumerate(zip(self._leaves, other._leaves, strict=True))
        return [i for i, (x, y) in pairs if isinstance(x, _NUMBERS) and isinstance(y, _NUMBERS) and x != y]

    def join(self, results: Iterable[Any], mirrored: Iterable[Any]) -> PyTree:
        """Returns the nest with these arrays and trees."""
        arrays, trees = iter(results), iter(mirrored)
        pick = lambda x: next(arrays) if x is _RESULT else Mirrored(next(trees)) if x is _MIRRORED else x  # noqa: E731
        return self._tree.unflatten(map(pick, self._leaves))


_RESULT, _MIRRORED = object(), object()
_NUMBERS = (bool, int, float, complex, np.generic)


class _Returned(NamedTuple):
    """What one call of a replica function returned.

    Args:
      results: its arrays that may differ between replicas, in order.
      mirrored: the trees of its `Mirrored` values, in order.
      nest: what the function returned, without its arrays.
      rows: the rows of the replica. None if all replicas have equally many.
    """

    results: list[jax.Array]
    mirrored: list[PyTree]
    nest: _Nest
    rows: ReplicaRows | None


class _ReplicaOutputs(NamedTuple):
    """What the program of one replica returns: arrays, their shapes if the program was only traced, or their specs.

    Args:
      results: arrays that may differ between replicas, (1, ...) each.
      mirrored: the trees of `Mirrored` values.
      values: new values of the variables that the program writes, in order. None for variables that are combined on demand.
      parts: new components of the on-read variables among them, (1, ...) each.
      gradients: one list per update that is applied after the program.
      records: what the function records for summaries, equal on all replicas.
      nest: what the function returned, without its arrays.
    """

    results: Any
    mirrored: Any
    values: Any
    parts: Any
    gradients: Any
    records: Any
    nest: Any


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
        of_replicas = self._of(differs)
        # Per-replica arrays are sharded inputs, other arrays are replicated inputs, and the rest stays in Python.
        self._sharded = [x.data for x in of_replicas]
        self._whole = [x.value for x in self._of(is_equal_everywhere)] + self._of(is_array)
        # The sizes of the arguments of one step, and the batches that they belong to.
        first_dim = 0 if steps is None else 1
        self._sizes = [x.rows and x.rows.without_dims(first_dim) for x in of_replicas]
        self._batches = list(dict.fromkeys(x.batch.without_dims(first_dim) for x in of_replicas if x.rows))
        num_replicas = strategy.num_replicas_in_sync
        self._shares = own_rows.shares_of([*self._sizes, *self._batches], num_replicas) if self._batches else []
        self._is_empty = [all(batch.counts[i] == 0 for batch in self._batches) for i in range(num_replicas)]

    @property
    def is_plain(self) -> bool:
        """Whether the run is one call for one replica on one device, without padding, so that no `shard_map` is needed."""
        topology = self._strategy.topology
        return topology.is_single and not self._batches and self._steps is None and not observers.of_replicas

    def inline(self) -> PyTree:
        """Calls the function for the only replica, in the program's own scope."""
        returned = self._call([x[0] for x in self._sharded], self._whole, jnp.int32(0))
        return returned.nest.join(returned.results, returned.mirrored)

    def mapped(self, scope: LiftScope) -> PyTree:
        """Calls the function for all replicas, under `shard_map`."""
        topology = self._strategy.topology
        scope.pass_.notes.used_per_replica.extend(self._sharded)
        discovery = scope.pass_.next_run(functools.partial(self._trace, is_eager=scope.pass_.is_eager))
        entries = [scope.entry(v) for v in discovery.variables]
        taken = [self._taken(scope, entry, written) for entry, written in zip(entries, discovery.written, strict=True)]
        whole = self._whole if self._steps is None else [self._steps, *self._whole]
        is_one_step = self._steps is None and discovery.plan is None and not discovery.eager
        dims = gathering.dims_of(discovery.variables, topology) if is_one_step else [None] * len(entries)
        body = functools.partial(self._body, discovery, dims=dims)
        outputs = self._shard_map(
            body, (_specs_of_values(discovery, dims), True, True, False), _specs_of_outputs(discovery)
        )([value for value, _ in taken], [parts for _, parts in taken], self._sharded, whole)
        results = outputs.results
        if topology.axes:
            # XLA may leave a result sharded over the devices of its replica. Users read results per replica, so gather them.
            results = with_sharding_constraint(results, topology.per_replica)
        components = iter(outputs.parts)
        scope.values_change()
        for entry, value in zip(itertools.compress(entries, discovery.written), outputs.values, strict=True):
            entry.written = True
            entry.replace(value, next(components) if entry.policy.on_read else None)
        for update, of_update in zip(discovery.updates, outputs.gradients, strict=True):
            left = dataclasses.replace(update, gradients=of_update)
            if self._strategy.updates is Updates.AFTER_PROGRAM:
                scope.defer_update(left)
            else:
                scope.apply_update(self._strategy, left)
        assert scope.records is not None
        scope.records.extend(outputs.records)
        sizes = discovery.sizes or (None,) * len(results)
        wrapped = (self._wrapped(x, rows) for x, rows in zip(results, sizes, strict=True))
        return outputs.nest.join(wrapped, outputs.mirrored)

    def _taken(self, scope: LiftScope, entry: Entry, written: bool) -> tuple[Any, Any]:
        """Returns the value of a variable, and its components if the replicas use their own."""
        if entry.policy.on_demand and not written:
            return scope.value(entry.variable), None
        return entry.value, scope.components(entry.variable, self._strategy.num_replicas_in_sync)

    def _wrapped(self, array: jax.Array, rows: ComponentSizes | None) -> PyTree:
        """Returns a result as `Strategy.run` returns it: a PerReplica, or the array itself if there is one replica."""
        if self._strategy.num_replicas_in_sync == 1 and rows is None and self._steps is None:
            return array[0]
        batch = self._batches[0] if len(self._batches) == 1 else None
        if self._steps is not None:
            rows, batch = rows and rows.of_steps(self._num_steps), batch and batch.of_steps(self._num_steps)
        return PerReplica(array, rows, batch)

    def _trace(self, *, is_eager: bool) -> Discovery:
        """Traces one call for one replica."""
        sharded, whole = self._one_step()
        try:
            discovery = (
                self._trace_shares(sharded, whole, is_eager=is_eager)
                if self._shares
                else self._trace_replica(sharded, whole)
            )
        except (TypeError, ValueError) as e:
            if isinstance(e, PhalanxError) or not self._takes_all_rows(sharded, whole):
                raise
            raise explain.fixed_batch_size(e) from e
        self._warn_of_slips(discovery)
        return dataclasses.replace(discovery, steps=None if self._steps is None else self._num_steps)

    def _takes_all_rows(self, sharded: list[Any], whole: list[Any]) -> bool:
        """Whether one call for the rows of all replicas can be traced."""
        share = own_rows.whole_share(sharded, [*self._sizes, *self._batches])
        with contextlib.suppress(Exception):
            self._trace_replica(share.shapes(sharded), whole, own_rows.Gathered([share], self._is_empty))
            return self._strategy.num_replicas_in_sync > 1
        return False

    def _trace_shares(self, sharded: list[Any], whole: list[Any], *, is_eager: bool) -> Discovery:
        """Traces one call for each share that replicas have of a batch, and makes one program of the traces."""

        def traces_of(known: own_rows.Gathered) -> list[Discovery]:
            return known.traces(lambda share: self._trace_replica(share.shapes(sharded), whole, known))

        sizes = functools.partial(own_rows.sizes_of_results, shares=self._shares, is_empty=self._is_empty)
        gathered = own_rows.Gathered(self._shares, self._is_empty)
        traces = traces_of(gathered)
        if any(map(is_new, traces[0].variables)):
            # A trace that makes variables, for example those of an optimizer, uses them in another order than the traces after it.
            traces = traces_of(gathered)

        def other_numbers() -> Iterable[int]:
            nests = [each.outputs.nest for each in traces]
            return (place for nest in nests for place in nest.other_numbers(nests[0]))

        while not gathered.is_settled(other_numbers()):
            traces = traces_of(gathered)
        of_replicas = [(x, each) for x, each in zip(self._shares, traces, strict=True) if x.replicas]
        if refused := equality.differing([each.jaxpr for _, each in of_replicas if each.equal]):
            # A number of rows, for example.
            self._trace_replica(of_replicas[0][0].shapes(sharded), whole, gathered, refused)
        try:
            plan = None if is_eager else self._plan(traces, sharded, whole)
        except IndivisibleError as e:
            own_rows.warn_of_padding(e)
            plan = None
        if plan is not None:
            return dataclasses.replace(traces[0], sizes=sizes(traces), plan=plan)
        # With a mask, the function may return something else.
        masked = own_rows.Gathered(self._shares, self._is_empty, is_padded=True)
        return dataclasses.replace(self._trace_replica(sharded, whole), sizes=sizes(traces_of(masked)))

    def _plan(self, traces: Sequence[Discovery], sharded: list[Any], whole: list[Any]) -> own_rows.DividedProgram:
        """Makes one program of the traces of the shares that replicas have.

        Raises:
          IndivisibleError: the traces do not exchange the same.
        """
        used = [share for share in self._shares if share.replicas]
        traces = [each for each, share in zip(traces, self._shares, strict=True) if share.replicas]
        variables = traces[0].variables
        if any(list(map(id, each.variables)) != list(map(id, variables)) for each in traces):
            raise IndivisibleError("other variables")
        if any(each.outputs.nest != traces[0].outputs.nest for each in traces):
            raise IndivisibleError("another structure of what the function returns")
        values = [shape_dtype(tuple(v.shape), dtype_of(v)) for v in variables]
        made: list[own_rows.DividedProgram] = []

        def body(values: PyTree, sharded: PyTree, whole: PyTree) -> PyTree:
            inputs = [own_rows.Inputs(values, _first(each), whole) for each in sharded]
            made.append(own_rows.DividedProgram(traces, used, inputs))
            return jnp.zeros((1,))

        jax.eval_shape(
            self._shard_map(body, (list(map(_along, traces[0].dims)), True, False), _along(0)),
            values,
            [share.shapes(sharded) for share in used],
            whole,
        )
        return made[0]

    def _evaluate(
        self, discovery: Discovery, state: list[Any], sharded: list[Any], whole: list[Any]
    ) -> _ReplicaOutputs:
        """Runs one call for one replica."""
        shares = self._strategy.topology.shares
        seeing = [*observers.of_replicas, *([shares] if shares.is_measured else [])] if discovery.optimizers else []
        plan: own_rows.DividedProgram | None = discovery.plan
        inputs = own_rows.Inputs(state, sharded, whole)
        if plan is None and seeing:
            plan = own_rows.DividedProgram([discovery], [], [inputs])
        outputs: _ReplicaOutputs
        if plan is None and any(isinstance(x, GatheredLater) for x in state):
            flat = discovery.flat(state, [], sharded, whole)
            trace = discovery.without_tapes(*(x.whole() if isinstance(x, GatheredLater) else x for x in flat))
            outputs = discovery.result(gathering.evaluate(trace, *flat))
        elif plan is None:
            outputs = discovery.evaluate(state, [], sharded, whole)
        else:
            outputs = plan.run(inputs, self._num_rows, seeing, may_be_empty=any(self._is_empty))
        return outputs

    @property
    def _num_rows(self) -> PyTree:
        """The number of rows of this replica, in a replica function."""
        if len(self._batches) == 1:
            return jnp.asarray(self._batches[0].counts)[lax.axis_index(REPLICA_AXIS)]
        sharded = self._one_step()[0]
        return sharded[0].shape[1] if sharded and sharded[0].ndim > 1 else 1

    def _warn_of_slips(self, discovery: Discovery) -> None:
        """Warns of mistakes that show in the trace of one replica."""
        num_replicas, num_batches = self._strategy.num_replicas_in_sync, len(self._of(differs))
        # Keras's trainer weights means correctly. Without an optimizer a mean over rows is not a mistake.
        if num_replicas > 1 and not context.current().averaging and (discovery.optimizers or discovery.updates):
            first = len(discovery.inputs)
            slips.warn_of_whole_batch(discovery.jaxpr, num_replicas, self._sharded, self._whole)
            slips.warn_of_mean(discovery.jaxpr, num_replicas, slice(first, first + num_batches))

    @property
    def _num_steps(self) -> int:
        """The number of steps that the arguments are stacked for."""
        return int(self._sharded[0].shape[1])

    def _one_step(self) -> tuple[list[Any], list[Any]]:
        """Returns the arguments of one call. Stacked arrays are replaced by the shape of one step."""
        if self._steps is None:
            return self._sharded, self._whole

        def one(x: jax.Array, dim: int) -> jax.ShapeDtypeStruct:
            return shape_dtype(x.shape[:dim] + x.shape[dim + 1 :], x.dtype)

        return [one(x, 1) for x in self._sharded], [one(x, 0) for x in self._whole]

    def _trace_replica(
        self,
        sharded: list[Any],
        whole: list[Any],
        gathered: own_rows.Gathered | None = None,
        refused: Collection[str] = (),
    ) -> Discovery:
        """Traces one call for one replica.

        Args:
          sharded: the shapes of the arguments of the replica.
          whole: the shapes of the arguments that are equal on all replicas.
          gathered: what the replicas gather, if the arguments are the rows of a share and nothing else.
          refused: descriptions of weights of which it is known that replicas assign them different values.
        """
        traces: list[Discovery] = []

        def body(sharded: PyTree, whole: PyTree) -> PyTree:
            replica = functools.partial(self._replica, gathered=gathered)
            traces.append(trace(replica, _first(sharded), whole, named=self._fn, mapped=True, refused=refused))
            return jnp.zeros((1,))

        jax.eval_shape(self._shard_map(body, (True, False), _along(0)), sharded, whole)
        return traces[0]

    def _body(
        self,
        discovery: Discovery,
        values: list[Any],
        parts: list[Any],
        sharded: PyTree,
        whole: PyTree,
        *,
        dims: Sequence[int | None],
    ) -> _ReplicaOutputs:
        """Runs the program of one replica."""
        state = [
            GatheredLater(value, dim)
            if dim is not None
            else first_component(policy_of(variable), value)
            if part is None
            else part[0]
            for variable, value, part, dim in zip(discovery.variables, values, parts, dims, strict=True)
        ]
        sharded = _first(sharded)
        if self._steps is not None:
            return self._loop(discovery, state, sharded, whole)
        if discovery.eager:
            return self._replica(executing_scope(discovery, state, [], sharded, whole, mapped=True), sharded, whole)
        return self._evaluate(discovery, state, sharded, whole)

    def _loop(self, discovery: Discovery, state: list[Any], sharded: list[Any], whole: list[Any]) -> _ReplicaOutputs:
        """Runs several steps. The results of the steps are stacked.

        On-read variables are combined once, after the last step.
        """
        count, arguments = whole[0], (sharded, whole[1:])

        def at(i: jax.Array) -> PyTree:
            return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, keepdims=False), arguments)

        written = [v for v, w in zip(discovery.variables, discovery.written, strict=True) if w]

        def body(i: jax.Array, carry: PyTree) -> PyTree:
            state, stacked = carry
            outputs = self._evaluate(discovery, state, *at(i))
            put = lambda buffer, x: lax.dynamic_update_index_in_dim(buffer, x, i, 0)  # noqa: E731
            records = list(map(_always, outputs.records))
            stacked = jax.tree.map(put, stacked, ([x[0] for x in outputs.results], outputs.mirrored, records))
            components = iter(outputs.parts)
            pairs = zip(written, outputs.values, strict=True)
            new = iter(
                [next(components)[0] if policy_of(v).on_read else first_component(policy_of(v), x) for v, x in pairs]
            )
            return [next(new) if w else x for w, x in zip(discovery.written, state, strict=True)], stacked

        def room(x: jax.ShapeDtypeStruct) -> jax.Array:
            return jnp.zeros((self._num_steps, *x.shape), x.dtype)

        one: _ReplicaOutputs = discovery.outputs if discovery.plan is None else discovery.plan.outputs
        stacked = (
            [room(shape_dtype(x.shape[1:], x.dtype)) for x in one.results],
            jax.tree.map(room, one.mirrored),
            # The conditions of steps that do not run stay False, so they record nothing.
            jax.tree.map(room, jax.eval_shape(lambda x: list(map(_always, x)), one.records)),
        )
        state, (results, mirrored, records) = lax.fori_loop(0, count, body, (state, stacked))
        ends = [x for w, x in zip(discovery.written, state, strict=True) if w]
        entries = [Entry(v, x, x) for v, x in zip(written, ends, strict=True)]
        batches = self._batches_of_replica(lax.axis_index(REPLICA_AXIS))
        values = _combine_at_boundary(entries, batches[0] if len(batches) == 1 else None)
        parts = [e.value[None] for e in entries if e.policy.on_read]
        return _ReplicaOutputs([x[None] for x in results], mirrored, values, parts, [], records, one.nest)

    def _replica(
        self, scope: LiftScope, sharded: PyTree, whole: PyTree, gathered: own_rows.Gathered | None = None
    ) -> _ReplicaOutputs:
        """Calls the function for one replica, in `scope`, and combines the variables that it wrote."""
        with scope:
            returned = self._call(sharded, whole, lax.axis_index(REPLICA_AXIS), gathered)
        written, rows = written_entries(scope), returned.rows
        for entry in written:
            if rows is not None and not entry.policy.on_demand and (entry.diverged or entry.policy.on_read):
                entry.value = rows.with_rows(entry.value, entry.initial)
        parts = [e.value[None] for e in written if e.policy.on_read]
        # In a loop over steps, `_loop` combines on-read variables after the last step.
        now = [e for e in written if self._steps is None or not e.policy.on_read]
        combined = dict(zip(map(id, now), _combine_at_boundary(now, rows), strict=True))
        values = [combined.get(id(e)) for e in written]
        gradients = [u.gradients for u in scope.updates]
        results = [x[None] for x in returned.results]
        return _ReplicaOutputs(results, returned.mirrored, values, parts, gradients, scope.records, returned.nest)

    def _call(
        self, sharded: list[Any], whole: list[Any], replica_id: jax.Array, gathered: own_rows.Gathered | None = None
    ) -> _Returned:
        """Calls the user's function with the arguments of one replica."""
        local_leaves, shared_leaves = iter(sharded), iter(whole)
        leaves = list(self._leaves)
        self._fill(leaves, differs, local_leaves)
        self._fill(leaves, is_equal_everywhere, shared_leaves)
        self._fill(leaves, is_array, shared_leaves)
        args, kwargs = self._tree.unflatten(leaves)
        replica = ReplicaContext(self._strategy, replica_id, self._batches_of_replica(replica_id, gathered))
        with context.enter(Mode(self._strategy, replica)):
            result = explain.call(self._fn, args, kwargs)
        leaves, tree = flatten(result)
        if gathered is not None and gathered.numbers:
            # A replica without rows has traced another number than its own.
            leaves = [_number(x, replica.rows) if i in gathered.numbers else x for i, x in enumerate(leaves)]
            result = tree.unflatten(leaves)
        results = [x for x in leaves if _is_traced(x)]
        mirrored = [x.value for x in leaves if is_equal_everywhere(x)]
        return _Returned(results, mirrored, _Nest(result), replica.rows)

    def _batches_of_replica(
        self, replica_id: jax.Array, gathered: own_rows.Gathered | None = None
    ) -> tuple[ReplicaRows, ...]:
        """Returns the rows that a replica has of each batch.

        Args:
          replica_id: the number of the replica.
          gathered: what the replicas gather, if the arguments are the rows of a share and nothing else. None if they may be padded.
        """
        if gathered is None:
            return tuple(ReplicaRows(x.counts, replica_id, max(1, *x.counts), is_padded=True) for x in self._batches)
        sizes = gathered.share.sizes[len(self._sizes) :]
        return tuple(
            ReplicaRows(x.counts, replica_id, size[0], is_padded=gathered.is_padded, gathered=gathered.sizes)
            for x, size in zip(self._batches, sizes, strict=True)
            if size is not None
        )

    def _fill(self, leaves: list[Any], kind: Callable[[Any], bool], values: Iterable[Any]) -> None:
        places = (i for i, x in enumerate(self._leaves) if kind(x))
        for place, value in zip(places, values, strict=False):
            leaves[place] = value

    def _of(self, kind: Callable[[Any], bool]) -> list[Any]:
        return [x for x in self._leaves if kind(x)]

    def _shard_map(self, body: Callable[..., Any], ins: Sequence[Any], out_specs: Any) -> Callable[..., Any]:
        """Maps `body` over the replicas.

        Args:
          body: the program of one replica.
          ins: for each argument of `body`, whether its leading dim is the replica, or the specs of its arrays.
          out_specs: the specs of what `body` returns.
        """
        return jax.shard_map(
            body,
            mesh=self._strategy.topology.mesh,
            in_specs=tuple(x if isinstance(x, list) else _along(0) if x else partition_spec() for x in ins),
            out_specs=out_specs,
            # Other axes of the mesh stay automatic: XLA partitions each replica's program along them.
            axis_names={REPLICA_AXIS},
            # Without the check, gradients stay local to a replica, and a scan with a constant carry (Keras's LSTM) can be traced.
            check_vma=False,
        )


def _specs_of_outputs(discovery: Discovery) -> _ReplicaOutputs:
    """Returns the specs of the outputs of the replicas' programs."""
    each, same = _along(0), partition_spec()
    values = [_along(dim) for dim in itertools.compress(discovery.dims, discovery.written)]
    gradients = [list(map(_along, u.dims)) for u in discovery.updates]
    return _ReplicaOutputs(each, same, values, each, gradients, records=same, nest=same)


def _specs_of_values(discovery: Discovery, gathered: Sequence[int | None]) -> list[PartitionSpec]:
    """Returns the specs of the variables.

    Args:
      discovery: the trace.
      gathered: for each variable that is gathered where it is used, the dim along which it is sharded.
    """
    return [_along(dim if later is None else later) for dim, later in zip(discovery.dims, gathered, strict=True)]


def _always(record: Record) -> Record:
    """Returns a record with an explicit condition."""
    return record if record.condition is not None else dataclasses.replace(record, condition=jnp.bool_(True))


def _combine_at_boundary(entries: list[Entry], rows: ReplicaRows | None) -> list[Any]:
    """Returns the value of each variable for all replicas. None for variables that several replicas combine on demand."""
    is_alone = lax.axis_size(REPLICA_AXIS) == 1
    diverged = [e for e in entries if (e.diverged or e.policy.is_local) and not e.policy.on_demand]
    values = combine(diverged, rows) if diverged else ()
    combined = {id(e): e.holding(x) for e, x in zip(diverged, values, strict=True)}
    return [None if e.policy.on_demand and not is_alone else combined.get(id(e), e.held) for e in entries]


def _along(dim: int | None) -> PartitionSpec:
    """Returns the spec of an array that is sharded over the replicas along `dim`. None for one that each of them has whole."""
    return partition_spec() if dim is None else partition_spec(*(None,) * dim, REPLICA_AXIS)


def _first(tree: PyTree) -> PyTree:
    """Returns one replica's components of arrays whose leading dim is the replica."""
    return jax.tree.map(_first_of_array, tree)


def _first_of_array(array: jax.Array) -> jax.Array:
    component = lax.squeeze(array, (0,))
    if component.ndim < 2 or jnp.issubdtype(component.dtype, jax.dtypes.extended):
        return component
    # This is the layout that the array has anyway. Stating it keeps XLA on CPUs from fusing the squeeze with a transpose that
    # follows, which a recurrent layer begins with. Fused, they copy the batch once more; apart, they cost nothing.
    return with_layout_constraint(component, Layout(tuple(range(component.ndim))))


def _number(value: PyTree, rows: ReplicaRows | None) -> jax.Array:
    return jnp.asarray(value) if rows is None else rows.with_rows(jnp.asarray(value))


def _is_traced(leaf: object) -> bool:
    return isinstance(leaf, jax.core.Tracer)
