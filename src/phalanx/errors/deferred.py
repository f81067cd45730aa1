# SPDX-License-Identifier: Apache-2.0
"""Errors of background threads, which the main thread raises at its next step or call. Standard library only."""

from collections.abc import Callable

failures: list[Exception] = []
"""Errors that the main thread has not raised yet. Steps look at it, so it is a plain list."""


def guarded(fn: Callable[[], None]) -> Callable[[], None]:
    """Returns a function for a background thread, whose error becomes one of the `failures`."""

    def run() -> None:
        try:
            fn()
        except Exception as e:
            # Without a lock, because `append` is atomic.
            failures.append(e)

    return run


def raise_deferred() -> None:
    """Raises the first error of a background thread that was not raised yet."""
    if failures:
        raise failures.pop(0)
