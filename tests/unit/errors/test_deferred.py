"""Errors of background threads."""

import threading

import pytest

from phalanx.errors import deferred


def test_error_of_a_thread_is_raised_once():
    """In the order in which they happened."""
    for name in ("first", "second"):
        thread = threading.Thread(target=deferred.guarded(lambda name=name: int(name)))
        thread.start()
        thread.join()
    with pytest.raises(ValueError, match="first"):
        deferred.raise_deferred()
    with pytest.raises(ValueError, match="second"):
        deferred.raise_deferred()
    deferred.raise_deferred()


def test_function_without_an_error_leaves_none():
    """Its work is done."""
    done = []
    deferred.guarded(lambda: done.append(1))()
    assert (done, deferred.failures) == ([1], [])
