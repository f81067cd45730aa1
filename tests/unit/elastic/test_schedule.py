"""At which steps the processes of an elastic group copy."""

import numpy as np
import pytest

from phalanx._src.elastic.schedule import CopySchedule


def copies(schedule, steps, exchange, *, is_agreed=False):
    """Returns the steps before which a process copies, if each copy takes so many times as long as a step."""
    copied = []
    for step in steps:
        schedule.agree(step, exchange, is_agreed=is_agreed)
        if schedule.is_due(step, exchange, is_agreed=is_agreed, has_missed=False):
            copied.append(step)
            schedule.end_copy(step, 1e-9, is_made=True)
        schedule.begin_steps()
        schedule.end_steps(1)
    return copied


def alone(array):
    return array[None]


def test_fixed_interval_asks_nobody():
    assert copies(CopySchedule(4), range(10), exchange=None) == [0, 4, 8]


def test_longest_interval_of_all_processes_counts():
    """They agree after 8 steps, and again each time that the number of steps has doubled."""
    asked = []

    def exchange(array):
        asked.append(array)
        return np.array([array, [12 if len(asked) == 1 else 20]])

    assert copies(CopySchedule(None), range(45), exchange) == [0, 8, 12, 20, 40]
    assert len(asked) == 3


def test_one_process_that_has_missed_makes_all_copy():
    """If all must ask for the position together. Otherwise each decides alone."""
    schedule = CopySchedule(None)
    schedule.end_copy(0, 0.0, is_made=True)
    assert not schedule.is_due(1, alone, is_agreed=True, has_missed=False)
    assert schedule.is_due(1, lambda array: np.array([array, [True]]), is_agreed=True, has_missed=False)
    assert schedule.is_due(1, None, is_agreed=False, has_missed=True)


@pytest.mark.parametrize(("is_made", "expected"), [(True, [8]), (False, [2])])
def test_copy_that_was_impossible_is_tried_again(is_made, expected):
    schedule = CopySchedule(8)
    schedule.end_copy(1, 0.0, is_made=is_made)
    assert [step for step in range(2, 9) if schedule.is_due(step, alone, is_agreed=False, has_missed=False)][
        :1
    ] == expected


def test_new_group_copies_first():
    """It continues with the interval of the process that had the variables."""
    schedule = CopySchedule(None)
    schedule.continue_at(21, 5)
    assert copies(schedule, range(21, 32), alone) == [21, 25, 30]
