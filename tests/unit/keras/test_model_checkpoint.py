"""The callback that saves the model regularly, or whenever it has become better."""

import keras
import numpy as np
import pytest
from keras import layers

import phalanx
from phalanx.errors import InvalidArgumentError
from phalanx.keras import ModelCheckpoint
from phalanx.train import Checkpoint, latest_checkpoint, load_checkpoint

X = np.random.RandomState(0).rand(32, 4).astype("float32")


def made(strategy=None, metrics=()):
    """A small model."""
    with (strategy or phalanx.MirroredStrategy(["cpu:0", "cpu:1"])).scope():
        model = keras.Sequential([keras.Input((4,)), layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), "mse", metrics=list(metrics), steps_per_execution=1)
    return model


class Replay(keras.callbacks.Callback):
    """Reports chosen values at the end of the epochs."""

    def __init__(self, name, values):
        super().__init__()
        self.name, self.values = name, values

    def on_epoch_end(self, epoch, logs=None):
        """Replaces the value."""
        logs[self.name] = self.values[epoch]


def fit(model, *callbacks, epochs=1, **given):
    """Trains for so many epochs of four batches."""
    model.fit(X, X[:, :1], batch_size=8, epochs=epochs, shuffle=False, verbose=0, callbacks=list(callbacks), **given)


def names(folder):
    """The numbers of the checkpoints."""
    return sorted(
        int(file.name.removesuffix(".safetensors").rpartition("-")[2]) for file in folder.glob("*.safetensors")
    )


def test_saves_each_epoch_and_keeps_some(tmp_path):
    """The last two of three, and what they restore under another strategy is the model of that epoch."""
    model, callback = made(), ModelCheckpoint(tmp_path, max_to_keep=2)
    fit(model, callback, epochs=3)
    assert names(tmp_path) == [2, 3]
    assert callback.latest_checkpoint == latest_checkpoint(tmp_path)
    other = made(phalanx.OneDeviceStrategy("cpu:0"))
    Checkpoint(model=other).restore(callback.latest_checkpoint).assert_consumed()
    np.testing.assert_array_equal(other.layers[0].kernel.numpy(), model.layers[0].kernel.numpy())
    assert int(other.optimizer.iterations) == 12


@pytest.mark.parametrize("steps_per_execution", [1, 3])
def test_saves_after_some_batches(tmp_path, steps_per_execution):
    """Of 8 batches each 3; where one call trains on several, after the call."""
    model = made()
    model.steps_per_execution = steps_per_execution
    fit(model, ModelCheckpoint(tmp_path, save_freq=3), epochs=2)
    saved = [
        int(load_checkpoint(tmp_path / f"model-{n}").get_tensor("model/optimizer/variables/0")) for n in names(tmp_path)
    ]
    assert saved == ([3, 6] if steps_per_execution == 1 else [3, 7])


@pytest.mark.parametrize(
    ("monitor", "mode", "values", "better"),
    [
        ("val_loss", "auto", [3.0, 4.0, 2.0, 2.0, float("nan"), 1.0], [0, 2, 5]),
        ("gain", "max", [3.0, 4.0, 2.0, 5.0], [0, 1, 3]),
        ("gain", "min", [3.0, 4.0, 2.0, 5.0], [0, 2]),
        ("accuracy", "auto", [0.5, 0.4, 0.6], [0, 2]),
        ("val_mean_absolute_error", "auto", [0.5, 0.4, 0.6], [0, 1]),
    ],
)
def test_saves_only_what_is_better(tmp_path, monitor, mode, values, better):
    """The value of each save is better than at all saves before; NaN never is."""
    model = made(metrics=["accuracy", "mean_absolute_error"])
    callback = ModelCheckpoint(tmp_path, monitor=monitor, save_best_only=True, mode=mode)
    fit(model, Replay(monitor, values), callback, epochs=len(values))
    assert len(names(tmp_path)) == len(better)
    saved = [load_checkpoint(tmp_path / f"model-{n}") for n in names(tmp_path)]
    assert [reader.values["best"] for reader in saved] == [values[epoch] for epoch in better]
    assert [int(reader.get_tensor("model/optimizer/variables/0")) for reader in saved] == [4 * (e + 1) for e in better]
    assert callback.best == values[better[-1]]


def test_goes_on_when_the_program_starts_again(tmp_path):
    """Numbers and the best value are those of the folder."""
    fit(made(), Replay("val_loss", [3.0, 2.0]), ModelCheckpoint(tmp_path, save_best_only=True), epochs=2)
    callback = ModelCheckpoint(tmp_path, save_best_only=True)
    fit(made(), Replay("val_loss", [2.5, 1.0]), callback, epochs=2)
    assert names(tmp_path) == [1, 2, 3]
    assert callback.best == 1.0


def test_threshold_counts_as_the_best_so_far(tmp_path):
    """What is not better than the threshold is not saved."""
    callback = ModelCheckpoint(tmp_path, monitor="loss", save_best_only=True, initial_value_threshold=2.0)
    fit(made(), Replay("loss", [3.0, 1.0]), callback, epochs=2)
    assert names(tmp_path) == [1]


def test_validation_is_monitored(tmp_path):
    """The value is that of `evaluate` on the validation data."""
    model, callback = made(), ModelCheckpoint(tmp_path, save_best_only=True, max_to_keep=1)
    fit(model, callback, epochs=3, validation_data=(X, X[:, :1]))
    Checkpoint(model=model).restore(callback.latest_checkpoint)
    assert callback.best == pytest.approx(model.evaluate(X, X[:, :1], verbose=0), rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"monitor": "val_loss"}, r"the logs contain loss, mean_absolute_error; val_ metrics need validation_data"),
        ({"monitor": "los"}, r"monitor='los'\): the logs contain loss, mean_absolute_error.\nHINT: monitor=\"loss\""),
        ({"monitor": "mine"}, r"Keras does not know whether less or more[^§]*HINT: mode=\"max\""),
    ],
)
def test_metrics_that_cannot_be_monitored(tmp_path, arguments, message):
    """The error names what there is."""
    extra = [Replay("mine", [1.0, 2.0])] if arguments["monitor"] == "mine" else []
    with pytest.raises(InvalidArgumentError, match=message):
        fit(
            made(metrics=["mean_absolute_error"]),
            *extra,
            ModelCheckpoint(tmp_path, save_best_only=True, **arguments),
            epochs=2,
        )
    Checkpoint().sync()  # A save of the first epoch may still be under way.
