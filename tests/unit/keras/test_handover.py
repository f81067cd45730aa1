"""The counters of callbacks that `fit` hands over. With real processes: tests/cluster/test_elastic.py."""

import keras
import numpy as np
import pytest

import phalanx
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
        return Run(None, None, hooks, given, progress, 1, 1, None), strategy.topology

    return make


class Counter(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.number, self.best, self.words = 3, np.float32(0.5), {"a": [1, None]}
        self.weights, self.function = [np.ones((2, 2), "float32")], print


@pytest.mark.parametrize("has_arrays", [False, True])
def test_counters_arrive_in_the_run(run_of, has_arrays):
    """Numbers and text, and on demand the best weights so far and the history. Other objects stay as they are."""
    counter = Counter()
    run, topology = run_of(counter)
    history = run.hooks.model.history
    history.history = {"loss": [1.0]}
    run.share_counters(topology, has_arrays=has_arrays)
    counter.number, counter.best, counter.words, counter.weights, history.history = 0, 0, {}, None, {}
    run.take_counters()
    assert (counter.number, float(counter.best), counter.words) == (3, 0.5, {"a": [1, None]})
    assert counter.function is print
    if has_arrays:
        np.testing.assert_array_equal(counter.weights[0], np.ones((2, 2)))
        assert history.history == {"loss": [1.0]}
    else:
        assert counter.weights is None


def test_new_chief_writes_on(run_of, tmp_path):
    """Its writer gets the counters of the former one, and goes on in the same file without another header."""
    file = tmp_path / "log.csv"
    file.write_text("epoch,loss\n0,1.0\n")
    logger = keras.callbacks.CSVLogger(file)
    run, topology = run_of(logger)
    run.share_counters(topology)
    run.hooks.callbacks.remove(logger)
    run.promote(lambda callback: callback is logger)
    assert any(callback is logger for callback in run.hooks.callbacks)
    logger.on_epoch_end(1, {"loss": 0.5})
    logger.on_train_end()
    lines = file.read_text().splitlines()
    assert lines[:2] == ["epoch,loss", "0,1.0"]
    assert lines[2].startswith("1,0.5")
    assert len(lines) == 3
