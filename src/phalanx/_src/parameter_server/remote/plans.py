# SPDX-License-Identifier: Apache-2.0
"""The messages between the coordinator, the workers and the parameter servers.

Programs and placements are sent once and referred to by number. A step then needs a `Task` from the coordinator to a worker, a
`Push` from the worker to the first server, and a `Decision` from there to the other servers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.export
import numpy as np

from phalanx._src.kernels import optimization
from phalanx.errors import InputError


class ServerPart(NamedTuple):
    """The rows of a variable that one server holds.

    Args:
      server: index of the server.
      key: name of the rows on that server.
      start: first row.
      stop: last row, exclusive. None for a whole variable.
    """

    server: int
    key: int
    start: int
    stop: int | None

    def of(self, array: Any) -> Any:
        """Returns these rows of an array with the shape of the whole variable."""
        return array if self.stop is None else array[self.start : self.stop]


Placement = tuple[ServerPart, ...]
"""The parts of one variable, in the order of its rows."""


class Spec(NamedTuple):
    """The shape and the dtype of an array."""

    shape: tuple[int, ...]
    dtype: np.dtype


class VariableId(NamedTuple):
    """Identifies a variable in every start of a script.

    Args:
      path: path of the variable.
      number: number of variables with this path that the script created before.
      shape: shape of the whole variable.
      dtype: dtype of the variable.
    """

    path: str
    number: int
    shape: tuple[int, ...]
    dtype: str


class Label(NamedTuple):
    """Tells what the value behind a key is.

    Args:
      variable: the variable.
      start: first row.
      stop: last row, exclusive. None for a whole variable.
    """

    variable: VariableId
    start: int
    stop: int | None


class Inventory(NamedTuple):
    """The contents of a server, for a coordinator that finds it again.

    Args:
      lives: generation of each worker, by its index.
      labels: labels of the values, by key. Values without a label are not found again.
    """

    lives: dict[int, int]
    labels: dict[int, Label]


class Pusher(NamedTuple):
    """The identity of a worker process. A worker that is lost is replaced by one with the same index.

    Args:
      worker: index of the worker.
      life: generation: the number of workers that held this index before it.
    """

    worker: int
    life: int


State: TypeAlias = tuple[dict[int, np.ndarray], dict[int, Label], dict[Pusher, int]]
"""What a server holds: values and labels by key, and the number of the last push of each worker that was applied."""


class Rows(NamedTuple):
    """Some rows of a table or of its gradient.

    Args:
      ids: int array (rows,), without duplicates. Indices into the server's part of the table.
      values: array (rows, ...).
    """

    ids: np.ndarray
    values: np.ndarray


class Gradient(NamedTuple):
    """A gradient that a step computes.

    Args:
      placement: placement of its variable.
      table: index of the variable in the step's program if it is a table, else None.
    """

    placement: Placement
    table: int | None


@dataclass(frozen=True)
class WorkerProgram:
    """A compiled step, as sent to the workers. Variables are named by their index in `values`.

    Args:
      name: name of the function.
      module: the program, serialized by `jax.export`.
      draws: number of batches that the step takes from each of its resources.
      values: placement of each variable. None for the states of random generators, which are part of each `Task`.
      added: indices of the variables that the step adds to.
      set: indices of the variables that the step assigns.
      updates: per optimizer update, its name on the servers and the gradients that it takes.
      holders: servers by key, for parts that several servers hold.
      variant: number that tells the coordinator how to interpret the results.
      ids: serialized program that computes the ids to look up in tables. Empty if there are none.
      lookups: index of the table of each result of `ids`.
      tables: by index of a table, the number of rows that the program takes, and the name of the table.
    """

    name: str
    module: bytes
    draws: tuple[int, ...]
    values: tuple[Placement | None, ...]
    added: tuple[int, ...]
    set: tuple[int, ...]
    updates: tuple[tuple[int, tuple[Gradient, ...]], ...]
    holders: dict[int, tuple[int, ...]]
    variant: int = 0
    ids: bytes = b""
    lookups: tuple[int, ...] = ()
    tables: dict[int, tuple[int, str]] = field(default_factory=dict)


@dataclass(frozen=True)
class UpdateProgram:
    """One server's part of an optimizer's update.

    Args:
      module: serialized program, from values and gradients to new values.
      keys: keys of the values that the program takes.
      set: indices of the values that the program returns.
      rows_of: per value, the index of the gradient that selects its rows. None for a value that does not belong to a table.
    """

    module: bytes
    keys: tuple[int, ...]
    set: tuple[int, ...]
    rows_of: tuple[int | None, ...]


@dataclass(frozen=True)
class StepCall:
    """One step for a worker to run.

    Args:
      step: number of the step's function.
      inputs: leaves of the arguments.
      resources: names of the per-worker datasets and values among the arguments.
      seeds: states of the random generators that the step draws from, in the order of the program.
    """

    step: int
    inputs: tuple[Any, ...]
    resources: tuple[int, ...]
    seeds: tuple[np.ndarray, ...]


@dataclass(frozen=True)
class Push:
    """The changes of one step for one server.

    The push to the first server also carries the pushes for all other servers, so that one server decides about the whole step.

    Args:
      pusher: the worker.
      number: index of the step, counted per worker.
      pulled: version of the values that the step was computed with.
      updates: gradients by the name of the update.
      added: increments by key.
      set: new values by key.
      peer_pushes: on the first server, the push for each other server. None for a server that already holds its push.
      requests: on the first server, the values that the next step needs, per server. None if there is no next step yet.
    """

    pusher: Pusher
    number: int
    pulled: int
    updates: dict[int, list[np.ndarray | Rows]] = field(default_factory=dict)
    added: dict[int, np.ndarray] = field(default_factory=dict)
    set: dict[int, np.ndarray] = field(default_factory=dict)
    peer_pushes: dict[int, Any] = field(default_factory=dict)
    requests: dict[int, Sequence[Any]] | None = None

    @property
    def name(self) -> tuple[Pusher, int]:
        """The key of the push, unique among all pushes."""
        return self.pusher, self.number


@dataclass(frozen=True)
class Decision:
    """The order of one update, as the first server sends it to the others.

    Args:
      turn: number of the update.
      follows: per server that takes part, the turn of its previous update.
      parts: per other server, pairs of the name of a push and the server's part of it. None for a part that it holds.
    """

    turn: int
    follows: dict[int, int]
    parts: dict[int, list[tuple[tuple[Pusher, int], Any]]]


class Pushed(NamedTuple):
    """A push that may have been applied, and the results of its step.

    Args:
      number: number of the push.
      variant: variant of the results.
      arrays: arrays of the results.
    """

    number: int
    variant: int
    arrays: list[np.ndarray]


@dataclass
class StepReport:
    """A worker's report on some tasks. The steps after `results` were not run, except that the next one may have failed.

    Args:
      results: variant and arrays of each finished step, in order.
      error: exception that the next step raised.
      unknown: shapes of the batches of the next step, if the worker has no program for them.
      pushed: the push of the next step, if no server has answered it.
      has_lost_server: whether a server could not be reached.
      is_fenced: whether the servers have declared this worker lost.
    """

    results: list[tuple[int, list[np.ndarray]]] = field(default_factory=list)
    error: BaseException | None = None
    unknown: Any = None
    pushed: Pushed | None = None
    has_lost_server: bool = False
    is_fenced: bool = False


class FencedError(Exception):
    """A server rejects a call, because its worker was declared lost."""


class LostServerError(Exception):
    """A push cannot be applied, because another server is lost."""


def require_rows(ids: np.ndarray, placement: Placement, table: str) -> None:
    """Checks that a table has the requested rows.

    Args:
      ids: int array (rows,), sorted.
      placement: placement of the table.
      table: name of the table, for the message.

    Raises:
      InputError: an id is negative or too large.
    """
    count = placement[-1].stop or 0
    if len(ids) and not (ids[0] >= 0 and ids[-1] < count):
        raise InputError(
            f"row {ids[0] if ids[0] < 0 else ids[-1]} of {table}",
            f"the table has the rows 0 to {count - 1}.",
            "ShardedEmbedding with an input_dim greater than every id, or ids % input_dim",
        )


def load(module: bytes) -> Callable[..., Any]:
    """Deserializes and compiles a program, and returns it as a function."""
    # `jax.export.deserialize` is documented for a bytearray, not for bytes.
    exported: Any = jax.export.deserialize(bytearray(module))
    args, kwargs = exported.in_tree.unflatten(exported.in_avals)
    return jax.jit(exported.call).lower(*args, **kwargs).compile(optimization.compiler_options(jax.local_devices()))
