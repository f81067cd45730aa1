"""The law of `fit`: on N replicas, K steps in one execution, it trains like plain Keras on one device."""

import numpy as np
import pytest
from fit_models import VALIDATION_ROWS, WORKLOADS, train, train_on_one_device
from strategy_table import central, mirrored, model_parallel, sharded

# Keras's metrics of intersections ask for 64-bit integers.
pytestmark = pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64")

TABLE = [(name, count, k) for name in WORKLOADS for count in (1, 2, 3, 4) for k in (1, 8)]
# Either K, with and without statistics of a batch. Law 1 has the other models and numbers of replicas.
COVER = {("mlp", 3, 8), ("cnn", 2, 1)}


def assert_equal(got, wanted, atol, what):
    """Equal within rtol 1e-4; atol is for numbers that are almost zero."""
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=atol, err_msg=what)


def assert_equal_copies(strategy, variables):
    """Every device on which a variable lives holds the same bits of it."""
    for variable in variables:
        copies = strategy.experimental_local_results(variable)
        assert len(copies) == strategy.storage.num_replicas
        assert len({np.asarray(c).tobytes() for c in copies}) == 1, variable.path


@pytest.mark.cover(("name", "count", "k"), COVER)
@pytest.mark.parametrize(("name", "count", "k"), TABLE)
def test_fit_equals_keras(name, count, k):
    """Five epochs with validation leave the same history, weights, optimizer, evaluation and predictions."""
    assert_fit_equals_keras(mirrored(count)(), name, k)


ROWS = {
    "central": (central(2), "cnn", 8),
    "over_model": (model_parallel(2, 2), "mlp", 8),
    "over_replicas": (sharded(2, "layer"), "mlp", 8),
}


@pytest.mark.exhaustive("test_lora.py and test_divided_variables.py: fit of variables in parts; law 1: all strategies")
@pytest.mark.parametrize(("row", "name", "k"), ROWS.values(), ids=ROWS)
def test_fit_of_other_strategies(row, name, k):
    """With the variables on a device of their own, or in parts, too."""
    assert_fit_equals_keras(row(), name, k)


def assert_fit_equals_keras(strategy, name, k):
    """Trains both, and compares all that is left."""
    wanted = train_on_one_device(name)
    assert wanted.history["loss"][-1] < 0.7 * wanted.history["loss"][0], "a model that does not learn shows nothing"
    with strategy.scope():
        model = WORKLOADS[name].compiled(k=k, synchronized=True)
    got = train(WORKLOADS[name], model)
    assert list(got.history) == list(wanted.history)
    assert list(got.evaluated) == list(wanted.evaluated)
    for metric, values in wanted.history.items():
        assert_equal(got.history[metric], values, 1e-6, metric)
        if not metric.startswith("val_"):
            assert_equal(got.evaluated[metric], wanted.evaluated[metric], 1e-6, metric)
    assert len(got.predictions) == VALIDATION_ROWS
    assert_equal(got.predictions, wanted.predictions, 1e-6, "predictions")
    for ours, theirs in ((got.weights, wanted.weights), (got.state, wanted.state)):
        for value, (path, expected) in zip(ours.values(), theirs.items(), strict=True):
            # The key bias of attention has a true gradient of zero, and Adam divides noise by noise.
            noisy = "attention" in path and path.endswith("key/bias")
            assert_equal(value, expected, 2e-5 if noisy else 1e-6, path)
    assert_equal_copies(strategy, [*model.variables, *model.optimizer.variables])
