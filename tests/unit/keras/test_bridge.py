"""Which trainer a model gets, and what is refused."""

import functools
import gc
import threading
import warnings
import weakref

import keras
import numpy as np
import pytest
from twins import CLASSES, FIT, X, Y, alone, compiled, replicas, same, twins, under

import phalanx
from phalanx._src.strategies import base
from phalanx.errors import ContextError, MissingDependencyError, MixedStrategyError, SlipWarning

pytestmark = pytest.mark.slow


def test_model_belongs_to_the_scope_it_was_made_in(strategy):
    """It trains there, inside and outside the scope. So does a model made and compiled outside, if it trains in the scope."""
    (ours, theirs), adopted = twins(strategy, compiled()), alone(compiled())
    history = ours.fit(X, Y, **FIT).history
    assert ours.weights[0].value.sharding.device_set == set(strategy.topology.devices)
    with strategy.scope():
        again = ours.fit(X, Y, **FIT).history
        of_adopted = adopted.fit(X, Y, **FIT).history
    expected = theirs.fit(X, Y, **FIT).history
    same(history, expected)
    same(of_adopted, expected)
    same(again, theirs.fit(X, Y, **FIT).history)


@pytest.mark.parametrize(
    "method", ["fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch"]
)
def test_model_of_another_strategy(strategy, method):
    """It is refused, with the line to write. Nor can a replica start all replicas."""
    call = functools.partial(getattr(under(strategy, compiled()), method), *(X[:8], Y[:8])[: 2 - ("predict" in method)])
    with replicas(3).scope(), pytest.raises(MixedStrategyError, match="scope"):
        call()
    with pytest.raises(ContextError, match=f"{method.replace('_', '.')}|predict"):
        strategy.run(call)


def test_targets_of_another_shape(strategy):
    """An error of Keras names the lengths or shapes, and data without rows. The model is as it was, and trains on good targets."""
    model = under(strategy, compiled(loss=keras.losses.CategoricalCrossentropy(from_logits=True)))
    before = model.get_weights()
    targets = np.eye(3, dtype="float32")[Y]
    for method, args in (("fit", (X[:0], targets[:0])), ("evaluate", (X[:0], targets[:0])), ("predict", (X[:0],))):
        with pytest.raises(ValueError, match=r"(?i)empty|no batch|at least one"):
            getattr(model, method)(*args, verbose=0)
    with pytest.raises(ValueError, match="112"):
        model.fit(X, targets[:50], **FIT)
    with pytest.raises(ValueError, match="shape"):
        model.fit(X, np.zeros((112, 7), "float32"), **FIT)
    same(model.get_weights(), before)
    model.fit(X, targets, **FIT)


@pytest.mark.cover(["rows"], {1})
@pytest.mark.parametrize("rows", [1, 3])
def test_batch_smaller_than_the_replicas(rows):
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


@pytest.mark.exhaustive("tests/unit/keras/test_training.py: test_dropped_model_is_freed")
def test_models_are_forgotten(strategy):
    """A model that nobody uses leaves memory."""
    model = under(strategy, compiled())
    model.fit(X, Y, **FIT)
    seen = weakref.ref(model)
    del model
    keras.utils.clear_session() if hasattr(keras.utils, "clear_session") else keras.backend.clear_session()
    gc.collect()
    assert seen() is None


@pytest.mark.exhaustive("tests/contract/test_keras_trainer.py: test_loops_equal_those_of_keras")
def test_several_steps_of_an_eager_model():
    ours, theirs = twins(phalanx.OneDeviceStrategy("cpu:0"), compiled(run_eagerly=True, steps_per_execution=2))
    theirs.compile(theirs.optimizer, theirs.loss)
    seen, given = [], FIT | {"batch_size": 4}
    see = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(batch))
    same(ours.fit(X[:12], Y[:12], **given, callbacks=[see]).history, theirs.fit(X[:12], Y[:12], **given).history)
    assert seen == [1, 2]


class Star(keras.Model):
    """Hands on whatever Keras passes to its steps."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(CLASSES)

    def call(self, x):
        return self.dense(x)

    def train_step(self, *args):
        return super().train_step(*args)

    def test_step(self, *args):
        return super().test_step(*args)

    def predict_step(self, *args):
        return super().predict_step(*args)


class WithData(Star):
    """The same in the style of tf.keras."""

    def train_step(self, data):
        return super().train_step(data) | {"added": 3.0}

    def test_step(self, data):
        return super().test_step(data)

    def predict_step(self, data):
        return super().predict_step(data)


@pytest.mark.cover(["kind"], {WithData})
@pytest.mark.parametrize("kind", [Star, WithData])
def test_steps_that_call_those_of_keras(strategy, kind):
    """With `*args` they run outside all scopes too, as without Phalanx; with the data alone in a scope."""
    ours, theirs = under(strategy, compiled(kind)), alone(compiled(Star))
    found = ours.fit(X, Y, **FIT, epochs=2).history
    assert found.pop("added", [3.0, 3.0]) == [3.0, 3.0]
    same(found, theirs.fit(X, Y, **FIT, epochs=2).history)
    same(ours.evaluate(X, Y, verbose=0), theirs.evaluate(X, Y, verbose=0))
    same(ours.predict(X, verbose=0), theirs.predict(X, verbose=0))


def test_model_without_call(strategy):
    """Like most models with two parts it trains with a step of its own; what needs a call says so."""

    class Adversary(keras.Model):
        def __init__(self):
            super().__init__()
            self.part = keras.layers.Dense(1)
            self.total = keras.metrics.Mean(name="total")

        @property
        def metrics(self):
            return [self.total]

        def train_step(self, data):
            x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
            with phalanx.GradientTape() as tape:
                loss = keras.ops.mean((self.part(x)[:, 0] - keras.ops.cast(y, "float32")) ** 2)
            variables = self.part.trainable_variables
            self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
            self.total.update_state(loss)
            return {"total": self.total.result()}

    with strategy.scope():
        model = Adversary()
        model.compile(keras.optimizers.SGD(0.1))
    history = model.fit(X[:96], Y[:96], **FIT, epochs=5).history["total"]
    assert history[-1] < history[0]
    model.train_on_batch(X[:8], Y[:8])
    with pytest.raises(RuntimeError, match="call"):
        model.evaluate(X, Y, verbose=0)


def test_distributed_dataset_brings_its_strategy(strategy, collect):
    """A model of no scope trains and evaluates on the replicas of the dataset's strategy. If that is gone, an error says so."""
    ours, theirs = alone(compiled()), alone(compiled())
    dataset = strategy.experimental_distribute_dataset([(X[i : i + 16], Y[i : i + 16]) for i in range(0, 96, 16)])
    same(ours.fit(dataset, verbose=0).history, theirs.fit(X[:96], Y[:96], **FIT).history)
    assert ours.weights[0].value.sharding.device_set == set(strategy.topology.devices)
    same(ours.evaluate(dataset, verbose=0), theirs.evaluate(X[:96], Y[:96], verbose=0))
    dataset = replicas(2).experimental_distribute_dataset([(X[:16], Y[:16])])
    collect()
    with pytest.raises(ContextError, match=r"no longer exists.*\nHINT: with strategy.scope\(\):"):
        alone(compiled()).fit(dataset, verbose=0)


def test_datasets_of_the_default_strategy(strategy):
    """`strategy = get_strategy()` runs the same program on one device as Keras alone. Another strategy may take the model over."""
    default, (ours, theirs) = phalanx.get_strategy(), (alone(compiled()), alone(compiled()))
    dataset = default.experimental_distribute_dataset((X, Y), batch_size=16)
    same(
        ours.fit(dataset, verbose=0, validation_data=dataset).history,
        theirs.fit(X, Y, **FIT, validation_data=(X, Y)).history,
    )
    same(ours.evaluate(dataset, verbose=0), theirs.evaluate(X, Y, verbose=0))
    same(
        ours.predict(default.experimental_distribute_dataset(X, batch_size=16), verbose=0), theirs.predict(X, verbose=0)
    )
    dataset = strategy.experimental_distribute_dataset((X, Y), batch_size=16)
    same(ours.fit(dataset, verbose=0).history, theirs.fit(X, Y, **FIT).history)
    assert ours.weights[0].value.sharding.device_set == set(strategy.topology.devices)


def test_two_threads_that_fit_one_model(strategy):
    """The second one is refused, the first one ends; then it may."""
    model, has_begun, may_end = under(strategy, compiled()), threading.Event(), threading.Event()
    wait = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: (has_begun.set(), may_end.wait(timeout=300))
    )
    thread = threading.Thread(target=lambda: model.fit(X, Y, **FIT, callbacks=[wait]))
    thread.start()
    try:
        assert has_begun.wait(timeout=300)
        for method in (model.fit, model.evaluate, model.train_on_batch):
            with pytest.raises(ContextError, match=r"another thread is training or evaluating it.*\nHINT: wait"):
                method(X, Y)
        assert model.predict(X, verbose=0).shape == (len(X), CLASSES)
    finally:
        may_end.set()
        thread.join(timeout=300)
    assert model.evaluate(X, Y, verbose=0) > 0


def test_fit_outside_although_there_are_replicas(monkeypatch):
    """A model of no scope trains on one device: one warning per line, even if the strategy has models already."""

    def slips_of_fit():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                model.fit(X[:8], Y[:8], **FIT)
        return [str(w.message) for w in caught if w.category is SlipWarning]

    monkeypatch.setattr(base, "_living", weakref.WeakSet())
    model = alone(compiled())
    assert not slips_of_fit()
    strategy = replicas(2)
    under(strategy, compiled()).fit(X[:8], Y[:8], **FIT)
    (message,) = slips_of_fit()
    assert "fit was called outside the scope of MirroredStrategy(['cpu:0', 'cpu:1'])" in message
    assert "HINT: with strategy.scope(): around the lines that create and compile the model. If one device" in message
    another = phalanx.MirroredStrategy(["cpu:1", "cpu:0"])
    assert not slips_of_fit()
    assert set(base.living_strategies()) == {strategy, another}


def test_tensorboard_without_tensorflow(strategy):
    """The error names the callback that writes the same files."""
    model = under(strategy, compiled())
    with pytest.raises(MissingDependencyError, match=r"not installed.*\nHINT: phalanx.keras.TensorBoard"):
        model.fit(X, Y, **FIT, callbacks=[keras.callbacks.TensorBoard("unused")])
