# SPDX-License-Identifier: Apache-2.0
"""Access to the shards of a variable on parameter servers."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import numpy as np
from jax.typing import ArrayLike

from phalanx._src.compat import Variable, dtype_of
from phalanx._src.parameter_server.remote.plans import ServerPart
from phalanx._src.parameter_server.variables.homes import Homes, homes_of
from phalanx.errors import InvalidArgumentError, shown


@final
@dataclass(frozen=True)
class Shard:
    """The rows of a variable that one server holds, as an element of `ShardedVariable.variables`.

    Args:
      server: index of the server.
      start: first row.
      stop: last row, exclusive.
    """

    server: int
    start: int
    stop: int
    _variable: Variable
    _part: ServerPart
    _homes: Homes

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the shard."""
        return (self.stop - self.start, *self._variable.shape[1:])

    def numpy(self) -> np.ndarray:
        """Fetches the rows from the server. May be called in any context except a step."""
        return self._homes.read_part(self._part)

    def assign(self, value: ArrayLike) -> None:
        """Sends new values of the rows to the server. May be called in any context except a step.

        Args:
          value: array of the shape of the shard. It is cast to the dtype of the variable.

        Raises:
          InvalidArgumentError: `value` has another shape.
        """
        array = np.asarray(value, dtype_of(self._variable))
        if array.shape != self.shape:
            raise InvalidArgumentError(
                f"assign an array {array.shape} to rows {self.start} to {self.stop - 1} of {self._variable.path!r}",
                f"the shard has the shape {self.shape}.",
                f"an array of shape {self.shape}",
            )
        if not self._homes.is_newer(self._variable):
            self._homes.write_part(self._part, array)


@final
class ShardedVariable:
    """The shards of a variable on parameter servers. May be created and used in any context except a step.

    Args:
      variable: a variable with at least one dim, created in the scope of a `ParameterServerStrategy`. If no step has used it
        yet, it moves to the servers.
      strategy: the strategy. May be None if a step has used the variable.

    Raises:
      InvalidArgumentError: `variable` is not such a variable.

    Source: tf.distribute's ShardedVariable.

    Example:
      >>> import keras, phalanx
      >>> strategy = phalanx.ParameterServerStrategy(
      ...     variable_partitioner=phalanx.experimental.partitioners.FixedShardsPartitioner(2), workers=1, ps=2)
      >>> with strategy.scope():
      ...     v = keras.Variable([[1.0], [2.0], [3.0]])
      >>> shards = phalanx.experimental.ShardedVariable(v, strategy)
      >>> [(s.server, s.numpy().ravel().tolist()) for s in shards]
      [(0, [1.0, 2.0]), (1, [3.0])]
      >>> strategy.close()
    """

    def __init__(self, variable: Variable, strategy: object = None) -> None:
        homes = strategy.homes if hasattr(strategy, "homes") else homes_of(variable)
        if not isinstance(variable, Variable) or homes is None or not variable.shape:
            raise InvalidArgumentError(
                f"ShardedVariable({shown(variable, 80)})",
                "must be a variable on parameter servers with at least one dim.",
                "ShardedVariable(variable, strategy) with a variable created in the scope of a ParameterServerStrategy",
            )
        homes.take_in([variable])
        rows = variable.shape[0]
        self._variable = variable
        self.variables = tuple(
            Shard(p.server, p.start, rows if p.stop is None else p.stop, variable, p, homes)
            for p in homes.placement(variable) or ()
        )

    @property
    def name(self) -> str:
        """The name of the variable."""
        return str(self._variable.name)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole variable."""
        return tuple(self._variable.shape)

    @property
    def dtype(self) -> str:
        """The dtype of the variable."""
        return dtype_of(self._variable)

    def numpy(self) -> np.ndarray:
        """Fetches the whole variable from the servers."""
        return np.concatenate([shard.numpy() for shard in self.variables])

    def __iter__(self) -> Iterator[Shard]:
        return iter(self.variables)

    def __len__(self) -> int:
        return len(self.variables)

    def __repr__(self) -> str:
        rows = ", ".join(f"{s.start} to {s.stop - 1} on server {s.server}" for s in self)
        return f"ShardedVariable({self._variable.path!r}, rows {rows})"
