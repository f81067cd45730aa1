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
from collections.abc import Callable, Sequence

import jax
import keras
import numpy as np
from jax.typing import ArrayLike

from phalanx._src import compat
from phalanx._src.compat import Variable
from phalanx._src.mesh.devices import Held
from phalanx._src.parameter_server.processes.ray import RayCluster
from phalanx._src.parameter_server.remote.plans import Placement, ServerPart, require_rows
from phalanx._src.parameter_server.remote.server import ParameterServer
from phalanx._src.parameter_server.variables.client import Servers
from phalanx._src.parameter_server.variables.inventory import id_of, labels_of, stored_in
from phalanx._src.parameter_server.variables.ledger import Ledger
from phalanx._src.parameter_server.variables.partitioners import check_partitions, place, split_rows
from phalanx._src.parameter_server.variables.update_plans import UpdatePlans
from phalanx._src.programs.identity import IdentityMap
from phalanx._src.programs.slots import slot_of
from phalanx._src.tracing.policy import describe
from phalanx._src.tracing.strategy import AbstractStrategy
from phalanx.errors import MixedStrategyError

_log = logging.getLogger("phalanx")

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

    Attributes:
      servers: the servers.
      ledger: which of them holds what.
      updates: the updates that they have programs for.

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
        self._partitioner, self._outlives = partitioner, cluster.outlives
        self.ledger = Ledger(cluster.ps)
        self.servers = Servers(
            cluster,
            self.ledger.names_on,
            max_staleness=max_staleness,
            snapshot_every_s=snapshot_every_s,
            timeout_s=timeout_s,
        )
        self.updates = UpdatePlans(self, device, partitioner, max_staleness)
        self._placements: IdentityMap[Placement] = IdentityMap()
        # Values of an earlier start that no variable of this start has taken over yet.
        self._stored = stored_in(self.servers.inventories)
        # The number of scheduled steps, now and when each variable took over its value.
        self._num_steps = 0
        self._steps_before: IdentityMap[int] = IdentityMap()
        stored_keys = {key for stored in self._stored.values() for key in stored.holders}
        self._keys = itertools.count(max(stored_keys, default=-1) + 1)
        self._has_new = bool(stored_keys)
        if self.servers.inventories:
            self.servers.tell(ParameterServer.keep, stored_keys)
            self.save_new()
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
            Held(
                f"ps:{server}",
                tuple([slice(part.start, part.stop), *slices][: len(slices)]),
                self.ledger.size(part.key),
            )
            for part in placement
            for server in self.ledger.holders(part.key)
        ]

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
            self.ledger.add_holders(stored.holders)
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
        rows, places = np.unique(ids, return_inverse=True)  # Each row crosses the network once.
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
            shards = [_num_shards(v, len(self.servers), self._partitioner) for v in new]
            sizes = [_bytes_of(v) // n for v, n in zip(new, shards, strict=True)]
            whole = [i for i, n in enumerate(shards) if n == 1]
            chosen = dict(zip(whole, place([sizes[i] for i in whole], self.ledger.loads), strict=True))
            for i, variable in enumerate(new):
                if shards[i] == 1 and compat.initializer_of(variable) is None:
                    self._move(variable, [(chosen[i], 0, None)])
                    continue
                lightest = sorted(range(len(self.ledger.loads)), key=lambda s: self.ledger.loads[s])[: shards[i]]
                rows = split_rows(variable.shape[0], shards[i])
                self._move(variable, [(s, r.start, r.stop) for s, r in zip(lightest, rows, strict=True)])
            self.save_new()

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
        return np.array(array)  # A copy for the user, because arrays from Ray are read-only.

    def write_part(self, part: ServerPart, value: np.ndarray) -> None:
        """Sends one part of a variable to every server that holds it."""
        self.servers.ask(ParameterServer.put, *((s, {part.key: value}) for s in self.ledger.holders(part.key)))

    def hold(self, variable: Variable, server: int) -> int:
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
            if server in self.ledger.holders(part.key):
                return part.key
        (part,) = placement
        # A variable of the whole optimizer, such as the number of updates. Each server keeps its own copy.
        value = np.asarray(self.read(variable))
        self.servers.ask(ParameterServer.put, (server, {part.key: value}, labels_of(variable, part)))
        self.ledger.add_holders({part.key: (*self.ledger.holders(part.key), server)})
        return part.key

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
        # The value leaves this process in `_settle`, after the servers have confirmed that they have it.
        sent = ((p.server, {p.key: p.of(array)}, labels_of(variable, p)) for p in placement)
        self.servers.ask(ParameterServer.put, *sent)
        self._settle(variable, placement)

    def _settle(self, variable: Variable, placement: Placement) -> None:
        """Records the placement of a variable, and releases its value in this process."""
        rows, size = variable.shape[0] if variable.shape else 1, _bytes_of(variable)
        for part in placement:
            of_part = size if part.stop is None else size // max(1, rows) * (part.stop - part.start)
            self.ledger.add(part, variable.path, of_part)
        self._has_new = True
        self._placements[variable] = placement
        _owners[variable] = self
        compat.set_raw_values([variable], [None])
        slot_of(variable).store(None, None)
        # The servers free the memory once this process can no longer ask for the variable.
        weakref.finalize(variable, self._forget, placement)

    def save_new(self) -> None:
        """Takes a snapshot if variables have moved to the servers since the last one, which does not contain them."""
        if self._has_new:
            self.servers.take_snapshot()
        self._has_new = False

    def _forget(self, placement: Placement) -> None:
        self.ledger.remove(placement)
        # At the end of a script its variables disappear, but its next start needs them. Then no step follows.
        if not self._outlives:
            self._drop_unneeded()

    def _drop_unneeded(self) -> None:
        while (unneeded := self.ledger.pop_unneeded()) is not None:
            self.servers.drop(*unneeded)


_owners: IdentityMap[Homes] = IdentityMap()


def _fetch(variable: Variable) -> bool:
    """Fills a variable from the servers before it is read. Returns True, which empties the variable after the read."""
    homes = _owners.get(variable)
    if homes is None or compat.lift_scope() is not None:  # A step that is being traced has the variable as an input.
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


def _num_shards(variable: Variable, most: int, partitioner: Callable[..., Sequence[int]] | None) -> int:
    """Returns the number of shards of a variable, at most one per server. A table has one on each server."""
    if compat.initializer_of(variable) is not None:
        return min(most, int(variable.shape[0]))
    if partitioner is None or not len(variable.shape):
        return 1
    shape = tuple(variable.shape)
    return min(most, check_partitions(shape, partitioner(shape, compat.dtype_of(variable))))


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
