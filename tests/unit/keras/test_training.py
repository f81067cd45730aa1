"""`fit`, `evaluate` and `predict` of what is special, against Keras's own trainer on one device. Models of all kinds: the law of `fit`."""

import gc
import io
import sys
import weakref

import keras
import numpy as np
import pytest
from keras import layers
from twins import CLASSES, FIT, SHORT, WEIGHTS, X, Y, compiled, replicas, same, same_fit, under

import phalanx
from phalanx.errors import InvalidArgumentError

pytestmark = pytest.mark.slow

RANDOM = np.random.RandomState(11)
X, Y, WEIGHTS = X[:SHORT], Y[:SHORT], WEIGHTS[:SHORT]
ACCURACY = {"metrics": ["accuracy"], "weighted_metrics": ["accuracy"]}


@pytest.mark.cover(["count"], {2})
@pytest.mark.parametrize(
    ("count", "k", "given"),
    [
        pytest.param(1, 1, {}, id="one replica"),
        pytest.param(3, 4, {"class_weight": {0: 0.2, 1: 1.0, 2: 3.0}, "shuffle": "batch"}, id="class_weight"),
        pytest.param(
            2,
            4,
            {
                "sample_weight": WEIGHTS,
                "validation_data": (X[:37], Y[:37], WEIGHTS[:37]),
                "validation_batch_size": 9,
            },
            id="sample_weight and validation",
        ),
    ],
)
def test_training_equals_keras_on_one_device(count, k, given):
    """History, weights, optimizer, metrics and predictions, for any replicas and steps in one program."""
    ours, theirs = same_fit(replicas(count), compiled(steps_per_execution=k, **ACCURACY), X, Y, **given)
    weights = given["sample_weight"][:37] if "sample_weight" in given else None
    same(*(m.evaluate(X[:37], Y[:37], sample_weight=weights, batch_size=9, verbose=0) for m in (ours, theirs)))
    same(*(m.predict(X[:37], batch_size=9, verbose=0) for m in (ours, theirs)))


@pytest.mark.cover(["loss"], {"mean_with_sample_weight"})
@pytest.mark.parametrize("loss", ["mean_with_sample_weight", "sum_over_batch_size", "sum"])
def test_reductions_of_losses(loss):
    made = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=loss)
    how = compiled(loss=made, optimizer=lambda: keras.optimizers.SGD(0.02))
    same_fit(replicas(3), how, X, Y, sample_weight=WEIGHTS)


def test_targets_of_sequences():
    """A loss for each time step, with weights of the steps. Masked steps count neither in the loss nor in the metrics."""
    how = {"weighted_metrics": ["accuracy"]}
    dense = compiled(lambda: keras.Sequential([layers.Input((4, 3)), layers.Dense(CLASSES)]), **how)
    rows, weights = (RANDOM.rand(SHORT, 4, *shape).astype("float32") for shape in ((3,), ()))
    same_fit(replicas(3), dense, rows, RANDOM.randint(0, CLASSES, (SHORT, 4)), sample_weight=weights)

    def masked():
        inner = [layers.Embedding(5, 3, mask_zero=True), layers.Dense(3, activation="tanh")]
        return keras.Sequential([layers.Input((4,)), *inner, layers.Dense(CLASSES)])

    words = RANDOM.randint(0, 5, (96, 4))
    words[:, 0] = 1
    same_fit(replicas(2), compiled(masked, **how), words, words % CLASSES)


def test_batch_normalization_not_synchronized_averages_statistics(strategy):
    """Each replica normalizes with its own rows; the moving mean is the mean of theirs."""

    def model():
        return keras.Sequential([layers.Input((5,)), layers.BatchNormalization(momentum=0.0), layers.Dense(CLASSES)])

    ours = under(strategy, compiled(model))
    ours.fit(X[:16], Y[:16], **FIT)
    halves = np.stack([X[:8].var(0), X[8:16].var(0)])
    same(ours.layers[0].moving_mean.numpy(), X[:16].mean(0))
    same(ours.layers[0].moving_variance.numpy(), halves.mean(0))


@pytest.mark.cover(["count"], {2})
@pytest.mark.parametrize(("count", "k"), [(2, 2), (3, 1), (4, 2)])
def test_predict_returns_the_rows_in_order(count, k):
    """Exactly as many rows as were given, in their order, for any rest."""
    model = under(replicas(count), compiled(steps_per_execution=k))
    expected = np.asarray(model(X[:9]))
    for rows in range(1, 10):
        same(model.predict(X[:rows], batch_size=4, verbose=0), expected[:rows])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("call", [lambda m, *rows: m.fit(*rows, verbose=0), lambda m, *rows: m.train_on_batch(*rows)])
def test_rows_of_64_bits_build_a_model_without_a_warning(strategy, call):
    """It is built with the dtypes that its steps get. JAX warns since version 0.12 if it has to shorten them."""
    model = under(strategy, compiled(lambda: keras.Sequential([layers.Dense(4)]), metrics=["accuracy"]))
    call(model, X[:16].astype("float64"), Y[:16].astype("int64"))
    assert {v.dtype for v in model.trainable_variables} == {"float32"}


@pytest.mark.parametrize("rows", [7, 11])
def test_outputs_of_pairs_of_rows(rows):
    """Neither replicas nor batches of different sizes have outputs that can be joined."""
    with phalanx.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        x = keras.Input((3,))
        model = keras.Model(x, keras.ops.matmul(x, keras.ops.transpose(x)))
    with pytest.raises(
        InvalidArgumentError,
        match=r"predict of outputs of shapes \((\d), \1\) and \((\d), \2\): a dim .*\nHINT: outputs",
    ):
        model.predict(np.ones((rows, 3), "float32"), batch_size=8, verbose=0)


def test_output_in_a_file_has_no_progress_bar(strategy, tmp_path, monkeypatch):
    """A line per epoch, as in the log of several processes. What is neither a file nor a terminal, as a notebook, has the bar."""
    written = {}
    for name, stream in (("file", (tmp_path / "log").open("w+")), ("notebook", io.StringIO())):
        with stream, monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", stream)
            under(strategy, compiled()).fit(X[:16], Y[:16])
            stream.seek(0)
            written[name] = stream.read()
    assert "loss" in written["file"]
    assert ("\b" in written["file"], "\b" in written["notebook"]) == (False, True)


def test_dropped_model_is_freed(strategy, tmp_path):
    """With its optimizer, its variables, its programs and its callbacks, after all methods with callbacks of every kind."""
    kinds = keras.callbacks
    callbacks = [
        kinds.LambdaCallback(on_epoch_end=lambda epoch, logs: None),
        kinds.EarlyStopping("loss", restore_best_weights=True),
        kinds.ReduceLROnPlateau("loss"),
        kinds.CSVLogger(tmp_path / "log.csv"),
        kinds.ModelCheckpoint(tmp_path / "model.keras"),
        phalanx.keras.ModelCheckpoint(tmp_path / "models"),
        phalanx.keras.BackupAndRestore(tmp_path / "backup", save_freq=1),
        phalanx.keras.SyncCheck(1),
        phalanx.keras.TensorBoard(tmp_path / "board", histogram_freq=1),
    ]
    model = under(strategy, compiled())
    model.fit(X[:32], Y[:32], validation_data=(X[:16], Y[:16]), **FIT, callbacks=callbacks)
    model.evaluate(X[:16], Y[:16], verbose=0, callbacks=callbacks[:1])
    model.predict(X[:16], verbose=0, callbacks=callbacks[:1])
    alive = [weakref.ref(x) for x in (model, model.optimizer, *model.variables, *callbacks)]
    del model, callbacks
    # What a model holds is dropped with it, and may be a cycle again.
    gc.collect()
    gc.collect()
    assert [type(x()).__name__ for x in alive if x() is not None] == []
