"""Builds what `recorded.json` describes: the data, the columns and the estimators."""

import json
from pathlib import Path

import numpy as np

import phalanx.estimator as estimator
from phalanx import feature_column

RECORDED = json.loads((Path(__file__).parent / "recorded.json").read_text())
DATA = RECORDED["data"]


def array(entry):
    """The array of an entry with `dtype`, `shape` and `values`."""
    dtype = object if entry["dtype"] == "string" else entry["dtype"]
    return np.array(entry["values"], dtype).reshape(entry["shape"])


def column(entry):
    """The feature column of an entry."""
    if isinstance(entry, list):
        return [column(x) for x in entry]
    if not isinstance(entry, dict) or "column" not in entry:
        return entry
    options = {name: column(value) for name, value in entry.items() if name != "column"}
    return getattr(feature_column, entry["column"])(**options)


def batches(case, size=DATA["batch_size"]):
    """The batches of the rows, in order."""
    features = {name: array(DATA["features"][name]) for name in case["features"]}
    labels = array(DATA["labels"][case["labels"]])
    return [
        ({name: x[i : i + size] for name, x in features.items()}, labels[i : i + size])
        for i in range(0, len(labels), size)
    ]


class Watch(estimator.SessionRunHook):
    """Gives the variables their recorded first values, and notes the losses."""

    def __init__(self, case):
        self.first, self.losses = case["initial"], []

    def after_create_session(self, session, coord):
        """Assigns the values."""
        for name, value in self.first.items():
            variable = session.graph.find(name)
            if variable is not None and variable.trainable:
                variable.assign(np.array(value, "float32"))

    def before_run(self, run_context):
        """Asks for the loss."""
        return estimator.SessionRunArgs("loss")

    def after_run(self, run_context, run_values):
        """Notes the loss."""
        self.losses.append(float(run_values.results))


def made(case, folder, **options):
    """The estimator of a case."""
    arguments = {name: column(value) for name, value in case["arguments"].items()}
    config = estimator.RunConfig(save_summary_steps=None, log_step_count_steps=None, **options)
    return getattr(estimator, case["estimator"])(model_dir=str(folder), config=config, **arguments)
