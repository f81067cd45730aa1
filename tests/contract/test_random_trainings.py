"""Trainings drawn at random: model, loss, metrics, rows, batch size, replicas. `fit`, `evaluate` and `predict` are those of one device."""

import hypothesis
import hypothesis.strategies as st
import keras
import numpy as np
from tests.draws import draws

import phalanx

WIDTH, CLASSES, LENGTH = 3, 3, 4
ops = keras.ops


def mlp():
    x = keras.Input((WIDTH,))
    return keras.Model(
        x, keras.layers.Dense(CLASSES, activation="softmax")(keras.layers.Dense(4, activation="tanh")(x))
    )


def normalized():
    """Statistics of the batch in the middle of the model, over all replicas."""
    x = keras.Input((WIDTH,))
    y = keras.layers.BatchNormalization(synchronized=True)(keras.layers.Dense(4, activation="tanh")(x))
    return keras.Model(x, keras.layers.Dense(CLASSES, activation="softmax")(y))


class Regularized(keras.layers.Layer):
    """Adds a loss of its activations, and a metric."""

    def call(self, x):
        self.add_loss(0.1 * ops.mean(ops.square(x)))
        return x


def regularized():
    x = keras.Input((WIDTH,))
    return keras.Model(x, keras.layers.Dense(CLASSES, activation="softmax")(Regularized()(keras.layers.Dense(4)(x))))


MODELS = {"mlp": mlp, "normalized": normalized, "regularized": regularized}


class Masked(keras.losses.Loss):
    """Leaves out rows of class 0."""

    def call(self, y, p):
        values = keras.losses.sparse_categorical_crossentropy(y, p)
        keras.src.backend.set_keras_mask(values, ops.reshape(y, (-1,)) > 0)
        return values


def one_hot(y):
    return ops.one_hot(ops.reshape(ops.cast(y, "int32"), (-1,)), CLASSES)


LOSSES = {
    "crossentropy": lambda: "sparse_categorical_crossentropy",
    "ignore_class": lambda: keras.losses.SparseCategoricalCrossentropy(ignore_class=1),
    "sum": lambda: keras.losses.SparseCategoricalCrossentropy(reduction="sum"),
    "weighted": lambda: keras.losses.SparseCategoricalCrossentropy(reduction="mean_with_sample_weight"),
    "masked": Masked,
    "mean of the batch": lambda: lambda y, p: ops.mean(ops.square(one_hot(y) - p)),
    "sum of the batch": lambda: lambda y, p: ops.sum(ops.square(one_hot(y) - p)) / 8,
    "root of the batch": lambda: lambda y, p: ops.sqrt(ops.mean(ops.square(one_hot(y) - p))),
    "dice": lambda: lambda y, p: 1 - 2 * ops.sum(one_hot(y) * p) / (ops.sum(one_hot(y)) + ops.sum(ops.square(p))),
    "contrast": lambda: (
        lambda y, p: ops.logsumexp(ops.matmul(p, ops.transpose(p)), axis=-1) - ops.sum(one_hot(y) * p, axis=-1)
    ),
}


class Counting(keras.metrics.Metric):
    """Counts rows, without weights."""

    def __init__(self):
        super().__init__(name="counting")
        self.rows = self.add_weight(name="rows", initializer="zeros")

    def update_state(self, y, p, sample_weight=None):
        self.rows.assign_add(ops.shape(p)[0])

    def result(self):
        return ops.copy(self.rows)


METRICS = {
    "accuracy": lambda: "accuracy",
    "counting": Counting,
    "top": lambda: keras.metrics.SparseTopKCategoricalAccuracy(2),
    "ratio": lambda: lambda y, p: ops.sum(one_hot(y) * p) / ops.sum(ops.square(p)),
}

X = np.random.default_rng(0).normal(size=(70, WIDTH)).astype("float32")
Y = np.random.default_rng(1).integers(0, CLASSES, (70, 1))
WEIGHTS = np.random.default_rng(2).uniform(0.5, 2, 70).astype("float32")


def results(strategy, model, loss, metrics, rows, batch_size, weighted, steps):
    keras.utils.set_random_seed(3)
    with strategy.scope():
        made = MODELS[model]()
        chosen = [METRICS[name]() for name in metrics]
        made.compile(keras.optimizers.SGD(0.3), LOSSES[loss](), metrics=chosen, steps_per_execution=steps)
    weights = WEIGHTS[:rows] if weighted else None
    options = {"batch_size": batch_size, "verbose": 0}
    history = made.fit(X[:rows], Y[:rows], epochs=2, shuffle=False, sample_weight=weights, **options).history
    scores = made.evaluate(X[: rows // 2 + 1], Y[: rows // 2 + 1], return_dict=True, **options)
    return {
        **history,
        **{f"test {k}": v for k, v in scores.items()},
        "predictions": made.predict(X[:rows], **options),
    }, made.get_weights()


@draws(4, 500)
@hypothesis.given(
    st.sampled_from(sorted(MODELS)),
    st.sampled_from(sorted(LOSSES)),
    st.lists(st.sampled_from(sorted(METRICS)), unique=True, max_size=2),
    st.integers(1, 70),
    st.integers(1, 40),
    st.integers(2, 5),
    st.booleans(),
    st.sampled_from([1, 3]),
)
def test_any_training_is_that_of_one_device(model, loss, metrics, rows, batch_size, replicas, weighted, steps):
    """Also on batches that replicas cannot divide."""
    hypothesis.assume(rows / batch_size < 12)
    # A weight of a row has no meaning for one number per batch.
    hypothesis.assume(
        not weighted
        or (loss in ("crossentropy", "ignore_class", "sum", "weighted", "masked") and "ratio" not in metrics)
    )
    args = (model, loss, metrics, rows, batch_size, weighted, steps)
    found, weights = results(phalanx.MirroredStrategy([f"cpu:{i}" for i in range(replicas)]), *args)
    expected, whole = results(phalanx.OneDeviceStrategy("cpu:0"), *args)
    assert list(found) == list(expected)
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=2e-4, atol=2e-5, err_msg=name)
    for a, b in zip(weights, whole, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-4)
