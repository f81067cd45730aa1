"""`Estimator`: its arguments, and what it does with checkpoints."""

import functools
import json

import keras
import numpy as np
import pytest
from one_weight import WEIGHT_AFTER, X, Y, made, model_fn, refused, rows

import phalanx.estimator as estimator
from phalanx.errors import CheckpointError, CheckpointMismatchError, InvalidArgumentError
from phalanx.estimator import tf1


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """An Estimator after two steps."""
    return made(tmp_path_factory.mktemp("model")).train(rows(2))


def spec_of(features, mode, predictions):
    """A specification of predictions alone."""
    return estimator.EstimatorSpec(mode, predictions=predictions)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: estimator.Estimator(3), ["model_fn=3", "not callable"]),
        (lambda: estimator.Estimator(lambda labels, mode: 0), ["lacks the parameter 'features'", "def model_fn"]),
        (lambda: estimator.Estimator(lambda features, other: 0), ["the parameter 'other'", "def model_fn"]),
        (lambda: estimator.Estimator(model_fn, params={}), ["lacks the parameter 'params'"]),
        (lambda: estimator.Estimator(model_fn, params=3), ["params=3", "must be a dict"]),
        (lambda: estimator.Estimator(model_fn, config=3), ["config=3", "must be a RunConfig"]),
        (lambda: estimator.Estimator(model_fn, 3), ["model_dir=3", "must be a path"]),
        (lambda: estimator.Estimator(model_fn, ""), ["model_dir=''", "the name of a folder"]),
        (lambda: made("a", model_dir="b"), ["model_dir='a'", "the config has model_dir='b'"]),
        (lambda: made("a", warm_start_from=3), ["warm_start_from=3", "must be a path"]),
    ],
)
def test_arguments_of_the_constructor(call, words):
    """Each wrong one has a typed error."""
    with refused(InvalidArgumentError, words):
        call()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda e: e.train(3), ["input_fn=3", "not callable"]),
        (lambda e: e.train(rows(), steps=1, max_steps=1), ["train(steps=1, max_steps=1)", "only one of them"]),
        (lambda e: e.train(rows(), steps=0), ["steps=0", "positive"]),
        (lambda e: e.train(rows(), max_steps=1.5), ["max_steps=1.5", "positive"]),
        (lambda e: e.train(rows(), hooks=3), ["hooks=3", "not a SessionRunHook"]),
        (lambda e: e.train(rows(), saving_listeners=3), ["a saving listener=3", "CheckpointSaverListener"]),
        (lambda e: e.evaluate(3), ["input_fn=3", "not callable"]),
        (lambda e: e.evaluate(rows(), steps=-1), ["steps=-1", "positive"]),
        (lambda e: e.evaluate(rows(), hooks=[3]), ["hooks=[3]", "not a SessionRunHook"]),
        (lambda e: e.evaluate(rows(), checkpoint_path=3), ["checkpoint_path=3", "must be a path"]),
        (lambda e: list(e.predict(3)), ["input_fn=3", "not callable"]),
        (lambda e: list(e.predict(rows(), hooks=[3])), ["hooks=[3]", "not a SessionRunHook"]),
        (lambda e: list(e.predict(rows(), yield_single_examples=3)), ["yield_single_examples=3", "True or False"]),
        (lambda e: list(e.predict(rows(), "nothing")), ["predict_keys=['nothing']", "are ['output']"]),
        (lambda e: list(e.predict(rows(), 3)), ["predict_keys=3", "are ['output']"]),
        (lambda e: e.export_saved_model(3, rows()), ["export_dir_base=3", "must be a path"]),
        (lambda e: e.export_saved_model("a", 3), ["serving_input_receiver_fn=3", "not callable"]),
        (lambda e: e.export_saved_model("a", rows(), as_text=3), ["as_text=3", "True or False"]),
        (lambda e: e.export_saved_model("a", rows(), experimental_mode="eval"), ["experimental_mode='eval'", "only"]),
    ],
)
def test_arguments_of_the_methods(call, words, trained):
    """Each wrong one has a typed error."""
    with refused(InvalidArgumentError, words):
        call(trained)


@pytest.mark.parametrize(
    "call",
    [
        lambda e: e.get_variable_names(),
        lambda e: e.get_variable_value("weight"),
        lambda e: e.export_saved_model("export", lambda: None),
    ],
)
def test_calls_that_need_a_checkpoint(call, tmp_path):
    """Before the first training, they say so."""
    assert made(tmp_path).latest_checkpoint() is None
    with refused(CheckpointError, [str(tmp_path), "there is no checkpoint", "train(input_fn) first"]):
        call(made(tmp_path))


def test_checkpoints_that_are_missing(trained):
    """A path without a file, and a name that the checkpoint does not have."""
    for call in (
        lambda: trained.evaluate(rows(), checkpoint_path="/nowhere/model.ckpt-1"),
        lambda: list(trained.predict(rows(), checkpoint_path="/nowhere/model.ckpt-1")),
        lambda: trained.get_variable_value("nothing"),
    ):
        with refused(CheckpointError, ["no"]):
            call()


def test_checkpoint_of_another_model(trained):
    """A variable that the checkpoint lacks is an error that names it."""

    def other_fn(features, labels, mode):
        keras.Variable(0.0, name="another")
        return model_fn(features, labels, mode)

    with refused(CheckpointMismatchError, ["model.ckpt-2 in mode 'train'", "another", "another model_dir"]):
        made(trained.model_dir, other_fn).train(rows())


def test_labels_without_a_parameter(tmp_path):
    """A model function without labels cannot take them."""
    model = made(tmp_path, lambda features, mode: spec_of(features, mode, features))
    with refused(InvalidArgumentError, ["without the parameter labels", "returns labels"]):
        model.train(rows())


@pytest.mark.parametrize(
    ("predictions", "words"),
    [
        (lambda x: {"a": x, "b": x[:1]}, ["{'a': (2,), 'b': (1,)}", "one entry per row"]),
        (lambda x: x.sum(), ["predictions of the shapes ()", "yield_single_examples=False"]),
    ],
)
def test_predictions_without_rows(predictions, words, tmp_path):
    """They are yielded as a whole, but not row by row."""
    model = made(tmp_path, lambda features, mode: spec_of(features, mode, predictions(features["x"])))
    with refused(InvalidArgumentError, words):
        list(model.predict(lambda: [X]))
    assert len(list(model.predict(lambda: [X], yield_single_examples=False))) == 1


def test_predictions_that_are_an_array(tmp_path):
    """They are yielded row by row, and have no names to choose from."""
    model = made(tmp_path, lambda features, mode: spec_of(features, mode, features["x"] * 2))
    assert list(model.predict(lambda: [X, X])) == [2, 4, 2, 4]
    with refused(InvalidArgumentError, ["predict_keys=['a']", "are an array"]):
        list(model.predict(lambda: [X], predict_keys="a"))


def test_parameters_and_functions_are_copies(tmp_path):
    """The model function and the input function get `params`, `config` and `mode`; callers cannot change them."""
    seen = []

    def fn(features, labels, mode, params, config):
        seen.append((params["a"], config.model_dir, mode))
        return model_fn(features, labels, mode)

    def input_fn(params, mode, config, input_context):
        assert (params["a"], mode, config.model_dir, input_context.num_input_pipelines) == (
            1,
            "train",
            str(tmp_path),
            1,
        )
        return [(X, Y)]

    model = made(tmp_path, fn, params={"a": 1})
    model.params["a"] = 2
    model.train(input_fn)
    assert set(seen) == {(1, str(tmp_path), "train")}
    assert model.config.model_dir == model.model_dir == str(tmp_path)
    assert model.eval_dir() == str(tmp_path / "eval")
    assert model.eval_dir("a") == str(tmp_path / "eval_a")
    assert callable(model.model_fn)


def test_model_function_may_be_partial(tmp_path):
    """Objects with a signature are functions, too."""

    def fn(features, labels, mode, params):
        return model_fn(features, labels, mode)

    model = made(tmp_path, functools.partial(fn), params={})
    assert model.train(rows(1)).get_variable_value("global_step") == 1


def test_temporary_folder_is_told(caplog):
    """Without a folder, one is made; in a cluster, that is an error."""
    model = estimator.Estimator(model_fn)
    assert model.model_dir in caplog.text


def test_cluster_needs_a_folder(monkeypatch):
    """All processes need the same one. Evaluators and servers do not train."""
    cluster = {"cluster": {"chief": ["a:1"], "ps": ["b:1"]}, "task": {"type": "ps", "index": 0}}
    with monkeypatch.context() as patch:
        patch.setenv("TF_CONFIG", json.dumps(cluster))
        with refused(InvalidArgumentError, ["without model_dir in a cluster", "the same folder"]):
            estimator.Estimator(model_fn)
        with refused(InvalidArgumentError, ["train in the task 'ps'", "train_and_evaluate"]):
            estimator.Estimator(model_fn, "model").train(rows())


def test_evaluation_of_another_checkpoint(tmp_path):
    """Checkpoints can be evaluated and predicted with, one after the other."""
    model = made(tmp_path, save_checkpoints_steps=1).train(rows(3))
    for step in (1, 3, 2):
        path = str(tmp_path / f"model.ckpt-{step}")
        found = model.evaluate(rows(), checkpoint_path=path)
        np.testing.assert_allclose(found["loss"], 2.5 * (2 - WEIGHT_AFTER[step]) ** 2, rtol=1e-5)
        assert found["global_step"] == step
        (first, _) = model.predict(lambda: [X], checkpoint_path=path)
        np.testing.assert_allclose(first["output"], WEIGHT_AFTER[step], rtol=1e-6)


def test_evaluation_without_a_checkpoint(tmp_path):
    """It has the first values, each time."""
    model = made(tmp_path)
    assert [model.evaluate(rows())["loss"] for _ in range(2)] == [2.5, 2.5]
    assert [row["output"] for row in model.predict(lambda: [X])] == [1, 2]


def test_prediction_may_be_left_unfinished(trained):
    """The caller may stop, and train or evaluate between two rows."""
    predictions = trained.predict(lambda: [X] * 3)
    assert next(predictions)["output"] == WEIGHT_AFTER[2]
    assert trained.evaluate(rows())["global_step"] == 2
    assert next(predictions)["output"] == 2 * WEIGHT_AFTER[2]
    predictions.close()
    assert estimator.get_global_step() is None


def test_predictions_see_no_labels(tmp_path):
    """As in an export, although the input function returns them."""
    seen = []

    def noting(features, labels, mode, params=None):
        seen.append((mode, labels is None))
        return model_fn(features, labels, mode)

    model = made(tmp_path, noting).train(rows(1))
    list(model.predict(rows(1)))
    assert set(seen) == {("train", False), ("infer", True)}


@pytest.mark.parametrize(
    ("module", "name", "hint"),
    [
        (estimator, "BoostedTreesClassifier", "a library of trees"),
        (estimator.export, "PredictOutput", "leave export_outputs out"),
        (estimator.experimental, "LinearSDCA", "estimator.LinearClassifier"),
        (tf1, "placeholder", ".*return arrays from the input_fn"),
    ],
)
def test_names_that_are_missing(module, name, hint):
    """The error says what to write instead."""
    with pytest.raises(AttributeError, match=rf"has no attribute '{name}'\nHINT: {hint}"):
        getattr(module, name)
    assert not hasattr(module, "nothing")
