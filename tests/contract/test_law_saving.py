"""What is saved under one strategy goes on under every other, and without one: weights, slots, metrics, schedules."""

from contextlib import nullcontext

import keras
import numpy as np
import pytest
from strategy_table import ROWS

FROM = ["none", "mirrored_x2", "mirrored_x3"]
INTO = ["none", "one_device", "mirrored_x2", "mirrored_x4", "sharded_x4"]
# In more replicas, whose variables are divided, and without a strategy.
COVER = [("mirrored_x2", "sharded_x4"), ("mirrored_x3", "none")]
RANDOM = np.random.default_rng(3)
# Three batches, which three replicas share unevenly.
X = RANDOM.random((48, 6, 6, 1)).astype("float32")
Y = RANDOM.integers(3, size=48)
BATCH = {"batch_size": 16, "verbose": 0}
FIT = BATCH | {"shuffle": False}


def make():
    """A model with statistics, dropout and a seed, and an optimizer with slots and a schedule."""
    layers = keras.layers
    model = keras.Sequential(
        [
            layers.Input((6, 6, 1)),
            layers.Conv2D(4, 3, use_bias=False),
            layers.BatchNormalization(synchronized=True),
            layers.Activation("relu"),
            layers.Flatten(),
            layers.Dropout(0.0),
            layers.Dense(3),
        ]
    )
    rate = keras.optimizers.schedules.ExponentialDecay(0.02, 2, 0.8)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(rate), loss, metrics=["accuracy"])
    return model


def scope_of(name):
    return nullcontext() if name == "none" else ROWS[name]().scope()


def made_in(scope):
    keras.utils.set_random_seed(5)
    with scope:
        return make()


def state(model):
    return [v.numpy() for v in [*model.weights, *model.optimizer.variables]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Returns, for each row, files of a model that has trained for an epoch, its state, and its state after another one."""
    results = {}

    def of(name):
        if name not in results:
            folder = tmp_path_factory.mktemp(name)
            model = made_in(scope_of(name))
            model.fit(X, Y, **FIT)
            model.save(folder / "model.keras")
            model.save_weights(folder / "model.weights.h5")
            before, predicted = state(model), model.predict(X, **BATCH)
            model.fit(X, Y, **FIT)
            results[name] = folder, before, predicted, state(model)
        return results[name]

    return of


def assert_same(ours, theirs, **tolerance):
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, **tolerance)


@pytest.mark.cover(["saver", "into"], COVER)
@pytest.mark.parametrize("into", INTO)
@pytest.mark.parametrize("saver", FROM)
def test_saved_model_trains_on_unchanged(saved, saver, into):
    """A `.keras` file holds every bit, predicts the same, and trains on as if nothing had happened."""
    folder, before, predicted, after = saved(saver)
    with scope_of(into):
        model = keras.saving.load_model(folder / "model.keras")
    assert_same(state(model), before, rtol=0, atol=0)
    np.testing.assert_allclose(model.predict(X, **BATCH), predicted, rtol=1e-5, atol=1e-6)
    model.fit(X, Y, **FIT)
    assert_same(state(model), after, rtol=1e-4, atol=1e-5)


@pytest.mark.cover(["saver"], {"mirrored_x2", "mirrored_x3"})
@pytest.mark.parametrize(
    ("saver", "into", "inside"),
    [
        ("none", "mirrored_x2", True),
        ("mirrored_x3", "mirrored_x2", False),
        ("mirrored_x2", "none", False),
        ("sharded_x4", "none", False),
    ],
)
def test_saved_weights_load_in_any_scope(saved, saver, into, inside):
    """So does a file of weights, loaded inside the scope or outside."""
    folder, before, _, after = saved(saver)
    scope = scope_of(into)
    model = made_in(scope)
    model.optimizer.build(model.trainable_variables)
    with scope if inside else nullcontext():
        model.load_weights(folder / "model.weights.h5")
    assert_same(state(model), before, rtol=0, atol=0)
    model.fit(X, Y, **FIT)
    assert_same(state(model), after, rtol=1e-4, atol=1e-5)
