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
from jax import lax
from jax.experimental.layout import Layout
from jax.sharding import PartitionSpec

from phalanx._src.compat import dtype_of, is_new
from phalanx._src.mesh.layout import REPLICA_AXIS
from phalanx._src.mesh.values import ComponentSizes, PerReplica
from phalanx._src.programs import exchanges, explain, gathering, own_rows
from phalanx._src.programs.replica_call import ReplicaCall
from phalanx._src.programs.stages import IndivisibleError
from phalanx._src.programs.trace import executing_scope, trace, written_entries
from phalanx._src.runtime.observers import observers
from phalanx._src.tracing import context, equality, slips
from phalanx._src.tracing.boundary import combine, first_component
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
    call = ReplicaCall(strategy, fn, (tuple(args), dict(kwargs)), is_stacked=steps is not None)
    run = _Run(strategy, call, steps)
    return run.inline() if run.is_plain else run.mapped(scope)


class _ReplicaOutputs(NamedTuple):
    """What the program of one replica returns: arrays, their shapes if the program was only traced, or their specs.

    Args:
      results: arrays that may differ between replicas, (1, ...) each.
      mirrored: the arrays of `Mirrored` values.
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
    """One `Strategy.run` inside the trace of a program.

    Args:
      strategy: the strategy.
      call: the call of the replica function.
      steps: how often to call it. None if it is called once, with arguments that are not stacked.
    """

    def __init__(self, strategy: AbstractStrategy, call: ReplicaCall, steps: jax.Array | None) -> None:
        self._strategy, self._call, self._steps = strategy, call, steps

    @property
    def is_plain(self) -> bool:
        """Whether the run is one call for one replica on one device, without padding, so that no `shard_map` is needed."""
        topology = self._strategy.topology
        return topology.is_single and not self._call.batches and self._steps is None and not observers.of_replicas

    def inline(self) -> PyTree:
        """Calls the function for the only replica, in the program's own scope."""
        returned = self._call.run([x[0] for x in self._call.sharded], self._call.whole, jnp.int32(0))
        return returned.nest.join(returned.results, returned.mirrored)

    def mapped(self, scope: LiftScope) -> PyTree:
        """Calls the function for all replicas, under `shard_map`."""
        topology = self._strategy.topology
        scope.pass_.notes.used_per_replica.extend(self._call.sharded)
        discovery = scope.pass_.next_run(functools.partial(self._trace, is_eager=scope.pass_.is_eager))
        entries = [scope.entry(v) for v in discovery.variables]
        taken = [self._taken(scope, entry, written) for entry, written in zip(entries, discovery.written, strict=True)]
        whole = self._call.whole if self._steps is None else [self._steps, *self._call.whole]
        dims = [None] * len(entries) if discovery.eager else gathering.dims_of(discovery.variables, topology)
        body = functools.partial(self._body, discovery, dims=dims)
        outputs = self._shard_map(
            body, (_specs_of_values(discovery, dims), True, True, False), _specs_of_outputs(discovery)
        )([value for value, _ in taken], [parts for _, parts in taken], self._call.sharded, whole)
        results = outputs.results
        if topology.axes:
            # XLA may leave a result sharded over the devices of its replica. Users read results per replica, so gather them.
            results = with_sharding_constraint(results, topology.per_replica)
        components = iter(outputs.parts)
        scope.inner_traces.values_change()
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
        batch = self._call.batches[0] if len(self._call.batches) == 1 else None
        if self._steps is not None:
            rows, batch = rows and rows.of_steps(self._call.num_steps), batch and batch.of_steps(self._call.num_steps)
        return PerReplica(array, rows, batch)

    def _trace(self, *, is_eager: bool) -> Discovery:
        """Traces one call for one replica."""
        sharded, whole = self._call.one_step()
        try:
            discovery = (
                self._trace_shares(sharded, whole, is_eager=is_eager)
                if self._call.shares
                else self._trace_replica(sharded, whole)
            )
        except (TypeError, ValueError) as e:
            if isinstance(e, PhalanxError) or not self._takes_all_rows(sharded, whole):
                raise
            raise explain.fixed_batch_size(e) from e
        self._warn_of_slips(discovery)
        return dataclasses.replace(discovery, steps=None if self._steps is None else self._call.num_steps)

    def _takes_all_rows(self, sharded: list[Any], whole: list[Any]) -> bool:
        """Whether one call for the rows of all replicas can be traced."""
        share = own_rows.whole_share(sharded, [*self._call.sizes, *self._call.batches])
        with contextlib.suppress(Exception):
            self._trace_replica(share.shapes(sharded), whole, own_rows.Gathered([share], self._call.is_empty))
            return self._strategy.num_replicas_in_sync > 1
        return False

    def _trace_shares(self, sharded: list[Any], whole: list[Any], *, is_eager: bool) -> Discovery:
        """Traces one call for each share that replicas have of a batch, and makes one program of the traces."""

        def traces_of(known: own_rows.Gathered) -> list[Discovery]:
            return known.traces(lambda share: self._trace_replica(share.shapes(sharded), whole, known))

        sizes = functools.partial(own_rows.sizes_of_results, shares=self._call.shares, is_empty=self._call.is_empty)
        gathered = own_rows.Gathered(self._call.shares, self._call.is_empty)
        traces = traces_of(gathered)
        if any(map(is_new, traces[0].variables)):
            # A trace that makes variables, for example those of an optimizer, uses them in another order than the traces after it.
            traces = traces_of(gathered)

        def other_numbers() -> Iterable[int]:
            nests = [each.outputs.nest for each in traces]
            return (place for nest in nests for place in nest.other_numbers(nests[0]))

        while not gathered.is_settled(other_numbers()):
            traces = traces_of(gathered)
        of_replicas = [(x, each) for x, each in zip(self._call.shares, traces, strict=True) if x.replicas]
        if refused := equality.differing([each.jaxpr for _, each in of_replicas if each.equal]):
            # A number of rows, for example.
            self._trace_replica(of_replicas[0][0].shapes(sharded), whole, gathered, refused)
        if is_eager:
            own_rows.warn_of_padding(
                "the operations of a step that is executed eagerly have equal shapes on all replicas",
                "run_eagerly=False, or RunOptions(eager=False)",
            )
        else:
            try:
                plan = self._plan(traces, sharded, whole)
                return dataclasses.replace(traces[0], sizes=sizes(traces), plan=plan)
            except IndivisibleError as e:
                hint = "the same collective operations for any number of rows, outside of loops and branches"
                own_rows.warn_of_padding(
                    f"replicas with different numbers of rows exchange different arrays in a step: {e}",
                    "phalanx.get_replica_context().all_gather(x, axis=0)" if str(e).startswith("all_gather") else hint,
                )
        # With a mask, the function may return something else.
        masked = own_rows.Gathered(self._call.shares, self._call.is_empty, is_padded=True)
        return dataclasses.replace(self._trace_replica(sharded, whole), sizes=sizes(traces_of(masked)))

    def _plan(self, traces: Sequence[Discovery], sharded: list[Any], whole: list[Any]) -> own_rows.DividedProgram:
        """Makes one program of the traces of the shares that replicas have.

        Raises:
          IndivisibleError: the traces do not exchange the same.
        """
        used = [share for share in self._call.shares if share.replicas]
        is_any_empty = any(self._call.is_empty)
        differ = equality.differing_results(traces[0].jaxpr, traces[1].jaxpr) if is_any_empty else []
        traces = [each for each, share in zip(traces, self._call.shares, strict=True) if share.replicas]
        variables = traces[0].variables
        if any(list(map(id, each.variables)) != list(map(id, variables)) for each in traces):
            raise IndivisibleError("other variables")
        if any(each.outputs.nest != traces[0].outputs.nest for each in traces):
            raise IndivisibleError("another structure of what the function returns")
        values = [shape_dtype(tuple(v.shape), dtype_of(v)) for v in variables]
        topology = self._strategy.topology
        dims = gathering.dims_of(variables, topology)
        # `eval_shape` returns shapes only, so the program leaves the traced function through a list.
        made: list[own_rows.DividedProgram] = []

        def body(values: PyTree, sharded: PyTree, whole: PyTree) -> PyTree:
            values = [gathering.later(topology, *each) for each in zip(values, dims, strict=True)]
            inputs = [own_rows.Inputs(values, _first(each), whole) for each in sharded]
            made.append(own_rows.DividedProgram(traces, used, inputs, differ))
            return jnp.zeros((1,))

        jax.eval_shape(
            self._shard_map(body, (_specs_of_values(traces[0], dims), True, False), _along(0)),
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
        seeing = [*observers.of_replicas, *([shares] if shares.is_measured else [])]
        if seeing and not discovery.trains([True] * len(sharded) + [False] * len(whole)):
            seeing = []
        plan: own_rows.DividedProgram | None = discovery.plan
        inputs = own_rows.Inputs(state, sharded, whole)
        # One trace, divided only so that the observers see where the replica's own part ends.
        if plan is None and seeing:
            plan = own_rows.DividedProgram([discovery], [], [inputs], [])
        if plan is not None:
            outputs: _ReplicaOutputs = plan.run(inputs, self._call.num_rows, seeing)
        else:
            outputs = exchanges.run(discovery, self._strategy, state, sharded, whole)
        return outputs

    def _warn_of_slips(self, discovery: Discovery) -> None:
        """Warns of mistakes that show in the trace of one replica."""
        num_replicas, num_batches = self._strategy.num_replicas_in_sync, len(self._call.sharded)
        # Keras's trainer weights means correctly. Without an optimizer a mean over rows is not a mistake.
        if num_replicas > 1 and not context.current().averaging and (discovery.optimizers or discovery.updates):
            first = len(discovery.inputs)
            slips.warn_of_mean(discovery.jaxpr, num_replicas, slice(first, first + num_batches))

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
            traces.append(trace(replica, _first(sharded), whole, named=self._call.fn, mapped=True, refused=refused))
            return jnp.zeros((1,))

        try:
            jax.eval_shape(self._shard_map(body, (True, False), _along(0)), sharded, whole)
        except NotImplementedError as e:
            if "Explicit" not in str(e):
                raise
            raise explain.array_of_another_mesh(e) from e
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
        topology = self._strategy.topology
        state = [
            gathering.later(topology, first_component(policy_of(variable), value) if part is None else part[0], dim)
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
            return jnp.zeros((self._call.num_steps, *x.shape), x.dtype)

        one: _ReplicaOutputs = discovery.outputs if discovery.plan is None else discovery.plan.outputs
        stacked = (
            [room(shape_dtype(x.shape[1:], x.dtype)) for x in one.results],
            jax.tree.map(room, one.mirrored),
            # The conditions of steps that do not run stay False, so they record nothing.
            jax.tree.map(room, jax.eval_shape(lambda x: list(map(_always, x)), one.records)),
        )
        # The number of steps is an input, so a shorter last group of steps needs no other program.
        state, (results, mirrored, records) = lax.fori_loop(0, count, body, (state, stacked))
        ends = [x for w, x in zip(discovery.written, state, strict=True) if w]
        entries = [Entry(v, x, x) for v, x in zip(written, ends, strict=True)]
        batches = self._call.rows_of(lax.axis_index(REPLICA_AXIS))
        values = _combine_at_boundary(entries, batches[0] if len(batches) == 1 else None)
        parts = [e.value[None] for e in entries if e.policy.on_read]
        return _ReplicaOutputs([x[None] for x in results], mirrored, values, parts, [], records, one.nest)

    def _replica(
        self, scope: LiftScope, sharded: PyTree, whole: PyTree, gathered: own_rows.Gathered | None = None
    ) -> _ReplicaOutputs:
        """Calls the function for one replica, in `scope`, and combines the variables that it wrote."""
        with scope:
            returned = self._call.run(sharded, whole, lax.axis_index(REPLICA_AXIS), gathered)
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

    def _shard_map(self, body: Callable[..., Any], ins: Sequence[Any], out_specs: Any) -> Callable[..., Any]:
        """Maps `body` over the replicas.

        Args:
          body: the program of one replica.
          ins: for each argument of `body`, whether its leading dim is the replica, or the specs of its arrays.
          out_specs: the specs of what `body` returns.
        """
        mesh = self._strategy.topology.mesh
        if (names := jax.sharding.get_abstract_mesh().axis_names) not in ((), mesh.axis_names):
            raise explain.set_mesh(names)
        return jax.shard_map(
            body,
            mesh=mesh,
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
