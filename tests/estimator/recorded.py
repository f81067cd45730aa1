"""Builds what `recorded.json` and `recorded_columns.json` describe: the data, the columns and the estimators."""

import dataclasses
import json
from pathlib import Path

import numpy as np
from one_weight import Fetch

import phalanx.estimator as estimator
from phalanx import feature_column

RECORDED = json.loads(Path(__file__).with_name("recorded.json").read_text(encoding="utf-8"))
DATA = RECORDED["data"]
MOST_BUCKETS = 2**31 - 1  # Ids are int32. TensorFlow's are int64.


def array(entry):
    dtype = object if entry["dtype"] == "string" else entry["dtype"]
    return np.array(entry["values"], dtype).reshape(entry["shape"])


def built(description, folder=None):
    """Returns the column, or the argument of one, that a description stands for."""
    if isinstance(description, list):
        return [built(item, folder) for item in description]
    if not isinstance(description, dict):
        return description
    if "column" in description:
        named = {name: built(item, folder) for name, item in description.items() if name != "column"}
        size = named.get("hash_bucket_size", 0)
        if size > MOST_BUCKETS:
            named["hash_bucket_size"] = MOST_BUCKETS
        column = getattr(feature_column, description["column"])(**named)
        return dataclasses.replace(column, hash_bucket_size=size) if size > MOST_BUCKETS else column
    if "dtype" in description:
        return description["dtype"]
    if "function" in description:
        return eval(description["function"])
    if "constant" in description:
        return lambda shape, dtype=None: np.array(description["constant"], np.float32)
    path = folder / "vocabulary.txt"
    path.write_text(description["file"], encoding="utf-8")
    return path


def batches(case, size=DATA["batch_size"]):
    """The batches of the rows, in order."""
    features = {name: array(DATA["features"][name]) for name in case["features"]}
    labels = array(DATA["labels"][case["labels"]])
    return [
        ({name: x[i : i + size] for name, x in features.items()}, labels[i : i + size])
        for i in range(0, len(labels), size)
    ]


class Watch(Fetch):
    """Gives the variables their recorded first values, and notes the losses."""

    def __init__(self, case):
        super().__init__("loss")
        self.first = case["initial"]

    def after_create_session(self, session, coord):
        for name, value in self.first.items():
            variable = session.graph.find(name)
            if variable is not None and variable.trainable:
                variable.assign(np.array(value, "float32"))


def made(case, folder, **options):
    config = estimator.RunConfig(**{"save_summary_steps": None, "log_step_count_steps": None, **options})
    arguments = {name: built(value) for name, value in case["arguments"].items()}
    return getattr(estimator, case["estimator"])(model_dir=str(folder), config=config, **arguments)
