"""What Keras's own trainer does, on two replicas: each behaviour against the same model in the hands of Keras."""

import csv
import functools

import grain
import keras
import numpy as np
import pytest
from keras import layers, ops
from twins import (
    CLASSES,
    FIT,
    WEIGHTS,
    Recorder,
    X,
    Y,
    alone,
    compiled,
    crossentropy,
    mlp,
    replicas,
    same,
    same_fit,
    same_state,
    twins,
    under,
)

import phalanx

ACCURATE = compiled(metrics=["accuracy"], weighted_metrics=["accuracy"])


@pytest.fixture
def strategy():
    """Two replicas."""
    return replicas(2)


def batches(count, size=16):
    """Yields batches of `(x, y)` for ever."""
    while True:
        for i in range(count):
            yield X[i * size : (i + 1) * size], Y[i * size : (i + 1) * size]


@pytest.mark.parametrize("weights", [{}, {"sample_weight": WEIGHTS[:7]}, {"class_weight": {0: 1.0, 1: 2.0, 2: 0.5}}])
def test_train_on_batch(strategy, weights):
    """Trains on one batch and returns its loss and metrics."""
    ours, theirs = twins(strategy, ACCURATE)
    for _ in range(2):
        same(ours.train_on_batch(X[:7], Y[:7], **weights), theirs.train_on_batch(X[:7], Y[:7], **weights))
    same_state(ours, theirs)


def test_test_on_batch(strategy):
    """Evaluates one batch, weighted; metrics start anew at each call."""
    ours, theirs = twins(strategy, ACCURATE)
    for rows in (5, 5, 8):
        data = X[:rows], Y[:rows], WEIGHTS[:rows]
        same(ours.test_on_batch(*data), theirs.test_on_batch(*data))


def test_predict_on_batch(strategy):
    """Returns as many rows as it was given."""
    ours, theirs = twins(strategy, ACCURATE)
    for rows in (5, 1, 4):
        same(ours.predict_on_batch(X[:rows]), theirs.predict_on_batch(X[:rows]))


def test_on_batch_return_dict(strategy):
    """Results by name, in Python's numbers."""
    ours, theirs = twins(strategy, ACCURATE)
    for method in ("train_on_batch", "test_on_batch"):
        result = getattr(ours, method)(X[:8], Y[:8], return_dict=True)
        same(result, getattr(theirs, method)(X[:8], Y[:8], return_dict=True))
        assert {type(v) for v in result.values()} == {float}


def test_class_weight_and_sample_weight_on_a_batch(strategy):
    """One of them is allowed."""
    model = under(strategy, ACCURATE)
    with pytest.raises(ValueError, match="class_weight"):
        model.train_on_batch(X[:8], Y[:8], sample_weight=WEIGHTS[:8], class_weight={0: 1, 1: 1, 2: 1})


VALIDATION = {
    "split": {"validation_split": 0.3},
    "split_weighted": {"validation_split": 0.3, "sample_weight": WEIGHTS},
    "data": {"validation_data": (X[:21], Y[:21])},
    "weighted": {"validation_data": (X[:21], Y[:21], WEIGHTS[:21])},
    "freq": {"validation_data": (X[:21], Y[:21]), "validation_freq": 2, "epochs": 3},
    "freq_list": {"validation_data": (X[:21], Y[:21]), "validation_freq": [1, 3], "epochs": 3},
    "batch_size": {"validation_data": (X[:21], Y[:21]), "validation_batch_size": 5},
    "steps": {"validation_data": (X[:21], Y[:21]), "validation_batch_size": 5, "validation_steps": 2},
    "initial_epoch": {"initial_epoch": 1, "epochs": 3},
    "no_epoch": {"initial_epoch": 2, "epochs": 2},
}


@pytest.mark.parametrize("given", VALIDATION.values(), ids=VALIDATION)
def test_arguments_of_fit(strategy, given):
    """Validation and epochs."""
    same_fit(strategy, ACCURATE, **given)


def test_steps_per_epoch_with_a_generator(strategy):
    """The next epoch goes on where the last one ended."""
    ours, theirs = twins(strategy, ACCURATE)
    histories = [
        m.fit(batches(5), epochs=3, steps_per_epoch=2, shuffle=False, verbose=0).history for m in (ours, theirs)
    ]
    same(*histories)
    same_state(ours, theirs)


@pytest.mark.parametrize("k", [1, 4])
def test_steps_per_epoch_with_arrays(strategy, k):
    """Arrays of seven batches, three steps an epoch; Keras would make four of them where four are one execution."""
    ours, theirs = under(strategy, compiled(steps_per_execution=k)), alone(compiled())
    same(*(m.fit(X, Y, **FIT, epochs=2, steps_per_epoch=3).history for m in (ours, theirs)))
    same_state(ours, theirs)


def test_a_generator_that_ends_early(strategy):
    """A warning, and the steps that were."""
    model, seen = under(strategy, ACCURATE), Recorder()
    with pytest.warns(UserWarning, match="data"):
        model.fit(
            (b for _, b in zip(range(3), batches(5), strict=False)),
            steps_per_epoch=5,
            shuffle=False,
            verbose=0,
            callbacks=[seen],
        )
    assert [c for c in seen.calls if c[0] == "end"] == [("end", 0), ("end", 1), ("end", 2)]


def test_callbacks_are_called_as_by_keras(strategy):
    """The same callbacks with the same steps and logs, of fit with validation."""
    ours, theirs = twins(strategy, compiled(metrics=["accuracy"]))
    seen = Recorder(), Recorder()
    for model, recorder in zip((ours, theirs), seen, strict=True):
        model.fit(X, Y, **FIT, validation_data=(X[:21], Y[:21]), callbacks=[recorder])
    assert seen[0].calls == seen[1].calls
    same(seen[0].logs, seen[1].logs)


def test_callbacks_of_groups(strategy):
    """Before the first step of a group and after its last; Keras counts steps that a short group has not."""
    model, seen = under(strategy, compiled(steps_per_execution=4)), Recorder()
    model.fit(X, Y, **FIT, validation_data=(X[:21], Y[:21]), callbacks=[seen])
    assert seen.calls[:4] == [("begin", 0), ("end", 3), ("begin", 4), ("end", 6)]
    assert seen.calls[4:] == [("test", 1), ("epoch", 0, "loss", "val_loss")]


def test_callbacks_of_predict(strategy):
    """Outputs reach the callbacks, as long as the real rows."""
    model, seen = under(strategy, compiled(steps_per_execution=2)), Recorder()
    model.predict(X[:11], batch_size=4, verbose=0, callbacks=[seen])
    assert seen.calls == [("predict", 1, 8), ("predict", 2, 3)]


def test_stop_training_within_an_epoch(strategy):
    """A callback ends the training after the third step."""

    def stop():
        def at_end(batch, logs):
            box[0].stop_training = batch == 2

        return keras.callbacks.LambdaCallback(on_train_batch_end=at_end)

    models, box = twins(strategy, ACCURATE), [None]
    for model in models:
        box[0] = model
        model.fit(X, Y, **FIT, epochs=5, callbacks=[stop()])
    same(models[0].history.history, models[1].history.history)
    same_state(*models)


def callbacks_of(tmp_path):
    """Callbacks that change the training, anew."""
    made = keras.callbacks
    return {
        "early_stopping": [made.EarlyStopping("val_loss", min_delta=10.0, patience=1, restore_best_weights=True)],
        "schedule": [made.LearningRateScheduler(lambda epoch, rate: rate * 0.5)],
        "plateau": [made.ReduceLROnPlateau("loss", factor=0.1, patience=1, min_delta=10.0)],
        "terminate": [made.TerminateOnNaN()],
        "swap": [made.SwapEMAWeights(swap_on_epoch=True)],
        "backup": [made.BackupAndRestore(tmp_path / "backup")],
    }


@pytest.mark.parametrize("name", ["early_stopping", "schedule", "plateau", "terminate"])
def test_callbacks_that_steer(strategy, tmp_path, name):
    """Keras's callbacks have the same effect."""
    ours, theirs = twins(strategy, ACCURATE)
    for model in (ours, theirs):
        steering = callbacks_of(tmp_path)[name]
        model.fit(X, Y, **FIT, epochs=4, validation_data=(X[:21], Y[:21]), callbacks=steering)
    same(ours.history.history, theirs.history.history)
    assert ours.history.epoch == theirs.history.epoch
    same_state(ours, theirs)


def test_model_checkpoint_saves_weights_each_epoch(strategy, tmp_path):
    """Saves the weights after each epoch, for a model without a strategy too."""
    ours, theirs = twins(strategy, ACCURATE)
    save = keras.callbacks.ModelCheckpoint(tmp_path / "{epoch}.weights.h5", save_weights_only=True)
    ours.fit(X, Y, **FIT, epochs=2, callbacks=[save])
    theirs.fit(X, Y, **FIT, epochs=2)
    restored = alone(mlp)
    restored.load_weights(tmp_path / "2.weights.h5")
    same(restored.get_weights(), theirs.get_weights())


def test_csv_logger_writes_a_line_per_epoch(strategy, tmp_path):
    """A line for each epoch, with numbers."""
    model = under(strategy, ACCURATE)
    model.fit(X, Y, **FIT, epochs=2, callbacks=[keras.callbacks.CSVLogger(tmp_path / "log.csv")])
    lines = list(csv.DictReader((tmp_path / "log.csv").read_text().splitlines()))
    same([float(line["loss"]) for line in lines], model.history.history["loss"])


def test_terminate_on_nan(strategy):
    """Stops at the first step whose loss is not a number."""
    model, seen, rows = under(strategy, ACCURATE), Recorder(), X.copy()
    rows[20] = np.nan
    model.fit(rows, Y, **FIT, epochs=3, callbacks=[keras.callbacks.TerminateOnNaN(), seen])
    assert [c for c in seen.calls if c[0] == "end"] == [("end", 0), ("end", 1)]


def test_backup_and_restore(strategy, tmp_path):
    """A training that fails in its third epoch goes on from the second."""
    ours, theirs = twins(strategy, ACCURATE)

    def fail(epoch, logs):
        if epoch == 2:
            raise ZeroDivisionError

    failing = keras.callbacks.LambdaCallback(on_epoch_begin=fail)
    with pytest.raises(ZeroDivisionError):
        ours.fit(X, Y, **FIT, epochs=4, callbacks=[*callbacks_of(tmp_path)["backup"], failing])
    again = under(strategy, ACCURATE)
    again.fit(X, Y, **FIT, epochs=4, callbacks=callbacks_of(tmp_path)["backup"])
    theirs.fit(X, Y, **FIT, epochs=4)
    assert again.history.epoch == [2, 3]
    same_state(again, theirs)


@pytest.mark.parametrize("verbose", [1, 2])
def test_progress_bar_shows_steps_and_metrics(strategy, capsys, verbose):
    """The bar counts the steps and shows the metrics."""
    model = under(strategy, compiled(metrics=["accuracy"], steps_per_execution=4))
    model.fit(X, Y, batch_size=16, verbose=verbose)
    out = capsys.readouterr().out
    assert "7/7" in out
    assert "accuracy: " in out
    assert "loss: " in out


def test_progress_of_evaluate_and_predict(strategy, capsys):
    """They have a bar, too."""
    model = under(strategy, ACCURATE)
    model.evaluate(X, Y, batch_size=16, verbose=1)
    assert "7/7" in capsys.readouterr().out
    model.predict(X, batch_size=50, verbose=1)
    assert "3/3" in capsys.readouterr().out


def test_evaluate_returns_metrics_in_order(strategy):
    """A list in the order of `metrics_names`, or a dict."""
    ours, theirs = twins(
        strategy, compiled(metrics=["accuracy", lambda: keras.metrics.SparseTopKCategoricalAccuracy(2)])
    )
    for kwargs in ({}, {"return_dict": True}, {"steps": 2}, {"sample_weight": WEIGHTS}):
        given = {"batch_size": 16, "verbose": 0} | kwargs
        same(ours.evaluate(X, Y, **given), theirs.evaluate(X, Y, **given))
    assert ours.metrics_names == theirs.metrics_names


def test_evaluate_with_the_loss_alone(strategy):
    """A number, not a list."""
    ours, theirs = twins(strategy, compiled())
    same(ours.evaluate(X, Y, verbose=0), theirs.evaluate(X, Y, verbose=0))


def named():
    """Outputs by name."""
    x = layers.Input((5,))
    return keras.Model(x, {"b": layers.Dense(2)(x), "a": layers.Dense(1)(x)})


@pytest.mark.parametrize("k", [1, 3])
def test_predict_of_named_outputs(strategy, k):
    """A dict of arrays."""
    ours, theirs = twins(strategy, compiled(named, loss={"a": "mse", "b": "mse"}, steps_per_execution=k))
    same(*(m.predict(X[:11], batch_size=4, verbose=0) for m in (ours, theirs)))


def test_predict_of_a_model_that_is_not_compiled(strategy):
    """Predict needs no compile."""
    ours, theirs = twins(strategy, mlp)
    same(*(m.predict(X[:11], batch_size=4, verbose=0) for m in (ours, theirs)))


def test_predict_takes_steps_of_endless_generator(strategy):
    """So many batches of an endless generator."""
    ours, theirs = twins(strategy, mlp)
    same(*(m.predict(((x,) for x, _ in batches(3, 5)), steps=4, verbose=0) for m in (ours, theirs)))


class Rows(keras.utils.PyDataset):
    """Five batches, the last one short."""

    def __len__(self):
        return 5

    def __getitem__(self, index):
        return X[index * 9 : min(index * 9 + 9, 40)], Y[index * 9 : min(index * 9 + 9, 40)]


class Source:
    """Rows for Grain."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return X[index], Y[index]


def some_rows(size):
    """Yields batches of 40 rows, once."""
    yield from ((X[i : min(i + size, 40)], Y[i : min(i + size, 40)]) for i in range(0, 40, size))


DATA = {
    "py_dataset": Rows,
    "workers": lambda: Rows(workers=2, use_multiprocessing=False),
    "generator": lambda: some_rows(9),
    "grain": lambda: grain.MapDataset.source(Source()).batch(9),
    "grain_iter": lambda: grain.MapDataset.source(Source()).to_iter_dataset().batch(9),
}


@pytest.mark.parametrize("name", DATA)
def test_kinds_of_data(strategy, name):
    """Every kind of data trains as it does with Keras."""
    ours, theirs = twins(strategy, ACCURATE)
    theirs.fit(X[:40], Y[:40], batch_size=9, shuffle=False, verbose=0)
    history = ours.fit(DATA[name](), shuffle=False, verbose=0).history
    same(history, theirs.history.history)
    same_state(ours, theirs)
    same(ours.evaluate(DATA[name](), verbose=0), theirs.evaluate(X[:40], Y[:40], batch_size=9, verbose=0))


def test_distributed_dataset_trains_like_arrays(strategy):
    """What `experimental_distribute_dataset` returns trains too."""
    ours, theirs = twins(strategy, ACCURATE)
    dataset = strategy.experimental_distribute_dataset(list(some_rows(10)))
    theirs.fit(X[:40], Y[:40], batch_size=10, shuffle=False, verbose=0)
    same(ours.fit(dataset, verbose=0).history, theirs.history.history)


def two_inputs():
    """Two inputs in a list."""
    a, b = layers.Input((2,)), layers.Input((3,))
    return keras.Model([a, b], layers.Dense(CLASSES)(layers.Concatenate()([a, b])))


def test_list_of_inputs_trains_as_with_keras(strategy):
    """Inputs in a list."""
    same_fit(strategy, compiled(two_inputs), [X[:, :2], X[:, 2:]], Y)


class Energy(layers.Layer):
    """Has a loss of its own."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(5)

    def call(self, x):
        """Reconstructs its inputs."""
        self.add_loss(ops.mean(ops.square(self.dense(x) - x)))
        return x


def test_model_without_targets_trains_on_added_loss(strategy):
    """A model whose only loss is one that a layer adds."""

    def make():
        model = keras.Sequential([layers.Input((5,)), Energy()])
        model.compile("sgd")
        return model

    ours, theirs = twins(strategy, make)
    histories = [m.fit(X[:96], batch_size=16, shuffle=False, epochs=2, verbose=0).history for m in (ours, theirs)]
    same(*histories)


class Distance(keras.metrics.Metric):
    """The mean distance of the first output from the target."""

    def __init__(self, name="distance"):
        super().__init__(name=name)
        self.total = self.add_weight(name="total", initializer="zeros")
        self.count = self.add_weight(name="count", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        """Adds up."""
        distance = ops.abs(ops.cast(ops.reshape(y_true, (-1,)), "float32") - y_pred[:, 0])
        weight = ops.ones_like(distance) if sample_weight is None else ops.reshape(sample_weight, (-1,))
        self.total.assign(self.total + ops.sum(distance * weight))
        self.count.assign(self.count + ops.sum(weight))

    def result(self):
        """The mean."""
        return self.total / self.count


METRICS = {
    "top_k": lambda: keras.metrics.SparseTopKCategoricalAccuracy(2),
    "custom": Distance,
    "function": lambda: lambda y, p: ops.abs(p[:, 0]),
}


@pytest.mark.parametrize("name", METRICS)
@pytest.mark.parametrize("kind", ["metrics", "weighted_metrics"])
def test_metrics_accumulate_over_replicas_and_steps(name, kind):
    """Metrics of all kinds accumulate over replicas and steps."""
    same_fit(replicas(3), compiled(**{kind: [METRICS[name]]}) if name != "function" else by_function(kind))


def by_function(kind):
    """A metric that is a function."""

    def first(y_true, y_pred):
        return ops.abs(y_pred[:, 0])

    def make():
        model = mlp()
        model.compile("sgd", crossentropy(), **{kind: [first]})
        return model

    return make


def binary():
    """One output between 0 and 1."""
    return keras.Sequential([layers.Input((5,)), layers.Dense(1, activation="sigmoid")])


BINARY = ["AUC", "Precision", "Recall", "TruePositives", "FalseNegatives", "BinaryAccuracy", "F1Score", "R2Score"]


@pytest.mark.parametrize("weighted", [False, True])
def test_metrics_of_two_classes(weighted):
    """AUC and confusion-style metrics, weighted or not."""
    kind = "weighted_metrics" if weighted else "metrics"
    made = [functools.partial(getattr(keras.metrics, name), name=name) for name in BINARY]
    how = compiled(binary, loss=keras.losses.BinaryCrossentropy(), **{kind: made})
    target = (Y == 1).astype("float32")[:, None]
    same_fit(replicas(3), how, X, target, sample_weight=WEIGHTS)


@pytest.mark.parametrize("how", [{"jit_compile": False}, {"run_eagerly": True}])
def test_training_without_compilation_equals_keras(strategy, how):
    """For debugging: the same numbers."""
    ours, theirs = twins(strategy, compiled(metrics=["accuracy"], **how))
    for model in (ours, theirs):
        model.fit(X[:23], Y[:23], batch_size=8, shuffle=False, verbose=0)
    same(ours.history.history, theirs.history.history)
    same_state(ours, theirs)
    same(*(m.predict(X[:7], batch_size=4, verbose=0) for m in (ours, theirs)))


class Subclassed(keras.Model):
    """Builds its layers at the first batch."""

    def __init__(self):
        super().__init__()
        self.hidden, self.out = layers.Dense(6, activation="tanh"), layers.Dense(CLASSES)

    def call(self, x, training=False):
        """Two layers."""
        return self.out(self.hidden(x))


@pytest.mark.parametrize(
    "method", ["fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch"]
)
def test_subclassed_model_is_built_at_the_first_batch(strategy, method):
    """By whichever method comes first."""
    ours, theirs = twins(strategy, compiled(Subclassed))
    args = (X[:8],) if "predict" in method else (X[:8], Y[:8])
    results = [getattr(m, method)(*args, **({} if "on_batch" in method else {"verbose": 0})) for m in (ours, theirs)]
    assert ours.built
    if method != "fit":
        same(*results)


def test_model_made_before_the_scope(strategy):
    """Compiled in the scope, it trains there."""
    ours, theirs = alone(mlp), alone(compiled())
    with strategy.scope():
        ours.compile(keras.optimizers.SGD(0.5, momentum=0.9), crossentropy())
    same(*(m.fit(X, Y, **FIT, epochs=2).history for m in (ours, theirs)))
    assert len(ours.weights[0].value.sharding.device_set) == 2


def test_model_compiled_outside_the_scope(strategy):
    """Made in the scope, it trains there."""
    ours, theirs = under(strategy, mlp), alone(compiled())
    ours.compile(keras.optimizers.SGD(0.5, momentum=0.9), crossentropy())
    same(*(m.fit(X, Y, **FIT, epochs=2).history for m in (ours, theirs)))
    same_state(ours, theirs)


def test_model_of_keras_stays_with_keras():
    """A model that no scope has seen is trained by Keras."""
    model = alone(compiled())
    model.fit(X, Y, **FIT)
    assert model.train_function is not None


def test_custom_loop_between_two_fits(strategy):
    """Steps of one's own use the same weights and optimizer."""
    ours, theirs = twins(strategy, compiled())
    ours.fit(X, Y, **FIT)

    def step(batch):
        x, y = batch
        with phalanx.GradientTape() as tape:
            loss = phalanx.nn.compute_average_loss(
                keras.losses.sparse_categorical_crossentropy(y, ours(x), from_logits=True)
            )
        variables = ours.trainable_variables
        ours.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    for batch in strategy.experimental_distribute_dataset([(X[:16], Y[:16])]):
        strategy.run(step, args=(batch,))
    ours.fit(X, Y, **FIT)
    theirs.fit(X, Y, **FIT)
    theirs.train_on_batch(X[:16], Y[:16])
    theirs.fit(X, Y, **FIT)
    same_state(ours, theirs)


def test_frozen_layer_can_be_thawed(strategy):
    """After recompiling, a frozen layer keeps its weights, and can be thawed."""
    ours, theirs = twins(strategy, compiled())
    for model in (ours, theirs):
        model.fit(X, Y, **FIT)
        before = model.layers[0].get_weights()
        model.layers[0].trainable = False
        model.compile(keras.optimizers.SGD(0.5), crossentropy())
        model.fit(X, Y, **FIT)
        same(model.layers[0].get_weights(), before)
        model.layers[0].trainable = True
        model.compile(keras.optimizers.SGD(0.5), crossentropy())
        model.fit(X, Y, **FIT)
    same_state(ours, theirs)


@pytest.mark.parametrize("rate", [0.01, keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.5)])
def test_learning_rate_replaced_between_fits(strategy, rate):
    """By a number or a schedule."""
    ours, theirs = twins(strategy, compiled())
    for model in (ours, theirs):
        model.fit(X, Y, **FIT)
        model.optimizer.learning_rate = rate
        model.fit(X, Y, **FIT)
    same(ours.get_weights(), theirs.get_weights())


OPTIMIZERS = {
    "clipnorm": {"clipnorm": 0.05},
    "clipvalue": {"clipvalue": 0.01},
    "global_clipnorm": {"global_clipnorm": 0.05},
    "ema": {"use_ema": True, "ema_momentum": 0.8, "ema_overwrite_frequency": 3},
    "ema_at_the_end": {"use_ema": True, "ema_momentum": 0.8},
    "accumulation": {"gradient_accumulation_steps": 2},
    "accumulation_clipped": {"gradient_accumulation_steps": 2, "clipnorm": 0.05},
    "decay": {"weight_decay": 0.1},
}


@pytest.mark.parametrize(("name", "k"), [(n, 1) for n in OPTIMIZERS] + [("accumulation", 4), ("ema", 4)])
def test_optimizers_equal_one_device(name, k):
    """Clipping, averages of weights and accumulated gradients equal one device."""
    make = compiled(optimizer=lambda: keras.optimizers.Adam(0.05, **OPTIMIZERS[name]), steps_per_execution=k)
    ours, theirs = twins(replicas(3), make)
    same(*(m.fit(X, Y, **FIT, epochs=2).history for m in (ours, theirs)))
    same(ours.get_weights(), theirs.get_weights())


def precise(policy):
    """A model that computes with a policy, with an output in float32."""

    def model():
        inner = layers.Dense(6, activation="tanh", dtype=policy)
        return keras.Sequential([layers.Input((5,)), inner, layers.Dense(CLASSES, dtype="float32")])

    return model


def test_mixed_float16_scales_loss_as_one_device(strategy):
    """The loss scale rises and falls with one on one device."""

    def scaled():
        return keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.1), initial_scale=1024.0, dynamic_growth_steps=3
        )

    ours, theirs = twins(strategy, compiled(precise("mixed_float16"), optimizer=scaled))
    same(*(m.fit(X, Y, **FIT, epochs=2).history for m in (ours, theirs)), rtol=5e-3)
    same(float(ours.optimizer.dynamic_scale), float(theirs.optimizer.dynamic_scale))


def test_mixed_float16_wraps_the_optimizer(strategy):
    """`compile` puts a LossScaleOptimizer around the optimizer of such a model, as Keras does."""

    def make():
        model = precise("mixed_float16")()
        model.dtype_policy = keras.DTypePolicy("mixed_float16")
        model.compile("sgd", crossentropy())
        return model

    ours, theirs = twins(strategy, make)
    assert type(ours.optimizer) is type(theirs.optimizer)
    same(*(m.fit(X, Y, **FIT).history for m in (ours, theirs)), rtol=5e-3)


def test_overflow_skips_a_step(strategy):
    """Gradients that overflow on one replica leave the weights, and the scale is halved."""

    def scaled():
        return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=1024.0)

    ours, theirs = twins(strategy, compiled(optimizer=scaled))
    before, rows = ours.get_weights(), X[:8].copy()
    rows[1] = np.inf
    for model in (ours, theirs):
        model.train_on_batch(rows, Y[:8])
    same(ours.get_weights(), before)
    assert float(ours.optimizer.dynamic_scale) == float(theirs.optimizer.dynamic_scale) == 512.0


def test_mixed_bfloat16_equals_keras(strategy):
    """Equal up to the precision of bfloat16."""
    ours, theirs = twins(strategy, compiled(precise("mixed_bfloat16")))
    same(*(m.fit(X, Y, **FIT, epochs=2).history for m in (ours, theirs)), rtol=3e-2)


def test_export_of_a_saved_model(strategy, tmp_path):
    """`.keras` saved outside the scope goes on training in another strategy and without one, with its optimizer."""
    ours, theirs = twins(strategy, compiled(optimizer=lambda: keras.optimizers.Adam(0.05)))
    for model in (ours, theirs):
        model.fit(X, Y, **FIT)
    ours.save(tmp_path / "m.keras")
    theirs.fit(X, Y, **FIT)
    for other in (replicas(3), phalanx.get_strategy()):
        with other.scope():
            loaded = keras.models.load_model(tmp_path / "m.keras")
        loaded.fit(X, Y, **FIT)
        same_state(loaded, theirs)


def test_clone_of_a_model(strategy):
    """A clone in another strategy trains there."""
    ours = under(strategy, compiled())
    with replicas(3).scope():
        clone = keras.models.clone_model(ours)
        clone.compile("sgd", crossentropy())
    clone.fit(X, Y, **FIT)
    assert len(clone.weights[0].value.sharding.device_set) == 3


def test_a_layer_knows_its_replica(strategy):
    """`get_replica_context` inside a layer tells the replica."""

    class Numbered(layers.Layer):
        def call(self, x):
            context = phalanx.get_replica_context()
            number = 0 if context is None else context.replica_id_in_sync_group
            return x * 0 + ops.cast(number, x.dtype)

    model = under(strategy, lambda: keras.Sequential([layers.Input((1,)), Numbered()]))
    same(model.predict(np.ones((8, 1)), batch_size=4, verbose=0)[:, 0], np.array([0, 0, 1, 1] * 2))


def test_a_layer_communicates(strategy):
    """`all_reduce` inside a layer makes a mean over the global batch."""

    class Centred(layers.Layer):
        def call(self, x):
            mean, context = ops.mean(x, 0), phalanx.get_replica_context()
            inside = context is not None and context.num_replicas_in_sync > 1
            return x - (context.all_reduce("MEAN", mean) if inside else mean)

    make = compiled(lambda: keras.Sequential([layers.Input((5,)), Centred(), layers.Dense(CLASSES)]))
    same_fit(strategy, make, X[:96], Y[:96])
