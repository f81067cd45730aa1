"""Exported models."""

import json
import shutil
from pathlib import Path

import jax
import jax.export
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from one_weight import WEIGHT_AFTER, X, Y, made, rows
from refusals import refused

import phalanx.estimator as estimator
from phalanx import feature_column
from phalanx.errors import CheckpointError, InputError, InvalidArgumentError, MissingDependencyError
from phalanx.estimator.exporting import saved_model
from phalanx.estimator.exporting.operations import refused_operation

RECEIVE = estimator.export.build_raw_serving_input_receiver_fn({"x": X["x"]})


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return made(tmp_path_factory.mktemp("model")).train(rows(2))


@pytest.fixture(scope="module")
def folder(model):
    return model.export_saved_model(Path(model.model_dir) / "export", RECEIVE)


def test_any_number_of_rows(folder):
    """The export predicts as the model does, for arrays and lists, and refuses other names, shapes and types."""
    loaded = estimator.load_saved_model(folder)
    for x in (X["x"], [1.0, 2.0, 5.0], np.array([3])):
        np.testing.assert_allclose(loaded.predict({"x": x})["output"], np.multiply(x, WEIGHT_AFTER[2]), rtol=1e-6)
    for features, words in (
        ({"y": Y}, ["features of the names ['y']", "the model takes ['x']"]),
        (Y, ["features of the names ['']", "the model takes ['x']"]),
        (None, ["features of the names ['']", "the model takes ['x']"]),
        ({"x": np.ones((2, 3))}, ["the feature 'x' of the shape (2, 3)", "a row has the shape []"]),
        ({"x": 3.0}, ["the feature 'x' of the shape ()", "an array of the shape (rows,)"]),
        ({"x": np.ones(0)}, ["the feature 'x' of the shape (0,)", "an array of the shape (rows,)"]),
        ({"x": ["a", "b"]}, ["the feature 'x'", "not an array of float32"]),
        ({"x": [[1.0], [2.0, 3.0]]}, ["the feature 'x'", "not an array of float32"]),
    ):
        with refused(InputError, words):
            loaded.predict(features)


def test_program_that_reaches_out_is_refused(folder, tmp_path):
    """A callback to Python takes an address from the file, so it is refused before anything is compiled."""
    name = "xla_ffi_python_cpu_callback"
    call = jax.ffi.ffi_call(name, jax.ShapeDtypeStruct((3,), "float32"))
    program = jax.jit(lambda v, x: call(x["x"], index=np.uint64(12345)))
    checks = [jax.export.DisabledSafetyCheck.custom_call(name)]
    exported = jax.export.export(program, disabled_checks=checks)({}, {"x": X["x"][:3]})
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "program.bin").write_bytes(exported.serialize())
    with refused(CheckpointError, ["a call of 'xla_ffi_python_cpu_callback'", "computes nothing from arrays"]):
        estimator.load_saved_model(copy)


def test_operations_of_linear_algebra_are_allowed():
    """They are functions outside the program too, which JAX has for them."""
    program = jax.jit(lambda x: jnp.linalg.qr(x)[0] + jax.random.normal(jax.random.key(0), (3, 3)))
    exported = jax.export.export(program)(jax.ShapeDtypeStruct((3, 3), "float32"))
    assert refused_operation(jax.export.deserialize(exported.serialize())) is None


@pytest.mark.parametrize("content", [None, b"", b"{}", b"abc", b"[],", (1 << 23).to_bytes(8, "little") + b"[],"])
def test_incomplete_exports_are_refused(content, folder, tmp_path):
    """A file that is missing or damaged is an error that names the folder."""
    for name in ("program.bin", "signature.json", "variables.safetensors"):
        copy = shutil.copytree(folder, tmp_path / name)
        (copy / name).unlink()
        if content is not None:
            # Lists that would fill the memory, as a signature and as the header of the variables.
            (copy / name).write_bytes(content if b"[" not in content else content + b"[]," * 4_000_000)
        with refused(CheckpointError, ["load_saved_model(", "not an exported model, or is incomplete", "has returned"]):
            estimator.load_saved_model(copy)


ODD = [
    {"features": {"x": 5}},
    {"features": {"x": ["(2,", [3]]}},
    {"features": {"x": ["float32", ["3"]]}},
    {"features": None},
    {"is_dict": 1},
    {"classes": 3},
    {"classes": [1, 2]},
    {"columns": [{"module": "keras.layers", "class_name": "Dense", "config": {"units": 1}}]},
    {
        "columns": [
            {
                "module": "phalanx.feature_column.dense",
                "class_name": "IndicatorColumn",
                "config": {"categorical_column": {"module": "keras", "class_name": "Sequential", "config": {}}},
                "registered_name": "phalanx>IndicatorColumn",
            }
        ]
    },
]


@pytest.mark.parametrize("odd", ODD, ids=str)
def test_signatures_of_another_form_are_refused(odd, folder, tmp_path):
    """The file may come from anyone."""
    copy = shutil.copytree(folder, tmp_path / "copy")
    signature = json.loads((copy / "signature.json").read_text())
    (copy / "signature.json").write_text(json.dumps(signature | odd))
    with refused(CheckpointError, ["not an exported model, or is incomplete"]):
        estimator.load_saved_model(copy)


def test_classes_that_do_not_fit_the_program(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    signature = json.loads((copy / "signature.json").read_text())
    (copy / "signature.json").write_text(json.dumps(signature | {"classes": ["a"]}))
    loaded = estimator.load_saved_model(copy)
    (dtype, shape) = next(iter(loaded.signature["features"].values()))
    rows = {name: np.ones((2, *shape), dtype) for name in loaded.signature["features"]}
    with refused(CheckpointError, ["signature.json names 1 classes, which do not fit its program"]):
        loaded.predict(rows if loaded.signature["is_dict"] else rows[""])


def test_folders_without_an_export(tmp_path):
    for path in (tmp_path, tmp_path / "nothing"):
        with refused(CheckpointError, ["not an exported model"]):
            estimator.load_saved_model(path)
    with refused(InvalidArgumentError, ["path=3", "must be a path"]):
        estimator.load_saved_model(3)


def test_failed_export_leaves_nothing(model, tmp_path):
    """Each wrong argument has a typed error, and the next export works."""
    for receive, assets, words in (
        (lambda: 3, None, ["the result of serving_input_receiver_fn=3", "ServingInputReceiver"]),
        (RECEIVE, 3, ["assets_extra=3", "a dict from paths to paths"]),
        (RECEIVE, {"a": 3}, ["assets_extra=3", "must be a path"]),
        (RECEIVE, {"a": "/nowhere"}, ["assets_extra={'a': '/nowhere'}", "cannot be copied"]),
        (RECEIVE, {"../a": __file__}, ["assets_extra={'../a'", "out of the export"]),
        (RECEIVE, {"/a": __file__}, ["assets_extra={'/a'", "out of the export"]),
    ):
        with refused(InvalidArgumentError, words):
            model.export_saved_model(tmp_path, receive, assets)
        assert list(tmp_path.iterdir()) == []
    with refused(CheckpointError, ["an export into '/proc/nowhere'", "cannot be written"]):
        model.export_saved_model("/proc/nowhere", RECEIVE)


def test_text_and_assets_of_an_export(model, tmp_path):
    """Exports of one second have numbers of their own; each has its files."""
    paths = [model.export_saved_model(tmp_path, RECEIVE, {"a/b.py": __file__}, as_text=True) for _ in range(2)]
    assert len(set(paths)) == 2
    assert int(Path(paths[0]).name) < int(Path(paths[1]).name)
    text = (Path(paths[0]) / "program.txt").read_text()
    assert "stablehlo" in text
    assert (Path(paths[1]) / "assets.extra/a/b.py").read_bytes() == Path(__file__).read_bytes()


def shaping(shape):
    """A model function whose predictions have a shape of their own."""

    def fn(features, labels, mode):
        weight = keras.Variable(1.0, name="weight")
        if mode == estimator.ModeKeys.PREDICT:
            return estimator.EstimatorSpec(mode, predictions=shape(features["x"]) * weight.value)
        return estimator.EstimatorSpec(mode, loss=weight.value * 1, train_op=[])

    return fn


def test_program_that_depends_on_the_rows(tmp_path):
    """It cannot be exported, or refuses other numbers of rows; both errors say why."""
    model = made(tmp_path / "a", shaping(lambda x: x + np.ones(2, "float32"))).train(rows())
    with refused(InvalidArgumentError, ["export_saved_model of this model_fn", "any number of rows", "reshape"]):
        model.export_saved_model(tmp_path / "export", RECEIVE)
    model = made(tmp_path / "b", shaping(lambda x: keras.ops.reshape(x, (2, 1)))).train(rows())
    loaded = estimator.load_saved_model(model.export_saved_model(tmp_path / "export", RECEIVE))
    with refused(InputError, ["features of the shapes {'x': (3,)}", "this number of rows", "reshape"]):
        loaded.predict({"x": [1.0, 2.0, 3.0]})


def test_text_features_and_classes(tmp_path):
    """Columns and the names of classes are part of the export, also with further metrics."""
    word = feature_column.categorical_column_with_vocabulary_list("s", ["a", "b"])
    config = estimator.RunConfig(str(tmp_path), save_summary_steps=None, log_step_count_steps=None)
    model = estimator.LinearClassifier([word], config=config, label_vocabulary=["no", "yes"])
    features = {"s": np.array(["a", "b", "b"])}
    model.train(lambda: [(features, np.array(["no", "yes", "yes"]))] * 5)
    receive = estimator.export.build_parsing_serving_input_receiver_fn({"s": np.empty((), object)})
    wanted = [row["classes"].tolist() for row in model.predict(lambda: [features])]
    for exported in (model, estimator.add_metrics(model, lambda: {})):
        path = exported.export_saved_model(tmp_path / "export", receive)
        found = estimator.load_saved_model(path).predict(features)
        assert found["classes"].tolist() == wanted == [[b"no"], [b"yes"], [b"yes"]]


def test_library_that_is_missing(monkeypatch, folder):
    with monkeypatch.context() as patch:
        patch.setattr(saved_model.importlib.util, "find_spec", lambda name: None)
        with refused(MissingDependencyError, ["an exported model", "the library flatbuffers"]):
            estimator.load_saved_model(folder)


def test_normalizers_are_in_the_program(tmp_path):
    """An export loads without the functions that normalize its numbers, also those of buckets."""
    number = feature_column.numeric_column("x", normalizer_fn=lambda x: (x - 2) / 3)
    buckets = feature_column.bucketized_column(number, [-0.5, 0.5])
    columns = [number, buckets, feature_column.embedding_column(buckets, 2)]
    model = estimator.DNNRegressor([4], columns, tmp_path / "model")
    x = np.float32([[1], [2], [3], [9]])
    model.train(lambda: [({"x": x}, x)] * 3)
    folder = model.export_saved_model(tmp_path, estimator.export.build_raw_serving_input_receiver_fn({"x": x}))
    wanted = [row["predictions"] for row in model.predict(lambda: [{"x": x}])]
    np.testing.assert_allclose(estimator.load_saved_model(folder).predict({"x": x})["predictions"], wanted, rtol=1e-5)


def test_normalizers_of_crosses_are_refused(tmp_path):
    """The host computes a cross, and an export cannot bring a function along."""
    number = feature_column.numeric_column("x", normalizer_fn=lambda x: x / 3)
    cross = feature_column.crossed_column([feature_column.bucketized_column(number, [0.5]), "y"], 7)
    model = estimator.LinearRegressor([cross], tmp_path / "model")
    features = {"x": np.float32([[1], [2]]), "y": np.array(["a", "b"])}
    model.train(lambda: [(features, features["x"])])
    receive = estimator.export.build_raw_serving_input_receiver_fn(features)
    with refused(InvalidArgumentError, ["crossed_column of numbers that have a normalizer_fn", "could not load"]):
        model.export_saved_model(tmp_path, receive)
