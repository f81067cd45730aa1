"""Records hashes that TensorFlow 2.15 computes: `python record_hashes.py`, in an environment that has it."""

import json
from pathlib import Path

LENGTHS = (*range(20), 24, 31, 32, 33, 40, 47, 48, 63, 64, 65, 96, 127, 128, 129, 191, 192, 193, 200)
CROSSES = {
    "strings": (["red", "", "red"], ["x", "y", "x"]),
    "integers": ([0, -1, 2**40], [3, 4, -5]),
    "both": (["red", "blue", ""], [3, 4, -1]),
}


def text(length):
    """Returns bytes of all values, without an order that a hash could profit from."""
    return bytes((37 * length + 101 * place + place * place // 7) % 256 for place in range(length))


def record():
    """Writes the fingerprints and the crosses beside this file."""
    import tensorflow as tf

    rows = {length: tf.fingerprint(tf.constant([text(length)])).numpy()[0] for length in LENGTHS}
    crosses = {
        name: tf.feature_column.crossed_column(["a", "b"], 10**9).get_sparse_tensors(cache(tf, a, b), None)[0].values
        for name, (a, b) in CROSSES.items()
    }
    recorded = {
        "fingerprints": {length: str(int.from_bytes(bytes(row), "little")) for length, row in rows.items()},
        "crosses": {name: values.numpy().tolist() for name, values in crosses.items()},
    }
    Path(__file__).with_name("recorded_hashes.json").write_text(json.dumps(recorded, indent=1) + "\n", encoding="utf-8")


def cache(tf, a, b):
    """Returns two features as a column reads them."""
    from tensorflow.python.feature_column.feature_column_v2 import FeatureTransformationCache

    return FeatureTransformationCache({"a": tf.constant(a), "b": tf.constant(b)})


if __name__ == "__main__":
    record()
