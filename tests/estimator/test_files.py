"""Checkpoints and summaries of an Estimator, against the recorded answers of tensorflow-estimator 2.15."""

import dataclasses
import re

import numpy as np
import pytest
from event_files import written
from tests.estimator.recorded import RECORDED, batches, column

import phalanx.estimator as estimator
from phalanx import summary
from phalanx.estimator import tf1

FILES = RECORDED["files"]
SETTINGS = {"save_checkpoints_steps": 5, "save_summary_steps": 5, "log_step_count_steps": 5}
DATA = batches({"features": ["z"], "labels": "number"})


def model_fn(features, labels, mode):
    """A linear model that writes summaries of its own."""
    output = tf1.layers.Dense(1, name="output")(features["z"])[:, 0]
    if mode == estimator.ModeKeys.PREDICT:
        return estimator.EstimatorSpec(mode, predictions={"output": output})
    loss = tf1.losses.mean_squared_error(labels, output)
    summary.scalar("mine", loss * 2)
    summary.histogram("outputs", output)
    if mode == estimator.ModeKeys.EVAL:
        metrics = {"error": tf1.metrics.mean_absolute_error(labels, output)}
        return estimator.EstimatorSpec(mode, loss=loss, eval_metric_ops=metrics)
    return estimator.EstimatorSpec(mode, loss=loss, train_op=tf1.train.GradientDescentOptimizer(0.01).minimize(loss))


def custom(folder, **settings):
    """The Estimator of `model_fn`, and its data."""
    return estimator.Estimator(model_fn, str(folder), estimator.RunConfig(**{**SETTINGS, **settings})), DATA


def classifier(folder):
    """The recorded `DNNClassifier`, and its data."""
    case = RECORDED["dnn"]["two classes"]
    arguments = {name: column(value) for name, value in case["arguments"].items()}
    model = getattr(estimator, case["estimator"])(
        model_dir=str(folder), config=estimator.RunConfig(**SETTINGS), **arguments
    )
    return model, batches(case)


MODELS = {
    "a model_fn with summaries": custom,
    "DNNClassifier": classifier,
    "keep_checkpoint_max=2, save_summary_steps=0": lambda folder: custom(
        folder, keep_checkpoint_max=2, save_summary_steps=0
    ),
}


def recorded(events):
    """The steps of each tag."""
    found = {}
    for event in events:
        for value in event.get("values", []):
            found.setdefault(value["tag"], []).append(event["step"])
    return found


def found(folder):
    """The steps of each tag in event files."""
    return {tag: [step for step, _ in values] for tag, values in written(folder).items()}


@pytest.mark.parametrize("name", MODELS)
def test_files_and_tags_equal_tensorflow(name, tmp_path):
    """The checkpoints that are kept, and the steps of each summary in each folder, are those of TensorFlow."""
    model, data = MODELS[name](tmp_path)
    model.train(lambda: data * 7, steps=20)
    results = model.evaluate(lambda: data)
    named = model.evaluate(lambda: data, name="x")
    list(model.predict(lambda: data[:1]))
    wanted = FILES[name]["events"]
    assert found(tmp_path) == recorded(wanted["."])
    for folder, metrics in (("eval", results), ("eval_x", named)):
        assert found(tmp_path / folder) == recorded(wanted[folder])
        values = written(tmp_path / folder)
        for tag in set(metrics) - {"global_step"}:
            np.testing.assert_allclose(values[tag][0][1], metrics[tag], rtol=1e-6)
        assert values["checkpoint_path"][0][1] == [str(tmp_path / "model.ckpt-20").encode()]
    steps = re.findall(r"all_model_checkpoint_paths: \"model.ckpt-(\d+)", FILES[name]["checkpoint"])
    assert {path.name for path in tmp_path.glob("model.ckpt*")} == {f"model.ckpt-{n}.safetensors" for n in steps}


def test_default_configuration_equals_tensorflow():
    """The options and the properties of `RunConfig()` have the values of TensorFlow, as far as Phalanx has them."""
    config, wanted = estimator.RunConfig(), FILES["RunConfig()"]
    names = {f.name for f in dataclasses.fields(config)} | {"task_id", "task_type", "is_chief"}
    names |= {"num_ps_replicas", "num_worker_replicas"}
    assert names - {"experimental_distribute"} <= set(wanted)
    for name in names - {"experimental_distribute"}:
        assert repr(getattr(config, name)) == wanted[name], name
    assert not config.cluster_spec.jobs
