"""State is never lost: errors and Ctrl-C anywhere leave the weights of the last finished step."""

import functools
import subprocess
import sys
from pathlib import Path

import interrupted
import keras
import numpy as np
import pytest
from keras import layers, ops
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
    """Two replicas."""
    return replicas(2)


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


def later(model, kind):
    """Evaluates or predicts."""
    return functools.partial(model.evaluate, X, Y) if kind == "test" else functools.partial(model.predict, X)


@pytest.mark.parametrize("kind", ["test", "predict"])
def test_callback_that_raises_later(strategy, kind):
    """Neither evaluate nor predict loses weights, optimizer or metrics."""
    model, raising = under(strategy, compiled(metrics=["accuracy"])), Raising(kind, 2)
    model.fit(X, Y, **FIT)
    before = state(model)
    with pytest.raises(ZeroDivisionError):
        later(model, kind)(batch_size=16, verbose=0, callbacks=[raising])
    same(state(model), before)
    assert set(model.get_metrics_result()) == {"loss", "accuracy"}
    model.fit(X, Y, **FIT)


def test_callback_that_raises_in_validation(strategy):
    """The epoch's weights stay."""
    model, raising = under(strategy, compiled()), Raising("test", 1)
    with pytest.raises(ZeroDivisionError):
        model.fit(X, Y, **FIT, validation_data=(X, Y), callbacks=[raising])
    same(state(model), raising.state)
    model.fit(X, Y, **FIT)


class Failing(layers.Layer):
    """Raises when it is called by a replica's step, as often as it is told to."""

    fails = False

    def call(self, x):
        """Its inputs."""
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


CHILD = Path(interrupted.__file__)


@pytest.mark.parametrize("method", ["fit", "fit_groups", "evaluate", "predict"])
def test_ctrl_c_keeps_weights_of_last_step(method):
    """A process that gets SIGINT keeps usable weights, those of the last finished step."""
    child = subprocess.run([sys.executable, CHILD, method], capture_output=True, text=True, timeout=60, check=False)
    assert child.returncode == 0, child.stderr[-2000:]
    assert child.stdout.split() == ["interrupted", "equal", "usable"]


def test_weights_are_readable_after_every_failure(strategy):
    """Loss of a model whose training failed is a number."""
    model = under(strategy, compiled())
    for at in (0, 1):
        with pytest.raises(ZeroDivisionError):
            model.fit(X, Y, **FIT, callbacks=[Raising("train", at)])
        assert np.isfinite(float(ops.mean(crossentropy()(Y, model(X)))))
