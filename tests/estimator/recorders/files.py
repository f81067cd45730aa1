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
ABOUT = [
    "Each case trains for 20 steps with save_checkpoints_steps=5, save_summary_steps=5 and log_step_count_steps=5,",
    "then evaluates, evaluates with name='x', and predicts. 'after train' has the files of model_dir; the next ones have those that were added.",
    "checkpoint: the text of the file of that name. TIME stands for a time and HOST for the rest of an events file's name.",
    "events: per folder, the events in order: step, and kind (file_version, graph_def, ...) or values: tag, plugin, value.",
    "A value is a number if it is a scalar, else its type.",
]
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
    """Returns a name without its time and its host."""
    name = re.sub(r"events\.out\.tfevents\.\d+\.[^/]*?(\.v2)?$", r"events.out.tfevents.TIME.HOST\1", name)
    return re.sub(r"(?<=/)\d{10}(?=/|$)", "TIME", name)


def events_in(folder):
    """Returns the events of a folder's events files, in order."""
    paths = sorted(Path(folder).glob("events*"), key=lambda path: path.name)
    return [event for path in paths for event in map(described, tf1.train.summary_iterator(str(path)))]


def described(event):
    """Returns one event as plain data."""
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
    """Returns the files and events of one Estimator."""
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
    """Returns the Estimator of `summary_model_fn`."""
    return tf.estimator.Estimator(summary_model_fn, config=configuration(folder, **settings))


def classifier(folder, settings):
    """Returns the DNNClassifier of item 1."""
    description = premade.dnn_cases()["two classes"]
    return premade.construct(description, folder, config=configuration(folder, **settings))


def record():
    """Returns item 6."""
    few = record_files(custom, ["z"], "number", keep_checkpoint_max=2, save_summary_steps=0)
    return {
        "about": ABOUT,
        "a model_fn with summaries": record_files(custom, ["z"], "number"),
        "DNNClassifier": record_files(classifier, ["x", "z"], "binary"),
        "keep_checkpoint_max=2, save_summary_steps=0": few,
        "RunConfig()": default_configuration(),
    }


def default_configuration():
    """Returns the properties of a RunConfig without arguments."""
    config = tf.estimator.RunConfig()
    names = [name for name in dir(config) if not name.startswith("_") and not callable(getattr(config, name))]
    return {name: shortened(repr(getattr(config, name))) for name in names}
