# SPDX-License-Identifier: Apache-2.0
"""The cross-entropy of a saturated sigmoid or softmax has the loss and the gradients of its logits."""

import jax
import keras
import numpy as np
import pytest
from keras import layers, losses

import phalanx
from phalanx.errors import InvalidArgumentError
from phalanx.keras import logits

X = np.random.RandomState(3).normal(size=(24, 3)).astype("float32")
IS_POSITIVE = (X[:, 0] > 0).astype("float32")
# Such weights saturate a float32 sigmoid, whose clipped gradient is zero.
WIDE = keras.initializers.RandomNormal(stddev=60.0, seed=5)


@pytest.fixture(autouse=True)
def keep_the_option():
    yield
    phalanx.keras.set_logits_recovery(True)
    keras.config.set_dtype_policy("float32")


def fitted(strategy, loss, y, last=(), units=1):
    """Returns the losses of three epochs and the weights after them; the units' activation is in `last`."""
    with strategy.scope():
        model = keras.Sequential([layers.Input((3,)), layers.Dense(units, kernel_initializer=WIDE), *last])
        model.compile(keras.optimizers.SGD(0.1), loss)
    history = model.fit(X, y, epochs=3, batch_size=8, shuffle=False, verbose=0).history["loss"]
    return history, model.get_weights()


def assert_same(a, b):
    np.testing.assert_allclose(a[0], b[0], rtol=1e-5)
    for v, w in zip(a[1], b[1], strict=True):
        np.testing.assert_allclose(v, w, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "y"), [("float32", IS_POSITIVE), ("mixed_bfloat16", IS_POSITIVE[:, None])])
def test_sigmoid_equals_its_logits(strategy, policy, y):
    """Through a functional model, a cast, a change of rank and label smoothing."""
    keras.config.set_dtype_policy(policy)
    smooth = {"label_smoothing": 0.1}
    ours = fitted(strategy, losses.BinaryCrossentropy(**smooth), y, [layers.Activation("sigmoid")])
    assert_same(ours, fitted(strategy, losses.BinaryCrossentropy(from_logits=True, **smooth), y))
    assert ours[0][0] > 20  # A clipped one is at most 16.1.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "y"),
    [
        (losses.CategoricalCrossentropy, keras.utils.to_categorical(X.argmax(1), 3)),
        (losses.SparseCategoricalCrossentropy, X.argmax(1)),
    ],
    ids=["rows", "numbers"],
)
def test_softmax_equals_its_logits(strategy, kind, y):
    ours = fitted(strategy, kind(), y, [layers.Softmax()], units=3)
    assert_same(ours, fitted(strategy, kind(from_logits=True), y, units=3))


@pytest.mark.slow
def test_option_turns_it_off(strategy):
    """The loss is then that of plain Keras, which clips. Anything but a bool is refused."""
    with pytest.raises(InvalidArgumentError, match=r"enabled='no': must be True or False.*\nHINT: enabled=True"):
        phalanx.keras.set_logits_recovery("no")
    phalanx.keras.set_logits_recovery(False)
    clipped, _ = fitted(strategy, "binary_crossentropy", IS_POSITIVE, [layers.Activation("sigmoid")])
    plain, _ = fitted(phalanx.get_strategy(), "binary_crossentropy", IS_POSITIVE, [layers.Activation("sigmoid")])
    np.testing.assert_allclose(clipped, plain, rtol=1e-5)
    assert plain[0] < 16.2


def test_nothing_outside_of_steps(strategy, collect):
    """Keras's own function clips as before, eagerly and in a jit of JAX. The probabilities of a trace are forgotten with it."""

    def loss(x):
        return keras.ops.binary_crossentropy(np.float32([0.0]), keras.ops.sigmoid(x))

    collect()  # What other tests have left.
    x = np.float32([100.0])
    np.testing.assert_allclose([loss(x), jax.jit(loss)(x)], 15.942385, rtol=1e-5)
    assert not logits._sources
    strategy.run(lambda x: keras.ops.sigmoid(x), args=(X,))
    collect()
    assert not logits._sources


def test_other_axis_is_left_alone(strategy):
    """A softmax over another dim than that of the loss is a number like any other, and so is a sigmoid for classes."""
    rows = np.eye(3, dtype="float32")

    def step(x):
        probability = keras.ops.softmax(x, axis=0)
        return [
            keras.ops.categorical_crossentropy(rows, probability, axis=-1),
            keras.ops.categorical_crossentropy(rows, keras.ops.sigmoid(x), axis=-1),
            keras.ops.binary_crossentropy(rows, probability),
        ]

    x = X[:3] * 3
    on = [np.asarray(v.values[0]) for v in strategy.run(step, args=(x,))]
    for found, plain in zip(on, phalanx.get_strategy().run(step, args=(x,)), strict=True):
        np.testing.assert_allclose(found, plain, rtol=1e-5)


@pytest.mark.slow
def test_in_a_loop_of_ones_own(strategy):
    """A tape, `value_and_grad` and an eager step find the same gradients as those of the logits."""
    with strategy.scope():
        dense = layers.Dense(1, kernel_initializer=WIDE)
        dense.build((None, 3))
    y = (X[:, :1] > 0).astype("float32")

    def loss(x, y, *, from_logits):
        out = dense(x) if from_logits else keras.activations.sigmoid(dense(x))
        return phalanx.nn.compute_average_loss(losses.binary_crossentropy(y, out, from_logits=from_logits))

    def tape(x, y, from_logits):
        with phalanx.GradientTape() as tape:
            value = loss(x, y, from_logits=from_logits)
        return tape.gradient(value, dense.kernel)

    def transformed(x, y, from_logits):
        return phalanx.value_and_grad(lambda: loss(x, y, from_logits=from_logits), [dense.kernel])()[1][0]

    wanted = np.asarray(strategy.run(tape, args=(X, y, True)).values[0])
    assert np.abs(wanted).max() > 0.01
    eager = phalanx.RunOptions(eager=True)
    for step, options in ((tape, None), (transformed, None), (tape, eager)):
        found = strategy.run(step, args=(X, y, False), options=options).values[0]
        np.testing.assert_allclose(found, wanted, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("is_on", [True, False])
def test_tutorial_of_parameter_servers_learns(strategy, is_on):
    """TensorFlow's tutorial, with a width of 16,384 and RMSprop with 0.1, reaches accuracy 1.0 within ten steps. Clipped it does not."""
    phalanx.keras.set_logits_recovery(is_on)
    with strategy.scope():
        ids = layers.Input((3,), dtype="int32")
        pooled = keras.ops.mean(layers.Embedding(5, 16384)(ids), axis=1)
        model = keras.Model(ids, layers.Dense(1, activation="sigmoid")(pooled))
        optimizer = keras.optimizers.RMSprop(0.1)
        accuracy = keras.metrics.Accuracy()
    random = np.random.RandomState(0)
    batches = [random.randint(0, 5, (32, 3)) for _ in range(10)]
    crossentropy = losses.BinaryCrossentropy(reduction="none")

    def step(batch):
        ids, y = batch
        with phalanx.GradientTape() as tape:
            found = model(ids, training=True)
            loss = phalanx.nn.compute_average_loss(crossentropy(y, found))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        accuracy.update_state(y, keras.ops.cast(found > 0.5, "int32"))

    rows = [(x.astype("int32"), (x == 0).any(1, keepdims=True).astype("int32")) for x in batches]
    for batch in strategy.experimental_distribute_dataset(rows):
        accuracy.reset_state()
        strategy.run(step, args=(batch,))
    assert float(accuracy.result()) == 1 if is_on else float(accuracy.result()) < 0.8
