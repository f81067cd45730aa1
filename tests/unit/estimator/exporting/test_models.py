"""Keras models as programs that need neither Keras nor TensorFlow."""

import importlib.util
import subprocess
import sys

import keras
import numpy as np
import pytest
from refusals import refused

import phalanx
import phalanx.estimator as estimator
from phalanx.errors import CheckpointError, InputError, InvalidArgumentError, MissingDependencyError

X = np.arange(12, dtype="float32").reshape(4, 3)

WITHOUT_KERAS = """
import sys, jax.export, numpy as np
from safetensors.numpy import load_file
folder = sys.argv[1]
program = jax.export.deserialize(bytearray(open(folder + "/program.bin", "rb").read()))
print(np.asarray(program.call(load_file(folder + "/variables.safetensors"), np.load(sys.argv[2]))).tolist())
assert not {"keras", "tensorflow", "phalanx"} & set(sys.modules)
"""


class TwoInputs(keras.Model):
    """A model with a dict of features, whose two layers have one name."""

    def __init__(self):
        super().__init__()
        self.left = keras.layers.Dense(2, name="dense")
        self.right = keras.layers.Dense(2, name="dense")
        self.dropout = keras.layers.Dropout(0.5)

    def call(self, features, training=False):
        return {"sum": self.dropout(self.left(features["a"]) + self.right(features["b"]), training=training)}


def trained(model, x):
    with phalanx.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        model = model()
        model.compile("sgd", "mse")
    model.fit(x, np.ones((4, 2)), batch_size=2, verbose=0)
    return model


def small():
    return keras.Sequential([keras.layers.Dense(2), keras.layers.Dropout(0.5)])


@pytest.mark.cover(["model"], {TwoInputs})
@pytest.mark.parametrize(("model", "features"), [(small, X), (TwoInputs, {"a": X, "b": X[:, :2]})])
def test_export_predicts_as_the_model(tmp_path, model, features):
    """For any number of rows, although two variables of the model have one path."""
    model = model()
    expected = model(features, training=False)
    path = estimator.export_model(model, tmp_path / "export", features)
    loaded = estimator.load_saved_model(path)
    keras.tree.map_structure(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), loaded.predict(features), expected
    )
    rows = {name: x[:1] for name, x in features.items()} if isinstance(features, dict) else features[:1]
    assert [len(y) for y in keras.tree.flatten(loaded.predict(rows))] == [1]


def test_trained_model_needs_jax_only(tmp_path):
    model = trained(small, X)
    path = estimator.export_model(model, tmp_path / "export", X[:1])
    np.save(tmp_path / "x.npy", X)
    command = [sys.executable, "-c", WITHOUT_KERAS, path, tmp_path / "x.npy"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(np.array(eval(done.stdout)), model.predict(X, verbose=0), rtol=1e-5)


def test_exports_that_cannot_be(tmp_path):
    by_rows = keras.Sequential([keras.layers.Lambda(lambda x: x * int(x.shape[0]))])
    for arguments, kind, words in (
        ((3, tmp_path / "a", X), InvalidArgumentError, ["model=3", "export_model(model"]),
        ((small(), tmp_path, X), InvalidArgumentError, ["path=", "exists already"]),
        ((small(), tmp_path / "a", {}), InputError, ["arrays of numbers"]),
        ((small(), tmp_path / "a", 3.0), InputError, ["arrays of numbers"]),
        ((by_rows, tmp_path / "a", X), InvalidArgumentError, ["any number of rows", "keras.ops.reshape"]),
    ):
        with refused(kind, words):
            estimator.export_model(*arguments)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(importlib.util.find_spec("tensorflow") is not None, reason="TensorFlow is installed")
def test_export_of_keras_names_ours(tmp_path):
    with refused(MissingDependencyError, ["Sequential.export(", "tensorflow", "phalanx.estimator.export_model"]):
        keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]).export(str(tmp_path / "a"))


def test_links_that_lead_nowhere_and_long_names(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(InvalidArgumentError, match="exists already"):
        estimator.export_model(small(), tmp_path / "link", X)
    with pytest.raises(CheckpointError, match="cannot be written to"):
        estimator.export_model(small(), tmp_path / ("x" * 300), X)
