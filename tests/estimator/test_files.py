"""Checkpoints and summaries of an Estimator, against the recorded answers of tensorflow-estimator 2.15."""

import dataclasses
import re

import numpy as np
import pytest
from event_files import written
from tests.estimator.recorded import RECORDED, batches, made

import phalanx.estimator as estimator
from phalanx import summary
from phalanx.estimator import tf1

FILES = RECORDED["files"]
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


CLASSIFIED = RECORDED["dnn"]["two classes"]
MODELS = {
    "a model_fn with summaries": {},
    "DNNClassifier": {},
    "keep_checkpoint_max=2, save_summary_steps=0": {"keep_checkpoint_max": 2, "save_summary_steps": 0},
}


def recorded(events):
    """The steps of each tag."""
    found = {}
    for event in events:
        for value in event.get("values", []):
            found.setdefault(value["tag"], []).append(event["step"])
    return found


@pytest.mark.cover(["name"], {"a model_fn with summaries", "keep_checkpoint_max=2, save_summary_steps=0"})
@pytest.mark.parametrize("name", MODELS)
def test_files_and_tags_equal_tensorflow(name, tmp_path):
    """The checkpoints that are kept, and the steps of each summary in each folder, are those of TensorFlow."""
    settings = {"save_checkpoints_steps": 5, "save_summary_steps": 5, "log_step_count_steps": 5, **MODELS[name]}
    if name == "DNNClassifier":
        model, data = made(CLASSIFIED, tmp_path, **settings), batches(CLASSIFIED)
    else:
        model, data = estimator.Estimator(model_fn, tmp_path, estimator.RunConfig(**settings)), DATA
    model.train(lambda: data * 7, steps=20)
    results = model.evaluate(lambda: data)
    named = model.evaluate(lambda: data, name="x")
    list(model.predict(lambda: data[:1]))
    for folder, metrics in ((".", {}), ("eval", results), ("eval_x", named)):
        values = written(tmp_path / folder)
        found = {tag: [step for step, _ in steps] for tag, steps in values.items()}
        assert found == recorded(FILES[name]["events"][folder])
        for tag in set(metrics) - {"global_step"}:
            np.testing.assert_allclose(values[tag][0][1], metrics[tag], rtol=1e-6)
        if metrics:
            assert values["checkpoint_path"][0][1] == [str(tmp_path / "model.ckpt-20").encode()]
    steps = re.findall(r"all_model_checkpoint_paths: \"model.ckpt-(\d+)", FILES[name]["checkpoint"])
    assert {path.name for path in tmp_path.glob("model.ckpt*")} == {f"model.ckpt-{n}.safetensors" for n in steps}


def test_default_configuration_equals_tensorflow():
    """The options and the properties of `RunConfig()` have the values of TensorFlow, as far as Phalanx has them."""
    config, wanted = estimator.RunConfig(), FILES["RunConfig()"]
    names = {f.name for f in dataclasses.fields(config)} - {"experimental_distribute"}
    for name in names | {"task_id", "task_type", "is_chief", "num_ps_replicas", "num_worker_replicas"}:
        assert repr(getattr(config, name)) == wanted[name], name
    assert not config.cluster_spec.jobs
