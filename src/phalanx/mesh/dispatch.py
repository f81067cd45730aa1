# SPDX-License-Identifier: Apache-2.0
"""What must be held while a program is dispatched: one lock per process, and the turns of several processes."""

import re
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import jax

from phalanx.cluster import watch
from phalanx.errors import (
    ContextError,
    PeerLostError,
    StateLostError,
)

dispatch_lock = threading.RLock()
"""Two threads that dispatch programs over several devices can deadlock inside XLA, whatever its thread pool."""

_waiting: list[int] = []
"""The threads that wait for a program whose host callbacks run Python meanwhile."""


def process_dispatching() -> AbstractContextManager[Any]:
    """Returns what must be held while a program is dispatched on devices of this process.

    Raises:
      ContextError: called in a host callback of a program that runs.
    """
    if _waiting:
        _require_outside_callbacks()
    return dispatch_lock


@contextmanager
def calling_back() -> Iterator[None]:
    """Marks that this thread waits for a program whose host callbacks run Python meanwhile."""
    _waiting.append(threading.get_ident())
    try:
        yield
    finally:
        _waiting.pop()


def _require_outside_callbacks() -> None:
    # XLA runs callbacks in the thread that waits, or in one of its own, which Python knows as a dummy.
    if threading.get_ident() in _waiting or isinstance(threading.current_thread(), threading._DummyThread):
        raise ContextError(
            "a program was called in a host callback (jax.pure_callback, io_callback or debug.callback) of a step that runs",
            "the step waits for the callback, and the program would wait for the step.",
            "return what the callback needs from the step, and call the program after it",
        )


_NEWS_S = 3.0

_STATUS = re.compile(r"[A-Z_]+: ")


class Turn:
    """Something that all processes do together, one after the other."""

    def __init__(self, own: watch.Watch, is_step: bool) -> None:
        self._watch, self._is_step = own, is_step

    def __enter__(self) -> None:
        if lost := self._watch.loss():
            raise _peer_lost(lost)
        dispatch_lock.acquire()
        self._watch.begin(is_step=self._is_step)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        self._watch.end(is_step=self._is_step, has_failed=error is not None)
        dispatch_lock.release()
        # Where a process dies, what the others see first is a program that fails: all that it can say is less than this.
        if error is not None and _is_of_program(error) and (lost := self._watch.loss(_NEWS_S)):
            raise _peer_lost(lost) from None


def _is_of_program(error: BaseException) -> bool:
    """Whether a program has failed while it ran; what its collectives raise is a ValueError, which begins with a status."""
    if isinstance(error, ValueError):
        return _STATUS.match(str(error)) is not None
    return isinstance(error, (jax.errors.JaxRuntimeError, StateLostError))


def _peer_lost(how: str) -> PeerLostError:
    return PeerLostError(
        how,
        "no step can be done without it.",
        "phalanx run --max-restarts 3 ..., and let the script go on from its last checkpoint",
    )
