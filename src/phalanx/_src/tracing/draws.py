# SPDX-License-Identifier: Apache-2.0
"""Batches that a traced function takes from an iterator. They become inputs of its program.

While a function is traced, `next(iterator)` returns an abstract batch and records a `Draw`. Each call of the compiled program
first looks at the next batches without taking them. The iterator advances after the program has run, so a call that fails loses
no batch.
"""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from phalanx._src.tracing.structure import AbstractStream, Arguments
from phalanx.errors import ContextError, OutOfRangeError
from phalanx.errors.frames import user_place


class AbstractIterator(AbstractStream, ABC):
    """An iterator whose batches can be inputs of a program."""

    @abstractmethod
    def look(self, index: int) -> tuple[Any] | None:
        """Returns the batch `index` batches ahead, in a 1-tuple, without advancing. None if the iterator ends before it."""

    @abstractmethod
    def advance(self, count: int) -> None:
        """Advances by `count` batches, which `look` must have returned."""


@dataclass(frozen=True)
class Draw:
    """One batch that a function took while it was traced.

    Args:
      iterator: the iterator.
      index: number of batches that the function had taken from the iterator before.
      is_optional: whether the function handles the end of the iterator itself.
      key: structure, shapes and dtypes of the batch, which select the program. None if the iterator was at its end.
    """

    iterator: AbstractIterator
    index: int
    is_optional: bool
    key: Hashable


def draw(iterator: AbstractIterator, before: Sequence[Draw], *, is_optional: bool) -> tuple[Draw, Arguments | None]:
    """Looks at the next batch of an iterator.

    Args:
      iterator: the iterator.
      before: the earlier draws of the function.
      is_optional: whether the function handles the end of the iterator itself.

    Returns:
      The draw, and the batch in flat form. The batch is None if the iterator is at its end.

    Raises:
      OutOfRangeError: the iterator is at its end, and `is_optional` is False.
    """
    index = sum(d.iterator is iterator for d in before)
    # With several workers, `look` runs a program in which they agree on the batch. It must not become part of the trace.
    with jax.core.eval_context():
        batch = iterator.look(index)
    if batch is None and not is_optional:
        raise _at_end(index)
    arguments = None if batch is None else Arguments(batch, {})
    return Draw(iterator, index, is_optional, None if arguments is None else arguments.key), arguments


class Draws:
    """The draws of one program. It holds only weak references to iterators.

    Args:
      draws: the draws of the trace, in order.
      streams: the iterators among the arguments of the traced call.
    """

    def __init__(self, draws: Sequence[Draw], streams: Sequence[AbstractStream]) -> None:
        numbers = {id(s): i for i, s in enumerate(streams)}
        # An iterator that is an argument is stored by its position, because the next call may pass another iterator.
        self._draws = [
            (numbers.get(id(d.iterator), weakref.ref(d.iterator)), d.index, d.is_optional, d.key) for d in draws
        ]

    def look(self, arguments: Arguments) -> list[Arguments] | None:
        """Returns the next batches in flat form. None if the program was not compiled for batches like these.

        Raises:
          OutOfRangeError: an iterator has fewer batches than the program needs.
        """
        batches = []
        for source, index, is_optional, key in self._draws:
            iterator = self._iterator(source, arguments)
            batch = None if iterator is None else iterator.look(index)
            if batch is None:
                if iterator is not None and not is_optional:
                    raise _at_end(index)
                # With `key=None` the program was traced at the end of the iterator, which is the case again.
                if iterator is None or key is not None:
                    return None
                continue
            flat_batch = Arguments(batch, {})
            if flat_batch.key != key:
                return None
            batches.append(flat_batch)
        return batches

    def advance(self, arguments: Arguments) -> None:
        """Advances each iterator by the number of batches that the program has taken."""
        for source, _, _, key in self._draws:
            iterator = self._iterator(source, arguments)
            # A draw at the end of the iterator has taken no batch.
            if key is not None and iterator is not None:
                iterator.advance(1)

    @staticmethod
    def _iterator(source: Any, arguments: Arguments) -> AbstractIterator | None:
        """Returns the iterator of one draw, or None if it no longer exists.

        Args:
          source: the position of the iterator among the arguments, or a weak reference if the function closes over it.
          arguments: the arguments of the call.
        """
        iterator: Any = arguments.streams[source] if isinstance(source, int) else source()
        return iterator  # type: ignore[no-any-return]


def _at_end(index: int) -> OutOfRangeError:
    return OutOfRangeError(
        "next(iterator) was called in a phalanx.function",
        f"the function takes {index + 1} batches per call, and the dataset has only {index} left."
        if index
        else "the dataset has no further batch.",
        "for _ in range(len(dataset)): step(iterator), or iterator.get_next_as_optional() in the function",
    )


def refuse_draw() -> ContextError:
    """Returns the error for a draw in a replica function or in a control-flow body, where a batch cannot become an input."""
    return ContextError(
        f"next(iterator) was called in a traced step at {user_place()}",
        "the call is in a replica function or in the body of a loop or branch, so the batch would become a constant of the "
        "compiled step.",
        "pass the batch to the step: strategy.run(step, args=(next(iterator),))",
    )
