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


def made(strategy, *metrics):
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), "mse", metrics=list(metrics))
    return model


def replay(name, values):
    """Reports chosen values at the end of the epochs."""
    return keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: logs.update({name: values[epoch]}))


def fit(model, *callbacks, epochs=1, **given):
    """Trains for so many epochs of four batches."""
    model.fit(X, X[:, :1], batch_size=8, epochs=epochs, shuffle=False, verbose=0, callbacks=list(callbacks), **given)


def saved(folder):
    """The checkpoints, by number."""
    numbers = sorted(int(file.stem.rpartition("-")[2]) for file in folder.glob("*.safetensors"))
    return {number: load_checkpoint(folder / f"model-{number}") for number in numbers}


def steps(folder):
    """The steps after which the checkpoints were saved."""
    return [int(reader.get_tensor("model/optimizer/iteration")) for reader in saved(folder).values()]


def test_saves_each_epoch_and_keeps_some(tmp_path, strategy):
    """The last two of three, and what they restore under another strategy is the model of that epoch.

    The value that is monitored is that of `evaluate` on the validation data.
    """
    model, callback = made(strategy), ModelCheckpoint(tmp_path, max_to_keep=2)
    best = ModelCheckpoint(tmp_path / "best", save_best_only=True, max_to_keep=1)
    fit(model, callback, best, epochs=3, validation_data=(X, X[:, :1]))
    assert list(saved(tmp_path)) == [2, 3]
    assert callback.latest_checkpoint == latest_checkpoint(tmp_path)
    other = made(phalanx.OneDeviceStrategy("cpu:0"))
    Checkpoint(model=other).restore(callback.latest_checkpoint).assert_consumed()
    np.testing.assert_array_equal(other.layers[0].kernel.numpy(), model.layers[0].kernel.numpy())
    assert int(other.optimizer.iterations) == 12
    Checkpoint(model=model).restore(best.latest_checkpoint)
    assert best.best == pytest.approx(model.evaluate(X, X[:, :1], verbose=0), rel=1e-5)


@pytest.mark.parametrize(("steps_per_execution", "expected"), [(1, [3, 6]), (3, [3, 7])])
def test_saves_after_some_batches(tmp_path, strategy, steps_per_execution, expected):
    """Of 8 batches each 3; where one call trains on several, after the call."""
    model = made(strategy)
    model.steps_per_execution = steps_per_execution
    fit(model, ModelCheckpoint(tmp_path, save_freq=3), epochs=2)
    assert steps(tmp_path) == expected


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
def test_saves_only_what_is_better(tmp_path, strategy, monitor, mode, values, better):
    """The value of each save is better than at all saves before; NaN never is."""
    callback = ModelCheckpoint(tmp_path, monitor=monitor, save_best_only=True, mode=mode)
    fit(made(strategy, "accuracy", "mean_absolute_error"), replay(monitor, values), callback, epochs=len(values))
    assert [reader.values["best"] for reader in saved(tmp_path).values()] == [values[epoch] for epoch in better]
    assert steps(tmp_path) == [4 * (epoch + 1) for epoch in better]
    assert callback.best == values[better[-1]]


def test_goes_on_when_the_program_starts_again(tmp_path, strategy):
    """Numbers and the best value are those of the folder. What is not better than the threshold is not saved."""
    model = made(strategy)
    callback = ModelCheckpoint(tmp_path, save_best_only=True, initial_value_threshold=np.float32(4))
    fit(model, replay("val_loss", [5.0, 3.0, 2.0]), callback, epochs=3)
    assert list(saved(tmp_path)) == [1, 2]
    callback = ModelCheckpoint(tmp_path, save_best_only=True)
    fit(model, replay("val_loss", [2.5, 1.0]), callback, epochs=2)
    assert list(saved(tmp_path)) == [1, 2, 3]
    assert callback.best == 1.0


@pytest.mark.parametrize(
    ("monitor", "message"),
    [
        ("val_loss", r"the logs contain loss, mean_absolute_error; val_ metrics need validation_data"),
        ("los", r"monitor='los'\): the logs contain loss, mean_absolute_error.\nHINT: monitor=\"loss\""),
        ("mine", r"Keras does not know whether less or more[^§]*HINT: mode=\"max\""),
    ],
)
def test_metrics_that_cannot_be_monitored(tmp_path, strategy, monitor, message):
    callbacks = [ModelCheckpoint(tmp_path, monitor=monitor, save_best_only=True)]
    if monitor == "mine":
        callbacks.insert(0, replay("mine", [1.0, 2.0]))
    with pytest.raises(InvalidArgumentError, match=message):
        fit(made(strategy, "mean_absolute_error"), *callbacks, epochs=2)
    Checkpoint().sync()  # A save of the first epoch may still be under way.
