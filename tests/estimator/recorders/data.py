"""The rows on which every case trains; each case names its features and its labels."""

import numpy as np
import tensorflow as tf

from recorders.plain import arrays

ROWS = 20
BATCH = 8
ABOUT = [
    "20 rows, which every case reads in this order, without shuffling, in batches of 8, 8 and 4 rows.",
    "Training repeats the three batches for 20 steps; evaluation reads them once; prediction reads the first 4 rows.",
    "features: 'w' holds weights of rows, 's' and 't' words, 'z' three numbers per row.",
]


def features():
    """Returns the features by name."""
    random = np.random.RandomState(7)
    return {
        "x": random.randn(ROWS).round(2).astype("float32"),
        "y": random.uniform(-3, 3, ROWS).round(2).astype("float32"),
        "z": random.randn(ROWS, 3).round(2).astype("float32"),
        "s": random.choice(["red", "green", "blue", "pink"], ROWS),
        "t": random.choice(["one", "two", "three", "four", "five"], ROWS),
        "w": random.choice([0.5, 1.0, 2.0, 3.0], ROWS).astype("float32"),
    }


def labels():
    """Returns the labels by name."""
    random = np.random.RandomState(8)
    rows = features()
    score = rows["x"] + 0.5 * rows["y"] + rows["z"][:, 0] + random.randn(ROWS) * 0.3
    three = np.digitize(score, [-0.7, 0.7])
    return {
        "binary": (score > 0).astype("int64"),
        "three": three.astype("int64"),
        "yes or no": np.where(score > 0, "yes", "no"),
        "sizes": np.array(["small", "medium", "large"])[three],
        "number": score.round(2).astype("float32"),
        "two numbers": np.stack([score, -0.5 * score + 1], 1).round(2).astype("float32"),
        "many": np.stack([score > 0, score < 1, three == 1], 1).astype("int64"),
        "counts": np.floor(np.abs(score) * 2).astype("float32"),
    }


def input_fn(names, label, batch=BATCH, repeat=None):
    """Returns an input function of the named features and label; without `repeat`, it is read once."""
    rows = {name: features()[name] for name in names}
    target = labels()[label]

    def read():
        dataset = tf.data.Dataset.from_tensor_slices((rows, target)).batch(batch)
        return dataset.repeat() if repeat else dataset

    return read


def first_rows(names):
    """Returns an input function of the first four rows, without labels."""
    rows = {name: features()[name][:4] for name in names}
    return lambda: tf.data.Dataset.from_tensor_slices(rows).batch(4)


def record():
    """Returns the rows."""
    return {"about": ABOUT, "batch_size": BATCH, "features": arrays(features()), "labels": arrays(labels())}
