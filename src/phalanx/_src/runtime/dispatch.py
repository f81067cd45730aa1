# SPDX-License-Identifier: Apache-2.0
"""Serializes the dispatch of programs: one lock per process, and one turn at a time for several processes."""

import re
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import jax

from phalanx._src.cluster.watch import membership, watch
from phalanx.errors import ContextError, PeerLostError, StateLostError

dispatch_lock = threading.RLock()
"""Two threads that dispatch multi-device programs can deadlock inside XLA, whatever the size of its thread pool."""

_waiting: list[int] = []
"""Identifiers of the threads that wait for a program whose host callbacks run Python code."""


def process_dispatching() -> AbstractContextManager[Any]:
    """Returns the lock to hold while a program is dispatched on devices of this process.

    Raises:
      ContextError: called in a host callback of a running program.
    """
    if _waiting:
        _require_outside_callbacks()
    return dispatch_lock


@contextmanager
def calling_back() -> Iterator[None]:
    """Marks that this thread waits for a program whose host callbacks run Python code."""
    thread = threading.get_ident()
    _waiting.append(thread)
    try:
        yield
    finally:
        _waiting.remove(thread)  # Another thread may have begun to wait since.


def _require_outside_callbacks() -> None:
    # A program that is called in a host callback can hang (https://github.com/jax-ml/jax/issues/24255). XLA runs
    # callbacks in the waiting thread, or in a separate thread, which Python represents as a dummy thread.
    if threading.get_ident() in _waiting or isinstance(threading.current_thread(), threading._DummyThread):
        raise ContextError(
            "a program was called in a host callback (jax.pure_callback, io_callback or debug.callback) of a step",
            "the step waits for the callback, and the program would wait for the step.",
            "return the inputs of the callback from the step, and call the program after the step",
        )


_NEWS_S = 5.0
"""Time in seconds to wait for a report of a lost process, after a program has failed."""

_STATUS = re.compile(r"[A-Z_]+: ")


class Turn:
    """A context manager for work that all processes do together, such as a step, in the same order."""

    def __init__(self, watchdog: watch.Watch, is_step: bool) -> None:
        self._watch, self._is_step = watchdog, is_step

    def __enter__(self) -> None:
        if lost := self._watch.loss():
            raise _peer_lost(lost)
        dispatch_lock.acquire()
        self._watch.operations.begin(is_step=self._is_step)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        self._watch.operations.end(is_step=self._is_step, has_failed=error is not None)
        dispatch_lock.release()
        # If a process dies, a program fails first in the other processes. The report of the watchdog has more details, so it
        # replaces the error of the program.
        if error is not None and _is_of_program(error) and (lost := self._watch.loss(_NEWS_S)):
            raise _peer_lost(lost) from None


def raise_again(watchdog: watch.Watch) -> None:
    """Raises the loss of a process again that a call has raised before.

    Code of the user that catches every exception, such as a damaged batch, would otherwise skip step after step.

    Raises:
      PeerLostError: a process was lost, and a call has raised that.
    """
    if watchdog.has_told_loss and (lost := watchdog.loss()):
        raise _peer_lost(lost)


def _is_of_program(error: BaseException) -> bool:
    """Returns whether a running program raised an error. Collectives raise a ValueError that begins with a status."""
    if isinstance(error, ValueError):
        return _STATUS.match(str(error)) is not None
    return isinstance(error, (jax.errors.JaxRuntimeError, StateLostError))


def _peer_lost(how: str) -> PeerLostError:
    if membership.is_elastic():
        hint = (
            "train with fit, or with: for loss in phalanx.elastic.steps(train_step, dataset). If a process dies outside them, "
            "or before the first step, the group ends; phalanx run --max-restarts 3 restarts it"
        )
    else:
        hint = (
            "phalanx run --workers MIN:MAX keeps the other workers training; "
            "--max-restarts 3 restarts a script that resumes from a checkpoint"
        )
    return PeerLostError(how, "no step can run without it.", hint)
