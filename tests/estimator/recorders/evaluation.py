"""Item 8: train_and_evaluate on one machine, and what its exporters write."""

import re
import tempfile

import shared
import tensorflow as tf

from recorders import data, premade
from recorders.columns import build
from recorders.files import names_in, timeless
from recorders.plain import attempt, plain
from recorders.training import configuration

CASE = data.RECORDED["dnn"]["two classes"]


class Steps(shared.Steps, tf.estimator.SessionRunHook):
    library = tf.compat.v1


class Exports(shared.Exports, tf.estimator.Exporter):
    pass


def exporters():
    with tempfile.TemporaryDirectory() as folder:
        columns = build(CASE["arguments"]["feature_columns"], folder)
    receive = tf.estimator.export.build_parsing_serving_input_receiver_fn(
        tf.feature_column.make_parse_example_spec(columns)
    )
    return [
        tf.estimator.FinalExporter("final", receive),
        tf.estimator.LatestExporter("latest", receive, exports_to_keep=2),
        tf.estimator.BestExporter("best", receive, exports_to_keep=1),
    ]


def record_run(before=0, with_exporters=True, batches=None, max_steps=20, every=5, **evaluate):
    """Returns what one call of train_and_evaluate does."""
    calls = []
    with tempfile.TemporaryDirectory() as folder:
        config = configuration(f"{folder}/model", save_checkpoints_steps=every)
        estimator = premade.construct(CASE, folder, config=config)
        read = data.input_fn(CASE["features"], CASE["labels"], repeat=True)
        if before:
            estimator.train(read, steps=before)
        train_spec = tf.estimator.TrainSpec(
            (lambda: read().take(batches)) if batches else read, max_steps, hooks=[Steps(calls, "train")]
        )
        eval_spec = tf.estimator.EvalSpec(
            data.input_fn(CASE["features"], CASE["labels"]),
            hooks=[Steps(calls, "evaluate")],
            exporters=[Exports(calls, exporter) for exporter in exporters()] if with_exporters else None,
            **{"throttle_secs": 0, **evaluate},
        )
        result = attempt(lambda: plain(tf.estimator.train_and_evaluate(estimator, train_spec, eval_spec)))
        names = names_in(estimator.model_dir)
        return {
            "calls": calls,
            "returned": relative(result, estimator.model_dir),
            "checkpoints": sorted(int(x) for name in names for x in re.findall(r"model\.ckpt-(\d+)\.index", name)),
            "files": [name for name in names if not name.startswith("model.ckpt")],
        }


def relative(result, folder):
    """Returns what train_and_evaluate returned, with the paths of exports relative to model_dir and without times."""
    if isinstance(result, dict) or result[1] is None:
        return result
    return [result[0], [path and timeless(path.removeprefix(f"{folder}/")) for path in result[1]]]


def record(runs):
    return {name: record_run(**options) for name, options in shared.EVALUATIONS.items()}
