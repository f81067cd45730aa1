"""Item 4: a model function of one hidden layer, on one device and on two replicas."""

import collections
import logging
import re
import tempfile

import tensorflow as tf

from recorders import data, premade
from recorders.plain import arrays, attempt, described, plain
from recorders.training import STEPS, Watch, configuration, predictions, record_estimator

tf1 = tf.compat.v1
REDUCTIONS = {"mean": tf1.losses.Reduction.SUM_BY_NONZERO_WEIGHTS, "sum": tf1.losses.Reduction.SUM}


class Log(logging.Handler):
    """Keeps the messages that TensorFlow logs, without times and folders."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        if re.match("Using config|It seems that global step|.*deprecated", record.getMessage()):
            return
        text = re.sub(r"\(?\d+(\.\d+)?(e-\d+)? sec\)?", "(SECONDS sec)", record.getMessage())
        text = re.sub(r"global_step/sec: \S+", "global_step/sec: RATE", text)
        text = re.sub(r"\d{4}-\d\d-\d\dT[\d:]+|\d{4}-\d\d-\d\d-[\d:]+|/\d{10}(?=\b)", "TIME", text)
        self.lines.append(re.sub(r"/tmp/\w+", "FOLDER", text))

    def __enter__(self):
        tf1.logging.set_verbosity(tf1.logging.INFO)
        logging.getLogger("tensorflow").addHandler(self)
        return self

    def __exit__(self, *error):
        logging.getLogger("tensorflow").removeHandler(self)
        tf1.logging.set_verbosity(tf1.logging.WARN)


def model_fn(features, labels, mode, params):
    hidden = tf1.layers.Dense(4, tf.nn.relu, name="hidden")(features["z"])
    output = tf1.layers.Dense(1, name="output")(hidden)[:, 0]
    if mode == tf.estimator.ModeKeys.PREDICT:
        return tf.estimator.EstimatorSpec(mode, predictions={"output": output})
    loss = tf1.losses.mean_squared_error(labels, output, reduction=REDUCTIONS[params["loss"]])
    if mode == tf.estimator.ModeKeys.EVAL:
        metrics = {"error": tf1.metrics.mean_absolute_error(labels, output)}
        return tf.estimator.EstimatorSpec(mode, loss=loss, eval_metric_ops=metrics)
    replica = tf.convert_to_tensor(tf.distribute.get_replica_context().replica_id_in_sync_group)
    seen = tf1.numpy_function(params["see"], [replica, labels, loss], [])
    train = getattr(tf1.train, params["optimizer"])(0.01).minimize(loss, tf1.train.get_global_step())
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=tf.group(train, seen))


def strategy_of(replicas):
    """Returns the strategy of a number of replicas, or None for one without."""
    devices = [f"/cpu:{number}" for number in range(replicas)]
    reduction = tf.distribute.ReductionToOneDevice()  # its default, a collective, hangs in a session with two CPUs
    return tf.distribute.MirroredStrategy(devices, cross_device_ops=reduction) if replicas else None


def record_custom(optimizer, loss, replicas, batch):
    tf.keras.utils.set_random_seed(3)
    seen = collections.defaultdict(list)

    def see(number, labels, value):
        seen[int(number)].append({"labels": plain(labels), "loss": plain(value)})

    strategy = strategy_of(replicas)
    with tempfile.TemporaryDirectory() as folder, Log() as log:
        settings = configuration(folder, train_distribute=strategy, eval_distribute=strategy, log_step_count_steps=5)
        parameters = {"loss": loss, "optimizer": optimizer, "see": see}
        estimator = tf.estimator.Estimator(model_fn, config=settings, params=parameters)
        watch = Watch()
        estimator.train(data.input_fn(["z"], "number", batch, repeat=True), hooks=[watch], steps=STEPS)
        logged = [line for line in log.lines if "loss" in line or "global_step" in line]
        metrics = attempt(
            lambda: arrays(estimator.evaluate(data.input_fn(["z"], "number", batch), steps=4 // (replicas or 1)))
        )
        predicted = predictions(estimator, data.first_rows(["z"]))
    few = {number: rows[:3] for number, rows in sorted(seen.items())}
    case = {"optimizer": optimizer, "loss": loss, "replicas": replicas, "batch": batch}
    return case | watch.record() | {"logged": logged, "evaluate": metrics, "predict": predicted, "per_replica": few}


def record_premade(case):
    """Returns what a premade estimator does on replicas, or its exception."""
    with tempfile.TemporaryDirectory() as folder:
        settings = configuration(f"{folder}/model", train_distribute=strategy_of(case["replicas"]))
        estimator = premade.construct(case, folder, config=settings)
        answers = record_estimator(estimator, case["features"], case["labels"], case["batch"])
        return described(answers, "losses", "initial", "final", "evaluate")


def record(cases):
    own, ready = ("optimizer", "loss", "replicas", "batch"), (*premade.DESCRIPTION, "replicas", "batch")
    answers = {}
    for name, case in cases.items():
        if "optimizer" in case:
            answers[name] = attempt(lambda: record_custom(**described(case, *own)))
        elif name != "about":
            answers[name] = described(case, *ready) | attempt(lambda: record_premade(case))
    return answers
