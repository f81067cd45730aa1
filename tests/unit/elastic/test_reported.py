"""What the user's code is told again after a loss: nothing that it knows."""

from phalanx._src.elastic.reported import ReportedProgress


def test_repeated_steps_are_not_new():
    reported = ReportedProgress()
    assert reported.begin_epoch(0)
    for end in (1, 2):
        assert reported.begin_steps(0, end)
        reported.end_steps()
    assert not reported.begin_epoch(0)
    assert [reported.begin_steps(0, end) for end in (1, 2, 3)] == [False, False, True]


def test_process_that_is_behind_catches_up():
    reported = ReportedProgress()
    reported.begin_epoch(0)
    reported.meet([1, 3, 0])
    assert (reported.is_behind, reported.told) == (True, [0, 0, 0])
    reported.catch_up()
    assert (reported.is_behind, reported.told) == (False, [1, 3, 0])


def test_callbacks_count_within_their_epoch():
    reported = ReportedProgress()
    reported.begin_epoch(2)
    reported.end_callbacks(4)
    assert reported.told == [2, 0, 4]
    assert reported.begin_epoch(3)
