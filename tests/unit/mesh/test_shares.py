"""Shares that follow measured speeds: only if all replicas were measured, and only if the change is worth a new program."""

import numpy as np
import pytest

from phalanx._src.mesh import shares as module
from phalanx._src.mesh.shares import Shares


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def measured(clock, seconds, rows=10, steps=8, shares=None):
    """Shares after some steps in which each replica takes so long for its rows."""
    shares = shares or Shares(is_measured=True)
    for _ in range(steps):
        began_s = clock[0]
        for replica, own_s in enumerate(seconds):
            clock[0] = began_s
            shares.after_replica_step(replica)
            clock[0] = began_s + own_s
            shares.after_own_part(replica, rows)
    return shares


def adapted(shares, count):
    """The weights after all replicas of one process were compared."""
    shares.adapt(range(count), lambda own: own[None])
    return shares.weights


def test_shares_follow_the_speeds(clock):
    """Rows per second, in sixteenths of the fastest."""
    assert adapted(measured(clock, [1.0, 2.0, 4.0]), 3) == [16.0, 8.0, 4.0]


def test_other_processes_are_compared(clock):
    shares = measured(clock, [1.0])
    shares.adapt(range(1), lambda own: np.stack([own, 2 * own]))
    assert shares.weights == [16.0, 8.0]


def test_small_changes_are_left_alone(clock):
    """Each other share needs a new program."""
    shares = Shares([16.0, 8.0], is_measured=True)
    assert adapted(measured(clock, [1.0, 1.95], shares=shares), 2) == [16.0, 8.0]
    assert adapted(measured(clock, [1.0, 1.2], shares=shares), 2) == [16.0, 13.0]


def test_too_few_measurements(clock):
    """After some steps only, and if a replica had no rows, the shares stay."""
    assert adapted(measured(clock, [1.0, 2.0], steps=7), 2) == []
    assert adapted(measured(clock, [1.0, 2.0], rows=0), 2) == []


def test_first_step_has_no_beginning(clock):
    """Its program was compiled in it."""
    shares = Shares(is_measured=True)
    for _ in range(9):
        shares.after_own_part(0, 10)
    assert adapted(shares, 1) == []


def test_chosen_shares_are_not_measured():
    """No process asks the others."""
    shares = Shares([2.0, 1.0])
    shares.adapt(range(2), lambda _: pytest.fail("asked"))
    assert shares.weights == [2.0, 1.0]
