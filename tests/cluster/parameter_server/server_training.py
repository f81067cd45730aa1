"""A small model, its batches, and its training by scheduled steps and by plain Keras."""

import keras
import numpy as np

import phalanx

X = np.random.RandomState(0).normal(size=(20, 8, 6)).astype("float32")
BATCHES = [(x, x.sum(1, keepdims=True)) for x in X]


def mlp(*units):
    """A model whose first kernel is large, so that a partitioner divides it."""
    hidden = [keras.layers.Dense(n, activation="tanh") for n in units or (5,)]
    return keras.Sequential([keras.layers.Input((6,)), *hidden, keras.layers.Dense(1)])


def parts(strategy, make):
    """What `make` makes in the scope, with the same first values as `by_keras`."""
    keras.utils.set_random_seed(3)
    with strategy.scope():
        return make()


def training(model, optimizer, counter=None):
    """A step as users of tf.distribute write it."""

    def step(x, y):
        with phalanx.GradientTape() as tape:
            loss = optimizer.scale_loss(keras.ops.mean(keras.ops.square(model(x, training=True) - y)))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        if counter is not None:
            counter.assign_add(1)
        return loss

    return step


def do(coordinator, step, *calls):
    """Lets workers do a step with the arguments of each call, and waits until they have."""
    for args in calls:
        coordinator.schedule(step, args=args)
    coordinator.join()


def new_counter(name="counter"):
    """A variable that counts."""
    return keras.Variable(0, dtype="int32", trainable=False, aggregation="sum", name=name)


def by_keras(make, optimizer, batches):
    """The model that plain Keras trains on some batches."""
    keras.utils.set_random_seed(3)
    model = make()
    model.compile(optimizer, "mse")
    for x, y in batches:
        model.train_on_batch(x, y)
    return model


def assert_same(ours, theirs, rtol=1e-5, atol=1e-6):
    """Weights are equal to rounding."""
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=rtol, atol=atol)
