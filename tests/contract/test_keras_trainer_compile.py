"""What Keras's trainer is compiled with, on two replicas: losses, metrics, optimizers, methods of the model's own.

Every test compares a model of the strategy with its twin in Keras's hands, or with NumPy. Not held, and why:

- Classes that `compile` uses inside, tried out apart from a model: they are Keras's, and private.
- A mean of the user's own over the rows of a batch that the replicas cannot divide evenly: it sees the padding.
"""

import functools

import keras
import numpy as np
import pytest
from keras import layers, ops
from keras_twins import (
    EVALUATE,
    EVEN,
    FIT,
    KIND,
    SEVENS,
    SEVENS_TESTED,
    WEIGHTS,
    X,
    Y,
    agree,
    agreeing,
    compiled,
    everything,
    history,
    linear,
    made,
    same,
    two_outputs,
)
from strategy_table import on

import phalanx

pytestmark = on("mirrored_x2")


def by_name():
    return two_outputs("b", "a")


def nested():
    x = layers.Input((3,))
    outputs = {"a": layers.Dense(2, name="two")(x), "b": {"c": layers.Dense(3, name="three")(x)}}
    return keras.Model(x, outputs)


BY_NAME = {"b": Y, "a": X}
# A model, how it is compiled, its targets.
LOSSES = {
    "one_for_all": (two_outputs, {"loss": "mse"}, [Y, X]),
    "list_and_weights": (two_outputs, {"loss": ["mse", "mae"], "loss_weights": [0.1, 2.0]}, [Y, X]),
    "by_name_of_layer": (
        two_outputs,
        {"loss": {"two": "mse", "three": "mae"}, "loss_weights": {"two": 3.0, "three": 1.0}},
        [Y, X],
    ),
    "dict": (by_name, {"loss": {"a": "mae", "b": "mse"}, "loss_weights": {"a": 0.2, "b": 0.5}}, BY_NAME),
    "nested": (nested, {"loss": {"a": "mse", "b": {"c": "mae"}}}, {"a": Y, "b": {"c": X}}),
    "of_one_output": (two_outputs, {"loss": ["mse", None], "loss_weights": [0.7, 0.2]}, [Y, X]),
    "targets_of_one_output": (two_outputs, {"loss": ["mse", None]}, [Y, None]),
    "one_weight": (linear, {"loss": "mse", "loss_weights": 0.2}, Y),
    "object": (linear, {"loss": keras.losses.Huber(0.1)}, Y),
    "function": (linear, {"loss": lambda y, p: ops.sum(ops.abs(y - p), -1)}, Y),
    "none": (linear, {"loss": None}, Y),
}


@pytest.mark.cover(
    ["model", "how", "targets"],
    [LOSSES[name] for name in ("list_and_weights", "dict", "nested", "of_one_output", "function")],
)
@pytest.mark.parametrize(("model", "how", "targets"), LOSSES.values(), ids=LOSSES)
def test_losses_have_their_means_in_logs(strategy, model, how, targets):
    agree(strategy, compiled(model, **how), history(X, targets, batch_size=8))


LOSSES_THAT_ARE_REFUSED = {
    "structure": (two_outputs, {"loss": ["mse", "mse"]}, Y),
    "path": (by_name, {"loss": {"c": "mse"}}, BY_NAME),
    "too_many_weights": (two_outputs, {"loss": ["mse", "mse"], "loss_weights": [1.0, 2.0, 3.0]}, [Y, X]),
    "name": (linear, {"loss": "no_such_loss"}, Y),
    "metric": (linear, {"metrics": ["no_such_metric"]}, Y),
}


@pytest.mark.parametrize(("model", "how", "targets"), LOSSES_THAT_ARE_REFUSED.values(), ids=LOSSES_THAT_ARE_REFUSED)
def test_what_is_refused(strategy, model, how, targets):
    """With the error of Keras."""
    with pytest.raises(Exception, match=".") as theirs:
        made(compiled(model, **how)).fit(X, targets, **FIT)
    with pytest.raises(type(theirs.value)) as ours:
        made(compiled(model, **how), strategy).fit(X, targets, **FIT)
    assert str(ours.value)[:40] == str(theirs.value)[:40]


def nothing(y_true, y_pred):
    return 0.0


def one(y_true, y_pred):
    return 1.0


def worst(y_true, y_pred):
    return ops.max(ops.abs(y_true - y_pred), -1)


class Distance(keras.metrics.Metric):
    """The mean distance of the first output from the target, weighted."""

    def __init__(self, name="distance"):
        super().__init__(name=name)
        self.total = self.add_weight(name="total", initializer="zeros")
        self.count = self.add_weight(name="count", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        distance = ops.abs(y_true[:, 0] - y_pred[:, 0])
        weight = ops.ones_like(distance) if sample_weight is None else ops.reshape(sample_weight, (-1,))
        self.total.assign(self.total + ops.sum(distance * weight))
        self.count.assign(self.count + ops.sum(weight))

    def result(self):
        return self.total / self.count


def binary():
    return keras.Sequential([layers.Input((3,)), layers.Dense(1, activation="sigmoid")])


COUNTS = ["AUC", "Precision", "Recall", "TruePositives", "FalseNegatives", "BinaryAccuracy", "F1Score", "R2Score"]
# A model of fit_models has the first five without weights.
OF_TWO_CLASSES = {
    kind: [functools.partial(getattr(keras.metrics, name), name=f"{kind}_{name}") for name in names]
    for kind, names in {"metrics": COUNTS[5:], "weighted_metrics": COUNTS}.items()
}
METRICS = {
    "names": (linear, {"metrics": ["mse", "mae"], "weighted_metrics": ["mae"]}, Y),
    "objects": (linear, {"metrics": [keras.metrics.MeanSquaredError, keras.metrics.RootMeanSquaredError]}, Y),
    "own": (linear, {"metrics": [Distance], "weighted_metrics": [Distance]}, Y),
    "of_two_classes": (
        binary,
        {"loss": "binary_crossentropy", **OF_TWO_CLASSES},
        (KIND == 1)[:, None].astype("float32"),
    ),
    "function": (linear, {"metrics": [worst], "weighted_metrics": [worst]}, Y),
    "lists": (two_outputs, {"metrics": [["mse", "mae"], ["mse"]]}, [Y, X]),
    "by_name_of_layer": (two_outputs, {"metrics": {"three": "mae"}, "weighted_metrics": {"two": ["mse"]}}, [Y, X]),
    "dict": (by_name, {"metrics": {"a": ["mse", "mae"], "b": "mse"}}, BY_NAME),
    "some": (by_name, {"weighted_metrics": {"b": "mse"}}, BY_NAME),
    "accuracy": (linear, {"metrics": ["acc", "accuracy"]}, (Y.mean() < Y).astype("float32")),
}


@pytest.mark.cover(
    ["model", "how", "targets"], [METRICS[name] for name in ("own", "function", "lists", "dict", "accuracy")]
)
@pytest.mark.parametrize(("model", "how", "targets"), METRICS.values(), ids=METRICS)
def test_metrics_have_names_in_order_of_keras(strategy, model, how, targets):
    weights = keras.tree.map_structure(lambda _: WEIGHTS, targets)
    given = SEVENS_TESTED | {"sample_weight": weights, "return_dict": True}
    ours, theirs = agree(strategy, compiled(model, **how), lambda m: m.evaluate(X, targets, **given))
    assert ours.metrics_names == theirs.metrics_names


@pytest.mark.parametrize("order", [[nothing, one], [one, nothing]])
def test_metrics_that_are_numbers(strategy, order):
    """Results come in the order of the metrics."""
    result = made(compiled(metrics=order), strategy).evaluate(X, Y, **SEVENS_TESTED)
    same(result[1:], [order[0](None, None), order[1](None, None)])


class Sums(keras.metrics.Metric):
    """Two results in one metric."""

    def __init__(self):
        super().__init__(name="sums")
        self.total = self.add_weight(name="total", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(ops.sum(y_true))

    def result(self):
        return {"once": ops.copy(self.total), "twice": 2 * self.total}


def test_metrics_of_a_model(strategy):
    """The loss, what is compiled, and the model's own, which `fit` resets but does not update."""

    def make():
        model = linear()
        model.mine = keras.metrics.Mean(name="mine")
        model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
        return model

    def act(model):
        model.fit(X, Y, **SEVENS)
        model.mine.update_state(3.0)
        fitted = model.fit(X, Y, **SEVENS).history
        shapes = [v.shape for v in model.metrics_variables]
        return fitted, [m.name for m in model.metrics], shapes, len(model.non_trainable_variables)

    agree(strategy, make, act)


class Watched(layers.Layer):
    """Has a metric of its own."""

    def __init__(self):
        super().__init__()
        self.mean = keras.metrics.Mean(name="mean_input")

    def call(self, x):
        self.mean.update_state(ops.mean(x, -1))
        return x


def test_metrics_of_a_layer_deep_inside(strategy):
    """A metric of a layer within a layer counts the real rows alone; Keras on JAX cannot update it in a call."""

    def make():
        block = keras.Sequential([Watched(), layers.Dense(2)])
        model = keras.Sequential([layers.Input((3,)), block])
        model.compile("sgd", "mse")
        return model

    same(made(make, strategy).fit(X, Y, **FIT).history["mean_input"], [X.mean()])


@agreeing(compiled(metrics=["mae"]))
def test_model_compiled_again_keeps_its_weights(model):
    """Other metrics, another loss and another optimizer from then on, with the weights learned so far."""
    results = [model.fit(X, Y, **SEVENS).history, model.evaluate(X, Y, **SEVENS_TESTED, return_dict=True)]
    model.compile(keras.optimizers.Adam(0.1), "mae", metrics=["mse"])
    return [*results, model.fit(X, Y, **SEVENS).history, model.evaluate(X, Y, **SEVENS_TESTED, return_dict=True)]


def test_constraints_hold_after_each_step(strategy):
    def make():
        layer = layers.Dense(2, kernel_constraint="non_neg")
        model = keras.Sequential([layers.Input((3,)), layer])
        model.compile(keras.optimizers.SGD(0.5), "mse")
        return model

    ours, _ = agree(strategy, make, history(X, -Y))
    assert np.min(ours.layers[0].get_weights()[0]) >= 0


@pytest.mark.parametrize("scaled", [True, False])
def test_loss_scaling_keeps_float16_gradients(strategy, scaled):
    """In float16 the gradients of a deep model vanish unless the loss is scaled."""

    def make():
        kwargs = {"use_bias": False, "kernel_initializer": "ones", "activation": "sigmoid", "dtype": "mixed_float16"}
        deep = keras.Sequential([layers.Input((1,)), *(layers.Dense(1, **kwargs) for _ in range(15))])
        deep.dtype_policy = keras.DTypePolicy("mixed_float16")
        deep.compile(keras.optimizers.SGD(1e9), "mse", auto_scale_loss=scaled)
        return deep

    model = made(make, strategy)
    model.fit(np.ones((2, 1)), np.ones((2, 1)), batch_size=2, verbose=0)
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer) == scaled
    assert (model.layers[0].get_weights()[0] != 1).all() == scaled


class Measured(keras.Model):
    """Watches its own loss, four times."""

    def __init__(self, penalty=None):
        super().__init__()
        self.watch = keras.metrics.Mean(name="watch")
        self.dense = layers.Dense(2, activity_regularizer=penalty)

    def call(self, x):
        return self.dense(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        self.watch.update_state(loss * 4)
        return loss


class WithoutTraining(Measured):
    """The signature of an older Keras."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
        return super().compute_loss(x, y, y_pred, sample_weight)


@pytest.mark.cover(["model"], {Measured})
@pytest.mark.parametrize("model", [Measured, WithoutTraining])
def test_metrics_in_compute_loss(strategy, model):
    """The metric is four times the loss, in `fit` and `evaluate`, of a short batch too."""
    ours, _ = agree(strategy, compiled(model), history(validation_data=(X, Y), batch_size=8))
    fitted = ours.fit(*EVEN, **FIT).history
    same(fitted["watch"][0], 4 * fitted["loss"][0])


def test_what_compute_loss_sees(strategy):
    """The losses of layers, and whether it is called in `fit` or in `evaluate`."""
    seen = set()

    class Seeing(Measured):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            seen.add(training)
            self.watch.update_state(sum(self.losses))
            return super().compute_loss(x, y, y_pred, sample_weight, training)

    ours, _ = agree(strategy, compiled(lambda: Seeing("l2")), history(*EVEN, batch_size=8))
    assert ours.history.history["watch"][0] > 0
    model = made(compiled(Seeing), strategy)
    seen.clear()
    model.fit(X, Y, **SEVENS)
    assert True in seen
    seen.clear()
    model.evaluate(X, Y, **SEVENS_TESTED)
    assert seen == {False}


class Largest(Measured):
    """Has a metric that it computes itself, and hides Keras's."""

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        super().compute_metrics(x, y, y_pred, sample_weight)
        self.watch.reset_state()
        self.watch.update_state(ops.max(y_pred, -1))
        return {"largest": self.watch.result(), "loss": self._loss_tracker.result()}


class Taped(Measured):
    """Steps of its own, with a tape where the strategy needs one."""

    def train_step(self, data):
        x, y = data
        with phalanx.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(x=x, y=y, y_pred=y_pred)
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        self._loss_tracker.update_state(loss, sample_weight=ops.shape(x)[0])
        return self.compute_metrics(x, y, y_pred) | {"own": 10.0}

    def test_step(self, data):
        x, y = data
        y_pred = self(x, training=False)
        self._loss_tracker.update_state(self.compute_loss(x=x, y=y, y_pred=y_pred), sample_weight=ops.shape(x)[0])
        return self.compute_metrics(x, y, y_pred) | {"own": 5.0}

    def predict_step(self, data):
        return 2 * self(data[0] if isinstance(data, tuple) else data, training=False)


@pytest.mark.cover(["k"], {2})
@pytest.mark.parametrize("k", [1, 2])
def test_own_steps_return_the_logs(strategy, k):
    """They train as Keras's, and what they return is in the logs; the results of `evaluate` end with it."""
    ours = made(compiled(Taped, metrics=["mae"], steps_per_execution=k), strategy)
    theirs = made(compiled(Measured, metrics=["mae"]))
    fitted, expected = (m.fit(*EVEN, **FIT, epochs=2).history for m in (ours, theirs))
    assert fitted.pop("own") == [10.0, 10.0]
    same(dict(sorted(fitted.items())), dict(sorted(expected.items())))
    same(ours.get_weights(), theirs.get_weights())
    tested = ours.evaluate(*EVEN, **EVALUATE)
    assert tested[-1] == 5.0
    same(sorted(tested[:-1]), sorted(theirs.evaluate(*EVEN, **EVALUATE)))
    assert ours.evaluate(*EVEN, **EVALUATE, return_dict=True)["own"] == 5.0
    same(ours.predict(X, **EVALUATE), 2 * theirs.predict(X, **EVALUATE))


class Stateless(Measured):
    """Steps of its own in Keras's style on JAX: they call Keras's and add to the logs."""

    def train_step(self, state, data):
        logs, state = super().train_step(state, data)
        return logs | {"own": 10.0}, state

    def test_step(self, state, data):
        logs, state = super().test_step(state, data)
        return logs | {"own": 5.0}, state


def test_own_stateless_steps(strategy):
    """What they add is in the logs, and last in the results of `evaluate`."""
    ours, _ = agree(strategy, compiled(Stateless, metrics=["mae"]), everything(*EVEN))
    assert ours.history.history["own"] == [10.0, 10.0]


def within():
    """A model with metrics within a model, whose metrics they do not belong to."""
    x = layers.Input((3,))
    return keras.Model(x, layers.Dense(2)(compiled(metrics=["mse"])()(x)))


def slow(loss):
    return compiled(loss=loss, optimizer=lambda: keras.optimizers.SGD(0.02))


WEIGHTED = history(sample_weight=WEIGHTS)
# What makes a model, and what is done with it.
COMPILED = {
    "loss_of_one_output": (
        compiled(two_outputs, loss=["mse", None]),
        lambda m: m.evaluate(X, Y, **EVALUATE, return_dict=True),
    ),
    "sum": (slow(keras.losses.MeanSquaredError(reduction="sum")), WEIGHTED),
    "weighted_mean": (slow(keras.losses.MeanAbsoluteError(reduction="mean_with_sample_weight")), WEIGHTED),
    "cosine": (slow(keras.losses.CosineSimilarity()), WEIGHTED),
    "metric_with_results_by_name": (
        compiled(metrics=[Sums]),
        history(*EVEN, epochs=2, validation_data=EVEN, batch_size=8),
    ),
    "metrics_within": (compiled(within, metrics=["mae"]), history()),
    "own_metrics": (compiled(Largest), history(*EVEN, batch_size=8)),
    "optimizer_from_config": (
        compiled(optimizer={"class_name": "SGD", "config": {"learning_rate": 0.2}}),
        history(epochs=2),
    ),
    "optimizer": (compiled(optimizer=keras.optimizers.RMSprop), history(epochs=2)),
}


@pytest.mark.cover(
    ["make", "act"],
    [COMPILED[name] for name in ("weighted_mean", "metric_with_results_by_name", "own_metrics", "metrics_within")],
)
@pytest.mark.parametrize(("make", "act"), COMPILED.values(), ids=COMPILED)
def test_what_a_model_is_compiled_with(strategy, make, act):
    """Reductions over the rows of the whole batch, weighted; metrics of every kind; optimizers."""
    agree(strategy, make, act)


@agreeing(compiled(Measured))
def test_a_subclass_is_built_by_its_first_batch(model):
    """Building leaves nothing in the metrics, and no weight is drawn twice."""
    first = model.evaluate(X, Y, **SEVENS_TESTED)
    assert model.built
    weights = model.get_weights()
    model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
    second = model.evaluate(X, Y, **SEVENS_TESTED)
    same(model.get_weights(), weights)
    return first, second
