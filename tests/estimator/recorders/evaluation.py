"""Item 8: train_and_evaluate on one machine, and what its exporters write."""

import tempfile

import tensorflow as tf

from recorders import data, premade
from recorders.columns import build
from recorders.files import names_in, timeless
from recorders.plain import plain
from recorders.training import attempt, configuration

ABOUT = [
    "train_and_evaluate of DNNClassifier 'two classes', max_steps=20, throttle_secs=0 and save_checkpoints_steps=5.",
    "calls: in order: the begin and end of training (global_step at that time), the end of each evaluation,"
    " and each call of an exporter's export: its step (of checkpoint_path) and is_the_final_export.",
    "returned: what train_and_evaluate returned. checkpoints: the steps of the checkpoints that are left; files: the other files of model_dir.",
]
NAMES = ["x", "z"]


class Steps(tf.estimator.SessionRunHook):
    """Notes the global step at the begin and at the end of a session."""

    def __init__(self, calls, name):
        self.calls, self.name = calls, name

    def after_create_session(self, session, coord):
        """Notes the begin."""
        self.calls.append([f"{self.name} begins", int(session.run(tf.compat.v1.train.get_global_step()))])

    def end(self, session):
        """Notes the end."""
        self.calls.append([f"{self.name} ends", int(session.run(tf.compat.v1.train.get_global_step()))])


class Noting(tf.estimator.Exporter):
    """Notes the calls of export, and hands them to another exporter."""

    def __init__(self, calls, exporter):
        self.calls, self.exporter = calls, exporter

    @property
    def name(self):
        """The name of the other exporter."""
        return self.exporter.name

    def export(self, estimator, export_path, checkpoint_path, eval_result, is_the_final_export):
        """Exports, and notes what was returned."""
        arguments = (estimator, export_path, checkpoint_path, eval_result, is_the_final_export)
        result = self.exporter.export(*arguments)
        step = int(checkpoint_path.rsplit("-", 1)[1])
        written = "a folder" if result else result
        self.calls.append([f"export {self.name}", step, bool(is_the_final_export), written])
        return result


def exporters():
    """Returns one exporter of each kind."""
    with tempfile.TemporaryDirectory() as folder:
        columns = build(premade.DNN["feature_columns"], folder)
    receive = tf.estimator.export.build_parsing_serving_input_receiver_fn(
        tf.feature_column.make_parse_example_spec(columns)
    )
    return [
        tf.estimator.FinalExporter("final", receive),
        tf.estimator.LatestExporter("latest", receive, exports_to_keep=2),
        tf.estimator.BestExporter("best", receive, exports_to_keep=1),
    ]


def record_run(with_exporters=True, batches=None, train=None, evaluate=None, before=0, **settings):
    """Returns what one call of train_and_evaluate does."""
    calls = []
    with tempfile.TemporaryDirectory() as folder:
        config = configuration(f"{folder}/model", **({"save_checkpoints_steps": 5} | settings))
        estimator = premade.construct(premade.dnn_cases()["two classes"], folder, config=config)
        read = data.input_fn(NAMES, "binary", repeat=True)
        if before:
            estimator.train(read, steps=before)
        train_spec = tf.estimator.TrainSpec(
            (lambda: read().take(batches)) if batches else read,
            hooks=[Steps(calls, "train")],
            **({"max_steps": 20} | (train or {})),
        )
        eval_spec = tf.estimator.EvalSpec(
            data.input_fn(NAMES, "binary"),
            hooks=[Steps(calls, "evaluate")],
            exporters=[Noting(calls, exporter) for exporter in exporters()] if with_exporters else None,
            **({"throttle_secs": 0} | (evaluate or {})),
        )
        result = attempt(lambda: plain(tf.estimator.train_and_evaluate(estimator, train_spec, eval_spec)))
        return {"calls": calls, "returned": relative(result, estimator.model_dir)} | files_of(estimator)


def relative(result, folder):
    """Returns what train_and_evaluate returned, with the paths of exports relative to model_dir and without times."""
    if isinstance(result, dict) or result[1] is None:
        return result
    return [result[0], [path and timeless(path.removeprefix(f"{folder}/")) for path in result[1]]]


def files_of(estimator):
    """Returns the steps of an Estimator's checkpoints, and its other files."""
    names = names_in(estimator.model_dir)
    steps = sorted(
        int(name.split("-")[1].split(".")[0]) for name in names if name.endswith(".index") and "ckpt" in name
    )
    return {"checkpoints": steps, "files": [name for name in names if not name.startswith("model.ckpt")]}


def record():
    """Returns item 8."""
    return {
        "about": ABOUT,
        "with exporters": record_run(),
        "without exporters": record_run(with_exporters=False),
        "an input of 12 batches": record_run(batches=12),
        "an input of 12 batches and no max_steps": record_run(batches=12, train={"max_steps": None}),
        "throttle_secs=600": record_run(evaluate={"throttle_secs": 600}),
        "name='x' and steps=1": record_run(with_exporters=False, evaluate={"name": "x", "steps": 1}),
        "already trained for 20 steps": record_run(before=20),
        "already trained for 7 steps": record_run(before=7),
        "checkpoints every 6 steps": record_run(with_exporters=False, save_checkpoints_steps=6),
        "start_delay_secs=100": record_run(with_exporters=False, evaluate={"start_delay_secs": 100}),
    }
