"""Item 9: the order in which hooks are called, and what TensorFlow's own hooks do."""

import tempfile

import numpy as np
import shared
import tensorflow as tf

from recorders.custom import Log
from recorders.files import events_in
from recorders.plain import attempt, plain
from recorders.semantics import rows

tf1 = tf.compat.v1


class Calls(shared.Calls, tf1.train.SessionRunHook):
    library = tf1


class Listener(shared.Saved, tf1.train.CheckpointSaverListener):
    pass


def counting_model_fn(features, labels, mode, params):
    """Returns a model whose variable counts steps; its loss is nan from the step that the parameters name."""
    weight = tf1.get_variable("weight", [], initializer=tf1.constant_initializer(1.0))
    step = tf1.train.get_or_create_global_step()
    loss = tf.where(tf.equal(step, params.get("nan_at", -1)), np.float32("nan"), tf.identity(weight, name="value"))
    tf.identity(step, name="steps")
    loss += 0.0 * tf.reduce_sum(features["x"])  # evaluation ends with its input, if it reads it
    tf1.summary.scalar("mine", loss)
    hooks = [hook() for hook in params.get("training_hooks", [])]
    with tf.control_dependencies([loss]):
        train = tf.group(weight.assign_add(1.0), step.assign_add(1))
    metrics = {"mean": tf1.metrics.mean(weight)}
    return tf.estimator.EstimatorSpec(
        mode, predictions=features, loss=loss, train_op=train, eval_metric_ops=metrics, training_hooks=hooks
    )


def new(folder, params=None, **settings):
    quiet = {"save_summary_steps": 0, "log_step_count_steps": None} | settings
    return tf.estimator.Estimator(counting_model_fn, f"{folder}/model", tf.estimator.RunConfig(**quiet), params or {})


def train(steps=3, params=None, make=list, listeners=None, before=0, **settings):
    """Returns the outcome of training with hooks: the lines logged, global_step, and the exception if there is one."""
    with tempfile.TemporaryDirectory() as folder, Log() as log:
        estimator = new(folder, params, **settings)
        if before:
            estimator.train(rows(), steps=before)
            log.lines.clear()
        hooks = make()
        error = attempt(lambda: estimator.train(rows(), hooks=hooks, steps=steps, saving_listeners=listeners) and {})
        steps_saved = tf.train.get_checkpoint_state(estimator.model_dir)
        saved = [int(path.rsplit("-", 1)[1]) for path in steps_saved.all_model_checkpoint_paths] if steps_saved else []
        step = {"global_step": int(estimator.get_variable_value("global_step"))} if saved else {}
        return {"checkpoints": saved} | step | error, log.lines


def order_of_calls():
    def trained(steps, *hooks, stop_at=None, spec=()):
        calls = []
        params = {"training_hooks": [lambda name=name: Calls(calls, name) for name in spec]}
        outcome, _ = train(steps, params, lambda: [Calls(calls, name, stop_at) for name in hooks])
        return {"calls": calls} | outcome

    record = {
        "train of 3 steps": trained(3, ""),
        "train of 5 steps, stopped after 2": trained(5, "", stop_at=2),
        "train of 1 step with two hooks": trained(1, "first ", "second "),
        "train of 1 step with a hook of the specification": trained(1, "argument ", spec=["spec "]),
    }
    with tempfile.TemporaryDirectory() as folder:
        estimator = new(folder)
        estimator.train(rows(), steps=2)
        for name, call in {
            "evaluate of 2 batches": lambda hooks: estimator.evaluate(rows(2), hooks=hooks),
            "evaluate with steps=2": lambda hooks: estimator.evaluate(rows(9), steps=2, hooks=hooks),
            "predict of 2 batches": lambda hooks: list(estimator.predict(rows(2), hooks=hooks)),
        }.items():
            record[name] = {"calls": []}
            call([Calls(record[name]["calls"])])
    return record


def made(code):
    return eval(f"tf.estimator.{code}")


def own_hooks(names):
    formatted = "LoggingTensorHook(['value'], every_n_iter=2, formatter=lambda values: f'it is {values[\"value\"]}')"
    return {
        name: attempt(lambda: logged(name if name.endswith(")") else formatted))
        for name in names
        if name.startswith("LoggingTensorHook")
    } | {
        "the estimator's own NanTensorHook, loss nan at step 2": train(5, {"nan_at": 2})[0],
        "NanTensorHook(loss, fail_on_nan_loss=False)": nan_without_failure(),
        **{
            f"{code} after 3 steps": train(20, make=lambda: [made(code)], before=3)[0]
            for code in ("StopAtStepHook(num_steps=4)", "StopAtStepHook(last_step=5)", "StopAtStepHook(last_step=2)")
        },
        **{
            code: attempt(lambda: made(code) and {})
            for code in ("StopAtStepHook()", "StopAtStepHook(num_steps=1, last_step=1)")
        },
        "StepCounterHook(every_n_steps=2) over 5 steps": events(
            lambda folder: tf.estimator.StepCounterHook(2, output_dir=folder)
        ),
        "SummarySaverHook(save_steps=2) over 5 steps": events(summary_hook),
        "FinalOpsHook": final_operations(),
        "SecondOrStepTimer(every_steps=3)": timer(),
        "FeedFnHook without a placeholder": attempt(lambda: train(1, make=lambda: [tf.estimator.FeedFnHook(dict)])[0]),
        "GlobalStepWaiterHook(0)": train(2, make=lambda: [tf.estimator.GlobalStepWaiterHook(0)])[0],
    }


def logged(code):
    """Returns the lines that a hook logs in 5 steps, without those of the estimator."""
    outcome, lines = train(5, make=lambda: [made(code)])
    own = ("Graph was", "Running", "Done", "Saving", "Calling", "Create", "Restoring", "Loss for", "Using")
    return {"logged": [line for line in lines if not line.startswith(own)]} | outcome


def nan_without_failure():
    """Returns what a NanTensorHook that does not fail does in a session of its own."""
    with tf.Graph().as_default(), Log() as log:
        step = tf1.train.create_global_step()
        loss = tf.where(tf.equal(step, 2), np.float32("nan"), np.float32(1.0))
        with tf.control_dependencies([loss]):
            train_op = step.assign_add(1)
        count = 0
        with tf1.train.MonitoredSession(hooks=[tf.estimator.NanTensorHook(loss, fail_on_nan_loss=False)]) as session:
            while not session.should_stop() and count < 9:
                session.run(train_op)
                count += 1
        return {
            "about": "MonitoredSession of its own; loss is nan in the third step",
            "steps": count,
            "logged": [line for line in log.lines if "NaN" in line],
        }


def summary_hook(folder):
    scaffold = tf1.train.Scaffold(summary_op=tf1.summary.scalar("hooked", tf1.train.get_global_step()))
    return tf.estimator.SummarySaverHook(save_steps=2, output_dir=folder, scaffold=scaffold)


def events(make):
    with tempfile.TemporaryDirectory() as folder, tf.Graph().as_default():
        step = tf1.train.create_global_step()
        train_op = step.assign_add(1)
        with tf1.train.MonitoredSession(hooks=[make(folder)]) as session:
            for _ in range(5):
                session.run(train_op)
        tf1.summary.FileWriterCache.clear()
        return {"events": events_in(folder)}


def final_operations():
    with tf.Graph().as_default():
        step = tf1.train.create_global_step()
        hook = tf.estimator.FinalOpsHook({"step": step, "twice": step * 2})
        train_op = step.assign_add(1)
        before = hook.final_ops_values
        with tf1.train.MonitoredSession(hooks=[hook]) as session:
            for _ in range(3):
                session.run(train_op)
        return {"final_ops_values before": before, "final_ops_values": plain(hook.final_ops_values)}


def timer():
    """Returns for which steps a timer triggers, and what update_last_triggered_step returns."""
    clock = made("SecondOrStepTimer(every_steps=3)")
    triggered = []
    for step in range(10):
        if clock.should_trigger_for_step(step):
            triggered.append([step, clock.update_last_triggered_step(step)[1]])
    return {
        "[step, steps since the last] of steps 0 to 9": triggered,
        "last_triggered_step": clock.last_triggered_step(),
        "neither": attempt(lambda: made("SecondOrStepTimer()") and {}),
        "both": attempt(lambda: made("SecondOrStepTimer(every_steps=3, every_secs=3)") and {}),
    }


def savers():
    """Returns at which steps checkpoints are saved, and the calls of listeners."""
    record = {}
    for name, settings in {
        "10 steps, save_checkpoints_steps=4": {"save_checkpoints_steps": 4},
        "10 steps, save_checkpoints_steps=5": {"save_checkpoints_steps": 5},
        "10 steps, no checkpoints": {"save_checkpoints_steps": None, "save_checkpoints_secs": None},
        "10 steps after 3, save_checkpoints_steps=4": {"save_checkpoints_steps": 4, "before": 3},
    }.items():
        calls = []
        outcome, lines = train(10, listeners=[Listener(calls)], **settings)
        saving = {} if "before" in settings else {"logged": [line for line in lines if "heckpoint" in line]}
        record[name] = {"calls": calls} | saving | outcome
    return record


def early_stopping(record):
    from tensorflow_estimator.python.estimator import early_stopping as internal

    with tempfile.TemporaryDirectory() as folder:
        write_metrics(folder, record)
        metrics = {str(step): plain(values) for step, values in internal.read_eval_metrics(folder).items()}
        nothing = dict(internal.read_eval_metrics(f"{folder}/nothing"))
    return {
        "read_eval_metrics": metrics,
        "read_eval_metrics of a folder that does not exist": nothing,
        "hooks": {code: attempt(lambda: stopped(code, record)) for code in record["hooks"]},
    }


def write_metrics(folder, record):
    """Writes the metrics as evaluations do, and a summary without them."""
    with tf.Graph().as_default():
        writer = tf1.summary.FileWriter(folder)
        for step, loss in record["metrics"]["loss"].items():
            value = tf1.Summary.Value(tag="loss", simple_value=loss)
            writer.add_summary(tf1.Summary(value=[value]), int(step))
        writer.close()


def stopped(code, record):
    """Returns the outcome of up to 20 steps with a hook for early stopping, which looks at each step if it does not say."""
    for option in ("run_every_secs=None", "run_every_steps=1"):
        code = code if option.partition("=")[0] in code else f"{code[:-1]}, {option})"
    with tempfile.TemporaryDirectory() as folder, Log() as log:
        estimator = new(folder)
        hook = eval(f"tf.estimator.experimental.{code}", {"tf": tf, "e": estimator})
        write_metrics(f"{estimator.model_dir}/eval", record)
        estimator.train(rows(), hooks=[hook], steps=20)
        lines = [line for line in log.lines if "stop" in line.lower() or "metric" in line.lower()]
        step = int(estimator.get_variable_value("global_step"))
        return {"global_step": step, "logged": lines, "variables": estimator.get_variable_names()}


def record(records):
    return {
        "order": order_of_calls(),
        "hooks": own_hooks(records["hooks"]),
        "savers": savers(),
        "early_stopping": records["early_stopping"] | early_stopping(records["early_stopping"]),
    }
