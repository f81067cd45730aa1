# SPDX-License-Identifier: Apache-2.0
"""Values that a function records for summaries. They leave its program as outputs, and go to a writer after the run."""

import functools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import keras

from phalanx._src.tracing.discovery import NeedsProgram


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["value", "step", "condition"],
    meta_fields=["kind", "tag", "notes", "writer"],
)
@dataclass(frozen=True, kw_only=True)
class Record:
    """One recorded value. Inside a program its arrays are outputs; `run_steps` stacks them along a dim for steps.

    Args:
      kind: what the value is, for example "scalar".
      tag: name of the value.
      value: the array. None if `notes` has the value.
      step: the training step. None for the default step at the time of the run.
      condition: bool. Whether the value is written. None for always.
      notes: what the writer must know besides the array. Hashable.
      writer: the writer. None for the default writer at the time of the run.
    """

    kind: str
    tag: str
    value: Any
    step: Any = None
    condition: Any = None
    notes: Hashable = None
    writer: "AbstractWriter | None" = None


class AbstractWriter(ABC):
    """Takes records after a program has run."""

    @abstractmethod
    def write(self, record: Record, step: Any) -> None:
        """Writes a record.

        Args:
          record: the record. Its arrays may still be computed.
          step: the default step. It counts if the record has none.
        """


class Defaults(threading.local):
    """What a thread records, and where to.

    Attributes:
      writer: the default writer. None records nothing.
      step: the default step: an integer, an array or a variable. None if there is none.
      condition: whether to record: a bool, an array, or a function that returns one.
      offset: added to the default step, in a loop of `Strategy.run_steps`.
      is_traced: whether `condition` was set by a function that is being traced.
      is_own: whether a function that is being traced has set `writer`.
      is_on: whether programs record, as decided before the program that is being called.
      is_asked: whether a function that is being traced has asked whether to record.
      held: records that are not delivered before an eager step has succeeded. None outside such a step.
    """

    def __init__(self) -> None:
        self.writer: AbstractWriter | None = None
        self.step: Any = None
        self.offset = 0
        self.condition: Any = True
        self.is_traced = False
        self.is_own = False
        self.is_on = True
        self.is_asked = False
        self.held: list[Record] | None = None


defaults = Defaults()


def recording_key() -> Hashable:
    """Decides whether the program that is about to be called records, and returns what selects such a program.

    A program that was traced while recording is off contains nothing of its summaries.
    """
    condition = defaults.condition
    defaults.is_on = is_on = condition is True or bool(condition() if callable(condition) else condition)
    if defaults.writer is None:
        # A function may still record with its own writer.
        return None if is_on else False
    step = defaults.step
    # A program reads the variable that counts steps, so another one selects another program. Numbers are added after the run.
    return is_on, id(step) if isinstance(step, keras.Variable) else step is None


@dataclass(frozen=True)
class Recording:
    """What a thread records when it schedules a step, for the threads that trace the step and that get its records.

    Args:
      key: selects a program. See `recording_key`.
      writer: the default writer.
      step: the default step: an integer or a variable.
      is_on: whether to record.
    """

    key: Hashable = None
    writer: AbstractWriter | None = None
    step: Any = None
    is_on: bool = True

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Records in this thread as in the one that has scheduled the step."""
        with restored():
            defaults.writer, defaults.step, defaults.condition = self.writer, self.step, self.is_on
            yield


_NOTHING = Recording()


def current_recording() -> Recording:
    """Returns the recording settings of this thread. The default step is read now, unless it is a variable."""
    if defaults.writer is None and defaults.condition is True:
        return _NOTHING
    key, step = recording_key(), defaults.step
    if step is not None and not isinstance(step, keras.Variable):
        step = int(step)
    return Recording(key, defaults.writer, step, defaults.is_on)


def deliver(records: Iterable[Record]) -> None:
    """Gives records to their writers."""
    for record in records:
        if defaults.held is not None:
            defaults.held.append(record)
        elif writer := record.writer or defaults.writer:
            # A default step that counts may be a variable, and the record then has its value.
            step = defaults.step
            writer.write(record, step if record.step is not None or step is None else int(step) + defaults.offset)


EITHER_WAY = "either way"
"""Stands for the recording key of a program that contains the same whether it records or not."""


@contextmanager
def noting_questions() -> Iterator[Callable[[], bool]]:
    """Yields a function that returns whether anything inside the context has asked whether to record."""
    before, defaults.is_asked = defaults.is_asked, False
    try:
        yield lambda: defaults.is_asked
    finally:
        defaults.is_asked |= before


@contextmanager
def restored() -> Iterator[None]:
    """Restores the default writer, step and condition of this thread at the end."""
    before = defaults.writer, defaults.step, defaults.condition, defaults.is_traced, defaults.is_own
    try:
        yield
    finally:
        defaults.writer, defaults.step, defaults.condition, defaults.is_traced, defaults.is_own = before


@contextmanager
def counting_from(offset: int) -> Iterator[None]:
    """Adds `offset` to the default step, for one step of `Strategy.run_steps`."""
    before, defaults.offset = defaults.offset, offset
    try:
        yield
    finally:
        defaults.offset = before


@contextmanager
def held() -> Iterator[None]:
    """Holds back what an eager step records until the step ends, and drops it if the step starts again as a program."""
    outer, records = defaults.held, list[Record]()
    defaults.held = records
    try:
        yield
    except NeedsProgram:
        records.clear()
        raise
    finally:
        defaults.held = outer
        deliver(records)
