"""Item 11: feature columns, from features to ids, dense rows and linear sums."""

import tempfile
from pathlib import Path

import numpy as np
import tensorflow as tf
from tensorflow.python.feature_column import feature_column_v2 as internal
from tensorflow_estimator.python.estimator.canned.linear import LinearModel

from recorders.plain import array, attempt, described, failure, plain


def build(description, folder):
    """Returns the column, or the argument of one, that a description stands for."""
    if isinstance(description, list):
        return [build(item, folder) for item in description]
    if not isinstance(description, dict):
        return description
    if "column" in description:
        arguments = {name: build(item, folder) for name, item in description.items() if name != "column"}
        return getattr(tf.feature_column, description["column"])(**arguments)
    if "dtype" in description:
        return tf.as_dtype(description["dtype"])
    if "function" in description:
        return eval(description["function"])
    if "constant" in description:
        return tf.compat.v1.constant_initializer(np.array(description["constant"], np.float32))
    path = Path(folder, "vocabulary.txt")
    path.write_text(description["file"], encoding="utf-8")
    return str(path)


def tensor(feature):
    """Returns the tensor of a described feature: dense, or sparse if it has indices."""
    values = tf.constant(feature["values"], tf.as_dtype(feature["dtype"]))
    if "indices" not in feature:
        return values
    indices = np.array(feature["indices"], np.int64).reshape(-1, len(feature["dense_shape"]))
    return tf.SparseTensor(indices, values, feature["dense_shape"])


def run(compute, case):
    """Returns what a function of columns and tensors computes in a session, or its exception."""
    with tempfile.TemporaryDirectory() as folder, tf.Graph().as_default():
        try:
            columns = build(case["columns"], folder)
            result = compute(columns, {name: tensor(feature) for name, feature in case["features"].items()}, case)
            with tf.compat.v1.Session() as session:
                session.run([tf.compat.v1.global_variables_initializer(), tf.compat.v1.tables_initializer()])
                session.run(tf.compat.v1.get_collection("assignments"))
                return session.run(result)
        except Exception as error:  # whatever TensorFlow raises is the record
            return error


def ids_of(columns, features, case):
    """Returns the sparse ids, and the weights if there are any, of a categorical column."""
    cache = internal.FeatureTransformationCache(features)
    pair = columns[0].get_sparse_tensors(cache, None)
    return {"ids": pair.id_tensor} | ({} if pair.weight_tensor is None else {"weights": pair.weight_tensor})


def dense_of(columns, features, case):
    """Returns the rows that DenseFeatures makes, and the width of each column by name."""
    widths = {}
    rows = tf.compat.v1.keras.layers.DenseFeatures(columns)(features, cols_to_output_tensors=widths)
    return {"rows": rows, "by_column": {column.name: output for column, output in widths.items()}}


def linear_of(columns, features, case):
    """Returns the sums of the linear model, with the weights that `weights_of` gives, and the shapes of its variables."""
    model = LinearModel(columns, **case["linear"])
    sums = model(features)
    for variable in model.variables:
        tf.compat.v1.add_to_collection("assignments", variable.assign(weights_of(variable)))
    return {"sums": sums, "variables": {variable.name: tf.shape(variable) for variable in model.variables}}


def weights_of(variable):
    """Returns 1, 2, 3 and so on per row, plus half the number of the unit; a bias is 0.25."""
    if "bias" in variable.name:
        return tf.fill(variable.shape, 0.25)
    rows, units = variable.shape
    return np.arange(1, rows + 1, dtype=np.float32)[:, None] + 0.5 * np.arange(units, dtype=np.float32)


def spec_of(case):
    with tempfile.TemporaryDirectory() as folder, tf.Graph().as_default():
        specification = tf.feature_column.make_parse_example_spec(build(case["columns"], folder))
        return {name: repr(item) for name, item in sorted(specification.items())}


def about(case):
    with tempfile.TemporaryDirectory() as folder, tf.Graph().as_default():
        return [
            {
                "name": column.name,
                **({"num_buckets": column.num_buckets} if hasattr(column, "num_buckets") else {}),
                **({"variable_shape": list(column.variable_shape)} if hasattr(column, "variable_shape") else {}),
            }
            for column in build(case["columns"], folder)
        ]


def readable(result):
    if isinstance(result, Exception):
        return failure(result)
    if isinstance(result, dict):
        return {name: readable(item) for name, item in result.items()}
    if isinstance(result, tf.compat.v1.SparseTensorValue):
        return {"indices": plain(result.indices), **array(result.values), "dense_shape": plain(result.dense_shape)}
    return array(result)


def record_case(case):
    case = described(case, "columns", "features", "want", "about", "linear")
    computations = {"ids": ids_of, "dense": dense_of, "linear": linear_of}
    results = {f"{name}_result": readable(run(computations[name], case)) for name in case["want"]}
    specification = {"parse_example_spec": attempt(lambda: spec_of(case))}
    return case | {"about_columns": attempt(lambda: about(case))} | results | specification


def record(records):
    hashes = records["hashes"]
    fast = tf.strings.to_hash_bucket_fast(hashes["strings"], hashes["num_buckets"])
    rows = tf.fingerprint(hashes["strings"]).numpy()
    fingerprints = [str(int.from_bytes(bytes(row), "little")) for row in rows]
    return {
        "hashes": hashes | {"to_hash_bucket_fast": plain(fast.numpy()), "fingerprint64": fingerprints},
        "cases": {name: record_case(case) for name, case in records["cases"].items()},
    }
