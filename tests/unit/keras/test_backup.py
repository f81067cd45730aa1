"""`fit` goes on at the batch at which it was stopped."""

import functools

import keras
import numpy as np
import pytest
from keras import layers
from twins import replicas

from phalanx.errors import CheckpointMismatchError, ContextError, InvalidArgumentError
from phalanx.keras import BackupAndRestore
from phalanx.keras.backup import FitProgress

ROWS, BATCH, EPOCHS = 100, 8, 3
STEPS = 13
RANDOM = np.random.RandomState(0)
X = RANDOM.rand(ROWS, 6).astype("float32")
Y = RANDOM.randint(0, 3, ROWS)


class Stopped(Exception):
    pass


class Stop(keras.callbacks.Callback):
    """Ends `fit` after that many batches, which are numbered from 0 in each epoch."""

    def __init__(self, after):
        super().__init__()
        self.after, self.seen, self.last = after, 0, -1

    def on_epoch_begin(self, epoch, logs=None):
        self.last = -1

    def on_train_batch_end(self, batch, logs=None):
        self.seen += batch - self.last if self.last >= 0 else 1
        self.last = batch
        if self.seen >= self.after:
            raise Stopped


def made(strategy, steps_per_execution=1):
    """A model with random masks and statistics."""
    keras.utils.set_random_seed(7)
    with strategy.scope():
        statistics = layers.BatchNormalization(center=False, scale=False)
        parts = [layers.Dense(8, use_bias=False), statistics, layers.Dropout(0.3), layers.Dense(3)]
        model = keras.Sequential([keras.Input((6,)), *parts])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        adam = keras.optimizers.Adam(0.01)
        model.compile(adam, loss, metrics=["accuracy"], steps_per_execution=steps_per_execution)
    return model


def fit(model, *callbacks, **options):
    """Trains; returns the logs of each epoch."""
    found = {}
    note = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: found.update({epoch: dict(logs)}))
    options = {"batch_size": BATCH, "epochs": EPOCHS, "verbose": 0, "validation_data": (X[:16], Y[:16])} | options
    data = (X, Y) if "x" not in options else ()
    model.fit(*data, callbacks=[note, *callbacks], **options)
    return found


def state(model):
    """All that training has changed, and the next random number."""
    return [v.numpy() for v in [*model.variables, *model.optimizer.variables]], np.random.rand()


@functools.cache
def uninterrupted(count):
    """Logs and state of a training of all epochs on so many replicas."""
    model = made(replicas(count))
    return fit(model), state(model)


def assert_goes_on(folder, make, stops, expected, save_freq=1, **options):
    """Asserts that a training which is stopped again and again ends in the same state; returns the logs of the last part."""
    for after in stops:
        with pytest.raises(Stopped):
            fit(make(), BackupAndRestore(folder, save_freq=save_freq), Stop(after), **options)
    model = make()
    np.random.seed(99)
    logs = fit(model, BackupAndRestore(folder, save_freq=save_freq), **options)
    for found, wanted in zip(*map(keras.tree.flatten, (state(model), expected)), strict=True):
        np.testing.assert_array_equal(found, wanted)
    assert not list(folder.glob("backup*"))
    return logs


@pytest.mark.cover(["stops"], [[17, 9]])
@pytest.mark.parametrize(
    ("count", "stops"), [(2, [1]), (2, [13]), (2, [17, 9]), (2, [17, 4, 1, 9]), (2, [38]), (1, [14, 3])], ids=str
)
def test_stopped_training_ends_like_one_that_was_not(tmp_path, count, stops):
    """With the same bits: rows are shuffled, masks are random, and each program begins with other seeds."""
    logs, expected = uninterrupted(count)
    found = assert_goes_on(tmp_path, functools.partial(made, replicas(count)), stops, expected)
    assert found == {epoch: logs[epoch] for epoch in found}
    assert EPOCHS - 1 in found


@pytest.mark.cover(["stops"], [[6]])
@pytest.mark.parametrize("stops", [[6], [16, 8]], ids=str)
def test_several_steps_per_execution_go_on(tmp_path, strategy, stops):
    """The backup is at the end of a group of steps."""
    make, options = functools.partial(made, strategy, 4), {"validation_data": None}
    model = make()
    fit(model, **options)
    assert_goes_on(tmp_path, make, stops, state(model), save_freq=3, **options)


def test_data_that_ends_within_an_epoch_goes_on(tmp_path, strategy):
    """With steps_per_epoch, an epoch begins where the last one has ended."""
    options = {"x": X[:96], "y": Y[:96], "steps_per_epoch": 4, "epochs": 5, "validation_data": None}
    model = made(strategy)
    fit(model, **options)
    assert_goes_on(tmp_path, functools.partial(made, strategy), (3, 11), state(model), **options)


def test_distributed_dataset_goes_on_by_its_position(tmp_path, strategy):
    dataset = strategy.experimental_distribute_dataset((X, Y), batch_size=BATCH)
    options = {"x": dataset, "batch_size": None, "validation_data": None}
    model = made(strategy)
    fit(model, **options)
    assert_goes_on(tmp_path, functools.partial(made, strategy), [18], state(model), save_freq=4, **options)


def test_epoch_is_the_default(tmp_path, strategy):
    """What was done of an epoch that did not end is done again."""
    logs, _ = uninterrupted(2)
    backup = BackupAndRestore(tmp_path)
    with pytest.raises(Stopped):
        fit(made(strategy), backup, Stop(STEPS + 4))
    backup._manager.sync()
    assert len(list(tmp_path.glob("backup-1.safetensors"))) == 1
    assert fit(made(strategy), BackupAndRestore(tmp_path, delete_checkpoint=False)) == {1: logs[1], 2: logs[2]}
    assert len(list(tmp_path.glob("backup*"))) == 1
    assert fit(made(strategy), BackupAndRestore(tmp_path)) == {}


@pytest.mark.parametrize(("seconds", "number"), [(1e-9, 5), (1e6, 1)])
def test_backups_by_time_follow_the_clock(tmp_path, strategy, seconds, number):
    """One after the first batch, and then as many batches later as take so long."""
    backup = BackupAndRestore(tmp_path, save_every_s=seconds)
    with pytest.raises(Stopped):
        fit(made(strategy), backup, Stop(6))  # The backup is called after the callback that stops.
    backup._manager.sync()
    assert list(tmp_path.glob(f"backup-{number}.safetensors"))


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
    with pytest.raises(InvalidArgumentError, match=f"{next(iter(options))}="):
        BackupAndRestore(tmp_path, **options)


def test_backup_without_states_of_callbacks_loads_as_before(tmp_path, strategy, monkeypatch):
    """Earlier versions have saved none."""
    logs, _ = uninterrupted(2)
    get_state = FitProgress.get_state
    monkeypatch.setattr(
        FitProgress, "get_state", lambda self: {k: v for k, v in get_state(self).items() if k != "callbacks"}
    )
    with pytest.raises(Stopped):
        fit(made(strategy), BackupAndRestore(tmp_path), Stop(STEPS + 4))
    assert fit(made(strategy), BackupAndRestore(tmp_path)) == {1: logs[1], 2: logs[2]}


def test_run_that_a_callback_has_ended_stays_at_its_end(tmp_path, strategy):
    """It is saved with the epoch, and what callbacks do at the end is done again."""

    class End(keras.callbacks.Callback):
        ends = 0

        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = True

        def on_train_end(self, logs=None):
            End.ends += 1
            if End.ends == 1:
                raise Stopped

    with pytest.raises(Stopped):
        fit(made(strategy), BackupAndRestore(tmp_path), End())
    assert (fit(made(strategy), BackupAndRestore(tmp_path), End()), End.ends) == ({}, 2)


OTHER_DATA = {
    "batches of another size": {"batch_size": 10},
    "fewer rows": {"x": X[:60], "y": Y[:60]},
    "a part for validation": {"validation_split": 0.2, "validation_data": None},
    "a distributed dataset": {"batch_size": None},
}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """The folder with the backup of a training that was stopped."""
    folder = tmp_path_factory.mktemp("stopped")
    with pytest.raises(Stopped):
        fit(made(replicas(2)), BackupAndRestore(folder, save_freq=4), Stop(6))
    return folder


@pytest.mark.parametrize("options", OTHER_DATA.values(), ids=list(OTHER_DATA))
def test_position_in_other_data_is_refused_before_anything_is_restored(stopped, strategy, options, capsys):
    if options is OTHER_DATA["a distributed dataset"]:
        options = options | {"x": strategy.experimental_distribute_dataset((X, Y), batch_size=BATCH)}
    model = made(strategy)
    before = model.get_weights()
    with pytest.raises(
        CheckpointMismatchError, match="does not fit this program: .*\nHINT: use the data and the batch"
    ):
        fit(model, BackupAndRestore(stopped, save_freq=4), **options)
    for found, wanted in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(found, wanted)
    assert int(model.optimizer.iterations) == 0
    assert "resumed" not in "".join(capsys.readouterr())
