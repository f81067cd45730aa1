"""`fit`, `evaluate` and `predict` on any number of replicas equal Keras's own trainer on one device."""

import functools

import keras
import numpy as np
import pytest
from keras import layers, ops
from twins import (
    BATCH,
    CLASSES,
    FIT,
    ROWS,
    WEIGHTS,
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
    under,
)

pytestmark = pytest.mark.slow

RANDOM = np.random.RandomState(11)
IMAGES = RANDOM.rand(ROWS, 6, 6, 1).astype("float32")
SEQUENCES = RANDOM.rand(ROWS, 4, 3).astype("float32")
TWO = {"a": X[:, :2], "b": X[:, 2:]}
TWO_TARGETS = {"kind": Y, "size": X.sum(1, keepdims=True)}


def cnn(synchronized):
    """A convolution with batch normalization."""
    kwargs = {"synchronized": True} if synchronized else {}
    inner = [layers.Conv2D(3, 3), layers.BatchNormalization(momentum=0.8, **kwargs), layers.ReLU(), layers.Flatten()]
    return keras.Sequential([layers.Input((6, 6, 1)), *inner, layers.Dense(CLASSES)])


def lstm(_):
    """A recurrent model."""
    return keras.Sequential([layers.Input((4, 3)), layers.LSTM(4), layers.Dense(CLASSES)])


def transformer(_):
    """One block of attention."""
    x = layers.Input((4, 3))
    h = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 2)(x, x))
    return keras.Model(x, layers.Dense(CLASSES)(layers.GlobalAveragePooling1D()(h)))


def two_in_two_out(_):
    """Inputs and outputs by name."""
    inputs = {"a": layers.Input((2,), name="a"), "b": layers.Input((3,), name="b")}
    h = layers.Dense(5, activation="tanh")(layers.Concatenate()([inputs["a"], inputs["b"]]))
    return keras.Model(inputs, {"kind": layers.Dense(CLASSES)(h), "size": layers.Dense(1)(h)})


def l2(_):
    """A penalty on the kernels."""
    dense = functools.partial(layers.Dense, kernel_regularizer=keras.regularizers.L2(0.02))
    return keras.Sequential([layers.Input((5,)), dense(6, activation="tanh"), dense(CLASSES)])


class Activity(layers.Layer):
    """Adds the mean square of its inputs to the loss."""

    def call(self, inputs):
        """Adds a loss."""
        self.add_loss(0.3 * ops.mean(ops.square(inputs)))
        return inputs


def activity(_):
    """A loss that a layer adds."""
    return keras.Sequential([layers.Input((5,)), layers.Dense(6, activation="tanh"), Activity(), layers.Dense(CLASSES)])


ACCURACY = {"metrics": ["accuracy"], "weighted_metrics": ["accuracy"]}
NAMED = {
    "loss": {"kind": crossentropy(), "size": "mse"},
    "loss_weights": {"kind": 0.7, "size": 0.2},
    "metrics": [{"kind": ["accuracy"], "size": ["mae"]}],
}
# A model, how it is compiled, what it is given.
WORKLOADS = {
    "mlp": (lambda _: mlp(), ACCURACY, {"x": X, "y": Y}),
    "cnn": (cnn, ACCURACY, {"x": IMAGES, "y": Y}),
    "lstm": (lstm, ACCURACY, {"x": SEQUENCES, "y": Y}),
    "transformer": (transformer, ACCURACY, {"x": SEQUENCES, "y": Y}),
    "two_in_two_out": (two_in_two_out, NAMED, {"x": TWO, "y": TWO_TARGETS}),
    "sample_weight": (lambda _: mlp(), ACCURACY, {"x": X, "y": Y, "sample_weight": WEIGHTS}),
    "class_weight": (lambda _: mlp(), ACCURACY, {"x": X, "y": Y, "class_weight": {0: 0.2, 1: 1.0, 2: 3.0}}),
    "l2": (l2, ACCURACY, {"x": X, "y": Y, "sample_weight": WEIGHTS}),
    "add_loss": (activity, ACCURACY, {"x": X, "y": Y}),
}
EVERY = [(n, k) for n in (1, 2, 3, 4) for k in (1, 4)]
SOME = [(2, 1), (3, 4)]
# A mean of the user's own sees the padding of a short batch: `add_loss` has a test of batches that divide.
CELLS = [(name, n, k) for name in WORKLOADS if name != "add_loss" for n, k in (EVERY if name == "mlp" else SOME)]
CELLS += [("cnn", 1, 1), ("cnn", 4, 4), ("lstm", 4, 1), ("two_in_two_out", 1, 4), ("two_in_two_out", 4, 1)]


def make(name, *, synchronized, k=1):
    """Returns what makes the model of a workload."""
    model, how, _ = WORKLOADS[name]
    how = how | {"metrics": list(how["metrics"])}
    if name == "two_in_two_out":
        return compiled_by_name(model, how, k)
    return compiled(lambda: model(synchronized), steps_per_execution=k, **how)


def compiled_by_name(model, how, k):
    """Returns what makes a model of several outputs."""

    def made():
        it = model(None)
        it.compile(
            keras.optimizers.SGD(0.1), how["loss"], how["loss_weights"], how["metrics"][0], steps_per_execution=k
        )
        return it

    return made


def results(model, name):
    """Trains a model of a workload; returns everything it computed."""
    data = WORKLOADS[name][2]
    tested = {k: v for k, v in data.items() if k != "class_weight"}
    history = model.fit(**data, **FIT, epochs=3).history
    evaluated = model.evaluate(**tested, batch_size=BATCH, verbose=0)
    return history, evaluated, model.predict(data["x"], batch_size=BATCH, verbose=0)


@functools.cache
def reference(name):
    """What Keras's own trainer computes."""
    model = alone(make(name, synchronized=False))
    return results(model, name), model


# Where the number of replicas divides no batch; the contract's law of fit has others.
COVER = {("mlp", 1, 1), ("mlp", 2, 1), ("mlp", 4, 4), *(cell for cell in CELLS if cell[1:] == (3, 4))}


@pytest.mark.cover(("name", "count", "k"), COVER)
@pytest.mark.parametrize(("name", "count", "k"), CELLS)
def test_training_equals_keras_on_one_device(name, count, k):
    """History, metrics, predictions, weights and optimizer equal one device, for any replicas and steps in one program."""
    expected, theirs = reference(name)
    ours = under(replicas(count), make(name, synchronized=True, k=k))
    same(results(ours, name), expected)
    same_state(ours, theirs)


@pytest.mark.parametrize(("shuffle", "k"), [(True, 1), (True, 4), ("batch", 4)])
def test_shuffled_rows_come_in_the_order_of_keras(shuffle, k):
    """The same seed gives the same order of rows."""
    same_fit(replicas(3), compiled(steps_per_execution=k), shuffle=shuffle)


def test_losses_of_layers_of_even_batches():
    """A mean that a layer adds to the loss is one over the global batch where every replica has as many rows."""
    same_fit(replicas(4), make("add_loss", synchronized=False), X[:96], Y[:96])


def test_activity_regularizers_of_even_batches():
    """So is a penalty on activations."""

    def model():
        dense = layers.Dense(6, activity_regularizer=keras.regularizers.L2(0.1))
        return keras.Sequential([layers.Input((5,)), dense, layers.Dense(CLASSES)])

    same_fit(replicas(2), compiled(model), X[:96], Y[:96])


@pytest.mark.parametrize(("count", "k"), [(2, 4), (3, 1)])
def test_validation_equals_keras(count, k):
    """Validation of uneven batches, weighted, in each epoch."""
    validation = (X[:37], Y[:37], WEIGHTS[:37])
    how = compiled(metrics=["accuracy"], weighted_metrics=["accuracy"], steps_per_execution=k)
    same_fit(replicas(count), how, validation_data=validation, validation_batch_size=9)


@pytest.mark.parametrize("loss", ["mean_with_sample_weight", "sum_over_batch_size", "sum"])
def test_reductions_of_losses(loss):
    """Every reduction means the global batch."""
    made = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=loss)
    how = compiled(loss=made, optimizer=lambda: keras.optimizers.SGD(0.02))
    same_fit(replicas(3), how, sample_weight=WEIGHTS)


def test_targets_of_sequences():
    """A loss for each time step, with weights of the steps."""
    how = compiled(
        lambda: keras.Sequential([layers.Input((4, 3)), layers.Dense(CLASSES)]), weighted_metrics=["accuracy"]
    )
    targets, weights = RANDOM.randint(0, CLASSES, (ROWS, 4)), RANDOM.rand(ROWS, 4).astype("float32")
    same_fit(replicas(3), how, SEQUENCES, targets, sample_weight=weights)


def test_masked_sequences_count_real_steps():
    """Masked time steps count neither in the loss nor in the metrics."""

    def model():
        return keras.Sequential(
            [
                layers.Input((4,)),
                layers.Embedding(5, 3, mask_zero=True),
                layers.LSTM(3, return_sequences=True),
                layers.Dense(CLASSES),
            ]
        )

    words = RANDOM.randint(0, 5, (ROWS, 4))
    words[:, 0] = 1
    same_fit(replicas(3), compiled(model, weighted_metrics=["accuracy"]), words, words % CLASSES)


def test_dropout_repeats_from_the_seed():
    """Dropout repeats from the seed."""

    def model():
        return keras.Sequential([layers.Input((5,)), layers.Dropout(0.5), layers.Dense(CLASSES)])

    runs = [under(replicas(2), compiled(model)).fit(X, Y, **FIT, epochs=2).history for _ in range(2)]
    assert runs[0] == runs[1]


def test_batch_normalization_not_synchronized_averages_statistics(strategy):
    """Each replica normalizes with its own rows; the moving mean is the mean of theirs."""

    def model():
        return keras.Sequential([layers.Input((5,)), layers.BatchNormalization(momentum=0.0), layers.Dense(CLASSES)])

    ours = under(strategy, compiled(model))
    ours.fit(X[:16], Y[:16], **FIT)
    halves = np.stack([X[:8].var(0), X[8:16].var(0)])
    same(ours.layers[0].moving_mean.numpy(), X[:16].mean(0))
    same(ours.layers[0].moving_variance.numpy(), halves.mean(0))


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_predict_returns_the_rows_in_order(count, k):
    """Exactly as many rows as were given, in their order, for any rest."""
    model = under(replicas(count), compiled(steps_per_execution=k))
    for rows in range(1, 10):
        same(model.predict(X[:rows], batch_size=4, verbose=0), np.asarray(model(X[:rows])))


@pytest.mark.parametrize("count", [1, 2])
def test_accumulated_gradients_in_groups_of_steps(count):
    """Several steps in one program accumulate as single ones do, also on one replica."""
    sgd = functools.partial(keras.optimizers.SGD, 0.1, gradient_accumulation_steps=2)
    same_fit(replicas(count), compiled(optimizer=sgd, steps_per_execution=3))
