"""`fit` goes on at the batch at which it was stopped."""

import keras
import numpy as np
import pytest
from keras import layers

import phalanx
from phalanx.errors import ContextError, InvalidArgumentError
from phalanx.keras import BackupAndRestore

ROWS, BATCH, EPOCHS = 100, 8, 3
STEPS = 13
RANDOM = np.random.RandomState(0)
X = RANDOM.rand(ROWS, 6).astype("float32")
Y = RANDOM.randint(0, 3, ROWS)


class Stopped(Exception):
    """Stands for the end of the program."""


class Stop(keras.callbacks.Callback):
    """Ends `fit` after that many batches."""

    def __init__(self, after):
        super().__init__()
        self.after, self.seen, self.last = after, 0, -1

    def on_epoch_begin(self, epoch, logs=None):
        """Batches are numbered from 0 in each epoch."""
        self.last = -1

    def on_train_batch_end(self, batch, logs=None):
        """Counts."""
        self.seen += batch - self.last if self.last >= 0 else 1
        self.last = batch
        if self.seen >= self.after:
            raise Stopped


class Noted(keras.callbacks.Callback):
    """What the epochs have reported."""

    def __init__(self):
        super().__init__()
        self.logs = {}

    def on_epoch_end(self, epoch, logs=None):
        """Keeps the logs."""
        self.logs[epoch] = dict(logs)


def mirrored():
    """Two replicas."""
    return phalanx.MirroredStrategy(["cpu:0", "cpu:1"])


def made(strategy, steps_per_execution=1):
    """A model with random masks and statistics."""
    keras.utils.set_random_seed(7)
    with strategy.scope():
        parts = [layers.Dense(8), layers.BatchNormalization(), layers.Dropout(0.3), layers.Dense(3)]
        model = keras.Sequential([keras.Input((6,)), *parts])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        adam = keras.optimizers.Adam(0.01)
        model.compile(adam, loss, metrics=["accuracy"], steps_per_execution=steps_per_execution)
    return model


def fit(model, *callbacks, **options):
    """Trains; returns the logs of each epoch."""
    noted = Noted()
    options = {"batch_size": BATCH, "epochs": EPOCHS, "verbose": 0, "validation_data": (X[:20], Y[:20])} | options
    data = (X, Y) if "x" not in options else ()
    model.fit(*data, callbacks=[noted, *callbacks], **options)
    return noted.logs


def values(model):
    """All that training has changed."""
    return [v.numpy() for v in [*model.variables, *model.optimizer.variables]]


@pytest.mark.parametrize("stops", [[1], [5], [13], [14, 3], [17, 4, 1, 9], [38]], ids=str)
@pytest.mark.parametrize("make", [lambda: phalanx.OneDeviceStrategy("cpu:0"), mirrored])
def test_stopped_training_ends_like_one_that_was_not(tmp_path, make, stops):
    """With the same bits: rows are shuffled, masks are random, and each program begins with other seeds."""
    strategy = make()
    model = made(strategy)
    logs = fit(model)
    wanted, random = values(model), np.random.rand()
    for after in stops:
        model = made(strategy)
        with pytest.raises(Stopped):
            fit(model, BackupAndRestore(tmp_path, save_freq=1), Stop(after))
    model = made(strategy)
    np.random.seed(99)
    got = fit(model, BackupAndRestore(tmp_path, save_freq=1))
    for a, b in zip(values(model), wanted, strict=True):
        np.testing.assert_array_equal(a, b)
    assert np.random.rand() == random
    assert got == {epoch: logs[epoch] for epoch in got}
    assert EPOCHS - 1 in got
    assert not list(tmp_path.glob("backup*"))


@pytest.mark.parametrize("stops", [[6], [16, 8]], ids=str)
def test_several_steps_per_execution_go_on(tmp_path, stops):
    """The backup is at the end of a group of steps."""
    strategy = mirrored()
    model = made(strategy, 4)
    fit(model)
    wanted = values(model)
    for after in stops:
        model = made(strategy, 4)
        with pytest.raises(Stopped):
            fit(model, BackupAndRestore(tmp_path, save_freq=3), Stop(after))
    model = made(strategy, 4)
    fit(model, BackupAndRestore(tmp_path, save_freq=3))
    for a, b in zip(values(model), wanted, strict=True):
        np.testing.assert_array_equal(a, b)


def test_data_that_ends_within_an_epoch_goes_on(tmp_path):
    """With steps_per_epoch, an epoch begins where the last one has ended."""
    strategy = mirrored()
    options = {"x": X[:96], "y": Y[:96], "steps_per_epoch": 4, "epochs": 7, "validation_data": None}
    model = made(strategy)
    fit(model, **options)
    wanted = values(model)
    for after in (3, 9, 6):
        model = made(strategy)
        with pytest.raises(Stopped):
            fit(model, BackupAndRestore(tmp_path, save_freq=1), Stop(after), **options)
    model = made(strategy)
    fit(model, BackupAndRestore(tmp_path, save_freq=1), **options)
    for a, b in zip(values(model), wanted, strict=True):
        np.testing.assert_array_equal(a, b)


def test_distributed_dataset_goes_on_by_its_position(tmp_path):
    """Rows are not read again."""
    strategy = mirrored()
    dataset = strategy.experimental_distribute_dataset((X, Y), batch_size=BATCH)
    model = made(strategy)
    fit(model, x=dataset, batch_size=None)
    wanted = values(model)
    model = made(strategy)
    with pytest.raises(Stopped):
        fit(model, BackupAndRestore(tmp_path, save_freq=4), Stop(18), x=dataset, batch_size=None)
    model = made(strategy)
    fit(model, BackupAndRestore(tmp_path, save_freq=4), x=dataset, batch_size=None)
    for a, b in zip(values(model), wanted, strict=True):
        np.testing.assert_array_equal(a, b)


def test_epoch_is_the_default(tmp_path):
    """What was done of an epoch that did not end is done again."""
    strategy = mirrored()
    model = made(strategy)
    logs = fit(model)
    model = made(strategy)
    backup = BackupAndRestore(tmp_path)
    with pytest.raises(Stopped):
        fit(model, backup, Stop(STEPS + 4))
    backup._manager.sync()
    assert len(list(tmp_path.glob("backup-1.safetensors"))) == 1
    assert fit(made(strategy), BackupAndRestore(tmp_path, delete_checkpoint=False)) == {1: logs[1], 2: logs[2]}
    assert len(list(tmp_path.glob("backup*"))) == 1
    assert fit(made(strategy), BackupAndRestore(tmp_path)) == {}


def test_backups_by_time_follow_the_clock(tmp_path):
    """One after the first batch, and then as many batches later as take so long."""
    strategy = mirrored()
    backup = BackupAndRestore(tmp_path, save_every_s=1e-9)
    with pytest.raises(Stopped):
        fit(made(strategy), backup, Stop(5))
    backup._manager.sync()
    assert list(tmp_path.glob("backup-5.safetensors"))
    rare = BackupAndRestore(tmp_path / "rare", save_every_s=1e6)
    with pytest.raises(Stopped):
        fit(made(strategy), rare, Stop(5))
    rare._manager.sync()
    assert list((tmp_path / "rare").glob("backup-1.safetensors"))


def test_fails_where_the_position_is_unknown(tmp_path):
    """In Keras's own loop."""
    model = keras.Sequential([keras.Input((6,)), layers.Dense(3)])
    model.compile("sgd", "mse")
    with pytest.raises(ContextError, match=r"belongs to no strategy.*\nHINT: with strategy.scope\(\)"):
        model.fit(X, np.zeros((ROWS, 3)), verbose=0, callbacks=[BackupAndRestore(tmp_path)])


@pytest.mark.parametrize(
    "options", [{"save_freq": 0}, {"save_freq": "batch"}, {"save_every_s": -1}, {"delete_checkpoint": 1}]
)
def test_wrong_arguments_are_refused(tmp_path, options):
    """When the callback is made."""
    with pytest.raises(InvalidArgumentError, match=f"{next(iter(options))}="):
        BackupAndRestore(tmp_path, **options)
