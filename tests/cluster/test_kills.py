"""`kill -9` at random moments: the quick forms of `python -m benchmarks kills` and `elastic_data`."""

import random

import pytest
from benchmarks import elastic_data
from benchmarks.kills import play
from tests import forks


@pytest.mark.cover(["workers", "kills"], {(1, 2)})
@pytest.mark.parametrize(("workers", "kills"), [(1, 2), (1, 3), (2, 2)])
def test_killed_training_goes_on_from_its_newest_checkpoint(workers, kills):
    """The newest checkpoint is whole and restored; no step has other rows or another loss than without kills."""
    played = play(workers, kills, seed=workers, popen=forks.Popen)
    assert played.faults == []
    assert played.steps >= 20


@pytest.mark.cover(["kind"], {"shuffled by itself"})
@pytest.mark.parametrize("kind", elastic_data.KINDS)
def test_rows_count_once_in_a_group_that_loses_processes(kind):
    """A process joins in the middle of an epoch, whose rest it reads in the order of the others."""
    assert elastic_data.play(kind, 2, 1, random.Random(0), popen=forks.Popen)[1] == ""
