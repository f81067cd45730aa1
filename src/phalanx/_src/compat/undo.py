# SPDX-License-Identifier: Apache-2.0
"""Undoes eager assignments of Keras variables."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import repeat
from typing import Any

from keras import Variable
from keras.src.backend.common import global_state

from phalanx._src.compat.scope import active_scope

RAW_VALUE = "_value"
"""The attribute of a variable in which Keras stores its array."""


@contextmanager
def undo_log() -> Iterator[Callable[[], None]]:
    """Yields a function that undoes every eager assignment made since the context was entered."""
    log: list[tuple[Variable, Any]] = []
    previous = global_state.get_global_attribute("phalanx_undo_log")
    global_state.set_global_attribute("phalanx_undo_log", log)

    def rollback() -> None:
        # One call of C code, so that no signal handler can interrupt it halfway: Python runs handlers between bytecodes.
        variables, values = zip(*reversed(log), strict=True) if log else ((), ())
        deque(map(setattr, variables, repeat(RAW_VALUE), values), maxlen=0)

    try:
        yield rollback
    finally:
        global_state.set_global_attribute("phalanx_undo_log", previous)
        # An outer log must be able to undo these assignments too.
        if previous is not None:
            previous.extend(log)


@contextmanager
def transaction() -> Iterator[None]:
    """Undoes every eager assignment in the context if an exception leaves it, including one from a signal handler."""
    with undo_log() as rollback:
        try:
            yield
        except BaseException:
            rollback()
            raise


def is_undoable() -> bool:
    """Whether an `undo_log` is open and no Keras scope is."""
    return global_state.get_global_attribute("phalanx_undo_log") is not None and active_scope() is None


def note_old_value(variable: Variable) -> None:
    """Notes the value of a variable that is about to be assigned, if an `undo_log` is open."""
    log = global_state.get_global_attribute("phalanx_undo_log")
    # In `__init__` there is no earlier value to restore.
    if log is not None and RAW_VALUE in vars(variable):
        log.append((variable, variable.value))
