"""Item 9: the order in which hooks are called, and what TensorFlow's own hooks do."""

import tempfile

import numpy as np
import tensorflow as tf

from recorders.custom import Log
from recorders.files import events_in
from recorders.plain import failure, plain
from recorders.semantics import rows
from recorders.training import attempt

tf1 = tf.compat.v1
ABOUT = [
    "The model has one variable, weight, which starts at 1 and gets 1 more per step; the loss is its value before the step.",
    "calls: in order, [method, global_step at that time if the method can know it].",
    "logged: the lines that were logged, with (SECONDS sec) in place of times.",
    "early_stopping: global_step after training for up to 20 steps; metrics of evaluations were written to `eval` before"
    " and training evaluates nothing itself.",
]


class Calls(tf.estimator.SessionRunHook):
    """Notes the calls of every method."""

    def __init__(self, calls, name="", stop_at=None):
        self.calls, self.name, self.stop_at = calls, name, stop_at

    def note(self, method, *values):
        """Notes one call."""
        self.calls.append([f"{self.name}{method}", *values])

    def begin(self):
        """Notes the call."""
        self.note("begin")

    def after_create_session(self, session, coord):
        """Notes the call."""
        self.note("after_create_session", int(session.run(tf1.train.get_global_step())))

    def before_run(self, context):
        """Notes the call, and asks for the global step."""
        self.note("before_run", int(context.session.run(tf1.train.get_global_step())))
        return tf.estimator.SessionRunArgs(tf1.train.get_global_step())

    def after_run(self, context, values):
        """Notes the call, and stops if the global step is the one for it."""
        step = int(context.session.run(tf1.train.get_global_step()))
        self.note("after_run", step)
        if step == self.stop_at:
            context.request_stop()

    def end(self, session):
        """Notes the call."""
        self.note("end", int(session.run(tf1.train.get_global_step())))


class Listener(tf.estimator.CheckpointSaverListener):
    """Notes the calls of every method."""

    def __init__(self, calls):
        self.calls = calls

    def begin(self):
        """Notes the call."""
        self.calls.append(["begin"])

    def before_save(self, session, step):
        """Notes the call."""
        self.calls.append(["before_save", int(step)])

    def after_save(self, session, step):
        """Notes the call."""
        self.calls.append(["after_save", int(step)])

    def end(self, session, step):
        """Notes the call."""
        self.calls.append(["end", int(step)])


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
    """Returns an Estimator of the counting model."""
    quiet = {"save_summary_steps": 0, "log_step_count_steps": None} | settings
    return tf.estimator.Estimator(counting_model_fn, f"{folder}/model", tf.estimator.RunConfig(**quiet), params or {})


def train(steps=3, params=None, make=list, listeners=None, settings=None, before=0):
    """Returns the outcome of training with hooks: the lines logged, global_step, and the exception if there is one."""
    with tempfile.TemporaryDirectory() as folder, Log() as log:
        estimator = new(folder, params, **(settings or {}))
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
    """Returns the calls of hooks in training, evaluation and prediction."""
    record = {}
    for name, stop_at in {"train of 3 steps": None, "train of 5 steps, stopped after 2": 2}.items():
        calls = []
        outcome = train(5 if stop_at else 3, make=lambda: [Calls(calls, stop_at=stop_at)])[0]
        record[name] = {"calls": calls} | outcome
    calls = []
    make = lambda: [Calls(calls, "first "), Calls(calls, "second ")]  # noqa: E731
    record["train of 1 step with two hooks"] = {"calls": calls} | train(1, make=make)[0]
    calls = []
    parameters = {"training_hooks": [lambda: Calls(calls, "spec ")]}
    record["train of 1 step with a hook of the specification"] = {"calls": calls} | train(
        1, parameters, lambda: [Calls(calls, "argument ")]
    )[0]
    with tempfile.TemporaryDirectory() as folder:
        estimator = new(folder)
        estimator.train(rows(), steps=2)
        calls = []
        estimator.evaluate(rows(2), hooks=[Calls(calls)])
        record["evaluate of 2 batches"] = {"calls": calls}
        calls = []
        estimator.evaluate(rows(9), steps=2, hooks=[Calls(calls)])
        record["evaluate with steps=2"] = {"calls": calls}
        calls = []
        list(estimator.predict(rows(2), hooks=[Calls(calls)]))
        record["predict of 2 batches"] = {"calls": calls}
    return record


def own_hooks():
    """Returns what the hooks of TensorFlow do."""
    logging_hook = tf.estimator.LoggingTensorHook
    stop, nan = tf.estimator.StopAtStepHook, tf.estimator.NanTensorHook
    two = {"a": "value", "b": "steps"}
    return {
        "LoggingTensorHook(['value'], every_n_iter=2)": logged(lambda: [logging_hook(["value"], every_n_iter=2)]),
        "LoggingTensorHook({'a': 'value', 'b': 'steps'}, every_n_iter=2)": logged(
            lambda: [logging_hook(two, every_n_iter=2)]
        ),
        "LoggingTensorHook(['value'], at_end=True)": logged(lambda: [logging_hook(["value"], at_end=True)]),
        "LoggingTensorHook(['value'], every_n_iter=2, at_end=True)": logged(
            lambda: [logging_hook(["value"], every_n_iter=2, at_end=True)]
        ),
        "LoggingTensorHook with a formatter": logged(
            lambda: [logging_hook(["value"], every_n_iter=2, formatter=lambda values: f"it is {values['value']}")]
        ),
        "LoggingTensorHook(['value'])": attempt(lambda: logged(lambda: [logging_hook(["value"])])),
        "LoggingTensorHook(['nothing'], every_n_iter=1)": attempt(
            lambda: logged(lambda: [logging_hook(["nothing"], every_n_iter=1)])
        ),
        "the estimator's own NanTensorHook, loss nan at step 2": train(5, {"nan_at": 2})[0],
        "NanTensorHook(loss, fail_on_nan_loss=False)": nan_without_failure(nan),
        "StopAtStepHook(num_steps=4) after 3 steps": train(20, make=lambda: [stop(num_steps=4)], before=3)[0],
        "StopAtStepHook(last_step=5) after 3 steps": train(20, make=lambda: [stop(last_step=5)], before=3)[0],
        "StopAtStepHook(last_step=2) after 3 steps": train(20, make=lambda: [stop(last_step=2)], before=3)[0],
        "StopAtStepHook()": attempt(lambda: stop() and {}),
        "StopAtStepHook(num_steps=1, last_step=1)": attempt(lambda: stop(num_steps=1, last_step=1) and {}),
        "StepCounterHook(every_n_steps=2) over 5 steps": events(
            lambda folder: tf.estimator.StepCounterHook(2, output_dir=folder)
        ),
        "SummarySaverHook(save_steps=2) over 5 steps": events(summary_hook),
        "FinalOpsHook": final_operations(),
        "SecondOrStepTimer(every_steps=3)": timer(),
        "FeedFnHook without a placeholder": attempt(lambda: train(1, make=lambda: [tf.estimator.FeedFnHook(dict)])[0]),
        "GlobalStepWaiterHook(0)": train(2, make=lambda: [tf.estimator.GlobalStepWaiterHook(0)])[0],
    }


def logged(make):
    """Returns the lines that hooks log in 5 steps, without those of the estimator."""
    outcome, lines = train(5, make=make)
    own = ("Graph was", "Running", "Done", "Saving", "Calling", "Create", "Restoring", "Loss for", "Using")
    return {"logged": [line for line in lines if not line.startswith(own)]} | outcome


def nan_without_failure(nan):
    """Returns what a NanTensorHook that does not fail does in a session of its own."""
    with tf.Graph().as_default(), Log() as log:
        step = tf1.train.create_global_step()
        loss = tf.where(tf.equal(step, 2), np.float32("nan"), np.float32(1.0))
        with tf.control_dependencies([loss]):
            train_op = step.assign_add(1)
        count = 0
        with tf1.train.MonitoredSession(hooks=[nan(loss, fail_on_nan_loss=False)]) as session:
            while not session.should_stop() and count < 9:
                session.run(train_op)
                count += 1
        return {
            "about": "MonitoredSession of its own; loss is nan in the third step",
            "steps": count,
            "logged": [line for line in log.lines if "NaN" in line],
        }


def summary_hook(folder):
    """Returns a SummarySaverHook of the summaries of the graph."""
    scaffold = tf1.train.Scaffold(summary_op=tf1.summary.scalar("hooked", tf1.train.get_global_step()))
    return tf.estimator.SummarySaverHook(save_steps=2, output_dir=folder, scaffold=scaffold)


def events(make):
    """Returns the events that one hook writes in 5 steps of a session of its own."""
    with tempfile.TemporaryDirectory() as folder, tf.Graph().as_default():
        step = tf1.train.create_global_step()
        train_op = step.assign_add(1)
        with tf1.train.MonitoredSession(hooks=[make(folder)]) as session:
            for _ in range(5):
                session.run(train_op)
        tf1.summary.FileWriterCache.clear()
        return {"events": events_in(folder)}


def final_operations():
    """Returns the values of a FinalOpsHook."""
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
    clock = tf.estimator.SecondOrStepTimer(every_steps=3)
    triggered = []
    for step in range(10):
        if clock.should_trigger_for_step(step):
            elapsed = clock.update_last_triggered_step(step)
            triggered.append([step, elapsed[1]])
    both = attempt(lambda: tf.estimator.SecondOrStepTimer(every_steps=3, every_secs=3) and {})
    return {
        "[step, steps since the last] of steps 0 to 9": triggered,
        "last_triggered_step": clock.last_triggered_step(),
        "neither": attempt(lambda: tf.estimator.SecondOrStepTimer() and {}),
        "both": both,
    }


def savers():
    """Returns at which steps checkpoints are saved, and the calls of listeners."""
    record = {}
    for name, settings in {
        "save_checkpoints_steps=4": {"save_checkpoints_steps": 4},
        "save_checkpoints_steps=5": {"save_checkpoints_steps": 5},
        "no checkpoints": {"save_checkpoints_steps": None, "save_checkpoints_secs": None},
    }.items():
        calls = []
        outcome = train(10, listeners=[Listener(calls)], settings=settings)
        saving = [line for line in outcome[1] if "heckpoint" in line]
        record[f"10 steps, {name}"] = {"calls": calls, "logged": saving} | outcome[0]
    calls = []
    outcome = train(10, listeners=[Listener(calls)], settings={"save_checkpoints_steps": 4}, before=3)
    record["10 steps after 3, save_checkpoints_steps=4"] = {"calls": calls} | outcome[0]
    return record


METRICS = {5: 0.5, 10: 0.4, 15: 0.45, 20: 0.44, 25: 0.43}


def early_stopping():
    """Returns when hooks for early stopping stop, and what read_eval_metrics returns."""
    from tensorflow_estimator.python.estimator import early_stopping as internal

    e = tf.estimator.experimental
    every = {"run_every_secs": None, "run_every_steps": 1}
    makers = {
        "stop_if_no_decrease_hook(e, 'loss', 10)": lambda x: e.stop_if_no_decrease_hook(x, "loss", 10, **every),
        "stop_if_no_decrease_hook(e, 'loss', 15)": lambda x: e.stop_if_no_decrease_hook(x, "loss", 15, **every),
        "stop_if_no_decrease_hook(e, 'loss', 16)": lambda x: e.stop_if_no_decrease_hook(x, "loss", 16, **every),
        "stop_if_no_decrease_hook(e, 'loss', 10, min_steps=5)": lambda x: e.stop_if_no_decrease_hook(
            x, "loss", 10, min_steps=5, **every
        ),
        "stop_if_no_increase_hook(e, 'loss', 20)": lambda x: e.stop_if_no_increase_hook(x, "loss", 20, **every),
        "stop_if_no_increase_hook(e, 'loss', 21)": lambda x: e.stop_if_no_increase_hook(x, "loss", 21, **every),
        "stop_if_higher_hook(e, 'loss', 0.45)": lambda x: e.stop_if_higher_hook(x, "loss", 0.45, **every),
        "stop_if_higher_hook(e, 'loss', 0.5)": lambda x: e.stop_if_higher_hook(x, "loss", 0.5, **every),
        "stop_if_lower_hook(e, 'loss', 0.41)": lambda x: e.stop_if_lower_hook(x, "loss", 0.41, **every),
        "stop_if_lower_hook(e, 'loss', 0.4)": lambda x: e.stop_if_lower_hook(x, "loss", 0.4, **every),
        "make_early_stopping_hook(e, lambda: True)": lambda x: e.make_early_stopping_hook(x, lambda: True, **every),
        "make_early_stopping_hook(e, lambda: True, run_every_steps=4)": lambda x: e.make_early_stopping_hook(
            x, lambda: True, run_every_secs=None, run_every_steps=4
        ),
        "make_early_stopping_hook(e, lambda: False)": lambda x: e.make_early_stopping_hook(x, lambda: False, **every),
        "make_early_stopping_hook(e, 3)": lambda x: e.make_early_stopping_hook(x, 3, **every),
        "make_early_stopping_hook(e, lambda: True, run_every_secs=1, run_every_steps=1)": lambda x: (
            e.make_early_stopping_hook(x, lambda: True, run_every_secs=1, run_every_steps=1)
        ),
        "make_early_stopping_hook(3, lambda: True)": lambda x: e.make_early_stopping_hook(3, lambda: True),
        "stop_if_no_decrease_hook(e, 'nothing', 1)": lambda x: e.stop_if_no_decrease_hook(x, "nothing", 1, **every),
    }
    with tempfile.TemporaryDirectory() as folder:
        write_metrics(folder)
        metrics = {str(step): plain(values) for step, values in internal.read_eval_metrics(folder).items()}
        nothing = dict(internal.read_eval_metrics(f"{folder}/nothing"))
    return {
        "metrics": {
            "about": "loss of each evaluation by its step, as written to eval/ before training",
            "loss": METRICS,
        },
        "read_eval_metrics": metrics,
        "read_eval_metrics of a folder that does not exist": nothing,
        "hooks": {name: stopped(make) for name, make in makers.items()},
    }


def write_metrics(folder):
    """Writes the metrics as evaluations do, and a summary without them."""
    with tf.Graph().as_default():
        writer = tf1.summary.FileWriter(folder)
        for step, loss in METRICS.items():
            value = tf1.Summary.Value(tag="loss", simple_value=loss)
            writer.add_summary(tf1.Summary(value=[value]), step)
        writer.close()


def stopped(make):
    """Returns the outcome of up to 20 steps with a hook for early stopping."""
    with tempfile.TemporaryDirectory() as folder, Log() as log:
        estimator = new(folder)
        try:
            hook = make(estimator)
            write_metrics(f"{estimator.model_dir}/eval")
            estimator.train(rows(), hooks=[hook], steps=20)
        except Exception as error:  # whatever TensorFlow raises is the record
            return failure(error)
        lines = [line for line in log.lines if "stop" in line.lower() or "metric" in line.lower()]
        step = int(estimator.get_variable_value("global_step"))
        return {"global_step": step, "logged": lines, "variables": estimator.get_variable_names()}


def record():
    """Returns item 9."""
    return {
        "about": ABOUT,
        "order": order_of_calls(),
        "hooks": own_hooks(),
        "savers": savers(),
        "early_stopping": early_stopping(),
    }
