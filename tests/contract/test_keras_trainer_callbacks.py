"""The callbacks of Keras's trainer, on two replicas: when they are called and with what, and what Keras's own ones do.

Every test compares a model of the strategy with its twin in Keras's hands, or with what a callback says of itself. Not held:

- OrbaxCheckpoint: a library that is optional; checkpoints of the strategies have tests of their own.
- RemoteMonitor needs a server; TensorBoard is an optional library, too.
"""

import csv
import time

import keras
import numpy as np
import pytest
from keras import callbacks, layers, ops
from keras_twins import (
    EVALUATE,
    FIT,
    SEVENS,
    SEVENS_TESTED,
    Calls,
    X,
    Y,
    agree,
    agreeing,
    compiled,
    linear,
    made,
    same,
    state_of,
)
from strategy_table import on

pytestmark = on("mirrored_x2")

ACCURATE = compiled(metrics=["mae"])


@agreeing(ACCURATE)
def test_calls_and_names_of_logs(model):
    """Every callback, in Keras's order, with its step, the names of its logs, the user's model and the loop's parameters."""
    calls = Calls()
    model.fit(X, Y, **FIT, epochs=2, validation_data=(X, Y), callbacks=[calls])
    assert calls.model is model
    parameters = dict(calls.params)
    model.evaluate(X, Y, **EVALUATE, callbacks=[calls])
    model.predict(X, **EVALUATE, callbacks=[calls])
    assert len({call[0] for call in calls.all}) == 14
    return calls.all, calls.logs, parameters


def test_logs_are_numbers(strategy):
    """A callback can format, compare and add up what it is given."""
    seen = []
    watch = callbacks.LambdaCallback(
        on_train_batch_end=lambda step, logs: seen.append(f"{logs['loss']:.3f}"),
        on_epoch_end=lambda epoch, logs: seen.append(logs["loss"] + logs["val_loss"] > 0),
    )
    made(ACCURATE, strategy).fit(X, Y, **SEVENS, validation_data=(X, Y), callbacks=[watch])
    assert all(len(text) >= 5 for text in seen[:3])
    assert seen[3]


def test_aliases_of_train_batch(strategy):
    """`on_batch_begin` and `on_batch_end` are called in training alone."""

    class Old(callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.seen = []

        def on_batch_begin(self, batch, logs=None):
            self.seen.append(batch)

        def on_batch_end(self, batch, logs=None):
            self.seen.append(-batch)

    def act(model):
        old = Old()
        model.fit(X, Y, **SEVENS, validation_data=(X, Y), callbacks=[old])
        return old.seen

    agree(strategy, compiled(), act)


@pytest.mark.parametrize("method", ["fit", "predict"])
@agreeing(compiled())
def test_a_list_of_callbacks_made_before(model, method):
    calls = Calls()
    given = callbacks.CallbackList([calls], model=model, add_history=method == "fit")
    data = (X,) if method == "predict" else (X, Y)
    getattr(model, method)(*data, **(SEVENS if method == "fit" else SEVENS_TESTED), callbacks=given)
    return calls.all


def test_state_is_current_at_each_step(strategy):
    """Weights, and a variable that the model counts steps in, can be read in a callback."""

    class Counting(keras.Model):
        def __init__(self):
            super().__init__()
            self.count = self.add_weight(shape=(), initializer="zeros", trainable=False)
            self.dense = layers.Dense(2)

        def call(self, x):
            self.count.assign(self.count + 1)
            return self.dense(x)

    def act(model):
        seen = []
        watch = callbacks.LambdaCallback(on_train_batch_end=lambda step, logs: seen.append(watch.model.get_weights()))
        model.fit(X, Y, **FIT, callbacks=[watch])
        return seen

    ours, _ = agree(strategy, compiled(Counting), act)
    assert float(ours.count) == 3


def test_callbacks_may_write_variables(strategy):
    """Between the steps of all three loops; the next step sees it."""

    class Adding(callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.layers[0].bias.assign_add(ops.ones(2))

        def on_test_batch_end(self, batch, logs=None):
            self.model.layers[0].bias.assign_add(2 * ops.ones(2))

        def on_predict_batch_end(self, batch, logs=None):
            self.model.layers[0].bias.assign(self.model.layers[0].bias * 0.5)

    def act(model):
        fitted = model.fit(X, Y, **SEVENS, epochs=2, validation_data=(X, Y), callbacks=[Adding()]).history
        tested = model.evaluate(X, Y, **SEVENS_TESTED, callbacks=[Adding()])
        return fitted, tested, model.predict(X, **SEVENS_TESTED, callbacks=[Adding()])

    agree(strategy, compiled(), act)


def test_hooks_that_are_safe_in_a_thread_keep_their_order(strategy):
    """Keras calls them beside the steps, in several threads, of which the later one may be the faster."""

    class Slow(callbacks.Callback):
        async_safe = True
        batches = []

        def on_train_batch_end(self, batch, logs=None):
            time.sleep(0.05 * (2 - batch))
            self.batches.append(batch)

    model = made(compiled(), strategy)
    model.fit(X[:21], Y[:21], batch_size=7, verbose=0, callbacks=[Slow()])
    assert Slow.batches == [0, 1, 2]


@agreeing(compiled())
def test_callbacks_may_set_the_learning_rate(model):
    def lower(step, logs):
        at.model.optimizer.learning_rate = 0.3 / (step + 2)

    at = callbacks.LambdaCallback(on_train_batch_end=lower)
    return model.fit(X, Y, **SEVENS, callbacks=[at]).history


@agreeing(compiled())
def test_evaluate_and_predict_within_fit(model):
    seen = []

    def look(epoch, logs):
        seen.append(model.evaluate(X[:7], Y[:7], **SEVENS_TESTED))
        seen.append(model.predict(X[:7], **SEVENS_TESTED))

    fitted = model.fit(X, Y, **SEVENS, epochs=2, callbacks=[callbacks.LambdaCallback(on_epoch_end=look)])
    return fitted.history, seen


@agreeing(compiled())
def test_lambda_callback_sees_its_events(model):
    seen = []
    events = {
        name: lambda *args, name=name, **kwargs: seen.append((name, len(args) + len(kwargs)))
        for name in ("on_train_begin", "on_epoch_begin", "on_train_batch_begin", "on_epoch_end", "on_train_end")
    }
    model.fit(X, Y, **FIT, epochs=2, validation_split=0.2, callbacks=[callbacks.LambdaCallback(**events)])
    return seen


# Callbacks that steer the training, made anew for each twin; epochs.
STEERING = {
    "early_stopping_baseline": (
        lambda: callbacks.EarlyStopping("val_loss", patience=1, baseline=0.0, start_from_epoch=2),
        5,
    ),
    "early_stopping_max": (lambda: callbacks.EarlyStopping("val_mae", mode="max", restore_best_weights=True), 4),
    "schedule": (lambda: callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5), 3),
    "plateau_cooldown": (
        lambda: callbacks.ReduceLROnPlateau("val_loss", factor=0.1, patience=1, cooldown=1, min_lr=0.01, min_delta=9.0),
        5,
    ),
}


@pytest.mark.cover(["callback", "epochs"], [STEERING["early_stopping_max"], STEERING["plateau_cooldown"]])
@pytest.mark.parametrize(("callback", "epochs"), STEERING.values(), ids=STEERING)
@agreeing(ACCURATE)
def test_steering_callbacks_have_the_same_effect(model, callback, epochs):
    """As many epochs, the same rates, the same weights as with Keras."""
    fitted = model.fit(X, Y, **SEVENS, epochs=epochs, validation_data=(X, Y), callbacks=[callback()])
    return fitted.epoch, fitted.history, float(model.optimizer.learning_rate)


@agreeing(compiled())
def test_early_stopping_used_again(model):
    stop = callbacks.EarlyStopping("loss", patience=1, min_delta=10.0)
    return [model.fit(X, Y, **SEVENS, epochs=4, callbacks=[stop]).epoch for _ in range(2)]


@pytest.mark.parametrize(
    "make",
    [
        lambda: callbacks.LearningRateScheduler(lambda _: 0.1),
        lambda: callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=9.0),
    ],
)
def test_rates_that_are_a_schedule_already(strategy, make):
    schedule = keras.optimizers.schedules.PolynomialDecay(0.1, 3)
    model = made(compiled(optimizer=lambda: keras.optimizers.SGD(schedule)), strategy)
    with pytest.raises(TypeError, match="its learning rate is not settable"):
        model.fit(X, Y, **SEVENS, epochs=4, callbacks=[make()])


def test_monitoring_what_is_not_there(strategy):
    with pytest.warns(UserWarning, match=r"val_loss.* which is not available. Available metrics are: loss"):
        made(compiled(), strategy).fit(X, Y, **SEVENS, callbacks=[callbacks.EarlyStopping("val_loss")])


def test_verbose_callbacks_print_what_they_do(strategy, capsys):
    schedule = callbacks.LearningRateScheduler(lambda epoch: 0.01, verbose=1)
    stop = callbacks.EarlyStopping("loss", min_delta=10.0, verbose=1)
    made(compiled(), strategy).fit(X, Y, **SEVENS, epochs=4, callbacks=[schedule, stop])
    out = capsys.readouterr().out
    assert "setting learning rate to 0.01" in out
    assert "early stopping" in out


@pytest.mark.cover(["how"], [{"save_freq": 2}])
@pytest.mark.parametrize("how", [{}, {"save_best_only": True, "monitor": "val_loss"}, {"save_freq": 2}])
def test_model_checkpoint_saves_the_same_files(strategy, tmp_path, how):
    """Files after the same epochs or steps, with the same weights."""
    files = []

    def act(model):
        place = tmp_path / str(len(files))
        save = callbacks.ModelCheckpoint(f"{place}/{{epoch}}.weights.h5", save_weights_only=True, **how)
        model.fit(X, Y, **SEVENS, epochs=2, validation_data=(X, Y), callbacks=[save])
        files.append(place)
        return sorted(path.name for path in place.iterdir())

    agree(strategy, compiled(), act)
    for path in files[0].iterdir():
        models = made(linear), made(linear)
        for model, place in zip(models, files, strict=True):
            model.load_weights(place / path.name)
        same(*(m.get_weights() for m in models))


def test_checkpoints_of_whole_models(strategy, tmp_path):
    """What was saved in the middle trains on where it was, without a strategy."""
    save = callbacks.ModelCheckpoint(tmp_path / "{epoch}.keras")
    ours, theirs = made(ACCURATE, strategy), made(ACCURATE)
    ours.fit(X, Y, **SEVENS, epochs=2, callbacks=[save])
    theirs.fit(X, Y, **SEVENS)
    loaded = keras.models.load_model(tmp_path / "1.keras")
    same(loaded.fit(X, Y, **SEVENS).history, theirs.fit(X, Y, **SEVENS).history)
    same(ours.get_weights(), loaded.get_weights())


class Interrupted(callbacks.Callback):
    """Fails once in a training of several."""

    def __init__(self, epoch, step):
        super().__init__()
        self._epoch, self._step, self._now = epoch, step, 0

    def on_epoch_begin(self, epoch, logs=None):
        self._now = epoch

    def on_train_batch_begin(self, batch, logs=None):
        if (self._now, batch) == (self._epoch, self._step):
            raise RuntimeError("interrupted")


@pytest.mark.cover(["frequency"], {2})
@pytest.mark.parametrize("frequency", ["epoch", 2])
def test_backup_and_restore(strategy, tmp_path, frequency):
    """A training that fails goes on in the epoch where it stopped, with a model that is made anew."""
    results = []
    for scope in (strategy, None):
        backup = lambda: callbacks.BackupAndRestore(tmp_path / str(len(results)), save_freq=frequency)  # noqa: B023, E731
        with pytest.raises(RuntimeError, match="interrupted"):
            made(ACCURATE, scope).fit(X, Y, **SEVENS, epochs=4, callbacks=[backup(), Interrupted(2, 1)])
        model = made(ACCURATE, scope)
        fitted = model.fit(X, Y, **SEVENS, epochs=4, callbacks=[backup()])
        results.append((fitted.epoch, fitted.history, state_of(model)))
    same(*results)


def test_csv_logger_writes_and_appends_lines(strategy, tmp_path):
    """A line for each epoch; more lines where it is told to append."""
    path = tmp_path / "log.csv"
    model, losses = made(ACCURATE, strategy), []
    for append in (False, True):
        log = callbacks.CSVLogger(path, separator=";", append=append)
        losses += model.fit(X, Y, **SEVENS, epochs=2, validation_data=(X, Y), callbacks=[log]).history["val_loss"]
    lines = list(csv.DictReader(path.read_text().splitlines(), delimiter=";"))
    assert list(lines[0]) == ["epoch", "loss", "mae", "val_loss", "val_mae"]
    same([float(line["val_loss"]) for line in lines], losses)


NOT_A_NUMBER = np.where(np.arange(21)[:, None] == 9, np.nan, X).astype("float32")


@agreeing(compiled(), state=False)
def test_terminate_on_nan(model):
    """After the second of three steps, where the loss is no number."""
    calls = Calls()
    model.fit(NOT_A_NUMBER, Y, **SEVENS, epochs=3, callbacks=[callbacks.TerminateOnNaN(), calls])
    return calls.of("on_train_batch_end", "on_epoch_end", "on_train_end")


def test_terminate_on_nan_with_an_error(strategy):
    """Nothing is told of an end of the training."""
    calls = Calls()
    given = [callbacks.TerminateOnNaN(raise_error=True), calls]
    with pytest.raises(RuntimeError, match="NaN or Inf loss encountered at batch 1"):
        made(compiled(), strategy).fit(NOT_A_NUMBER, Y, **SEVENS, callbacks=given)
    assert not calls.of("on_train_end")


def averaged(**kwargs):
    return keras.optimizers.SGD(0.3, use_ema=True, ema_momentum=0.7, **kwargs)


EMA = {
    "each_epoch": ({"swap_on_epoch": True}, averaged),
    "scaled": ({}, lambda: keras.optimizers.LossScaleOptimizer(averaged())),
}


@pytest.mark.cover(["how"], [{}])
@pytest.mark.parametrize(("how", "optimizer"), EMA.values(), ids=EMA)
def test_swap_ema_weights(strategy, how, optimizer):
    """Validation sees the averages, and the model ends with them."""

    def act(model):
        swap = callbacks.SwapEMAWeights(**how)
        fitted = model.fit(X, Y, **SEVENS, epochs=2, validation_data=(X, Y), callbacks=[swap]).history
        return fitted, model.evaluate(X, Y, **SEVENS_TESTED)

    ours, _ = agree(strategy, compiled(optimizer=optimizer), act)
    same(ours.history.history["val_loss"][-1], ours.evaluate(X, Y, **SEVENS_TESTED))


def test_swap_without_averages(strategy):
    given = {"validation_data": (X, Y), "callbacks": [callbacks.SwapEMAWeights()]}
    with pytest.raises(ValueError, match="use_ema=True"):
        made(compiled(), strategy).fit(X, Y, **SEVENS, **given)


def test_callbacks_of_groups_read_logs_after_the_last_step(strategy):
    """With two steps in one execution, the logs are those of the second and of the last step."""

    def act(k):
        model = made(compiled(metrics=["mae"], steps_per_execution=k), strategy if k > 1 else None)
        calls = Calls()
        model.fit(X, Y, **SEVENS, callbacks=[calls])
        return [logs for logs in calls.logs if logs]

    # Three steps, then the logs of the epoch and of the training.
    same(act(2), act(1)[1:])
