"""Item 4: a model function of one hidden layer, on one device and on two replicas."""

import collections
import logging
import re
import tempfile

import tensorflow as tf

from recorders import data, premade
from recorders.plain import arrays, plain
from recorders.training import STEPS, Watch, attempt, configuration, predictions

tf1 = tf.compat.v1
ABOUT = [
    "model_fn: hidden = relu(x @ hidden/kernel + hidden/bias), 4 units; output = hidden @ output/kernel + output/bias.",
    "features are 'z' and labels 'number' of 'data'; the input repeats batches of `batch` rows, in order, for 20 steps.",
    "loss 'mean' is tf1.losses.mean_squared_error; 'sum' is the same with Reduction.SUM.",
    "optimizer: GradientDescentOptimizer(0.01) or AdamOptimizer(0.01), and minimize(loss, global_step).",
    "losses: the loss that train() sees in each step, and that it logs. logged: the lines that it logs.",
    "What these numbers say: with 'mean', gradients and reported losses are means over the replicas; with 'sum', sums."
    " Premade estimators apply the mean of the gradients, and report the sum of the losses.",
    "evaluate reads the first four batches: in 4 steps, or in 2 steps of 2 replicas. With five batches on 2 replicas,"
    " which rows count differs from run to run. The premade estimators evaluate without eval_distribute, all five.",
    "replicas 2: MirroredStrategy(['/cpu:0', '/cpu:1'], ReductionToOneDevice()) as train_distribute and eval_distribute;"
    " with its default reduction, a collective, 2.15 hangs on two logical CPUs."
    " per_replica: per step and replica, the labels that the replica got and the loss that its model_fn returned.",
]
OPTIMIZERS = {
    "GradientDescentOptimizer": lambda: tf1.train.GradientDescentOptimizer(0.01),
    "AdamOptimizer": lambda: tf1.train.AdamOptimizer(0.01),
}
REDUCTIONS = {"mean": tf1.losses.Reduction.SUM_BY_NONZERO_WEIGHTS, "sum": tf1.losses.Reduction.SUM}


class Log(logging.Handler):
    """Keeps the messages that TensorFlow logs, without times and folders."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        """Keeps one message."""
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
    """Returns the specification of the model of one hidden layer."""
    hidden = tf1.layers.Dense(4, tf.nn.relu, name="hidden")(features["z"])
    output = tf1.layers.Dense(1, name="output")(hidden)[:, 0]
    if mode == tf.estimator.ModeKeys.PREDICT:
        return tf.estimator.EstimatorSpec(mode, predictions={"output": output})
    loss = tf1.losses.mean_squared_error(labels, output, reduction=REDUCTIONS[params["loss"]])
    if mode == tf.estimator.ModeKeys.EVAL:
        metrics = {"error": tf1.metrics.mean_absolute_error(labels, output)}
        return tf.estimator.EstimatorSpec(mode, loss=loss, eval_metric_ops=metrics)
    seen = tf1.numpy_function(params["see"], [replica(), labels, loss], [])
    train = OPTIMIZERS[params["optimizer"]]().minimize(loss, tf1.train.get_global_step())
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=tf.group(train, seen))


def replica():
    """Returns the number of the replica."""
    return tf.convert_to_tensor(tf.distribute.get_replica_context().replica_id_in_sync_group)


def strategy_of(replicas):
    """Returns the strategy of a number of replicas, or None for one without."""
    devices = [f"/cpu:{number}" for number in range(replicas)]
    reduction = tf.distribute.ReductionToOneDevice()  # its default, a collective, hangs in a session with two CPUs
    return tf.distribute.MirroredStrategy(devices, cross_device_ops=reduction) if replicas else None


def record_custom(optimizer, loss, replicas, batch):
    """Returns what 20 steps of one case do."""
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


def record_premade(description, replicas=2):
    """Returns what a premade estimator does on replicas, with batches of 4 rows, or its exception."""
    strategy = strategy_of(replicas)
    with tempfile.TemporaryDirectory() as folder:
        settings = configuration(f"{folder}/model", train_distribute=strategy)
        estimator = premade.construct(description, folder, config=settings)
        watch = Watch()
        read = data.input_fn(description["features"], description["labels"], 4, repeat=True)
        estimator.train(read, hooks=[watch], steps=STEPS)
        metrics = estimator.evaluate(data.input_fn(description["features"], description["labels"], 4))
        return watch.record() | {"evaluate": arrays(metrics)}


def record():
    """Returns every case of item 4."""
    cases = {
        f"{optimizer}, {loss}, {replicas} replicas" if replicas else f"{optimizer}, {loss}, no strategy": attempt(
            lambda: record_custom(optimizer, loss, replicas, 4)
        )
        for optimizer in OPTIMIZERS
        for loss in REDUCTIONS
        for replicas in (0, 2)
    }
    chosen = {
        "DNNClassifier": premade.dnn_cases()["two classes"],
        "DNNClassifier by sum": premade.dnn_cases()["two classes by sum"],
        "LinearClassifier": premade.linear_cases()["two classes"],
        "LinearClassifier of numbers": premade.linear_cases()["two classes of numbers"],
        "BaselineClassifier": premade.other_cases()["BaselineClassifier of two classes"],
    }
    for name, description in chosen.items():
        case = description | {"replicas": 2, "batch": 4}
        cases[f"{name}, 2 replicas"] = case | attempt(lambda: record_premade(description))
    return {"about": ABOUT, **cases}
