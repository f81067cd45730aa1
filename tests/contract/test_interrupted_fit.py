"""State is never lost: errors and Ctrl-C anywhere leave the weights of the last finished step."""

import functools
import sys
from pathlib import Path

import interrupted
import keras
import numpy as np
import pytest
from keras import layers, ops
from tests import forks
from twins import (
    CLASSES,
    FIT,
    Raising,
    X,
    Y,
    compiled,
    crossentropy,
    mlp,
    replicas,
    same,
    same_state,
    state,
    twins,
    under,
)


@pytest.fixture
def strategy():
    return replicas(2)


@pytest.mark.cover(["error", "k"], {(ZeroDivisionError, 2), (KeyboardInterrupt, 1)})
@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_callback_that_raises_in_fit(strategy, k, error):
    """The model has the weights of the step before, and training goes on as if it had stopped there."""
    ours, theirs = twins(strategy, compiled(metrics=["accuracy"], steps_per_execution=k))
    raising = Raising("train", 3, error)
    with pytest.raises(error):
        ours.fit(X, Y, **FIT, callbacks=[raising])
    same(state(ours), raising.state)
    theirs.fit(X[:64], Y[:64], **FIT)
    same(ours.get_metrics_result(), theirs.get_metrics_result())
    for model in (ours, theirs):
        model.fit(X, Y, **FIT)
    same_state(ours, theirs)


def test_callback_that_raises_later(strategy):
    """Evaluate and predict lose nothing, and validation keeps the epoch's weights. The loss can be computed after every failure."""
    model = under(strategy, compiled(metrics=["accuracy"]))
    model.fit(X, Y, **FIT)
    for kind, call in (
        ("test", functools.partial(model.evaluate, X, Y)),
        ("predict", functools.partial(model.predict, X)),
    ):
        before = state(model)
        with pytest.raises(ZeroDivisionError):
            call(batch_size=16, verbose=0, callbacks=[Raising(kind, 2)])
        same(state(model), before)
        assert set(model.get_metrics_result()) == {"loss", "accuracy"}
        model.fit(X, Y, **FIT)
    for kind, step in (("test", 1), ("train", 0), ("train", 1)):
        raising = Raising(kind, step)
        with pytest.raises(ZeroDivisionError):
            model.fit(X, Y, **FIT, validation_data=(X, Y), callbacks=[raising])
        same(state(model), raising.state)
        assert np.isfinite(float(ops.mean(crossentropy()(Y, model(X)))))
    model.fit(X, Y, **FIT)


class Failing(layers.Layer):
    """Raises when it is called by a replica's step, as often as it is told to."""

    fails = False

    def call(self, x):
        if self.fails and not isinstance(x, keras.KerasTensor):
            raise ZeroDivisionError
        return x


@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
def test_layer_that_raises_while_it_is_traced(strategy, method):
    """The model is as it was; when the layer is repaired it trains."""
    failing = Failing()
    model = under(strategy, compiled(lambda: keras.Sequential([mlp(), failing])))
    model.train_on_batch(X[:8], Y[:8])
    args, before = (X,) if method == "predict" else (X, Y), model.get_weights()
    failing.fails = True
    with pytest.raises(ZeroDivisionError):
        getattr(model, method)(*args, batch_size=16, verbose=0)
    same(model.get_weights(), before)
    failing.fails = False
    getattr(model, method)(*args, batch_size=16, verbose=0)


@pytest.mark.exhaustive("test_law5_failures.py: test_eager_run_fails_half_way")
def test_layer_that_raises_in_an_eager_step(strategy):
    """Weights of the steps before stay."""
    failing = Failing()
    model = under(
        strategy,
        compiled(lambda: keras.Sequential([layers.Input((5,)), failing, layers.Dense(CLASSES)]), run_eagerly=True),
    )
    model.fit(X[:8], Y[:8], verbose=0)
    before, failing.fails = state(model), True
    with pytest.raises(ZeroDivisionError):
        model.fit(X[:8], Y[:8], verbose=0)
    same(state(model), before)


# SIGINT may be ignored where the tests run, and a process that they start would inherit that.
INTERRUPT = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
import interrupted
interrupted.main()
"""


@pytest.mark.cover(["method"], {"fit_groups"})
@pytest.mark.parametrize("method", ["fit", "fit_groups", "evaluate", "predict"])
def test_ctrl_c_keeps_weights_of_last_step(method):
    """A process that gets SIGINT in any of the methods keeps usable weights, those of the last finished step."""
    folder = Path(interrupted.__file__).parent
    command = [sys.executable, "-c", INTERRUPT, method]
    child = forks.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)
    assert child.returncode == 0, child.stderr[-2000:]
    assert child.stdout.split() == ["interrupted", "equal", "usable"]
