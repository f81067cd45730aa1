"""The loops of Keras's trainer, on two replicas: what its own tests hold of `fit`, `evaluate`, `predict` and steps.

Every test compares a model of the strategy with its twin in Keras's hands, or with NumPy. Not held, and why:

- Variables without a value between steps: Keras frees its own for memory; ours can be read in every callback.
- The last number of a short group of `steps_per_execution`: Keras counts steps that it did not do.
- `keras.distribution`: the strategy places the variables. Ragged tensors, `unrolled_steps_per_execution`, op determinism:
  TensorFlow alone has them; `torch.compile`: torch alone.
- A remote monitor needs a server, and sees nothing of the trainer but callbacks.
"""

import keras
import numpy as np
import pytest
from keras import layers, ops
from keras_twins import (
    EVALUATE,
    FIT,
    SEVENS,
    SEVENS_TESTED,
    WEIGHTS,
    Calls,
    X,
    Y,
    agree,
    agreeing,
    classes,
    compiled,
    everything,
    history,
    made,
    same,
)
from strategy_table import on

import phalanx

pytestmark = on("mirrored_x2")

ACCURATE = compiled(metrics=["mae"])


def dropping():
    return keras.Sequential([layers.Input((3,)), layers.Dropout(0.5), layers.Dense(2)])


UNBUILT = compiled(lambda: keras.Sequential([layers.Dense(2)]))
# What makes a model, what is done with it, and the steps per execution.
LOOPS = {
    "all": (ACCURATE, everything(X, Y), 1),
    "all_in_groups": (ACCURATE, everything(X, Y), 2),
    "all_in_one_group": (ACCURATE, everything(X, Y), 50),
    "compiled": (compiled(jit_compile=True), lambda m: m.train_on_batch(X[:5], Y[:5]), 1),
    "not_compiled": (compiled(jit_compile=False), lambda m: m.train_on_batch(X[:5], Y[:5]), 1),
    "eager": (compiled(run_eagerly=True), lambda m: m.test_on_batch(X[:5], Y[:5]), 1),
    "built_by_fit": (UNBUILT, history(), 1),
    "built_by_train_on_batch": (UNBUILT, lambda m: m.train_on_batch(X[:5], Y[:5]), 1),
    "built_by_test_on_batch": (UNBUILT, lambda m: m.test_on_batch(X[:5], Y[:5]), 1),
    "predictions_drop_nothing": (dropping, lambda m: [m.predict(X, **EVALUATE) for _ in range(2)], 1),
    "no_epoch": (compiled(), history(epochs=0), 1),
    "no_epoch_left": (compiled(), history(initial_epoch=2, epochs=2), 1),
    "batch_size_of_keras": (compiled(), history(batch_size=None), 1),
    "epochs_of_one_step": (compiled(), history(epochs=3, steps_per_epoch=1), 1),
    "epochs_of_one_step_in_groups": (compiled(), history(epochs=3, steps_per_epoch=1), 2),
    "epochs_of_all_steps": (compiled(), history(epochs=3, steps_per_epoch=3), 1),
    "epochs_of_all_steps_in_groups": (compiled(), history(epochs=3, steps_per_epoch=3), 2),
}


# Those that differ in more than the number of steps in one execution, and in who is called first.
COVER = [
    "all_in_groups",
    "eager",
    "built_by_fit",
    "predictions_drop_nothing",
    "no_epoch",
    "batch_size_of_keras",
    "epochs_of_one_step_in_groups",
]


@pytest.mark.cover(["make", "act", "k"], [LOOPS[name] for name in COVER])
@pytest.mark.parametrize(("make", "act", "k"), LOOPS.values(), ids=LOOPS)
@pytest.mark.filterwarnings("ignore:the operations of a step that is executed eagerly")
def test_loops_equal_those_of_keras(strategy, make, act, k):
    """The numbers are those of single steps, with a short group or with one group alone."""
    agree(strategy, make, act, k=k)


def test_any_batch_size_gives_one_loss(strategy):
    """Of a model that learns nothing; it is NumPy's."""

    def frozen():
        model = compiled()()
        model.trainable = False
        model.compile("sgd", "mse")
        return model

    model = made(frozen, strategy)
    kernel, bias = model.get_weights()
    losses = [model.fit(X, Y, batch_size=size, verbose=0).history["loss"][0] for size in (21, 16)]
    losses += [model.evaluate(X, Y, batch_size=size, verbose=0) for size in (21, 16)]
    same(losses, [np.square(X @ kernel + bias - Y).mean()] * 4)


def with_loss_alone():
    """A model compiled with nothing but a loss."""
    model = keras.Sequential([layers.Input((3,)), layers.Dense(2)])
    model.compile(loss="mse")
    return model


def test_fit_without_an_optimizer_given(strategy):
    """Keras's default optimizer is RMSprop."""
    ours, _ = agree(strategy, with_loss_alone, history())
    assert isinstance(ours.optimizer, keras.optimizers.RMSprop)


def test_on_batch_methods(strategy):
    """Lists or dicts of Python's numbers, of batches that do not divide."""

    def act(model):
        methods = [model.train_on_batch, model.test_on_batch]
        results = [call(X[:5], Y[:5], WEIGHTS[:5], return_dict=d) for d in (False, True) for call in methods]
        assert [type(result) for result in results] == [list, list, dict, dict]
        return results, model.predict_on_batch(X[:5])

    ours, _ = agree(strategy, compiled(metrics=["mae"], weighted_metrics=["mae"]), act)
    assert {type(v) for v in ours.test_on_batch(X[:5], Y[:5], return_dict=True).values()} == {float}
    assert isinstance(ours.predict_on_batch(X[:5]), np.ndarray)


@agreeing(with_loss_alone)
def test_on_batch_with_the_loss_alone(model):
    """As many results as with Keras, `predict_on_batch` before the others."""
    tested = [model.test_on_batch(X[:5], Y[:5]) for _ in range(2)]
    return model.predict_on_batch(X[:5]), tested, model.train_on_batch(X, Y)


def test_train_on_batch_with_class_weights(strategy):
    """Each row has the weight of its class, or one of its own."""
    kinds, weights = X[:5].argmax(1), {0: 0.2, 1: 0.3, 2: 2.0}
    ours, _ = agree(strategy, classes(), lambda m: m.train_on_batch(X[:5], kinds, class_weight=weights))
    with pytest.raises(ValueError, match="class_weight"):
        ours.train_on_batch(X[:5], kinds, sample_weight=WEIGHTS[:5], class_weight=weights)


def test_training_argument_is_true_only_in_fit(strategy):
    class Doubling(layers.Layer):
        def call(self, x, training=False):
            return 2 * x if training else 0 * x

    make = compiled(lambda: keras.Sequential([layers.Input((3,)), Doubling()]))
    model = made(make, strategy)
    same(model.fit(X, 0 * X, **SEVENS).history["loss"][0], 4 * np.square(X).mean())
    same(model.evaluate(X, 0 * X, **SEVENS_TESTED), 0.0)
    same(model.predict(X, **SEVENS_TESTED), 0 * X)


def test_training_argument_of_a_layer(strategy):
    """A dropout that was called with `training=True` drops in `predict` if it does with Keras, which changed its mind."""

    def dropping():
        inputs = layers.Input((20,))
        return keras.Model(inputs, layers.Dropout(0.5, seed=5)(inputs, training=True))

    rows = np.ones((8, 20), "float32")
    ours, theirs = (made(dropping, s).predict(rows, batch_size=4, verbose=0) for s in (strategy, None))
    assert set(np.unique(ours)) == set(np.unique(theirs))


def test_random_numbers_move_on_in_predict(strategy):
    """A layer with a seed of its own gives other numbers at each call."""

    class Noise(layers.Layer):
        def __init__(self):
            super().__init__()
            self.seed = keras.random.SeedGenerator(4)

        def call(self, x):
            return x + keras.random.normal(ops.shape(x), seed=self.seed)

    model = made(lambda: keras.Sequential([layers.Input((3,)), Noise()]), strategy)
    first, second = (model.predict(X, **EVALUATE) for _ in range(2))
    assert np.abs(first - second).mean() > 0.1
    assert np.abs((first - X)[:4] - (first - X)[4:8]).mean() > 0.1, "both replicas drew the same numbers"


def test_layers_know_their_replica_and_communicate(strategy):
    """In the replica context there, `all_reduce` makes the mean of the global batch."""

    class Centred(layers.Layer):
        def call(self, x):
            context = phalanx.get_replica_context()
            if context is None:  # Keras asks for the shape.
                return x
            mean = context.all_reduce("MEAN", ops.mean(x, 0))
            return x - mean + ops.cast(context.replica_id_in_sync_group, x.dtype)

    model = made(lambda: keras.Sequential([layers.Input((3,)), Centred()]), strategy)
    rows = X[:16].reshape(2, 8, 3)
    expected = rows - rows.mean(1, keepdims=True) + np.repeat([0, 1], 4)[:, None]
    same(model.predict(X[:16], **EVALUATE), expected.reshape(16, 3), atol=1e-5)


class Counting(layers.Layer):
    """A layer that adds up what it has seen."""

    def __init__(self):
        super().__init__()
        self.seen = self.add_weight(shape=(3,), initializer="ones", trainable=False, aggregation="sum")

    def call(self, x):
        self.seen.assign_add(ops.sum(x, 0))
        return x


@agreeing(compiled(lambda: keras.Sequential([layers.Input((3,)), Counting(), layers.Dense(2)])))
def test_weights_with_sums_of_rows(model):
    return model.fit(X, Y, **FIT | {"epochs": 2}).history


def test_callbacks_of_groups(strategy):
    """They are called before the first step and after the last one of each group, with all outputs of the real rows."""
    model, calls, rows = made(compiled(), strategy), Calls(), []
    model.steps_per_execution = 2
    model.fit(X, Y, **FIT, callbacks=[calls])
    model.evaluate(X, Y, **EVALUATE, callbacks=[calls])
    counting = keras.callbacks.LambdaCallback()
    counting.on_predict_batch_end = lambda batch, logs: rows.append(len(logs["outputs"]))
    model.predict(X, **EVALUATE, callbacks=[calls, counting])
    kinds = ("train", "test", "predict")
    assert [step for _, step in calls.of(*(f"on_{kind}_batch_begin" for kind in kinds))] == [0, 2] * 3
    assert [step for _, step, *_ in calls.of(*(f"on_{kind}_batch_end" for kind in kinds))] == [1, 2] * 3
    assert rows == [16, 5]


@pytest.mark.filterwarnings("ignore:.*ran out of data:UserWarning", "ignore:The data ended:UserWarning")
@pytest.mark.parametrize("steps", [2, 5])
@agreeing(compiled())
def test_steps_per_epoch_that_do_not_match(model, steps):
    """Three batches: after epochs that they cannot fill, the next one begins anew."""
    calls = Calls()
    fitted = model.fit(X, Y, **SEVENS, epochs=4, steps_per_epoch=steps, callbacks=[calls]).history
    return fitted, calls.of("on_train_batch_end", "on_epoch_end")


def test_too_few_batches_are_warned_of(strategy):
    """Whoever asks for more steps than there are batches is told, with the line of `fit`."""
    found = r"data ended after 3 of 5 steps of an epoch.\nHINT: dataset.repeat\(\)"
    with pytest.warns(UserWarning, match=found) as caught:
        made(compiled(), strategy).fit(X, Y, **SEVENS, steps_per_epoch=5)
    assert __file__ in {w.filename for w in caught}


def test_epochs_and_steps_capped(strategy):
    """`keras.config` can cap both, to try a program out."""

    def act(model):
        calls = Calls()
        with pytest.warns(UserWarning, match="Limiting"):
            model.fit(X, Y, **SEVENS, epochs=3, callbacks=[calls])
        return calls.of("on_epoch_end", "on_train_batch_end")

    keras.config.set_max_epochs(2)
    keras.config.set_max_steps_per_epoch(1)
    try:
        agree(strategy, compiled(), act)
    finally:
        keras.config.set_max_epochs(None)
        keras.config.set_max_steps_per_epoch(None)


@pytest.mark.filterwarnings("ignore:.*ran out of data:UserWarning", "ignore:The data ended:UserWarning")
@agreeing(compiled())
def test_steps_of_evaluate_and_predict(model):
    """So many batches, of arrays and of a generator without end."""
    evaluated = model.evaluate(X, Y, **EVALUATE, steps=2)
    return evaluated, model.predict(X, **EVALUATE, steps=2), model.predict(endless(X), steps=4, verbose=0)


def endless(*arrays):
    """Yields two batches of rows over and over."""
    while True:
        for first in (0, 8):
            yield tuple(a[first : first + 8] for a in arrays)


@agreeing(compiled())
def test_weights_set_between_fits(model, tmp_path):
    """The next fit goes on from them, whether they were set or loaded."""
    losses = model.fit(X, Y, **SEVENS).history["loss"]
    model.save_weights(tmp_path / "w.weights.h5")
    model.set_weights([np.ones_like(w) for w in model.get_weights()])
    losses += model.fit(X, Y, **SEVENS).history["loss"]
    model.load_weights(tmp_path / "w.weights.h5")
    return losses + model.fit(X, Y, **SEVENS).history["loss"]


def test_where_a_model_is_made_and_compiled(strategy):
    """In the scope and outside, in either order; a clone belongs to another scope, and to none what none has seen."""
    theirs = made(compiled())
    expected = theirs.fit(X, Y, **SEVENS).history
    assert theirs.train_function is not None
    make = lambda: keras.Sequential([layers.Input((3,)), layers.Dense(2, name="out")])  # noqa: E731
    outside, inside = made(make), made(make, strategy)
    with strategy.scope():
        outside.compile(keras.optimizers.SGD(0.3, momentum=0.5), "mse")
    inside.compile(keras.optimizers.SGD(0.3, momentum=0.5), "mse")
    for model in (outside, inside):
        same(model.fit(X, Y, **SEVENS).history, expected)
        assert len(model.weights[0].value.sharding.device_set) == 2
    with phalanx.OneDeviceStrategy(strategy.extended.worker_devices[1]).scope():
        clone = keras.models.clone_model(inside)
        clone.compile("sgd", "mse")
    clone.fit(X, Y, **SEVENS)
    assert len(clone.weights[0].value.sharding.device_set) == 1


@agreeing(compiled())
def test_history_is_of_the_last_fit(model):
    """`fit` returns it, the model keeps it, and it has the parameters of the loop, whose epochs start with the initial one."""
    model.fit(X, Y, **SEVENS, epochs=3)
    returned = model.fit(X, Y, **SEVENS, initial_epoch=2, epochs=4)
    assert model.history is returned
    return returned.epoch, returned.history, returned.params


def test_metrics_start_anew_each_epoch(strategy):
    model = made(compiled(optimizer=lambda: keras.optimizers.SGD(0.0)), strategy)
    fitted = model.fit(np.concatenate([X, 3 * X]), np.concatenate([Y, Y]), **SEVENS, epochs=3, validation_data=(X, Y))
    same(fitted.history["loss"], [fitted.history["loss"][0]] * 3)
    same(fitted.history["val_loss"], [model.evaluate(X, Y, **SEVENS_TESTED)] * 3)
    assert fitted.history["loss"][0] > 1.5 * fitted.history["val_loss"][0]


STOPPERS = {
    "fit": ("stop_training", "on_train_batch_end"),
    "evaluate": ("stop_evaluating", "on_test_batch_end"),
    "predict": ("stop_predicting", "on_predict_batch_end"),
}


@pytest.mark.parametrize("method", STOPPERS)
def test_stopping_an_endless_loop(strategy, method):
    """A callback ends the loop over a generator without end after four steps, and the next loop is not stopped."""
    flag, event = STOPPERS[method]

    def act(model):
        calls = Calls()
        stop = {event: lambda step, logs=None: setattr(model, flag, step == 3)}
        stopper = keras.callbacks.LambdaCallback(**stop)
        extra = {"verbose": 0} | ({"shuffle": False} if method == "fit" else {})
        data = (X,) if method == "predict" else (X, Y)
        results = [getattr(model, method)(endless(*data), **extra, callbacks=[stopper, calls]) for _ in range(2)]
        assert len(calls.of(event)) == 8
        return [r.history if method == "fit" else r for r in results], calls.of(event)

    agree(strategy, compiled(), act)


@agreeing(compiled())
def test_validation_by_a_generator_without_end(model):
    """Two steps of training and three of validation an epoch; the generators go on."""
    calls = Calls()
    steps = {"steps_per_epoch": 2, "validation_steps": 3, "epochs": 2, "shuffle": False, "verbose": 0}
    fitted = model.fit(endless(X, Y), validation_data=endless(X[4:], Y[4:]), **steps, callbacks=[calls])
    return fitted.history["loss"], calls.of("on_train_batch_end", "on_test_batch_end")


VALIDATION = {
    "listed_epochs": {"validation_split": 0.3, "validation_freq": [1, 3], "epochs": 3},
    "some_epochs": {"validation_split": 0.3, "sample_weight": WEIGHTS, "validation_freq": 2, "epochs": 3},
    "batch_size": {"validation_data": (X, Y, WEIGHTS), "validation_batch_size": 5},
    "steps": {"validation_data": (X, Y), "validation_batch_size": 5, "validation_steps": 2},
}


@pytest.mark.cover(["given"], [VALIDATION["listed_epochs"], VALIDATION["batch_size"]])
@pytest.mark.parametrize("given", VALIDATION.values(), ids=VALIDATION)
@agreeing(compiled(metrics=["mae"], weighted_metrics=["mse"]))
def test_arguments_of_validation(model, given):
    calls = Calls()
    return model.fit(X, Y, **SEVENS, **given, callbacks=[calls]).history, calls.of("on_epoch_end", "on_test_begin")


@agreeing(compiled())
def test_validation_goes_on_after_wrong_validation_data(model):
    """A fit whose validation fails leaves a model whose next fit is right."""
    model.fit(X, Y, **SEVENS, validation_data=(X, Y))
    with pytest.raises(Exception, match=r"."):
        model.fit(X, Y, **SEVENS, validation_data=(X[None], Y[None]))
    return model.fit(X, Y, **SEVENS, validation_data=(X[:5], Y[:5])).history


def test_programs_are_traced_once(strategy):
    """More epochs, more steps and a second call trace nothing anew."""
    traced = []

    class Counting(layers.Layer):
        def call(self, x):
            traced.append(1)
            return x

    model = made(compiled(lambda: keras.Sequential([layers.Input((3,)), Counting(), layers.Dense(2)])), strategy)
    act = everything(X, Y)
    act(model)
    count = len(traced)
    act(model)
    model.fit(X, Y, **FIT, epochs=3)
    assert len(traced) == count


@agreeing(ACCURATE)
def test_variables_of_a_first_predict(model):
    """An optimizer is not needed to predict, and predict leaves the metrics alone."""
    model.train_on_batch(X, Y)
    before = model.get_metrics_result()
    model.predict(X, **SEVENS_TESTED)
    return {k: float(v) for k, v in before.items()}, {k: float(v) for k, v in model.get_metrics_result().items()}


def test_verbose_controls_what_is_printed(strategy, capsys):
    """Nothing, a bar, or a line for each epoch."""
    model = made(compiled(metrics=["mae"], steps_per_execution=2), strategy)
    for verbose in (0, 1, 2):
        model.fit(X, Y, batch_size=7, epochs=2, verbose=verbose, validation_data=(X, Y))
        out = capsys.readouterr().out
        found = [text in out for text in ("Epoch 2/2", "3/3", " mae: ", "val_mae", "loss: ")]
        assert found == [verbose != 0] * 5, verbose
        for method, data in ((model.evaluate, (X, Y)), (model.predict, (X,))):
            method(*data, batch_size=7, verbose=verbose)
            assert ("3/3" in capsys.readouterr().out) == (verbose != 0), verbose


def test_a_bar_without_a_known_end(strategy, capsys):
    """Of a generator, the number of steps is known after the first epoch."""
    model = made(compiled(), strategy)
    model.fit(((X[i : i + 7], Y[i : i + 7]) for i in (0, 7, 14)), shuffle=False, verbose=2)
    assert "3/3" in capsys.readouterr().out


@pytest.mark.parametrize("method", ["fit", "evaluate", "train_on_batch", "test_on_batch"])
def test_model_not_compiled_is_refused(strategy, method):
    with pytest.raises(ValueError, match="call `compile"):
        getattr(made(lambda: keras.Sequential([layers.Dense(2)]), strategy), method)(X, Y)


def test_unknown_argument_of_evaluate(strategy):
    with pytest.raises((TypeError, ValueError), match="stpes"):
        made(compiled(), strategy).evaluate(X, Y, stpes=3)
