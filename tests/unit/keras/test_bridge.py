"""Which trainer a model gets, and what is refused."""

import gc
import os
import subprocess
import sys
import threading
import warnings

import keras
import numpy as np
import pytest
from twins import CLASSES, FIT, X, Y, alone, compiled, crossentropy, mlp, replicas, same, twins, under

import phalanx
from phalanx.errors import ContextError, MissingDependencyError, MixedStrategyError, SlipWarning

pytestmark = pytest.mark.slow


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
def test_fit_within_run_is_refused(strategy, method):
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
def test_data_without_rows_is_refused(strategy, method):
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


def test_several_steps_of_an_eager_model():
    """With run_eagerly the steps of one execution run one by one."""
    model = under(phalanx.OneDeviceStrategy("cpu:0"), compiled(run_eagerly=True, steps_per_execution=2))
    seen = []
    see = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(batch))
    same(
        model.fit(X[:12], Y[:12], batch_size=4, shuffle=False, verbose=0, callbacks=[see]).history,
        alone(compiled()).fit(X[:12], Y[:12], batch_size=4, shuffle=False, verbose=0).history,
    )
    assert seen == [1, 2]


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


class Star(keras.Model):
    """Hands on whatever Keras passes to its steps."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(CLASSES)

    def call(self, x):
        """One layer."""
        return self.dense(x)

    def train_step(self, *args):
        """Keras's own."""
        return super().train_step(*args)

    def test_step(self, *args):
        """Keras's own."""
        return super().test_step(*args)

    def predict_step(self, *args):
        """Keras's own."""
        return super().predict_step(*args)


class WithData(Star):
    """The same in the style of tf.keras."""

    def train_step(self, data):
        """Adds a number."""
        return super().train_step(data) | {"added": 3.0}

    def test_step(self, data):
        """Keras's own."""
        return super().test_step(data)

    def predict_step(self, data):
        """Keras's own."""
        return super().predict_step(data)


@pytest.mark.parametrize("kind", [Star, WithData])
def test_steps_that_call_those_of_keras(strategy, kind):
    """With `*args` they run outside all scopes too, as without Phalanx; with the data alone in a scope."""
    ours, theirs = twins(strategy, compiled(kind)), twins(strategy, compiled(Star))[1]
    found = ours[0].fit(X, Y, **FIT, epochs=2).history
    assert found.pop("added", [3.0, 3.0]) == [3.0, 3.0]
    same(found, theirs.fit(X, Y, **FIT, epochs=2).history)
    same(ours[0].evaluate(X, Y, verbose=0), theirs.evaluate(X, Y, verbose=0))
    same(ours[0].predict(X, verbose=0), theirs.predict(X, verbose=0))


class Adversary(keras.Model):
    """A `train_step` and no `call`, like most models with two parts."""

    def __init__(self):
        super().__init__()
        self.part = keras.layers.Dense(1)
        self.total = keras.metrics.Mean(name="total")

    @property
    def metrics(self):
        """Its own."""
        return [self.total]

    def train_step(self, data):
        """Trains the part."""
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        with phalanx.GradientTape() as tape:
            loss = keras.ops.mean((self.part(x)[:, 0] - keras.ops.cast(y, "float32")) ** 2)
        gradients = tape.gradient(loss, self.part.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.part.trainable_variables, strict=True))
        self.total.update_state(loss)
        return {"total": self.total.result()}


def test_model_without_call(strategy):
    """It trains with a step of its own; what needs a call says so."""
    with strategy.scope():
        model = Adversary()
        model.compile(keras.optimizers.SGD(0.1))
    history = model.fit(X[:96], Y[:96], **FIT, epochs=5).history["total"]
    assert history[-1] < history[0]
    model.train_on_batch(X[:8], Y[:8])
    with pytest.raises(RuntimeError, match="call"):
        model.evaluate(X, Y, verbose=0)


def test_distributed_dataset_brings_its_strategy(strategy):
    """A model of no scope trains, evaluates and predicts on the replicas of the dataset's strategy."""
    ours, theirs = alone(compiled()), alone(compiled())
    dataset = strategy.experimental_distribute_dataset([(X[i : i + 16], Y[i : i + 16]) for i in range(0, 96, 16)])
    same(ours.fit(dataset, verbose=0).history, theirs.fit(X[:96], Y[:96], **FIT).history)
    assert ours.weights[0].value.sharding.device_set == set(strategy.topology.devices)
    same(ours.evaluate(dataset, verbose=0), theirs.evaluate(X[:96], Y[:96], verbose=0))


def test_distributed_dataset_whose_strategy_is_gone():
    """The error says where the model belongs."""
    dataset = replicas(2).experimental_distribute_dataset([(X[:16], Y[:16])])
    gc.collect()
    with pytest.raises(ContextError, match=r"no longer exists.*\nHINT: with strategy.scope\(\):"):
        alone(compiled()).fit(dataset, verbose=0)


def test_two_threads_that_fit_one_model(strategy):
    """The second one is refused, the first one ends; then it may."""
    model, has_begun, may_end = under(strategy, compiled()), threading.Event(), threading.Event()

    def wait(batch, logs):
        has_begun.set()
        may_end.wait(timeout=60)

    see = keras.callbacks.LambdaCallback(on_train_batch_end=wait)
    thread = threading.Thread(target=lambda: model.fit(X, Y, **FIT, callbacks=[see]))
    thread.start()
    try:
        assert has_begun.wait(timeout=60)
        for method in (model.fit, model.evaluate, model.train_on_batch):
            with pytest.raises(ContextError, match=r"another thread is training or evaluating it.*\nHINT: wait"):
                method(X, Y)
        assert model.predict(X, verbose=0).shape == (len(X), CLASSES)
    finally:
        may_end.set()
        thread.join(timeout=60)
    assert model.evaluate(X, Y, verbose=0) > 0


def slips_of_fit():
    """Returns the warnings of two calls of `fit` by one line, with models of no scope."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            alone(compiled()).fit(X, Y, **FIT)
    return [str(w.message) for w in caught if w.category is SlipWarning]


def test_fit_outside_although_there_are_replicas():
    """A model of no scope trains on one device: one warning per line, even if the strategy has models already."""
    code = (
        "import phalanx; phalanx.set_virtual_cpu_devices(2)\n"
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from test_bridge import FIT, X, Y, compiled, replicas, slips_of_fit, under\n"
        "assert not slips_of_fit()\n"
        "strategy = replicas(2)\n"
        "model = under(strategy, compiled())\n"
        "model.fit(X, Y, **FIT)\n"
        "(message,) = slips_of_fit()\n"
        "another = phalanx.MirroredStrategy(['cpu:1', 'cpu:0'])\n"
        "assert not slips_of_fit()\n"
        "print(message)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, os.path.dirname(__file__)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert not done.returncode, done.stderr
    assert "fit was called outside the scope of MirroredStrategy(['cpu:0', 'cpu:1'])" in done.stdout
    assert (
        "HINT: with strategy.scope(): around the lines that create and compile the model. If one device" in done.stdout
    )


def test_tensorboard_without_tensorflow(strategy):
    """The error names the callback that writes the same files."""
    model = under(strategy, compiled())
    with pytest.raises(MissingDependencyError, match=r"not installed.*\nHINT: phalanx.keras.TensorBoard"):
        model.fit(X, Y, **FIT, callbacks=[keras.callbacks.TensorBoard("unused")])
