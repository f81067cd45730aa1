# SPDX-License-Identifier: Apache-2.0
"""Placement of variables on parameter servers.

A variable is created on the coordinator and moves to the servers at its first use. From then on the Keras variable holds no
array: reading it fetches the value, and assigning it sends the value. The slots of an optimizer are on the server of their
variable, so that an update needs no communication between servers.
"""

import itertools
import logging
import math
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import jax
import keras
import numpy as np
from jax.typing import ArrayLike

from phalanx._src import compat
from phalanx._src.compat import Variable
from phalanx._src.mesh.devices import Held
from phalanx._src.parameter_server.processes.ray import RayCluster
from phalanx._src.parameter_server.remote.plans import Gradient, Placement, ServerPart, UpdateProgram, require_rows
from phalanx._src.parameter_server.remote.server import ParameterServer
from phalanx._src.parameter_server.variables.client import Servers
from phalanx._src.parameter_server.variables.inventory import id_of, labels_of, stored_in
from phalanx._src.parameter_server.variables.partitioners import check_partitions, place, split_rows
from phalanx._src.programs.export import Exported, export
from phalanx._src.programs.identity import IdentityMap
from phalanx._src.programs.replicas import trace_run
from phalanx._src.programs.slots import slot_of
from phalanx._src.tracing import context
from phalanx._src.tracing.policy import describe
from phalanx._src.tracing.strategy import AbstractStrategy, Update
from phalanx._src.typed_jax import shape_dtype
from phalanx.errors import InvalidArgumentError, MixedStrategyError, TraceError

_log = logging.getLogger("phalanx")

# Their updates depend on norms or products over a whole variable.
_OF_WHOLE_VARIABLES = (keras.optimizers.Adafactor, keras.optimizers.Lamb, keras.optimizers.Muon)
# The golden ratio times 2**32, so that the seeds of neighbouring shards, and of tables with neighbouring seeds, differ widely.
_SEED_STRIDE = 0x9E3779B9


class Homes:
    """The placement of all variables of one strategy on its servers.

    Args:
      cluster: starts the processes of the servers.
      device: strategy of one device, in which updates are traced.
      partitioner: maps the shape and dtype of a variable to its number of shards. None for one shard.
      max_staleness: bound of the staleness, in updates. None for no bound.
      snapshot_every_s: seconds between two snapshots of the state of the servers. None for no snapshots.
      timeout_s: seconds that a server may pass without a heartbeat.

    Raises:
      StartupError: a server died during startup.
    """

    def __init__(
        self,
        cluster: RayCluster,
        device: AbstractStrategy,
        partitioner: Callable[..., Sequence[int]] | None,
        *,
        max_staleness: int | None,
        snapshot_every_s: float | None,
        timeout_s: float,
    ) -> None:
        self._device, self._partitioner, self._outlives = device, partitioner, cluster.outlives
        self._max_staleness = max_staleness
        self.servers = Servers(
            cluster,
            self._names_on,
            max_staleness=max_staleness,
            snapshot_every_s=snapshot_every_s,
            timeout_s=timeout_s,
        )
        self._placements: IdentityMap[Placement] = IdentityMap()
        # By key of a part: the path of its variable, and the servers that hold the part.
        self._names: dict[int, str] = {}
        self._holders: dict[int, tuple[int, ...]] = {}
        # In bytes: all parts on each server, and each part by key.
        self._loads = [0] * cluster.ps
        self._sizes: dict[int, int] = {}
        # Values of an earlier start that no variable of this start has taken over yet.
        self._stored = stored_in(self.servers.inventories)
        # The number of scheduled steps, now and when each variable took over its value.
        self._num_steps = 0
        self._steps_before: IdentityMap[int] = IdentityMap()
        stored_keys = {key for stored in self._stored.values() for key in stored.holders}
        self._keys, self._update_names = itertools.count(max(stored_keys, default=-1) + 1), itertools.count()
        self._updates: IdentityMap[dict[tuple[int, ...], tuple[int, Any]]] = IdentityMap()
        # Pairs of a server and a key that no variable of this process needs any more.
        self._unneeded: list[tuple[int, int]] = []
        self._has_new = bool(stored_keys)
        if self.servers.inventories:
            self.servers.tell(ParameterServer.keep, stored_keys)
            self._save_new()
            _log.warning(
                "%d parameter servers were found again, with %d variables. Assignments before the first step do not count, "
                "because these values are newer.",
                len(self.servers),
                len(self._stored),
            )

    def placement(self, variable: Variable) -> Placement | None:
        """Returns the placement of a variable; None if it has not moved to the servers yet."""
        return self._placements.get(variable)

    def held(self, variable: Variable) -> list[Held] | None:
        """Returns the servers of each part of a variable; None if it has not moved to the servers yet."""
        placement = self.placement(variable)
        if placement is None:
            return None
        slices = [slice(None)] * len(variable.shape)
        return [
            Held(f"ps:{server}", tuple([slice(part.start, part.stop), *slices][: len(slices)]), self._sizes[part.key])
            for part in placement
            for server in self._holders[part.key]
        ]

    def holders(self, placements: Iterable[Placement]) -> dict[int, tuple[int, ...]]:
        """Returns, by key, the servers of those parts that several servers hold, such as the number of updates."""
        keys = [part.key for placement in placements for part in placement]
        return {key: self._holders[key] for key in keys if len(self._holders[key]) > 1}

    def add_table(self, table: Variable) -> None:
        """Registers a variable without a value. The servers will initialize its rows."""
        _owners[table] = self
        self.take_over(table)

    def take_over(self, variable: Variable) -> bool:
        """Gives a variable the value that it had in an earlier start, if the servers hold it. Returns whether they do."""
        with self.servers.lock:
            stored = self._stored.pop(id_of(variable), None) if self._stored else None
            if stored is None:
                return False
            self._settle(variable, stored.placement)
            self._holders |= stored.holders
            self._steps_before[variable] = self._num_steps
            return True

    def note_step(self) -> None:
        """Records that a step was scheduled. From now on, assignments to variables that were taken over count."""
        self._num_steps += 1
        self._drop_unneeded()

    def is_newer(self, variable: Variable) -> bool:
        """Whether a variable was taken over after the last step, so that its value is newer than what the script assigns."""
        return self._steps_before.get(variable) == self._num_steps

    def rows(self, table: Variable, ids: np.ndarray) -> jax.Array:
        """Fetches rows of a table from the servers.

        Args:
          table: the table.
          ids: int array of any shape. The rows to fetch.

        Returns:
          An array of shape `ids.shape + (row length,)`.

        Raises:
          InputError: the table does not have one of the rows.
        """
        self.take_in([table])
        rows, places = np.unique(ids, return_inverse=True)
        placement = self.placement(table)
        assert placement is not None
        require_rows(rows, placement, describe(table))
        part_rows = [rows[(rows >= p.start) & (rows < (p.stop or 0))] - p.start for p in placement]
        requests = [(p.server, [(p.key, x)]) for p, x in zip(placement, part_rows, strict=True)]
        values = np.concatenate([arrays[0] for arrays in self.servers.ask(ParameterServer.get, *requests)])
        return jax.numpy.asarray(values[places.reshape(ids.shape)])

    def take_in(self, variables: Sequence[Variable]) -> None:
        """Moves variables to the servers, unless they are already there.

        Raises:
          MixedStrategyError: a variable is on the servers of another strategy.
        """
        for variable in variables:
            if _owners.get(variable) not in (None, self):
                raise MixedStrategyError(
                    f"{describe(variable)} in a step of a ParameterServerStrategy",
                    "the variable is on the parameter servers of another strategy.",
                    "create the variable in the scope of this strategy: with strategy.scope(): ...",
                )
        with self.servers.lock:
            new = [v for v in variables if self.placement(v) is None and not self.take_over(v)]
            for table in [v for v in new if _is_unmade(v)]:
                self._make(table)
            # Tables have a placement now. Place the rest: whole variables balance the loads, shards go to the emptiest.
            new = [v for v in new if self.placement(v) is None]
            shards = [self._num_shards(v) for v in new]
            sizes = [_bytes_of(v) // n for v, n in zip(new, shards, strict=True)]
            whole = [i for i, n in enumerate(shards) if n == 1]
            chosen = dict(zip(whole, place([sizes[i] for i in whole], self._loads), strict=True))
            for i, variable in enumerate(new):
                if shards[i] == 1 and compat.initializer_of(variable) is None:
                    self._move(variable, [(chosen[i], 0, None)])
                    continue
                lightest = sorted(range(len(self._loads)), key=lambda s: self._loads[s])[: shards[i]]
                rows = split_rows(variable.shape[0], shards[i])
                self._move(variable, [(s, r.start, r.stop) for s, r in zip(lightest, rows, strict=True)])
            self._save_new()

    def read(self, variable: Variable) -> jax.Array:
        """Fetches the value of a variable from the servers."""
        self.take_in([variable])
        placement = self.placement(variable)
        assert placement is not None
        parts = [
            arrays[0]
            for arrays in self.servers.ask(ParameterServer.get, *((part.server, [part.key]) for part in placement))
        ]
        return jax.numpy.array(parts[0] if len(parts) == 1 else np.concatenate(parts))

    def write(self, variable: Variable, value: ArrayLike) -> None:
        """Sends the value of a variable to the servers."""
        placement = self.placement(variable)
        assert placement is not None
        array = np.asarray(value)
        for part in placement:
            self.write_part(part, part.of(array))

    def read_part(self, part: ServerPart) -> np.ndarray:
        """Fetches one part of a variable."""
        ((array,),) = self.servers.ask(ParameterServer.get, (part.server, [part.key]))
        return np.array(array)

    def write_part(self, part: ServerPart, value: np.ndarray) -> None:
        """Sends one part of a variable to every server that holds it."""
        self.servers.ask(ParameterServer.put, *((s, {part.key: value}) for s in self._holders[part.key]))

    def plan(self, update: Update, step: Exported) -> tuple[int, tuple[Gradient, ...]]:
        """Sends the servers the programs of an optimizer's update, unless they have them.

        Args:
          update: the optimizer and the variables that it updates.
          step: the program that computes the gradients.

        Returns:
          The number that names the update on the servers, and the gradients that it takes.

        Raises:
          TraceError: the update of a table is requested under bounded staleness.
          InvalidArgumentError: the optimizer needs whole variables or all gradients, but several servers have parts of them.
        """
        with self.servers.lock:
            compat.build_optimizer(update.optimizer, update.variables)
            self.take_in(compat.trained_by(update.optimizer, None))
            self._check_divisible(update)
            numbers = [next((i for i, v in enumerate(step.variables) if v is u), None) for u in update.variables]
            tables = {id(step.variables[i]): n for i, n in step.num_rows.items()}
            if tables and self._max_staleness is not None:
                raise TraceError(
                    f"a ShardedEmbedding under max_staleness={self._max_staleness}",
                    "bounded staleness averages the updates of several workers, which is not supported for tables.",
                    "max_staleness=None, or keras.layers.Embedding",
                )
            placements = tuple(
                Gradient(self._placements.get(v) or (), i if i in step.num_rows else None)
                for v, i in zip(update.variables, numbers, strict=True)
            )
            rate = compat.learning_rate_of(update.optimizer)
            key = (*map(id, update.variables), id(rate), *tables.values())
            updates = self._updates.get(update.optimizer)
            if updates is None:
                updates = self._updates[update.optimizer] = {}
            if key not in updates:
                name = next(self._update_names)
                for server in sorted({part.server for placement, _ in placements for part in placement}):
                    program = self._program(update, server, tables)
                    self.servers.learn(server, name, program)
                # The value keeps the learning rate alive, because its id is part of the key and must not be reused.
                updates[key] = name, rate
                self._save_new()
            return updates[key][0], placements

    def clips(self, update: Update) -> bool:
        """Whether the worker must clip the gradients of an update, because no server has all of them."""
        optimizer = update.optimizer
        if len(self.servers) == 1 or isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            return False
        return bool(optimizer.global_clipnorm or (optimizer.clipnorm and self._partitioner is not None))

    def _check_divisible(self, update: Update) -> None:
        """Checks that the servers can apply an optimizer without communicating.

        Raises:
          InvalidArgumentError: the optimizer needs data of several servers at once.
        """
        placements = [self._placements.get(v) or () for v in update.variables]
        servers = {part.server for placement in placements for part in placement}
        name = type(update.optimizer).__name__
        if len(servers) == 1:
            return
        if isinstance(update.optimizer, keras.optimizers.LossScaleOptimizer):
            raise InvalidArgumentError(
                f"{name} over {len(servers)} parameter servers",
                "each server sees only some of the gradients, so none can check that all are finite.",
                "ParameterServerStrategy(ps=1)",
            )
        if self.clips(update) and update.optimizer.gradient_accumulation_steps:
            raise InvalidArgumentError(
                f"{name} with gradient_accumulation_steps over {len(servers)} parameter servers",
                "the optimizer clips the accumulated sum, but each server has only some of the gradients.",
                "clipvalue=...; or ParameterServerStrategy(ps=1)",
            )
        is_divided = any(len(placement) > 1 for placement in placements)
        if is_divided and isinstance(update.optimizer, _OF_WHOLE_VARIABLES):
            raise InvalidArgumentError(
                f"{name} with variables that are sharded over {len(servers)} parameter servers",
                "its update of a variable depends on all rows of the variable.",
                "variable_partitioner=None",
            )

    def _program(self, update: Update, server: int, tables: dict[int, int]) -> UpdateProgram:
        """Traces the update of the variables that one server holds, and moves their slots there.

        Args:
          update: the optimizer and the variables that it updates.
          server: index of the server.
          tables: number of rows that a step looks up, by the id of the table.
        """
        trained = compat.trained_by(update.optimizer, None)
        held = [(v, part) for v in trained for part in self._placements.get(v) or () if part.server == server]
        held_ids = {id(v) for v, _ in held}
        variables = tuple(v for v in update.variables if id(v) in held_ids)

        def program(gradients: list[Any]) -> None:
            with compat.restricted(update.optimizer, [v for v, _ in held]):
                trace_run(self._device, update.optimizer.apply, (gradients, variables), {})

        # The program takes the rows of a table that a step has looked up, and this server's rows of a sharded variable. Slots
        # of the same shape are sharded like their variable.
        rows = {id(v): tables.get(id(v), (p.stop or 0) - p.start) for v, p in held if p.stop is not None}
        owners = [(v, v) for v, _ in held] + [(s, compat.reference_of(s)) for s in update.optimizer.variables]
        owners = [(s, v) for s, v in owners if v is not None and id(v) in rows and tuple(s.shape) == tuple(v.shape)]
        shapes = [(s, (rows[id(v)], *s.shape[1:])) for s, v in owners]
        table_of = {id(s): i for s, v in owners for i, x in enumerate(variables) if x is v and id(v) in tables}
        with context.enter(context.Mode(self._device, None)), compat.shapes(shapes):
            gradients = [shape_dtype(tuple(v.shape), compat.dtype_of(v)) for v in variables]
            exported = export(program, gradients, self.servers.platforms, adds=False)
        keys = [self._hold(v, server) for v in exported.variables]
        return UpdateProgram(
            exported.module, tuple(keys), exported.set, tuple(table_of.get(id(v)) for v in exported.variables)
        )

    def _hold(self, variable: Variable, server: int) -> int:
        """Returns the key under which a server holds a variable, or its part of it. Moves or copies the variable there."""
        if self.placement(variable) is None and not self.take_over(variable) and _is_unmade(variable):
            self._make(variable)
        if self.placement(variable) is None:
            reference = compat.reference_of(variable)
            like = None if reference is None or reference.shape != variable.shape else self.placement(reference)
            parts = [(p.server, p.start, p.stop) for p in like or () if p.stop is not None]
            self._move(variable, parts or [(server, 0, None)])
        placement = self.placement(variable)
        assert placement is not None
        for part in placement:
            if server in self._holders[part.key]:
                return part.key
        (part,) = placement
        # A variable of the whole optimizer, such as the number of updates. Each server keeps its own copy.
        value = np.asarray(self.read(variable))
        self.servers.ask(ParameterServer.put, (server, {part.key: value}, labels_of(variable, part)))
        self._holders[part.key] = (*self._holders[part.key], server)
        return part.key

    def _num_shards(self, variable: Variable) -> int:
        """Returns the number of shards of a variable, at most one per server. A table has one on each server."""
        if compat.initializer_of(variable) is not None:
            return min(len(self.servers), int(variable.shape[0]))
        if self._partitioner is None or not len(variable.shape):
            return 1
        shape = tuple(variable.shape)
        return min(len(self.servers), check_partitions(shape, self._partitioner(shape, compat.dtype_of(variable))))

    def _make(self, table: Variable) -> None:
        """Initializes a table on the servers, each its own rows. The slots of a table are placed like its rows."""
        reference = compat.reference_of(table)
        if reference is None:
            shards = split_rows(table.shape[0], min(len(self.servers), table.shape[0]))
            parts = [(server, r.start, r.stop) for server, r in enumerate(shards)]
        else:
            self.take_in([reference])
            parts = [(p.server, p.start, p.stop or 0) for p in self._placements.get(reference) or ()]
        placement = tuple(ServerPart(server, next(self._keys), start, stop) for server, start, stop in parts)
        programs = [_rows_program(table, p, i, self.servers.platforms) for i, p in enumerate(placement)]
        self.servers.ask(
            ParameterServer.make,
            *((p.server, p.key, x, labels_of(table, p)) for p, x in zip(placement, programs, strict=True)),
        )
        self._settle(table, placement)

    def _move(self, variable: Variable, parts: Sequence[tuple[int, int, int | None]]) -> None:
        """Sends the value of a variable to the servers. A part is the index of a server, and its first and last row."""
        array = np.asarray(compat.raw_value(variable))
        placement = tuple(ServerPart(server, next(self._keys), start, stop) for server, start, stop in parts)
        sent = ((p.server, {p.key: p.of(array)}, labels_of(variable, p)) for p in placement)
        self.servers.ask(ParameterServer.put, *sent)
        self._settle(variable, placement)

    def _settle(self, variable: Variable, placement: Placement) -> None:
        """Records the placement of a variable, and releases its value in this process."""
        rows, size = variable.shape[0] if variable.shape else 1, _bytes_of(variable)
        for part in placement:
            self._sizes[part.key] = size if part.stop is None else size // max(1, rows) * (part.stop - part.start)
            self._loads[part.server] += self._sizes[part.key]
            self._names[part.key], self._holders[part.key] = variable.path, (part.server,)
        self._has_new = True
        self._placements[variable] = placement
        _owners[variable] = self
        compat.set_raw_values([variable], [None])
        slot_of(variable).store(None, None)
        weakref.finalize(variable, self._forget, placement)

    def _save_new(self) -> None:
        """Takes a snapshot if variables have moved to the servers since the last one, which does not contain them."""
        if self._has_new:
            self.servers.take_snapshot()
        self._has_new = False

    def _forget(self, placement: Placement) -> None:
        for part in placement:
            self._names.pop(part.key, None)
            self._loads[part.server] -= self._sizes.pop(part.key)
            self._unneeded += [(server, part.key) for server in self._holders.pop(part.key, ())]
        # At the end of a script its variables disappear, but its next start needs them. Then no step follows.
        if not self._outlives:
            self._drop_unneeded()

    def _drop_unneeded(self) -> None:
        while self._unneeded:
            self.servers.drop(*self._unneeded.pop())

    def _names_on(self, servers: Collection[int]) -> list[str]:
        """Returns the names of the variables that only these servers hold."""
        return sorted({name for key, name in self._names.items() if set(self._holders[key]) <= set(servers)})


_owners: IdentityMap[Homes] = IdentityMap()


def _fetch(variable: Variable) -> bool:
    """Fills a variable from the servers before it is read. Returns True, which empties the variable after the read."""
    homes = _owners.get(variable)
    if homes is None or compat.lift_scope() is not None:
        return False
    compat.set_raw_values([variable], [homes.read(variable)])
    return True


def _send(variable: Variable) -> None:
    """Sends an assigned value to the servers, and empties the variable."""
    homes = _owners.get(variable)
    # A table that is assigned before its first use moves later, like any other variable.
    if homes is not None and homes.placement(variable) is not None:
        if not homes.is_newer(variable):
            homes.write(variable, compat.raw_value(variable))
        compat.set_raw_values([variable], [None])


def homes_of(variable: Variable) -> Homes | None:
    """Returns the `Homes` that place a variable; None if it is not on any parameter server."""
    return _owners.get(variable)


def _require_servers(variables: Sequence[Variable]) -> None:
    """Checks that the servers of some variables are alive, before Keras opens and truncates a file to save them.

    Raises:
      ServerLostError: a server is lost.
    """
    homes_by_id = {id(homes): homes for v in variables if (homes := _owners.get(v)) is not None}
    for homes in homes_by_id.values():
        homes.servers.tell(ParameterServer.num_applied)


compat.on_first_read(_fetch)
compat.on_assign(_send)
compat.before_saving(_require_servers)


def _bytes_of(variable: Variable) -> int:
    return int(math.prod(variable.shape)) * np.dtype(compat.dtype_of(variable)).itemsize


def _is_unmade(variable: Variable) -> bool:
    """Whether a variable is a table that has neither been initialized nor assigned."""
    return compat.initializer_of(variable) is not None and compat.raw_value(variable) is None


def _rows_program(table: Variable, part: ServerPart, number: int, platforms: Sequence[str]) -> bytes:
    """Returns a serialized program that initializes one server's rows of a table."""
    initializer = compat.initializer_of(table)
    assert initializer is not None
    seed = getattr(initializer, "seed", None)
    if seed is not None:
        initializer = type(initializer).from_config({**initializer.get_config(), "seed": _own_seed(seed, number)})
    shape, dtype = ((part.stop or 0) - part.start, *table.shape[1:]), compat.dtype_of(table)
    make = jax.jit(lambda: jax.numpy.asarray(initializer(shape, dtype=dtype)))
    return bytes(jax.export.export(make, platforms=platforms)().serialize())


def _own_seed(seed: object, number: int) -> int:
    """Returns the seed for shard `number` of a table, different from those of other shards and of other tables."""
    if isinstance(seed, int):
        return (seed + number * _SEED_STRIDE) % 2**31
    return int(keras.random.randint((), 0, 2**31 - 1, seed=seed))
