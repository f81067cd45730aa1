"""`fit`, `evaluate` and `predict` under a parameter server with two workers, beside Keras's own."""

import keras
import numpy as np
import pytest

import phalanx
from phalanx.errors import InputError, InvalidArgumentError

ROWS, BATCH = 103, 16  # Seven batches, the last one of seven rows.
RANDOM = np.random.RandomState(7)
X = RANDOM.rand(ROWS, 5).astype("float32")
Y = X[:, :3].argmax(1)
NUMBERS = np.arange(ROWS, dtype="float32")


class Counting(keras.Model):
    """Says by its metrics which rows it was trained on, whatever the order of the batches."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.rows, self.total = keras.metrics.Sum(name="rows"), keras.metrics.Sum(name="total")
        self.compile(keras.optimizers.SGD(0.01))

    @property
    def metrics(self):
        return [self.rows, self.total]

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        with phalanx.GradientTape() as tape:
            loss = ((self(x)[:, 0] - y) ** 2).mean()
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        self.rows.update_state(keras.ops.ones_like(y))
        self.total.update_state(y)
        return {"rows": self.rows.result(), "total": self.total.result(), "loss": loss}


def classifier():
    """A small model of `X`, compiled."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(6, activation="tanh"), keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.5), loss, metrics=["accuracy"])
    return model


@pytest.fixture(scope="module")
def model(shared_strategies):
    """The small model over the server; tests take it as they find it."""
    with shared_strategies().scope():
        return classifier()


class Stop(keras.callbacks.Callback):
    """Ends `fit` after that many batches."""

    def __init__(self, after):
        super().__init__()
        self.left = after

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if not self.left:
            raise RuntimeError("stopped")


def test_stopped_fit_goes_on(strategy, tmp_path):
    """At the same batch: each row counts once an epoch. A step of the user's own returns metrics, and a number that is none."""
    for after in (4, 5, None):
        with strategy.scope():
            model = Counting()
        backup = phalanx.keras.BackupAndRestore(tmp_path, save_freq=2)
        if after is not None:
            with pytest.raises(RuntimeError, match="stopped"):
                model.fit(X, NUMBERS, batch_size=BATCH, epochs=2, verbose=0, callbacks=[backup, Stop(after)])
    history = model.fit(X, NUMBERS, batch_size=BATCH, epochs=2, verbose=0, callbacks=[backup]).history
    assert history["rows"] == [ROWS, ROWS]
    assert history["total"] == [NUMBERS.sum()] * 2
    assert len(history["loss"]) == 2
    assert int(model.optimizer.iterations.value) == 14


def test_dataset_function_makes_a_dataset_per_worker(strategy, tmp_path):
    """Each worker reads a dataset of its own, in which it is told who it is, and whose position within an epoch nobody knows."""

    def dataset_fn(context):
        rows = np.float32(10 ** (3 * context.input_pipeline_id))
        while True:
            yield X[:4], np.full(4, rows)

    with strategy.scope():
        model = Counting()
    creator = phalanx.keras.DatasetCreator(dataset_fn)
    history = model.fit(creator, epochs=2, steps_per_epoch=8, verbose=0).history
    assert history["rows"] == [32, 32]
    for total in history["total"]:
        of_second, of_first = divmod(round(total), 1000)
        assert of_first + of_second == 32
    with pytest.raises(InvalidArgumentError, match="HINT: fit\\(dataset_fn, steps_per_epoch=100\\)"):
        model.fit(creator, verbose=0)

    options = {"epochs": 2, "steps_per_epoch": 4, "verbose": 0}
    with pytest.raises(
        InputError, match=r"BackupAndRestore\(save_freq=...\) with a dataset function.*\nHINT: save_freq=\"epoch\""
    ):
        model.fit(dataset_fn, callbacks=[phalanx.keras.BackupAndRestore(tmp_path, save_freq=2)], **options)
    with pytest.raises(RuntimeError, match="stopped"):
        model.fit(dataset_fn, callbacks=[phalanx.keras.BackupAndRestore(tmp_path), Stop(6)], **options)
    history = model.fit(dataset_fn, callbacks=[phalanx.keras.BackupAndRestore(tmp_path)], **options).history
    assert history["rows"] == [16, 16]


def test_steps_outside_of_training_are_exact(strategy, model):
    """Any worker may do any batch: loss, accuracy and predictions, in order, are Keras's with the same weights."""
    alone = classifier()
    alone.set_weights(model.get_weights())
    ours, theirs = (m.evaluate(X, Y, batch_size=BATCH, verbose=0) for m in (model, alone))
    assert ours == pytest.approx(theirs, rel=1e-5)
    expected = alone.predict(X, verbose=0)
    np.testing.assert_allclose(model.predict(X, batch_size=BATCH, verbose=0), expected, rtol=1e-5, atol=1e-6)


def test_dataset_function_and_validation(strategy, model):
    """A function alone will do; validation has steps of its own."""
    dataset_fn = lambda context: iter(lambda: (X[:BATCH], Y[:BATCH]), None)  # noqa: E731
    given = {"validation_data": (X, Y), "validation_batch_size": BATCH}
    history = model.fit(dataset_fn, steps_per_epoch=3, verbose=0, **given).history
    expected = model.evaluate(X, Y, batch_size=BATCH, verbose=0)
    assert [history["val_loss"][0], history["val_accuracy"][0]] == pytest.approx(expected, rel=1e-5)
    results = model.evaluate(dataset_fn, steps=2, verbose=0)
    assert results == pytest.approx(model.evaluate(X[:BATCH], Y[:BATCH], verbose=0), rel=1e-5)


def test_callbacks_reach_the_server(strategy, tmp_path):
    """What ModelCheckpoint wrote after an epoch are the weights then; LearningRateScheduler and others that stop reach the server."""
    seen = []

    class Seen(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen.append((self.model.get_weights(), float(self.model.optimizer.learning_rate.value)))

    with strategy.scope():
        model = classifier()
    callbacks = [
        keras.callbacks.LearningRateScheduler(lambda epoch: [0.5, 0.0][epoch]),
        keras.callbacks.ModelCheckpoint(tmp_path / "{epoch}.weights.h5", save_weights_only=True),
        keras.callbacks.EarlyStopping("val_loss", min_delta=100.0),
        Seen(),
    ]
    before = model.get_weights()
    given = {"validation_data": (X, Y), "validation_batch_size": BATCH}
    history = model.fit(X, Y, batch_size=BATCH, epochs=9, verbose=0, callbacks=callbacks, **given)
    assert len(history.epoch) == 2  # The second one was not better.
    assert [rate for _, rate in seen] == [0.5, 0.0]
    alone = classifier()
    alone.load_weights(tmp_path / "1.weights.h5")
    for first, second, saved, start in zip(seen[0][0], seen[1][0], alone.get_weights(), before, strict=True):
        np.testing.assert_array_equal(first, second)  # With a rate of 0 nothing is learnt.
        np.testing.assert_array_equal(first, saved)
        assert np.abs(first - start).max() > 1e-3
    wrong = np.full_like(X, np.nan)
    history = model.fit(wrong, Y, batch_size=BATCH, epochs=9, verbose=0, callbacks=[keras.callbacks.TerminateOnNaN()])
    assert len(history.epoch) < 9


def test_train_on_batch_is_one_step(strategy):
    """One batch is one step, as in Keras."""
    with strategy.scope():
        ours = classifier()
    theirs = classifier()
    for _ in range(2):
        assert ours.train_on_batch(X, Y) == pytest.approx(theirs.train_on_batch(X, Y), rel=1e-5)
    assert ours.test_on_batch(X, Y, return_dict=True) == pytest.approx(
        theirs.test_on_batch(X, Y, return_dict=True), rel=1e-5
    )
    np.testing.assert_allclose(ours.predict_on_batch(X), theirs.predict_on_batch(X), rtol=1e-4, atol=1e-5)


def test_run_eagerly_is_refused(strategy):
    """There is no Python on a worker."""
    with strategy.scope():
        model = classifier()
        model.compile("sgd", "sparse_categorical_crossentropy", run_eagerly=True)
    with pytest.raises(InvalidArgumentError, match="run_eagerly=True under ParameterServerStrategy"):
        model.fit(X, Y, verbose=0)


def image_classifier():
    """A model of pictures of 64 pixels, compiled."""
    keras.utils.set_random_seed(0)
    layers = [keras.Input((64,)), keras.layers.Dense(128, activation="relu"), keras.layers.Dense(10)]
    model = keras.Sequential(layers)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(3e-3), loss, metrics=["accuracy"])
    return model


@pytest.mark.exhaustive("test_consistency.py: test_asynchronous_training_learns")
def test_accuracy_equals_synchronous_training(strategy):
    """Asynchronous training reaches the accuracy of Keras's own in the same number of epochs, within 2 points."""
    labels = np.arange(1800) % 10
    # Each picture is that of its class, and noise.
    pictures = (RANDOM.rand(10, 64)[labels] + 0.57 * RANDOM.randn(len(labels), 64)).astype("float32")
    with strategy.scope():
        ours = image_classifier()
    accuracies = []
    for model in (ours, image_classifier()):
        model.fit(pictures[300:], labels[300:], batch_size=64, epochs=6, verbose=0)
        accuracies.append(model.evaluate(pictures[:300], labels[:300], batch_size=64, verbose=0)[1])
    assert accuracies[0] > accuracies[1] - 0.02
    assert accuracies[0] > 0.9
