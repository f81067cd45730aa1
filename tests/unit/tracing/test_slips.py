"""Mistakes that a trace shows: a warning for each, and none for what is right."""

import random
import warnings

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import phalanx
from phalanx.errors import SlipWarning

X = np.random.default_rng(0).normal(size=(8, 3)).astype("float32")
KEY = jax.random.key(0)


def train(strategy, loss_of, change=lambda grads: grads, rows=8):
    """One step of training, on a batch of some rows."""
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(5, kernel_regularizer="l2")])
        optimizer = keras.optimizers.SGD(0.1)

    def step(x):
        with phalanx.GradientTape() as tape:
            loss = loss_of(model(x), model)
        weights = model.trainable_variables
        optimizer.apply_gradients(zip(change(tape.gradient(loss, weights)), weights, strict=True))
        return loss

    (batch,) = strategy.experimental_distribute_dataset(X[:rows], batch_size=rows)
    strategy.run(step, args=(batch,))


@pytest.mark.parametrize(
    "loss_of",
    [
        lambda y, _: jnp.mean(y**2),
        lambda y, _: keras.ops.mean(keras.ops.mean(y**2, axis=-1)),
        lambda y, _: -keras.ops.mean(keras.ops.sum(y, axis=-1)),
        lambda y, _: jnp.sum((y**2).sum(-1)) / 4,
        lambda y, m: phalanx.nn.scale_regularization_loss(m.losses[0]) + jnp.mean(jnp.sin(y)),
    ],
    ids=["mean", "twice", "negative", "by hand", "with regularization"],
)
def test_a_mean_over_the_rows_of_a_replica(strategy, loss_of):
    """Two replicas take steps twice as large."""
    with pytest.warns(SlipWarning, match=r"a mean over the 4 rows.*2 times as large.*\nHINT: loss = phalanx.nn.comp"):
        train(strategy, loss_of)


RIGHT = [
    lambda y, _: phalanx.nn.compute_average_loss(keras.ops.mean(y**2, axis=-1)),
    lambda y, _: phalanx.nn.compute_average_loss(keras.ops.mean(y**2, axis=-1), global_batch_size=8),
    lambda y, _: jnp.sum(y[:, 0]) / 8,
    lambda y, _: jnp.sum(y) / 8,
    lambda y, _: jnp.mean(y**2) / 2,
    lambda y, _: jnp.mean(y**2) * 0.5,
    lambda y, m: phalanx.nn.compute_average_loss(y[:, 0]) + jnp.mean(m.layers[0].kernel ** 2) / 2,
    lambda y, m: phalanx.nn.compute_average_loss(y[:, 0]) + jnp.mean(jnp.outer(X[:4], m.layers[0].kernel.value)),
    lambda y, _: jnp.sum(y**2),
    lambda y, _: phalanx.get_replica_context().all_reduce("MEAN", jnp.mean(y)) / 2,
]


@pytest.mark.cover(["loss_of", "rows"], [(loss_of, 7 if i in (0, 3, 6, 9) else 8) for i, loss_of in enumerate(RIGHT)])
@pytest.mark.parametrize("loss_of", RIGHT)
@pytest.mark.parametrize("rows", [8, 7])
def test_losses_that_are_right(strategy, loss_of, rows):
    """They say how they are averaged over the global batch, or sum."""
    train(strategy, loss_of, rows=rows)


def test_gradients_that_are_averaged_by_hand(strategy):
    """What makes up for a mean is no slip; nor is a mean on one replica, or one whose gradients no optimizer gets."""
    mean = lambda y, _: jnp.mean(y**2)  # noqa: E731
    train(strategy, mean, lambda grads: [g / 2 for g in grads])
    train(phalanx.OneDeviceStrategy("cpu:1"), mean)

    def step(x):
        with phalanx.GradientTape() as tape:
            tape.watch(x)
            loss = jnp.mean(x**2)
        return tape.gradient(loss, x)

    strategy.run(step, args=(next(iter(strategy.experimental_distribute_dataset(X, batch_size=8))),))


class Averaging(keras.Sequential):
    def train_step(self, data):
        with phalanx.GradientTape() as tape:
            loss = keras.ops.mean(self(data[0]) ** 2)
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"loss": loss}


@pytest.mark.slow
def test_fit_weighs_means(strategy):
    """A train_step of the user's in fit computes means over its rows: their gradients are weighted."""
    with strategy.scope():
        model = Averaging([keras.layers.Dense(2)])
        model.compile("sgd")
    model.fit(X, X, batch_size=8, verbose=0)


@pytest.mark.parametrize("module", [np.random.normal, random.random], ids=["numpy", "random"])
@pytest.mark.parametrize("builds", [True, False])
def test_a_random_number_in_a_program(strategy, module, builds):
    """Drawn once for all steps; what a layer draws when it is made does not count."""
    layer = keras.layers.Dropout(0.5)

    def step(x):
        return layer(x * module(), training=True) if builds else x * module()

    with pytest.warns(SlipWarning, match=r"A random number of numpy.random.*\nHINT: keras.random.normal"):
        strategy.run(step, args=(1.0 if not builds else np.ones((2, 2), "float32"),))


def test_random_numbers_that_are_right(strategy):
    """Keys among the arguments, folded with a step or the replica's number, seed generators, Dropout."""
    seeds, dropout, made = keras.random.SeedGenerator(0), keras.layers.Dropout(0.5), []

    def step(x, key, i):
        if not made:
            made.append(keras.layers.Dense(2))
        replica = phalanx.get_replica_context().replica_id_in_sync_group
        draws = [
            jax.random.normal(key, (2,)),
            jax.random.normal(jax.random.fold_in(KEY, i), (2,)),
            jax.random.normal(jax.random.fold_in(KEY, replica), (2,)),
            keras.random.normal((2,), seed=seeds),
        ]
        return made[0](dropout(x, training=True)) + sum(draws)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        strategy.run(step, args=(X, jax.random.key(1), 3))
        strategy.run(lambda x: x * 2, args=(np.random.normal(),))
