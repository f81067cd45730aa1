"""The rows on which every case trains; each case names its features and its labels."""

import json
from pathlib import Path

import numpy as np
import tensorflow as tf

RECORDED = json.loads(Path(__file__).parents[1].joinpath("recorded.json").read_text(encoding="utf-8"))


BATCH = RECORDED["data"]["batch_size"]
FEATURES, LABELS = (
    {
        name: np.array(entry["values"], str if entry["dtype"] == "string" else entry["dtype"])
        for name, entry in RECORDED["data"][kind].items()
    }
    for kind in ("features", "labels")
)


def input_fn(names, label, batch=BATCH, repeat=False):
    """Returns an input function of the named features and label; without `repeat`, it is read once."""
    rows = {name: FEATURES[name] for name in names}

    def read():
        dataset = tf.data.Dataset.from_tensor_slices((rows, LABELS[label])).batch(batch)
        return dataset.repeat() if repeat else dataset

    return read


def first_rows(names):
    """Returns an input function of the first four rows, without labels."""
    rows = {name: FEATURES[name][:4] for name in names}
    return lambda: tf.data.Dataset.from_tensor_slices(rows).batch(4)
