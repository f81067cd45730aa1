"""Which trainer a model gets, and what is refused."""

import gc

import keras
import numpy as np
import pytest
from twins import FIT, X, Y, alone, compiled, crossentropy, mlp, replicas, same, twins, under

from phalanx.errors import ContextError, MixedStrategyError


def test_model_belongs_to_the_scope_it_was_made_in(strategy):
    """It trains there, outside the scope too."""
    model = under(strategy, compiled())
    model.fit(X, Y, **FIT)
    assert model.weights[0].value.sharding.device_set == set(strategy.topology.devices)


def test_fit_inside_the_scope(strategy):
    """The same as outside."""
    ours, theirs = twins(strategy, compiled())
    with strategy.scope():
        history = ours.fit(X, Y, **FIT).history
    same(history, theirs.fit(X, Y, **FIT).history)


def test_model_of_keras_is_adopted_by_the_scope_of_fit(strategy):
    """Made and compiled outside, trained in a scope."""
    ours, theirs = alone(compiled()), alone(compiled())
    with strategy.scope():
        history = ours.fit(X, Y, **FIT).history
    same(history, theirs.fit(X, Y, **FIT).history)


@pytest.mark.parametrize(
    "method", ["fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch"]
)
def test_model_of_another_strategy(strategy, method):
    """It is refused, with the line to write."""
    model = under(strategy, compiled())
    args = (X[:8],) if "predict" in method else (X[:8], Y[:8])
    with replicas(3).scope(), pytest.raises(MixedStrategyError, match="scope"):
        getattr(model, method)(*args)


@pytest.mark.parametrize(
    "method", ["fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch"]
)
def test_within_run(strategy, method):
    """A replica cannot start all replicas."""
    model = under(strategy, compiled())
    args = (X[:8],) if "predict" in method else (X[:8], Y[:8])
    with pytest.raises(ContextError, match=f"{method.replace('_', '.')}|predict"):
        strategy.run(lambda: getattr(model, method)(*args))


@pytest.mark.parametrize("method", ["fit", "evaluate", "train_on_batch", "test_on_batch"])
def test_model_that_is_not_compiled(strategy, method):
    """Keras's own error."""
    with pytest.raises(ValueError, match="compile"):
        getattr(under(strategy, mlp), method)(X[:8], Y[:8])


def test_targets_of_another_length(strategy):
    """Keras's own error, and the model is as it was."""
    model = under(strategy, compiled())
    before = model.get_weights()
    with pytest.raises(ValueError, match="103"):
        model.fit(X, Y[:50], **FIT)
    same(model.get_weights(), before)


def test_targets_of_another_shape(strategy):
    """An error names the shapes; training goes on with good targets."""
    model = under(strategy, compiled(loss=keras.losses.CategoricalCrossentropy(from_logits=True)))
    with pytest.raises(ValueError, match="shape"):
        model.fit(X, np.zeros((103, 7), "float32"), **FIT)
    model.fit(X, np.eye(3, dtype="float32")[Y], **FIT)


@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
def test_no_row(strategy, method):
    """Empty data is an error."""
    model = under(strategy, compiled())
    args = (X[:0],) if method == "predict" else (X[:0], Y[:0])
    with pytest.raises(ValueError, match=r"(?i)empty|no batch|at least one"):
        getattr(model, method)(*args, verbose=0)


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_batch_smaller_than_the_replicas(rows):
    """Replicas without a row change nothing."""
    ours, theirs = twins(replicas(4), compiled(metrics=["accuracy"]))
    same(*(m.fit(X[:rows], Y[:rows], **FIT, epochs=2).history for m in (ours, theirs)))
    same(ours.get_weights(), theirs.get_weights())
    same(*(m.evaluate(X[:rows], Y[:rows], verbose=0) for m in (ours, theirs)))


def test_nan_in_the_loss(strategy):
    """Training goes on, and callbacks see it."""
    model, rows, seen = under(strategy, compiled()), X.copy(), []
    rows[30] = np.nan
    see = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(float(logs["loss"])))
    model.fit(rows, Y, **FIT, callbacks=[see])
    assert len(seen) == 7
    assert np.isfinite(seen[0])
    assert np.isnan(seen[1:]).all()


def test_several_steps_of_an_eager_model(strategy):
    """steps_per_execution with run_eagerly is refused by Keras or by us, or runs."""
    model = under(strategy, compiled(run_eagerly=True, steps_per_execution=2))
    with pytest.raises(ValueError, match="steps_per_execution"):
        model.fit(X, Y, **FIT)


def test_recompiling_gives_a_new_program(strategy):
    """Another loss and optimizer take effect."""
    ours, theirs = twins(strategy, compiled())
    for model in (ours, theirs):
        model.fit(X, Y, **FIT)
        model.compile(keras.optimizers.SGD(0.01), crossentropy(), metrics=["accuracy"])
    same(*(m.fit(X, Y, **FIT).history for m in (ours, theirs)))


def test_models_are_forgotten(strategy):
    """A model that nobody uses leaves memory."""
    import weakref

    model = under(strategy, compiled())
    model.fit(X, Y, **FIT)
    seen = weakref.ref(model)
    del model
    keras.utils.clear_session() if hasattr(keras.utils, "clear_session") else keras.backend.clear_session()
    gc.collect()
    assert seen() is None
