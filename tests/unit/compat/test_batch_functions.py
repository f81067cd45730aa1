"""Which losses and metrics get the rows of all replicas, and that trying them changes nothing."""

import jax.numpy as jnp
import keras
import numpy as np
import pytest
from drawn_trainings import FORMS, ROW_FORMS, function_of

import phalanx
from phalanx._src.compat.batch_functions import needs_all_rows

X = np.random.default_rng(0).normal(size=(7, 3)).astype("float32")
CLASSES = np.random.default_rng(1).integers(0, 3, (7, 1))
ops = keras.ops


@pytest.mark.parametrize(
    ("labels", "expected"), [pytest.param((7,), False, id="rows"), pytest.param((7, 1), True, id="pairs of rows")]
)
def test_functions_of_keras_with_labels_in_columns(labels, expected):
    """Keras compares each label with each row if a function of vectors gets a column."""
    fn = keras.losses.categorical_generalized_cross_entropy
    y, p = jnp.asarray(CLASSES.reshape(labels)), jnp.ones((7, 3)) / 3
    assert needs_all_rows(lambda y, p: fn(y, p, 0.5), y, p, source=fn) == expected


def test_functions_that_need_all_rows():
    """All but values of single rows and their mean, also if values hardly differ between rows."""
    p = ops.full((4, 3), 1 / 3)
    functions = {form: function_of(form, "smooth") for form in FORMS}
    found = {form: needs_all_rows(fn, p, p, source=fn) for form, fn in functions.items()}
    assert found == {form: form not in {*ROW_FORMS, "mean"} for form in FORMS}


def test_functions_that_draw_random_numbers():
    """Replicas draw as often as one device does, for a loss and for a metric."""
    found = []
    for strategy in (phalanx.OneDeviceStrategy("cpu:0"), phalanx.MirroredStrategy(["cpu:0", "cpu:1"])):
        seeds = [keras.random.SeedGenerator(number) for number in (4, 5)]

        def noisy(y, p, seed):
            return ops.square(y - p) + keras.random.uniform(ops.shape(p), seed=seed)

        def rows(y, p, seeds=seeds):
            return ops.mean(noisy(y, p, seeds[0]), axis=-1)

        def number(y, p, seeds=seeds):
            return ops.max(noisy(y, p, seeds[1]))

        with strategy.scope():
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(3)])
            model.compile("sgd", rows, metrics=[number])
        model.fit(X[:3], X[:3], epochs=2, verbose=0)
        found.append([np.asarray(seed.state.value).tolist() for seed in seeds])
    assert found[0] == found[1] != [[0, 4], [0, 5]]


def test_values_of_all_rows_count_one_by_one():
    """In a metric, a batch of four rows counts more than one of three, also if a value depends on the other rows."""
    found = []
    for strategy in (phalanx.OneDeviceStrategy("cpu:0"), phalanx.MirroredStrategy(["cpu:0", "cpu:1"])):
        with strategy.scope():
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(3, kernel_initializer="ones")])
            model.compile(loss="mse", metrics=[function_of("softmin", "square")])
        found.append(model.evaluate(X, X, batch_size=4, verbose=0))
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5)
