# SPDX-License-Identifier: Apache-2.0
"""Batches that a traced function takes from an iterator: inputs of its program, which each call fetches again.

While a function is traced, `next(iterator)` gives an abstract batch like the next one, and leaves a `Draw`. A call of the
compiled program looks at as many batches of the iterator, and moves it on when the program has run.
"""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from phalanx.errors import ContextError, OutOfRangeError
from phalanx.errors.frames import user_place
from phalanx.tracing.structure import AbstractStream, Arguments


class AbstractIterator(AbstractStream, ABC):
    """An iterator whose batches a program may take."""

    @abstractmethod
    def look(self, index: int) -> tuple[Any] | None:
        """Returns the batch after `index` others, in a tuple, without moving; None if there is none."""

    @abstractmethod
    def advance(self, count: int) -> None:
        """Moves on by as many batches, which were looked at."""


@dataclass(frozen=True)
class Draw:
    """One batch that a function took while it was traced.

    Args:
      iterator: where it took it from.
      index: how many batches of that iterator it had taken before.
      is_optional: whether it goes on if there is none.
      key: what about the batch selects the program; None if there was none.
    """

    iterator: AbstractIterator
    index: int
    is_optional: bool
    key: Hashable


def draw(iterator: AbstractIterator, before: Sequence[Draw], *, is_optional: bool) -> tuple[Draw, Arguments | None]:
    """Returns a draw, and the batch that it found, as the arguments of a call are taken apart; None if there was none.

    Args:
      iterator: where to take it from.
      before: what the function has drawn before.
      is_optional: whether the function goes on if there is none.

    Raises:
      OutOfRangeError: there is none, and the function needs one.
    """
    index = sum(d.iterator is iterator for d in before)
    with (
        jax.core.eval_context()
    ):  # Workers agree on a batch by a program of its own, outside of the one that is traced.
        batch = iterator.look(index)
    if batch is None and not is_optional:
        raise _at_end(index)
    arguments = None if batch is None else Arguments(batch, {})
    return Draw(iterator, index, is_optional, None if arguments is None else arguments.key), arguments


class Draws:
    """The draws of one program. It keeps no iterator alive.

    Args:
      draws: those of its trace, in order.
      streams: the iterators among the arguments of the call that was traced.
    """

    def __init__(self, draws: Sequence[Draw], streams: Sequence[AbstractStream]) -> None:
        numbers = {id(s): i for i, s in enumerate(streams)}
        self._draws = [
            (numbers.get(id(d.iterator), weakref.ref(d.iterator)), d.index, d.is_optional, d.key) for d in draws
        ]

    def look(self, arguments: Arguments) -> list[Arguments] | None:
        """Returns the next batches, taken apart; None if the program is not for them.

        Raises:
          OutOfRangeError: there are not as many as the program needs.
        """
        found = []
        for place, index, is_optional, key in self._draws:
            iterator = self._iterator(place, arguments)
            batch = None if iterator is None else iterator.look(index)
            if batch is None:
                if iterator is not None and not is_optional:
                    raise _at_end(index)
                if iterator is None or key is not None:
                    return None
                continue
            parts = Arguments(batch, {})
            if parts.key != key:
                return None
            found.append(parts)
        return found

    def advance(self, arguments: Arguments) -> None:
        """Moves each iterator on behind the batches that the program has taken."""
        for place, _, _, key in self._draws:
            iterator = self._iterator(place, arguments)
            if key is not None and iterator is not None:
                iterator.advance(1)

    @staticmethod
    def _iterator(place: Any, arguments: Arguments) -> AbstractIterator | None:
        """Returns the iterator at a place among the arguments; or the one that the function closes over, if it is alive."""
        found: Any = arguments.streams[place] if isinstance(place, int) else place()
        return found  # type: ignore[no-any-return]


def _at_end(index: int) -> OutOfRangeError:
    return OutOfRangeError(
        "next(iterator) in a phalanx.function",
        f"the function takes {index + 1} batches per call, and the dataset has only {index} left."
        if index
        else "the dataset has no further batch.",
        "for _ in range(len(dataset)): step(iterator), or iterator.get_next_as_optional() in the function",
    )


def refuse_draw() -> ContextError:
    """Returns the error for a batch that is taken from an iterator where no program can fetch it."""
    return ContextError(
        "next(iterator) in a traced step",
        f"at {user_place()}, in a replica function or the body of a loop or branch, the step would be compiled with this one batch.",
        "pass the batch to the step: strategy.run(step, args=(next(iterator),))",
    )
