"""`kill -9` at random moments of a loop that saves: the quick form of `python -m benchmarks kills`."""

import pytest
from benchmarks.kills import play
from tests import forks


@pytest.mark.cover(["workers"], {1})
@pytest.mark.parametrize(("workers", "kills"), [(1, 3), (2, 2)])
def test_killed_training_goes_on_from_its_newest_checkpoint(workers, kills):
    """The newest checkpoint is whole and restored; no step has other rows or another loss than without kills."""
    played = play(workers, kills, seed=workers, popen=forks.Popen)
    assert played.faults == []
    assert played.steps >= 20
