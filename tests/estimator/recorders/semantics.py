"""Item 5: steps and max_steps, and which exception a wrong argument raises."""

import tempfile

import numpy as np
import shared
import tensorflow as tf

from recorders.plain import array, failure, plain

tf1 = tf.compat.v1
Spec = tf.estimator.EstimatorSpec
MODES = tf.estimator.ModeKeys


def model_fn(features, labels, mode, params):
    weight = tf1.get_variable("weight", [], initializer=tf1.constant_initializer(1.0))
    output = features["x"] * weight
    if mode == MODES.PREDICT:
        return Spec(mode, predictions={"output": output})
    loss = tf.reduce_mean((output - labels) ** 2) if labels is not None else tf.reduce_mean(output**2)
    train = tf1.train.GradientDescentOptimizer(0.1).minimize(loss, tf1.train.get_global_step())
    return Spec(mode, loss=loss, train_op=train)


def rows(count=None):
    features, labels = {"x": np.array([1, 2], "float32")}, np.array([2, 4], "float32")
    return lambda: tf.data.Dataset.from_tensors((features, labels)).repeat(count)


def unlabelled(count=None):
    return lambda: tf.data.Dataset.from_tensors({"x": np.array([1, 2], "float32")}).repeat(count)


class Count(shared.Count, tf.estimator.SessionRunHook):
    pass


def new(folder, function=model_fn, **arguments):
    return tf.estimator.Estimator(function, config=tf.estimator.RunConfig(f"{folder}/model"), **arguments)


def returned(value, estimator):
    """Returns what a call returned, as plain data; the estimator itself is 'self'."""
    if estimator is not None and value is estimator:
        return "self"
    if isinstance(value, (int, float, str, bytes, type(None), np.generic, np.ndarray)):
        return array(value) if isinstance(value, np.ndarray) else plain(value)
    if isinstance(value, dict):
        return {name: returned(item, estimator) for name, item in value.items()}
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return [returned(item, estimator) for item in value]
    return f"a {type(value).__name__}"


def outcome(code, names):
    try:
        value = returned(eval(code, globals() | names), names.get("e"))
        return {"returned": value.replace(names["folder"], "FOLDER") if isinstance(value, str) else value}
    except Exception as error:  # whatever TensorFlow raises is the record
        return failure(error)


def record_sequence(codes):
    records = []
    with tempfile.TemporaryDirectory() as folder:
        estimator = new(folder)
        for code in codes:
            count = Count()
            result = outcome(code, {"e": estimator, "hooks": [count], "folder": folder})
            step = tf.train.latest_checkpoint(estimator.model_dir)
            step = int(estimator.get_variable_value("global_step")) if step else None
            records.append({"call": code} | result | {"steps_made": count.steps, "global_step": step})
    return records


def record_error(code):
    with tempfile.TemporaryDirectory() as folder, tf.Graph().as_default():
        tf1.train.create_global_step()
        return {"code": code} | outcome(code, {"folder": folder})


def record(records):
    codes = {name: [entry["call"] for entry in entries] for name, entries in records["sequences"].items()}
    sequences = {name: record_sequence(calls) for name, calls in codes.items()}
    return {"sequences": sequences, "errors": [record_error(entry["code"]) for entry in records["errors"]]}
