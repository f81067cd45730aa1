"""`Estimator`: its arguments, and what it does with checkpoints."""

import functools
import json
import tempfile

import keras
import numpy as np
import pytest
from one_weight import WEIGHT_AFTER, X, Y, made, model_fn, rows
from refusals import refusals, refused

import phalanx.estimator as estimator
from phalanx.errors import CheckpointError, CheckpointMismatchError, InvalidArgumentError
from phalanx.estimator import tf1


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return made(tmp_path_factory.mktemp("model")).train(rows(2))


def predicting(folder, predictions):
    spec_of = lambda features, mode: estimator.EstimatorSpec(mode, predictions=predictions(features["x"]))  # noqa: E731
    return made(folder, spec_of)


test_arguments_that_are_refused = refusals(
    InvalidArgumentError,
    (lambda e: estimator.Estimator(3), ["model_fn=3", "not callable"]),
    (lambda e: estimator.Estimator(lambda labels, mode: 0), ["lacks the parameter 'features'", "def model_fn"]),
    (lambda e: estimator.Estimator(lambda features, other: 0), ["the parameter 'other'", "def model_fn"]),
    (lambda e: estimator.Estimator(model_fn, params={}), ["lacks the parameter 'params'"]),
    (lambda e: estimator.Estimator(model_fn, params=3), ["params=3", "must be a dict"]),
    (lambda e: estimator.Estimator(model_fn, config=3), ["config=3", "must be a RunConfig"]),
    (lambda e: estimator.Estimator(model_fn, 3), ["model_dir=3", "must be a path"]),
    (lambda e: estimator.Estimator(model_fn, ""), ["model_dir=''", "the name of a folder"]),
    (lambda e: made("a", model_dir="b"), ["model_dir='a'", "the config has model_dir='b'"]),
    (lambda e: made("a", warm_start_from=3), ["warm_start_from=3", "must be a path"]),
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
    call=lambda call: call(made("model")),
)
UNTRAINED = ["untrained", "there is no checkpoint", "train(input_fn) first"]
test_calls_that_need_a_checkpoint = refusals(
    CheckpointError,
    (lambda e: e.get_variable_names(), UNTRAINED),
    (lambda e: e.get_variable_value("weight"), UNTRAINED),
    (lambda e: e.export_saved_model("export", lambda: None), UNTRAINED),
    call=lambda call: call(made("untrained")),
)


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
    def other_fn(features, labels, mode):
        keras.Variable(0.0, name="another")
        return model_fn(features, labels, mode)

    with refused(CheckpointMismatchError, ["model.ckpt-2 in mode 'train'", "another", "another model_dir"]):
        made(trained.model_dir, other_fn).train(rows())


def test_predictions_without_rows(tmp_path):
    """They are yielded as a whole, but not row by row. A model function without labels cannot take them."""
    for number, (predictions, words) in enumerate(
        (
            (lambda x: {"a": x, "b": x[:1]}, ["{'a': (2,), 'b': (1,)}", "one entry per row"]),
            (lambda x: x.sum(), ["predictions of the shapes ()", "yield_single_examples=False"]),
        )
    ):
        model = predicting(tmp_path / str(number), predictions)
        with refused(InvalidArgumentError, words):
            list(model.predict(lambda: [X]))
        assert len(list(model.predict(lambda: [X], yield_single_examples=False))) == 1
        with refused(InvalidArgumentError, ["without the parameter labels", "returns labels"]):
            model.train(rows())


def test_predictions_that_are_an_array(tmp_path):
    """They are yielded row by row, and have no names to choose from."""
    model = predicting(tmp_path, lambda x: x * 2)
    assert list(model.predict(lambda: [X, X])) == [2, 4, 2, 4]
    with refused(InvalidArgumentError, ["predict_keys=['a']", "are an array"]):
        list(model.predict(lambda: [X], predict_keys="a"))


def test_parameters_and_functions_are_copies(tmp_path):
    """Functions get `params`, `config` and `mode`, and callers cannot change them. Predictions see no labels, as in an export."""
    seen, asked = set(), []

    def fn(features, labels, mode, params, config):
        seen.add((params["a"], config.model_dir, mode, labels is None))
        return model_fn(features, labels, mode)

    def input_fn(params, mode, config, input_context):
        asked.append((params["a"], config.model_dir, input_context and input_context.num_input_pipelines, mode))
        return [(X, Y)]

    model = made(tmp_path, functools.partial(fn), params={"a": 1})
    model.params["a"] = 2
    model.train(input_fn)
    list(model.predict(input_fn))
    assert seen == {(1, str(tmp_path), "train", False), (1, str(tmp_path), "infer", True)}
    assert asked == [(1, str(tmp_path), 1, "train"), (1, str(tmp_path), 1, "infer")]
    assert model.config.model_dir == model.model_dir == str(tmp_path)
    assert (model.eval_dir(), model.eval_dir("a")) == (str(tmp_path / "eval"), str(tmp_path / "eval_a"))
    assert callable(model.model_fn)


def test_temporary_folder_is_told(caplog, tmp_path, monkeypatch):
    """Without a folder, one is made; in a cluster, that is an error."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
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
    """Before a training, each evaluation has the first values; then those of any checkpoint, one after the other."""
    model = made(tmp_path, save_checkpoints_steps=1)
    assert model.latest_checkpoint() is None
    assert [model.evaluate(rows())["loss"] for _ in range(2)] == [2.5, 2.5]
    assert [row["output"] for row in model.predict(lambda: [X])] == [1, 2]
    model.train(rows(3))
    for step in (1, 3, 2):
        path = str(tmp_path / f"model.ckpt-{step}")
        found = model.evaluate(rows(), checkpoint_path=path)
        np.testing.assert_allclose(found["loss"], 2.5 * (2 - WEIGHT_AFTER[step]) ** 2, rtol=1e-5)
        assert found["global_step"] == step
        (first, _) = model.predict(lambda: [X], checkpoint_path=path)
        np.testing.assert_allclose(first["output"], WEIGHT_AFTER[step], rtol=1e-6)


def test_prediction_may_be_left_unfinished(trained):
    """The caller may stop, and train or evaluate between two rows."""
    predictions = trained.predict(lambda: [X] * 3)
    assert next(predictions)["output"] == WEIGHT_AFTER[2]
    assert trained.evaluate(rows())["global_step"] == 2
    assert next(predictions)["output"] == 2 * WEIGHT_AFTER[2]
    predictions.close()
    assert estimator.get_global_step() is None


@pytest.mark.parametrize(
    ("module", "name", "hint"),
    [
        (estimator, "BoostedTreesClassifier", "a library of trees"),
        (estimator.export, "PredictOutput", "omit export_outputs"),
        (estimator.experimental, "LinearSDCA", "estimator.LinearClassifier"),
        (tf1, "placeholder", ".*return arrays from the input_fn"),
    ],
)
def test_names_that_are_missing(module, name, hint):
    with pytest.raises(AttributeError, match=rf"has no attribute '{name}'\nHINT: {hint}"):
        getattr(module, name)
    assert not hasattr(module, "nothing")
