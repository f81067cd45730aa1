"""Item 6: the files and the events that an Estimator writes."""

import os
import re
import tempfile
from pathlib import Path

import tensorflow as tf

from recorders import data, premade
from recorders.plain import plain, shortened
from recorders.training import configuration

tf1 = tf.compat.v1
SETTINGS = {"save_checkpoints_steps": 5, "save_summary_steps": 5, "log_step_count_steps": 5}


def summary_model_fn(features, labels, mode):
    """Returns a linear model that writes summaries of its own."""
    output = tf1.layers.Dense(1, name="output")(features["z"])[:, 0]
    if mode == tf.estimator.ModeKeys.PREDICT:
        return tf.estimator.EstimatorSpec(mode, predictions={"output": output})
    loss = tf1.losses.mean_squared_error(labels, output)
    tf1.summary.scalar("mine", loss * 2)
    tf1.summary.scalar("loss", loss)
    tf1.summary.histogram("outputs", output)
    if mode == tf.estimator.ModeKeys.EVAL:
        metrics = {"error": tf1.metrics.mean_absolute_error(labels, output)}
        return tf.estimator.EstimatorSpec(mode, loss=loss, eval_metric_ops=metrics)
    train = tf1.train.GradientDescentOptimizer(0.01).minimize(loss, tf1.train.get_global_step())
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train)


def names_in(folder):
    """Returns the names of all files below a folder; a folder without files ends in a slash."""
    found = []
    for path, folders, files in os.walk(folder):
        relative = os.path.relpath(path, folder)
        found += [os.path.normpath(f"{relative}/{name}") for name in files]
        found += [] if files or folders else [f"{relative}/"]
    return sorted(timeless(name) for name in found)


def timeless(name):
    name = re.sub(r"events\.out\.tfevents\.\d+\.[^/]*?(\.v2)?$", r"events.out.tfevents.TIME.HOST\1", name)
    return re.sub(r"(?<=/)\d{10}(?=/|$)", "TIME", name)


def events_in(folder):
    paths = sorted(Path(folder).glob("events*"), key=lambda path: path.name)
    return [event for path in paths for event in map(described, tf1.train.summary_iterator(str(path)))]


def described(event):
    kind = event.WhichOneof("what")
    record = {"step": event.step}
    if kind != "summary":
        status = {"status": event.session_log.status} if kind == "session_log" else {}
        version = {"file_version": event.file_version} if kind == "file_version" else {}
        return record | {"kind": kind} | status | version
    return record | {"values": [value_of(value) for value in event.summary.value]}


def value_of(value):
    """Returns a value of a summary: its tag, its plugin and its number or type."""
    kind = value.WhichOneof("value")
    record = {"tag": value.tag, "type": kind}
    if value.metadata.plugin_data.plugin_name:
        record["plugin"] = value.metadata.plugin_data.plugin_name
    if kind == "simple_value" and not value.tag.endswith("/sec"):
        record["value"] = float(f"{value.simple_value:.7g}")
    if kind == "tensor" and value.tensor.dtype == tf.string.as_datatype_enum:
        record["value"] = shortened(str(plain(tf.make_ndarray(value.tensor))))
    return record


def record_files(make, names, labels, **settings):
    tf.keras.utils.set_random_seed(3)
    with tempfile.TemporaryDirectory() as folder:
        estimator = make(f"{folder}/model", SETTINGS | settings)
        record = {}
        estimator.train(data.input_fn(names, labels, repeat=True), steps=20)
        record["after train"] = names_in(estimator.model_dir)
        record["checkpoint"] = Path(estimator.model_dir, "checkpoint").read_text()
        estimator.evaluate(data.input_fn(names, labels))
        record["after evaluate"] = added(estimator, record)
        estimator.evaluate(data.input_fn(names, labels), name="x")
        record["after evaluate with a name"] = added(estimator, record)
        list(estimator.predict(data.first_rows(names)))
        record["after predict"] = added(estimator, record)
        record["events"] = {name: events_in(f"{estimator.model_dir}/{name}") for name in (".", "eval", "eval_x")}
        return record


def added(estimator, record):
    """Returns the files of an Estimator that no earlier entry has."""
    known = {name for key, names in record.items() if key.startswith("after") for name in names}
    return [name for name in names_in(estimator.model_dir) if name not in known]


def custom(folder, settings):
    return tf.estimator.Estimator(summary_model_fn, config=configuration(folder, **settings))


def classifier(folder, settings):
    return premade.construct(data.RECORDED["dnn"]["two classes"], folder, config=configuration(folder, **settings))


def record(cases):
    config, few = tf.estimator.RunConfig(), {"keep_checkpoint_max": 2, "save_summary_steps": 0}
    names = [name for name in dir(config) if not name.startswith("_") and not callable(getattr(config, name))]
    return {
        "a model_fn with summaries": record_files(custom, ["z"], "number"),
        "DNNClassifier": record_files(classifier, ["x", "z"], "binary"),
        "keep_checkpoint_max=2, save_summary_steps=0": record_files(custom, ["z"], "number", **few),
        "RunConfig()": {name: shortened(repr(getattr(config, name))) for name in names},
    }
