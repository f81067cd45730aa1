"""`model_to_estimator`: an Estimator of a compiled Keras model."""

import keras
import numpy as np
from refusals import refusals, refused

import phalanx.estimator as estimator
from phalanx.errors import InputError, InvalidArgumentError


def sequential(compiled=True):
    """A model of one layer, whose weights are 1."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones", name="out")])
    if compiled:
        model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
    return model


class Subclassed(keras.Model):
    """A compiled model that cannot be copied: it has no configuration."""

    def __init__(self, part):
        super().__init__()
        self.compile("sgd", "mse")

    def call(self, x):
        return x


test_models_that_are_refused = refusals(
    InvalidArgumentError,
    (lambda: estimator.model_to_estimator(), ["exactly one of them"]),
    (lambda: estimator.model_to_estimator(sequential(), "a"), ["exactly one of them"]),
    (lambda: estimator.model_to_estimator(3), ["keras_model=3", "must be a Model"]),
    (lambda: estimator.model_to_estimator(keras_model_path=3), ["keras_model_path=3", "must be a path"]),
    (lambda: estimator.model_to_estimator(keras_model_path="/a"), ["keras_model_path='/a'", "cannot load it"]),
    (lambda: estimator.model_to_estimator(keras_model_path="/a.keras"), ["'/a.keras'", "cannot load it"]),
    (lambda: estimator.model_to_estimator(sequential(False)), ["the model is not compiled", "model.compile"]),
    (lambda: estimator.model_to_estimator(Subclassed(object())), ["no configuration", "cannot be copied"]),
    (lambda: estimator.model_to_estimator(sequential(), export_outputs=3), ["export_outputs=3", "all outputs"]),
    (lambda: estimator.model_to_estimator(sequential(), metric_names_map=3), ["metric_names_map=3", "a dict"]),
)


X, Y = np.array([[1, 2], [3, 4]], "float32"), np.array([[1], [2]], "float32")


def config(folder):
    return estimator.RunConfig(str(folder), save_summary_steps=None, log_step_count_steps=None)


def test_training_equals_that_of_keras(tmp_path):
    """A step, the metrics under other names, and predictions; the model itself does not change. So with further metrics."""
    model, twin = sequential(), sequential()
    trained = estimator.model_to_estimator(model, config=config(tmp_path / "a"), metric_names_map={"mae": "error"})
    twin.train_on_batch(X, Y)
    trained.train(lambda: [(X, Y)])
    np.testing.assert_allclose(trained.get_variable_value("out/kernel"), twin.get_weights()[0], rtol=1e-6)
    np.testing.assert_array_equal(model.get_weights()[0], np.ones((2, 1)))
    found = trained.evaluate(lambda: [(X, Y)])
    loss, error = twin.evaluate(X, Y, verbose=0)
    np.testing.assert_allclose([found["loss"], found["error"]], [loss, error], rtol=1e-5)
    rows = [row["out"] for row in trained.predict(lambda: [X])]
    np.testing.assert_allclose(rows, twin.predict(X, verbose=0), rtol=1e-5)
    other = estimator.model_to_estimator(model, config=config(tmp_path / "b"))
    extended = estimator.add_metrics(other, lambda: {}).train(lambda: [(X, Y)])
    np.testing.assert_allclose(extended.get_variable_value("out/kernel"), twin.get_weights()[0], rtol=1e-6)


def test_model_from_a_file(tmp_path):
    """The file of `model.save` is read. A dict of `features` and `sample_weights` weights the losses."""
    sequential().save(tmp_path / "model.keras")
    model = estimator.model_to_estimator(keras_model_path=tmp_path / "model.keras", config=config(tmp_path / "m"))
    assert model.evaluate(lambda: [(X, Y)])["mae"] == 3.5
    weights = np.array([0, 2], "float32")
    found = model.evaluate(lambda: [({"features": X, "sample_weights": weights}, Y)])
    np.testing.assert_allclose(found["loss"], (weights * [4, 25]).mean())


def test_several_inputs_and_outputs(tmp_path):
    """Features and predictions have the names of layers, and features may have weights of rows."""
    a, b = keras.Input((2,), name="a"), keras.Input((2,), name="b")
    outputs = [keras.layers.Dense(1, name="sum")(a + b), keras.layers.Dense(1, name="difference")(a - b)]
    functional = keras.Model([a, b], outputs)
    functional.compile("sgd", ["mse", "mse"])
    model = estimator.model_to_estimator(functional, config=config(tmp_path))
    rows = list(model.predict(lambda: [{"a": X, "b": X}]))
    assert set(rows[0]) == {"sum", "difference"}
    np.testing.assert_allclose([row["difference"] for row in rows], np.zeros((2, 1)))
    with refused(InputError, ["features of the names ['a', 'c']", "['a', 'b']"]):
        list(model.predict(lambda: [{"a": X, "c": X}]))
