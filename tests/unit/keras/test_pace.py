"""`steps_per_execution="auto"`: `fit` times its steps and chooses."""

import keras
import numpy as np
import pytest
from twins import compiled, same, same_state, twins, under

import phalanx
from phalanx.errors import InvalidArgumentError
from phalanx.keras import pace

pytestmark = pytest.mark.slow

STEPS = 90
RANDOM = np.random.RandomState(5)
X = RANDOM.rand(2 * STEPS, 5).astype("float32")
Y = X[:, :3].argmax(1)
FIT = {"batch_size": 2, "shuffle": False, "verbose": 0, "validation_data": (X[:20], Y[:20])}


class Clock(keras.callbacks.Callback):
    """Tells `fit` the time, and notes the number of steps of each execution.

    Args:
      times: for each number of steps per execution, how long an execution takes, in seconds.
    """

    def __init__(self, times):
        super().__init__()
        self._times, self._now_s, self.numbers = times, 0.0, []

    def now(self):
        return self._now_s

    def on_train_batch_end(self, batch, logs=None):
        self._now_s += self._times[self.model.steps_per_execution]
        self.numbers.append(self.model.steps_per_execution)

    def on_epoch_end(self, epoch, logs=None):
        self._now_s += 100.0  # What is between two epochs does not count.


@pytest.fixture
def clock_of(monkeypatch):
    """Makes the clock that `fit` looks at."""

    def make(times):
        clock = Clock(times)
        monkeypatch.setattr(pace, "perf_counter", clock.now)
        return clock

    return make


@pytest.mark.parametrize(
    ("times", "number", "sixteens"),
    [
        pytest.param({1: 0.001, 16: 0.004}, 16, 15, id="many are faster"),
        pytest.param({1: 0.001, 16: 0.0155}, 1, 6, id="many are hardly faster"),
        pytest.param({1: 0.03}, 1, 0, id="long steps"),
    ],
)
def test_faster_number_is_chosen(strategy, clock_of, capsys, times, number, sixteens):
    """After 3 and 48 steps, and then three and three executions of 16. All numbers stay those of Keras."""
    ours, theirs = twins(strategy, compiled(metrics=["accuracy"], optimizer=lambda: keras.optimizers.SGD(0.02)))
    ours.steps_per_execution = "auto"
    clock = clock_of(times)
    given = FIT | {"epochs": 3}
    same(ours.fit(X, Y, **given, callbacks=[clock]).history, theirs.fit(X, Y, **given).history)
    same_state(ours, theirs)
    assert ours.steps_per_execution == number
    assert clock.numbers.count(16) == sixteens
    assert f"steps_per_execution={number}, because a step takes" in capsys.readouterr().err
    same(ours.evaluate(X, Y, verbose=0), theirs.evaluate(X, Y, verbose=0))
    same(ours.predict(X, verbose=0), theirs.predict(X, verbose=0))


def test_short_training_chooses_nothing(strategy):
    """The next `fit` begins again. `evaluate` and `predict` run single steps until then."""
    model = under(strategy, compiled(steps_per_execution="auto"))
    model.fit(X[:20], Y[:20], **FIT)
    assert model.steps_per_execution == "auto"
    assert model.predict(X, verbose=0).shape == (len(X), 3)
    model.evaluate(X, Y, verbose=0)


def test_programs_of_one_step(clock_of):
    """There is nothing to choose if variables are updated after each program."""
    model = under(phalanx.experimental.CentralStorageStrategy(["cpu:0", "cpu:1"]), compiled(steps_per_execution="auto"))
    model.fit(X, Y, **FIT, callbacks=[clock_of({"auto": 0.001})])
    assert model.steps_per_execution == "auto"


def test_failed_training_chooses_nothing(strategy, clock_of):
    """After an error in the middle of the trial, the next `fit` begins again."""

    def rows():
        yield from zip(X.reshape(-1, 2, 5), Y.reshape(-1, 2), strict=True)
        raise ZeroDivisionError

    model = under(strategy, compiled(steps_per_execution="auto"))
    with pytest.raises(ZeroDivisionError):
        model.fit(rows(), shuffle=False, verbose=0, callbacks=[clock_of({1: 0.001, 16: 0.002})])
    assert model.steps_per_execution == "auto"


def test_number_that_cannot_be(strategy):
    model = under(strategy, compiled(steps_per_execution="often"))
    with pytest.raises(InvalidArgumentError, match=r"steps_per_execution='often'(.|\n)*HINT: .*=16, or \"auto\""):
        model.fit(X, Y, verbose=0)
