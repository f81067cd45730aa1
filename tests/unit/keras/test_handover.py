"""The counters of callbacks that `fit` hands over. With real processes: tests/cluster/test_elastic.py."""

import warnings
from itertools import count

import keras
import numpy as np
import pytest

import phalanx
from phalanx.errors import SlipWarning
from phalanx.keras.backup import FitProgress
from phalanx.keras.handover import Run


@pytest.fixture
def run_of():
    strategy = phalanx.OneDeviceStrategy("cpu:0")

    def make(*given):
        with strategy.scope():
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        hooks = keras.callbacks.CallbackList(list(given), add_history=True, model=model)
        progress = FitProgress(None, None, strategy.topology, lambda: None)
        hooks.on_train_begin()
        run = Run(None, None, hooks, given, progress, 1, 1, None)
        run.note_fresh()
        return run, strategy.topology

    return make


class Counter(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.number, self.best, self.words = 3, np.float32(0.5), {"a": [1, None]}
        self.weights, self.function = [np.ones((2, 2), "float32")], print


@pytest.fixture
def joined(run_of):
    """Returns a callback that has just started, after it has taken over the state of one that has trained."""

    def join(make, train):
        (run, topology), (newcomer, _) = run_of(make()), run_of(make())
        train(run.callbacks[0])
        run.share_counters(topology, has_arrays=True)
        newcomer._counters = run._counters
        newcomer.take_counters(is_new=True)
        return run.callbacks[0], newcomer.callbacks[0]

    return join


@pytest.mark.parametrize("has_arrays", [False, True])
def test_counters_arrive_in_the_run(run_of, has_arrays):
    """Numbers and text, and on demand the best weights so far and the history. Other objects stay as they are."""
    counter = Counter()
    run, topology = run_of(counter)
    history = run.hooks.model.history
    counter.number, counter.best, counter.words = 4, np.float32(0.25), {"b": [2, None]}
    counter.weights, history.history = [np.zeros((2, 2), "float32")], {"loss": [1.0]}
    run.share_counters(topology, has_arrays=has_arrays)
    counter.number, counter.best, counter.words, counter.weights, history.history = 0, 0, {}, None, {}
    run.take_counters(is_new=True)
    assert (counter.number, float(counter.best), counter.words) == (4, 0.25, {"b": [2, None]})
    assert counter.function is print
    if has_arrays:
        np.testing.assert_array_equal(counter.weights[0], np.zeros((2, 2)))
        assert history.history == {"loss": [1.0]}
    else:
        assert counter.weights is None


MONITORS = [keras.callbacks.ReduceLROnPlateau, keras.callbacks.EarlyStopping]


@pytest.mark.parametrize("mode", ["min", "max", "auto"])
@pytest.mark.parametrize("kind", MONITORS)
def test_newcomer_judges_as_the_others(joined, kind, mode):
    """Keras chooses a comparison and the sign of `min_delta` at the first epoch, so a callback that takes over must not choose again."""

    def end_epochs(callback, *losses):
        for epoch, loss in enumerate(losses):
            callback.on_epoch_end(epoch, {"loss": loss})

    survivor, newcomer = joined(
        lambda: kind("loss", patience=9, min_delta=0.05, mode=mode), lambda callback: end_epochs(callback, 1.0, 0.5)
    )
    for callback in (survivor, newcomer):
        end_epochs(callback, 0.49, 0.48, 0.6)
    names = vars(survivor).keys() - {"_model", "model", "params"}
    assert {name: getattr(newcomer, name) for name in names} == {name: getattr(survivor, name) for name in names}
    assert survivor.monitor_op is (keras.ops.greater if mode == "max" else keras.ops.less)


ranks = count()


class Ranked(keras.callbacks.Callback):
    """A callback that knows its process, counts, and holds what cannot be sent."""

    def __init__(self):
        super().__init__()
        self.rank, self.count, self.pending = next(ranks), 0, 3
        self.hook, self.file, self.timer, self.seen = print, None, None, {"a"}

    def train(self):
        """Changes what changes while it trains."""
        self.count, self.pending, self.timer, self.new = 5, None, object(), 1.5


def test_what_belongs_to_a_process_stays(joined):
    """What has not changed in training is not taken over, and what could not be sent is named."""
    with pytest.warns(SlipWarning, match="timer, seen of Ranked cannot be sent to it, so"):
        survivor, newcomer = joined(Ranked, Ranked.train)
    assert newcomer.rank == survivor.rank + 1
    assert (newcomer.count, newcomer.pending, newcomer.new, newcomer.timer) == (5, None, 1.5, None)


class Stateful(keras.callbacks.Callback):
    """A callback that says what its state is."""

    def __init__(self, state):
        super().__init__()
        self.state, self.calls = state, 0

    def get_state(self):
        return self.state

    def set_state(self, state):
        self.state = state


def test_state_of_its_own_is_taken_over(joined):
    """Only that which `get_state` returns; if it cannot be sent, that is named."""

    def train(callback):
        callback.state, callback.calls = {"seen": [np.ones(2), (1, "a")]}, 7

    with warnings.catch_warnings(action="error"):
        _, newcomer = joined(lambda: Stateful(None), train)
    assert newcomer.state["seen"][1] == (1, "a")
    assert newcomer.calls == 0
    with pytest.warns(SlipWarning, match=r"get_state\(\) of Stateful cannot be sent"):
        joined(lambda: Stateful(print), lambda callback: None)


def test_callback_that_has_trained_before(run_of):
    """In a second `fit`, the state that it brought is sent too: a process that joins then has not made the first."""
    counter = Counter()
    run, topology = run_of(counter)
    counter.number = 7
    again, _ = run_of(counter)
    again.fresh = run.fresh
    again.note_fresh()
    again.share_counters(topology)
    counter.number = 3
    again.take_counters(is_new=True)
    assert counter.number == 7


def test_writer_goes_from_chief_to_chief(run_of, tmp_path):
    """Each of them has joined after the last one, and knows what the first one has found to be the best."""
    runs = []
    for number in range(3):
        run, topology = run_of(keras.callbacks.ModelCheckpoint(tmp_path / "best.keras", save_best_only=True))
        (writer,) = run.callbacks
        if runs:
            run.hooks.callbacks.remove(writer)
            run._counters = runs[-1]._counters
            run.take_counters(is_new=True)
            run.promote()
        else:
            writer.on_epoch_end(0, {"val_loss": 0.5})
        assert writer.best == 0.5, number
        run.share_counters(topology)
        runs.append(run)


def test_new_chief_writes_on(run_of, tmp_path):
    """Its writer gets the counters of the former one, and goes on in the same file without another header."""
    file = tmp_path / "log.csv"
    logger = keras.callbacks.CSVLogger(file)
    run, topology = run_of(logger)
    file.write_text("epoch,loss\n0,1.0\n")
    run.share_counters(topology)
    run.hooks.callbacks.remove(logger)
    run.promote()
    assert any(callback is logger for callback in run.hooks.callbacks)
    logger.on_epoch_end(1, {"loss": 0.5})
    logger.on_train_end()
    lines = file.read_text().splitlines()
    assert lines[:2] == ["epoch,loss", "0,1.0"]
    assert lines[2].startswith("1,0.5")
    assert len(lines) == 3
