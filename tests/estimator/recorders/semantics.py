"""Item 5: steps and max_steps, and which exception a wrong argument raises."""

import tempfile

import numpy as np
import tensorflow as tf

from recorders.plain import array, failure, plain

tf1 = tf.compat.v1
Spec = tf.estimator.EstimatorSpec
MODES = tf.estimator.ModeKeys
ABOUT = [
    "sequences: calls on one Estimator, one after the other; each has the call as text, its outcome and global_step after it.",
    "steps_made: how often the training step ran in the call. The input repeats, unless the text names another input.",
    "errors: the code as text and the exception that it raises, or what it returns.",
]


def model_fn(features, labels, mode, params):
    """Returns a model of one variable."""
    weight = tf1.get_variable("weight", [], initializer=tf1.constant_initializer(1.0))
    output = features["x"] * weight
    if mode == MODES.PREDICT:
        return Spec(mode, predictions={"output": output})
    loss = tf.reduce_mean((output - labels) ** 2) if labels is not None else tf.reduce_mean(output**2)
    train = tf1.train.GradientDescentOptimizer(0.1).minimize(loss, tf1.train.get_global_step())
    return Spec(mode, loss=loss, train_op=train)


def rows(count=None):
    """Returns an input function of `count` batches of two rows, or of batches without end."""
    features, labels = {"x": np.array([1, 2], "float32")}, np.array([2, 4], "float32")
    return lambda: tf.data.Dataset.from_tensors((features, labels)).repeat(count)


def unlabelled(count=None):
    """Returns an input function of features alone."""
    return lambda: tf.data.Dataset.from_tensors({"x": np.array([1, 2], "float32")}).repeat(count)


class Count(tf.estimator.SessionRunHook):
    """Counts steps."""

    def __init__(self):
        self.steps = 0

    def after_run(self, context, values):
        """Counts one step."""
        self.steps += 1


def new(folder, function=model_fn, **arguments):
    """Returns an Estimator whose configuration has a fixed seed."""
    return tf.estimator.Estimator(function, config=tf.estimator.RunConfig(f"{folder}/model"), **arguments)


SEQUENCES = {
    "steps twice": ["e.train(rows(), hooks, steps=3)", "e.train(rows(), hooks, steps=3)"],
    "max_steps twice": ["e.train(rows(), hooks, max_steps=3)", "e.train(rows(), hooks, max_steps=3)"],
    "max_steps grows": ["e.train(rows(), hooks, max_steps=3)", "e.train(rows(), hooks, max_steps=5)"],
    "max_steps below the step": ["e.train(rows(), hooks, steps=5)", "e.train(rows(), hooks, max_steps=2)"],
    "steps after max_steps": ["e.train(rows(), hooks, max_steps=3)", "e.train(rows(), hooks, steps=2)"],
    "an input that ends": [
        "e.train(rows(4), hooks, steps=10)",
        "e.train(rows(4), hooks, max_steps=10)",
        "e.train(rows(4), hooks)",
    ],
    "an empty input": ["e.train(rows(0), hooks, steps=2)"],
    "both": ["e.train(rows(), hooks, steps=2, max_steps=2)"],
    "no steps": ["e.train(rows(), hooks, steps=0)", "e.train(rows(), hooks, max_steps=0)"],
    "evaluate": [
        "e.train(rows(), hooks, steps=2)",
        "e.evaluate(rows(3))",
        "e.evaluate(rows(3), steps=2)",
        "e.evaluate(rows(3), steps=9)",
        "e.evaluate(rows(3), name='other')",
        "e.evaluate(rows(0))",
        "e.evaluate(rows(3), steps=0)",
        "e.evaluate(rows(3), steps=-1)",
    ],
    "predict": [
        "e.train(rows(), hooks, steps=2)",
        "list(e.predict(unlabelled(2)))",
        "list(e.predict(rows(1)))",
        "list(e.predict(unlabelled(2), yield_single_examples=False))",
        "list(e.predict(unlabelled(1), predict_keys=['output']))",
        "list(e.predict(unlabelled(1), predict_keys=['nothing']))",
        "list(e.predict(unlabelled(0)))",
    ],
    "latest checkpoint": ["e.latest_checkpoint()", "e.train(rows(), hooks, steps=2)", "e.latest_checkpoint()"],
    "names and values": [
        "e.train(rows(), hooks, steps=2)",
        "e.get_variable_names()",
        "e.get_variable_value('weight')",
        "e.get_variable_value('nothing')",
    ],
    "the parameters are a copy": ["e.params"],
    "model_dir and mode keys": ["[MODES.TRAIN, MODES.EVAL, MODES.PREDICT]"],
}
ERRORS = [
    "new(folder).train(rows(), steps=-1)",
    "new(folder).train(rows(), max_steps=-1)",
    "new(folder).train(rows(), steps=1.5)",
    "new(folder).train(rows(), hooks=[3], steps=1)",
    "new(folder).train(rows(), saving_listeners=[3], steps=1)",
    "new(folder).train(None, steps=1)",
    "new(folder).train(lambda: None, steps=1)",
    "new(folder).train(lambda: 3, steps=1)",
    "new(folder).train(unlabelled(), steps=1)",
    "new(folder).train(lambda: ({'x': tf.constant([1.0])}, tf.constant([2.0])), steps=1)",
    "new(folder).train(lambda: {'x': tf.constant([1.0])}, steps=1)",
    "new(folder).train(lambda: ({'x': tf.constant([1.0])},), steps=1)",
    "new(folder).train(lambda: ({'x': tf.constant([1.0])}, 1, 2), steps=1)",
    "new(folder).train(lambda mode: rows()(), steps=1)",
    "new(folder).train(lambda params, config: rows()(), steps=1)",
    "new(folder).train(lambda unknown: rows()(), steps=1)",
    "new(folder).evaluate(rows(1))",
    "list(new(folder).predict(unlabelled(1)))",
    "new(folder).get_variable_names()",
    "new(folder).get_variable_value('weight')",
    "new(folder).latest_checkpoint()",
    "new(folder).evaluate(rows(1), checkpoint_path='/nowhere/model.ckpt-1')",
    "new(folder, lambda features, labels, mode: Spec(mode, loss=tf.constant(1.0))).train(rows(), steps=1)",
    "new(folder, lambda features, labels, mode: Spec(mode, train_op=tf.no_op())).train(rows(), steps=1)",
    "new(folder, lambda features, labels, mode: Spec(mode)).train(rows(), steps=1)",
    "new(folder, lambda features, labels, mode: 3).train(rows(), steps=1)",
    "new(folder, lambda features, labels, mode: None).train(rows(), steps=1)",
    "new(folder, lambda features, labels: None)",
    "new(folder, lambda features, labels, mode, other: None)",
    "new(folder, lambda labels, mode: None)",
    "new(folder, lambda x, y, mode: None)",
    "new(folder, lambda features, mode: model_fn(features, None, mode, {})).train(unlabelled(), steps=1)",
    "new(folder, lambda features, mode: model_fn(features, None, mode, {})).train(rows(), steps=1)",
    "new(folder, lambda features, labels, mode: None, params={})",
    "new(folder, None)",
    "new(folder, params=3)",
    "tf.estimator.Estimator(model_fn, config=3)",
    "tf.estimator.Estimator(model_fn, f'{folder}/a', tf.estimator.RunConfig(f'{folder}/b'))",
    "Spec(MODES.EVAL)",
    "Spec(MODES.TRAIN)",
    "Spec(MODES.TRAIN, loss=tf.constant(1.0))",
    "Spec(MODES.PREDICT)",
    "Spec('other')",
    "Spec(MODES.EVAL, loss=tf.constant([1.0]))._asdict()['loss'].shape.as_list()",
    "Spec(MODES.EVAL, loss=tf.constant([1.0, 2.0]))",
    "Spec(MODES.EVAL, loss=3)",
    "Spec(MODES.EVAL, loss=tf.constant(1.0), eval_metric_ops={'a': 3})",
    "Spec(MODES.EVAL, loss=tf.constant(1.0), eval_metric_ops=3)",
    "Spec(MODES.EVAL, loss=tf.constant(1.0), training_hooks=[3])",
    "Spec(MODES.TRAIN, loss=tf.constant(1.0), train_op=3)",
    "Spec(MODES.PREDICT, predictions=tf.constant(1.0), export_outputs=3)",
    "Spec(MODES.PREDICT, predictions='text')",
    "tf.estimator.RunConfig(save_checkpoints_steps=5, save_checkpoints_secs=5)",
    "tf.estimator.RunConfig(save_checkpoints_steps=-1)",
    "tf.estimator.RunConfig(keep_checkpoint_max=-1)",
    "tf.estimator.RunConfig(save_summary_steps=-1)",
    "tf.estimator.RunConfig(log_step_count_steps=0)",
    "tf.estimator.RunConfig(tf_random_seed=1.5)",
    "tf.estimator.RunConfig(model_dir='')",
    "tf.estimator.RunConfig().replace(other=3)",
    "tf.estimator.RunConfig().replace(save_checkpoints_steps=7).save_checkpoints_secs",
    "tf.estimator.TrainSpec(None)",
    "tf.estimator.TrainSpec(rows(), max_steps=0)",
    "tf.estimator.TrainSpec(rows(), hooks=[3])",
    "tf.estimator.EvalSpec(rows(), steps=0)",
    "tf.estimator.EvalSpec(rows(), throttle_secs=-1)",
    "tf.estimator.EvalSpec(rows(), start_delay_secs=-1)",
    "tf.estimator.EvalSpec(rows(), exporters=[3])",
    "tf.estimator.EvalSpec(rows(), name=3)",
    "tf.estimator.train_and_evaluate(3, tf.estimator.TrainSpec(rows(), 1), tf.estimator.EvalSpec(rows(1)))",
    "tf.estimator.train_and_evaluate(new(folder), 3, tf.estimator.EvalSpec(rows(1)))",
    "tf.estimator.train_and_evaluate(new(folder), tf.estimator.TrainSpec(rows(), 1), 3)",
    "tf.estimator.LatestExporter('a', rows(), exports_to_keep=0)",
    "tf.estimator.FinalExporter(None, rows())",
    "tf.estimator.BestExporter('a', rows(), compare_fn=3)",
    "tf.estimator.DNNClassifier(hidden_units=[2], feature_columns=[], n_classes=1)",
    "tf.estimator.DNNClassifier(hidden_units=[2], feature_columns=[], optimizer='unknown')",
    "tf.estimator.DNNClassifier(hidden_units=[2], feature_columns=[])",
    "tf.estimator.DNNClassifier(hidden_units=[2], feature_columns=[tf.feature_column.numeric_column('x')], label_vocabulary=['a'])",
    "tf.estimator.LinearClassifier([tf.feature_column.numeric_column('x')], sparse_combiner='other')",
    "tf.estimator.DNNLinearCombinedClassifier()",
    "tf.estimator.DNNLinearCombinedClassifier(dnn_feature_columns=[tf.feature_column.numeric_column('x')])",
    "tf.estimator.add_metrics(new(folder), lambda wrong: {})",
]


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
    """Returns what a piece of code returns, or its exception."""
    try:
        value = returned(eval(code, globals() | names), names.get("e"))
        return {"returned": value.replace(names["folder"], "FOLDER") if isinstance(value, str) else value}
    except Exception as error:  # whatever TensorFlow raises is the record
        return failure(error)


def record_sequence(codes):
    """Returns the outcome of calls on one Estimator, and global_step after each."""
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
    """Returns the outcome of one piece of code."""
    with tempfile.TemporaryDirectory() as folder, tf.Graph().as_default():
        tf1.train.create_global_step()
        return {"code": code} | outcome(code, {"folder": folder})


def record():
    """Returns item 5."""
    sequences = {name: record_sequence(codes) for name, codes in SEQUENCES.items()}
    return {"about": ABOUT, "sequences": sequences, "errors": [record_error(code) for code in ERRORS]}
