# SPDX-License-Identifier: Apache-2.0
"""What the coordinator, the workers and the parameter servers tell each other."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.export
import numpy as np

from phalanx.errors import InputError


class Part(NamedTuple):
    """Some rows of a variable, which one server holds.

    Args:
      server: its number.
      key: under which name it holds them.
      start: the first row.
      stop: the row after the last one; None where it is the whole variable.
    """

    server: int
    key: int
    start: int
    stop: int | None

    def of(self, array: Any) -> Any:
        """Returns these rows of the whole variable."""
        return array if self.stop is None else array[self.start : self.stop]


Placement = tuple[Part, ...]
"""Where a variable is: its parts in order, which follow each other."""


class Spec(NamedTuple):
    """An array without its numbers."""

    shape: tuple[int, ...]
    dtype: np.dtype


class Pusher(NamedTuple):
    """A worker, of which there may have been others of the same number.

    Args:
      worker: its number.
      life: the how-manieth it is.
    """

    worker: int
    life: int


class Rows(NamedTuple):
    """Some rows of a table, or of its gradient.

    Args:
      ids: their numbers in what the server holds, each once.
      values: the rows.
    """

    ids: np.ndarray
    values: np.ndarray


class Gradient(NamedTuple):
    """A gradient that a step computes.

    Args:
      placement: where its variable is.
      table: the number of the variable, where it is a table.
    """

    placement: Placement
    table: int | None


@dataclass(frozen=True)
class StepProgram:
    """What a worker needs to know to do a step.

    Args:
      name: of the function.
      module: the program, as `exported` writes it.
      draws: how many batches it takes from each of the step's resources.
      values: where each of its variables is; None for states of random generators, which come with the step.
      added: numbers of the variables that it adds to.
      set: numbers of those that it assigns.
      updates: of each optimizer's update the name, and the gradients that it takes.
      holders: for variables that several servers hold alike, by their keys, which servers.
      variant: what its results are called.
      ids: the program of what is looked up in tables; empty where nothing is.
      lookups: the numbers of the tables, in the order of its results.
      tables: of each table, how many rows the program takes, and what it is called.
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
    """What a server needs to know to do its part of an optimizer's update.

    Args:
      module: the program: of values and gradients.
      keys: the values that it takes.
      set: which of them it returns anew, by number.
      rows_of: of each value the number of the gradient whose rows it gets, where it is of a table.
    """

    module: bytes
    keys: tuple[int, ...]
    set: tuple[int, ...]
    rows_of: tuple[int | None, ...]


@dataclass(frozen=True)
class Task:
    """One step that is to be done.

    Args:
      step: which step.
      inputs: its arguments.
      resources: the names of the worker's own datasets and values among them.
      seeds: states of the random generators that it draws from, in order.
    """

    step: int
    inputs: tuple[Any, ...]
    resources: tuple[int, ...]
    seeds: tuple[np.ndarray, ...]


@dataclass(frozen=True)
class Push:
    """What one step asks of one server.

    Args:
      pusher: whose step.
      number: the how-manieth of this worker.
      pulled: the version of the values that it was computed with.
      updates: gradients by the update's name.
      added: increments by key.
      set: new values by key.
      others: of the first server's: what each of the others gets that has a part of this step; None where it holds that already.
      asked: of the first server's: what the next step needs of it and of those; None where no further step has begun.
    """

    pusher: Pusher
    number: int
    pulled: int
    updates: dict[int, list[np.ndarray | Rows]] = field(default_factory=dict)
    added: dict[int, np.ndarray] = field(default_factory=dict)
    set: dict[int, np.ndarray] = field(default_factory=dict)
    others: dict[int, Any] = field(default_factory=dict)
    asked: dict[int, Sequence[Any]] | None = None

    @property
    def name(self) -> tuple[Pusher, int]:
        """What tells it from all others."""
        return self.pusher, self.number


@dataclass(frozen=True)
class Decision:
    """Which pushes are one update.

    Args:
      turn: the how-manieth update it is.
      follows: of each server that has a part of it, which update it did before this one.
      parts: of each other server, the names of the pushes and what it gets of them.
    """

    turn: int
    follows: dict[int, int]
    parts: dict[int, list[tuple[tuple[Pusher, int], Any]]]


@dataclass
class Report:
    """What became of some tasks.

    Args:
      results: variants and arrays of the steps that were done, in order; the others were not begun, but for the next one.
      error: what that one raised.
      unknown: for which shapes of its batches the worker has no program for it.
      has_lost_server: whether a server could not be reached.
      is_fenced: whether the servers take this worker for lost.
    """

    results: list[tuple[int, list[np.ndarray]]] = field(default_factory=list)
    error: BaseException | None = None
    unknown: Any = None
    has_lost_server: bool = False
    is_fenced: bool = False


class FencedError(Exception):
    """A worker that was taken for lost has asked for something."""


class LostServerError(Exception):
    """A server cannot do its part of a push, for another one is lost."""


def require_rows(ids: np.ndarray, placement: Placement, table: str) -> None:
    """Raises for rows that a table does not have.

    Args:
      ids: the rows, in order.
      placement: of the table.
      table: what it is called.

    Raises:
      InputError: there are such.
    """
    count = placement[-1].stop or 0
    if len(ids) and not (ids[0] >= 0 and ids[-1] < count):
        raise InputError(
            f"row {ids[0] if ids[0] < 0 else ids[-1]} of {table}",
            f"it has the rows 0 to {count - 1}.",
            "ShardedEmbedding(input_dim=...) greater than every id, or ids % input_dim",
        )


def load(module: bytes) -> Callable[..., Any]:
    """Returns a program that `exported` wrote as a function, which is compiled already."""
    exported: Any = jax.export.deserialize(bytearray(module))
    args, kwargs = exported.in_tree.unflatten(exported.in_avals)
    return jax.jit(exported.call).lower(*args, **kwargs).compile()
