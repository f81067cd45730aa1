"""When a hook acts. The steps of TensorFlow are in tests/estimator/recorded.json."""

from refusals import refusals, refused
from tests.estimator.recorded import RECORDED

import phalanx.estimator as estimator
from phalanx.errors import ContextError, InvalidArgumentError
from phalanx.estimator.hooks import timer

test_intervals_that_are_refused = refusals(
    InvalidArgumentError,
    ((), ["every_secs=None and every_steps=None", "exactly one"]),
    ((1, 1), ["every_secs=1 and every_steps=1", "exactly one"]),
    ((-1,), ["every_secs=-1", "more than 0"]),
    (("a",), ["every_secs='a'", "more than 0"]),
    ((None, 0), ["every_steps=0", "positive"]),
    call=lambda arguments: estimator.SecondOrStepTimer(*arguments),
)


def test_steps_equal_those_of_tensorflow():
    """Of steps 0 to 9, the same ones, with the numbers of steps since the last."""
    wanted = RECORDED["hooks"]["hooks"]["SecondOrStepTimer(every_steps=3)"]
    found, clock = [], estimator.SecondOrStepTimer(every_steps=3)
    for step in range(10):
        if clock.should_trigger_for_step(step):
            found.append([step, clock.update_last_triggered_step(step)[1]])
    assert found == wanted["[step, steps since the last] of steps 0 to 9"]
    assert clock.last_triggered_step() == wanted["last_triggered_step"]
    clock.reset()
    assert clock.last_triggered_step() is None
    assert clock.should_trigger_for_step(9)


def test_seconds_between_two_times(monkeypatch):
    """The time decides, but never twice at one step."""
    now = [100.0]
    monkeypatch.setattr(timer.time, "monotonic", lambda: now[0])
    clock = estimator.SecondOrStepTimer(every_secs=10)
    assert clock.update_last_triggered_step(1) == (None, None)
    assert not clock.should_trigger_for_step(2)
    now[0] += 10
    assert not clock.should_trigger_for_step(1)
    assert clock.should_trigger_for_step(2)
    assert clock.update_last_triggered_step(2) == (10, 1)


def test_chief_decides_in_a_graph():
    """Outside an Estimator there is no chief to ask."""
    with refused(ContextError, ["a hook outside a model function"]):
        timer.agreed_by_chief(lambda: True)
    assert timer.agreed(True, 3)
