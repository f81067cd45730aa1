# SPDX-License-Identifier: Apache-2.0
"""The programs with which parameter servers apply the updates of optimizers."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Protocol, final

import keras

from phalanx._src import compat
from phalanx._src.compat import Variable
from phalanx._src.parameter_server.remote.plans import Gradient, Placement, UpdateProgram
from phalanx._src.parameter_server.variables.client import Servers
from phalanx._src.programs.export import Exported, export
from phalanx._src.programs.identity import IdentityMap
from phalanx._src.programs.replicas import trace_run
from phalanx._src.tracing import context
from phalanx._src.tracing.strategy import AbstractStrategy, Update
from phalanx._src.typed_jax import shape_dtype
from phalanx.errors import InvalidArgumentError, TraceError

# Their updates depend on norms or products over a whole variable.
_OF_WHOLE_VARIABLES = (keras.optimizers.Adafactor, keras.optimizers.Lamb, keras.optimizers.Muon)


class AbstractHomes(Protocol):
    """What a plan needs to know of the placement of variables, and to change in it. See `Homes`."""

    servers: Servers

    def placement(self, variable: Variable) -> Placement | None:
        """Returns the placement of a variable. None if it has not moved to the servers yet."""

    def take_in(self, variables: Sequence[Variable]) -> None:
        """Moves variables to the servers."""

    def hold(self, variable: Variable, server: int) -> int:
        """Returns the key under which a server holds a variable, or its part of it."""

    def save_new(self) -> None:
        """Takes a snapshot if variables have moved to the servers."""


@final
class UpdatePlans:
    """The updates that the servers have programs for.

    Args:
      homes: the placement of the variables.
      device: strategy of one device, in which updates are traced.
      partitioner: see `Homes`.
      max_staleness: see `Homes`.
    """

    def __init__(
        self,
        homes: AbstractHomes,
        device: AbstractStrategy,
        partitioner: Callable[..., Sequence[int]] | None,
        max_staleness: int | None,
    ) -> None:
        self._homes, self._device, self._partitioner, self._max_staleness = homes, device, partitioner, max_staleness
        self._names = itertools.count()
        self._updates: IdentityMap[dict[tuple[int, ...], tuple[int, Any]]] = IdentityMap()

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
        with self._homes.servers.lock:
            # Its slots must exist before they can be placed next to their variables.
            compat.build_optimizer(update.optimizer, update.variables)
            self._homes.take_in(compat.trained_by(update.optimizer, None))
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
                Gradient(self._homes.placement(v) or (), i if i in step.num_rows else None)
                for v, i in zip(update.variables, numbers, strict=True)
            )
            rate = compat.learning_rate_of(update.optimizer)
            # A program contains the slots of its variables, the learning rate, and the number of rows of each lookup.
            # The optimizer keeps its variables alive, so that no id of them is used again.
            key = (*map(id, update.variables), id(rate), *tables.values())
            updates = self._updates.get(update.optimizer)
            if updates is None:
                updates = self._updates[update.optimizer] = {}
            if key not in updates:
                name = next(self._names)
                for server in sorted({part.server for placement, _ in placements for part in placement}):
                    program = self._program(update, server, tables)
                    self._homes.servers.learn(server, name, program)
                # The value keeps the learning rate alive, because its id is part of the key and must not be reused.
                updates[key] = name, rate
                self._homes.save_new()
            return updates[key][0], placements

    def clips(self, update: Update) -> bool:
        """Whether the worker must clip the gradients of an update, because no server has all of them."""
        optimizer = update.optimizer
        if len(self._homes.servers) == 1 or isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            return False
        # `clipnorm` needs the norm of one gradient, which is divided only if its variable is a table, or a partitioner divides it.
        divides = self._partitioner is not None or any(map(compat.initializer_of, update.variables))
        return bool(optimizer.global_clipnorm or (optimizer.clipnorm and divides))

    def _check_divisible(self, update: Update) -> None:
        """Checks that the servers can apply an optimizer without communicating.

        Raises:
          InvalidArgumentError: the optimizer needs data of several servers at once.
        """
        placements = [self._homes.placement(v) or () for v in update.variables]
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
        if isinstance(update.optimizer, compat.JointOptimizer):
            raise InvalidArgumentError(
                f"{name} over {len(servers)} parameter servers",
                "each server has only some of the variables, but the update of one may depend on all others.",
                "ParameterServerStrategy(ps=1); or an optimizer of Keras",
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
        held = [(v, part) for v in trained for part in self._homes.placement(v) or () if part.server == server]
        held_ids = {id(v) for v, _ in held}
        variables = tuple(v for v in update.variables if id(v) in held_ids)

        def program(gradients: list[Any]) -> None:
            # Otherwise this server would also update the moving averages of variables that other servers hold.
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
            # New values and no increments, because the server puts them in the place of the old ones.
            exported = export(program, gradients, self._homes.servers.platforms, adds=False)
        keys = [self._homes.hold(v, server) for v in exported.variables]
        return UpdateProgram(
            exported.module, tuple(keys), exported.set, tuple(table_of.get(id(v)) for v in exported.variables)
        )
