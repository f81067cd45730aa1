"""Errors of background threads."""

import threading

import pytest

from phalanx.errors import deferred


def test_error_of_a_thread_is_raised_once():
    """In the order in which they happened. Work without an error leaves none."""
    done = []
    for name in ("first", "1", "second"):
        thread = threading.Thread(target=deferred.guarded(lambda name=name: done.append(int(name))))
        thread.start()
        thread.join()
    for name in ("first", "second"):
        with pytest.raises(ValueError, match=name):
            deferred.raise_deferred()
    deferred.raise_deferred()
    assert (done, deferred.failures) == ([1], [])
