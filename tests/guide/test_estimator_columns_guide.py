"""The calls of TensorFlow's guide for the migration of feature columns, with the imports changed."""

import math

import numpy as np

from phalanx.estimator import tf1


def call_feature_columns(feature_columns, inputs):
    feature_layer = tf1.feature_column.DenseFeatures(feature_columns)
    return np.asarray(feature_layer(inputs))


def test_feature_columns_outside_of_an_estimator():
    """Each kind of column: the arrays of the guide."""
    fc = tf1.feature_column
    columns = [fc.numeric_column("foo"), fc.numeric_column("bar"), fc.numeric_column("baz")]
    found = call_feature_columns(columns, {"foo": [1], "bar": [0], "baz": [-1]})
    assert found.tolist() == [[0, -1, 1]]
    kinds = fc.indicator_column(fc.categorical_column_with_identity("type", num_buckets=3))
    assert call_feature_columns(kinds, {"type": [0, 1, 2]}).tolist() == np.eye(3).tolist()
    numbers = fc.numeric_column("col", normalizer_fn=lambda x: (x - 2.0) / math.sqrt(1.0))
    assert call_feature_columns(numbers, {"col": [[0.0], [1.0], [2.0]]}).tolist() == [[-2], [-1], [0]]
    buckets = fc.bucketized_column(fc.numeric_column("col"), [1, 4, 5])
    found = call_feature_columns(buckets, {"col": [1.0, 2.0, 3.0, 4.0, 5.0]})
    assert found.argmax(axis=1).tolist() == [1, 1, 1, 2, 3]
    words = fc.categorical_column_with_vocabulary_list("sizes", ["small", "medium", "large"], num_oov_buckets=0)
    rows = {"sizes": ["small", "medium", "large"]}
    assert call_feature_columns(fc.indicator_column(words), rows).tolist() == np.eye(3).tolist()
    assert call_feature_columns(fc.embedding_column(words, 4), rows).shape == (3, 4)


def test_weighted_columns_outside_of_an_estimator():
    """Weights are added up per id; the mean of embeddings is weighted."""
    ids, weights = [[5, 11, 5, 17, 17]], np.array([[0.5, 1.5, 0.7, 1.8, 0.2]], "float32")
    categorical_col = tf1.feature_column.categorical_column_with_identity("ids", num_buckets=20)
    weighted_categorical_col = tf1.feature_column.weighted_categorical_column(categorical_col, "weights")
    indicator_col = tf1.feature_column.indicator_column(weighted_categorical_col)
    counts = np.bincount(ids[0], weights[0], 20)
    found = call_feature_columns(indicator_col, {"ids": ids, "weights": weights})
    np.testing.assert_allclose(found, [counts], rtol=1e-6)
    embedding_col = tf1.feature_column.embedding_column(weighted_categorical_col, 4, combiner="mean")
    feature_layer = tf1.feature_column.DenseFeatures(embedding_col)
    found = feature_layer({"ids": ids, "weights": weights})
    (table,) = feature_layer.get_weights()
    np.testing.assert_allclose(found, [counts @ table / counts.sum()], rtol=1e-5)


def test_feature_columns_of_an_estimator(tmp_path):
    """Three kinds of columns train a network of one unit; a word that is not in the vocabulary has a row of its own."""
    fc, vocab = tf1.feature_column, ["small", "medium", "large"]
    features = {"type": [0, 1, 1], "size": ["small", "small", "medium"], "weight": [2.7, 1.8, 1.6]}
    predict_features = {"type": [0], "size": ["foo"], "weight": [-0.7]}
    indicator_col = fc.indicator_column(fc.categorical_column_with_identity("type", num_buckets=3))
    vocab_col = fc.categorical_column_with_vocabulary_list("size", vocabulary_list=vocab, num_oov_buckets=1)
    embedding_col = fc.embedding_column(vocab_col, 4)
    numeric_col = fc.numeric_column("weight", normalizer_fn=lambda x: (x - 2.0) / math.sqrt(1.0))
    estimator = tf1.estimator.DNNClassifier(
        feature_columns=[indicator_col, embedding_col, numeric_col], hidden_units=[1], model_dir=tmp_path
    )

    def _input_fn():
        return tf1.data.Dataset.from_tensor_slices((features, [1, 1, 0])).batch(1)

    def _predict_fn():
        return tf1.data.Dataset.from_tensor_slices(predict_features).batch(1)

    estimator.train(_input_fn)
    prediction = next(estimator.predict(_predict_fn))
    value = estimator.get_variable_value
    table = value("dnn/input_from_feature_columns/size_embedding/embedding_weights")
    # By the names of columns: size_embedding, type_indicator, weight.
    row = np.concatenate([table[3], [1, 0, 0], [-2.7]])
    hidden = np.maximum(row @ value("dnn/hiddenlayer_0/kernel") + value("dnn/hiddenlayer_0/bias"), 0)
    logits = hidden @ value("dnn/logits/kernel") + value("dnn/logits/bias")
    np.testing.assert_allclose(prediction["logits"], logits, rtol=1e-5)
    np.testing.assert_allclose(prediction["probabilities"][1], 1 / (1 + np.exp(-logits[0])), rtol=1e-5)
