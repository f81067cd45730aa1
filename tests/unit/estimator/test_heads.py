"""Heads: losses, metrics and predictions, against NumPy."""

import jax.numpy as jnp
import keras
import numpy as np
from one_weight import made
from refusals import refusals, refused

import phalanx.estimator as estimator
from phalanx import feature_column
from phalanx.errors import InputError, InvalidArgumentError

LOGITS = np.array([[2.0], [-1.0], [0.5]], "float32")
THREE = np.array([[1.0, 2.0, 0.0], [0.5, -1.0, 3.0], [1.0, 1.5, -2.0]], "float32")
WEIGHTS = np.array([1, 0, 3], "float32")


def evaluated(head, folder, labels, logits=LOGITS, weights=WEIGHTS):
    """The metrics of a head for these logits, which do not depend on variables."""

    def fn(features, labels, mode):
        return head.create_estimator_spec(features, mode, features["logits"], labels)

    data = [({"logits": logits, "w": weights}, head.host_labels(labels))]
    return made(folder, fn).evaluate(lambda: data)


def test_binary_head_against_numpy(tmp_path):
    """Losses, weights, thresholds and names of metrics."""
    head = estimator.BinaryClassHead("w", thresholds=[0.7], loss_reduction="sum", name="h")
    y, p = np.array([1, 1, 0]), 1 / (1 + np.exp(-LOGITS[:, 0]))
    found = evaluated(head, tmp_path, y)
    losses = -(y * np.log(p) + (1 - y) * np.log(1 - p))
    np.testing.assert_allclose(found["loss"], (losses * WEIGHTS).sum(), rtol=1e-5)
    np.testing.assert_allclose(found["average_loss/h"], np.average(losses, weights=WEIGHTS), rtol=1e-5)
    for threshold, name in ((0.5, "accuracy/h"), (0.7, "accuracy/positive_threshold_0.7_mean/h")):
        np.testing.assert_allclose(found[name], np.average((p > threshold) == y, weights=WEIGHTS))
    np.testing.assert_allclose(found["label/mean/h"], 0.25)
    np.testing.assert_allclose(found["accuracy_baseline/h"], 0.75)
    assert (head.name, head.logits_dimension, head.classes) == ("h", 1, ["0", "1"])


def test_multi_class_head_against_numpy(tmp_path):
    """Losses of numbers of classes, and the accuracy."""
    head = estimator.MultiClassHead(3, feature_column.numeric_column("w"), label_vocabulary=["a", "b", "c"])
    found = evaluated(head, tmp_path, np.array([b"b", "a", "b"], object), THREE)
    shares = np.exp(THREE) / np.exp(THREE).sum(axis=1, keepdims=True)
    losses = -np.log(shares[range(3), [1, 0, 1]])
    np.testing.assert_allclose(found["loss"], (losses * WEIGHTS).sum() / 3, rtol=1e-5)
    np.testing.assert_allclose(found["average_loss"], np.average(losses, weights=WEIGHTS), rtol=1e-5)
    assert found["accuracy"] == 1
    predicted = head.host_predictions({"class_ids": np.array([[1], [2]])})
    assert predicted["classes"].tolist() == [[b"b"], [b"c"]]
    assert predicted["all_classes"].tolist() == [[b"a", b"b", b"c"]] * 2


def test_regression_head_against_numpy(tmp_path):
    """The squared error over the values of a row, and an inverse link."""
    head = estimator.RegressionHead(3, inverse_link_fn=jnp.exp)
    labels = THREE * 2
    found = evaluated(head, tmp_path, labels, THREE)
    np.testing.assert_allclose(found["loss"], np.square(THREE).mean(), rtol=1e-5)
    np.testing.assert_allclose(found["prediction/mean"], np.exp(THREE).mean(), rtol=1e-5)
    np.testing.assert_allclose(found["label/mean"], labels.mean(), rtol=1e-5)
    assert set(head.predictions(THREE)) == {"predictions", "logits"}
    assert (head.name, head.classes) == (None, None)


def test_loss_function_of_the_user(tmp_path):
    """It replaces the loss of the head. Of several losses per row, the mean counts."""
    head = estimator.RegressionHead(3, loss_fn=lambda labels, logits: jnp.abs(labels - logits))
    np.testing.assert_allclose(evaluated(head, tmp_path, THREE * 2, THREE)["loss"], np.abs(THREE).mean(), rtol=1e-5)
    head = estimator.BinaryClassHead(loss_fn=lambda labels, logits: 3)
    with refused(InvalidArgumentError, ["a loss_fn that returns the shape ()", "one loss per row"]):
        evaluated(head, tmp_path, np.array([1, 0, 1]))


test_options_that_are_refused = refusals(
    InvalidArgumentError,
    (lambda: estimator.BinaryClassHead(thresholds=[2]), ["thresholds=[2]", "between 0 and 1"]),
    (lambda: estimator.BinaryClassHead(thresholds=["a"]), ["thresholds=['a']", "between 0 and 1"]),
    (lambda: estimator.BinaryClassHead(thresholds=0.5), ["thresholds=0.5", "between 0 and 1"]),
    (lambda: estimator.BinaryClassHead(thresholds=np.array([0.5, 2])), ["thresholds=array", "between 0 and 1"]),
    (lambda: estimator.EstimatorSpec(mode=np.arange(3)), ["mode=array", "must be one of"]),
    (lambda: estimator.RunConfig(session_config=np.arange(3)), ["session_config=array", "no session"]),
    (lambda: estimator.SecondOrStepTimer(every_secs=np.arange(3)), ["every_secs=array", "more than 0 seconds"]),
    (lambda: estimator.BinaryClassHead(loss_fn=3), ["loss_fn=3", "not callable"]),
    (lambda: estimator.BinaryClassHead(weight_column=3), ["weight_column=3", "a name or a numeric column"]),
    (
        lambda: estimator.BinaryClassHead(feature_column.categorical_column_with_identity("w", 3)),
        ["weight_column=", "a name or a numeric column"],
    ),
    (lambda: estimator.BinaryClassHead(loss_reduction="mean"), ["loss_reduction='mean'", "must be one of"]),
    (lambda: estimator.BinaryClassHead(label_vocabulary=["a"]), ["label_vocabulary=['a']", "the 2 classes"]),
    (lambda: estimator.BinaryClassHead(label_vocabulary="ab"), ["label_vocabulary='ab'", "the 2 classes"]),
    (lambda: estimator.BinaryClassHead(label_vocabulary=["a", "a"]), ["['a', 'a']", "a class twice"]),
    (lambda: estimator.MultiClassHead(2), ["n_classes=2", "more than 2", "BinaryClassHead()"]),
    (lambda: estimator.RegressionHead(0), ["label_dimension=0", "positive"]),
    (lambda: estimator.RegressionHead(inverse_link_fn=3), ["inverse_link_fn=3", "not callable"]),
)


test_labels_that_are_refused = refusals(
    InputError,
    ((estimator.BinaryClassHead(), [0, 2]), ["the label 2", "integers from 0 to 1", "label_vocabulary"]),
    ((estimator.BinaryClassHead(), [-1, 0]), ["the label -1", "integers from 0 to 1"]),
    ((estimator.BinaryClassHead(), [0.5, 1]), ["the label 0.5", "integers from 0 to 1"]),
    ((estimator.MultiClassHead(3), [np.nan, 1]), ["the label nan", "integers from 0 to 2"]),
    ((estimator.MultiClassHead(3), ["a", "b"]), ["labels of <U1", "classes are numbers", "label_vocabulary"]),
    ((estimator.MultiClassHead(3), [[0, 1], [1, 2]]), ["labels of the shape (2, 2)", "one class"]),
    ((estimator.BinaryClassHead(label_vocabulary=["a", "b"]), ["a", "c"]), ["the label 'c'", "['a', 'b']"]),
    ((estimator.BinaryClassHead(label_vocabulary=["a", "b"]), [0, 1]), ["the label '0'", "['a', 'b']"]),
    ((estimator.RegressionHead(), [[1, 2]]), ["labels of int64[1, 2]", "a row has 1", "label_dimension=2"]),
    ((estimator.RegressionHead(2), ["a"]), ["labels of <U1[1]", "a row has 2"]),
    ((estimator.RegressionHead(), {"a": 1}), ["labels of object", "a row has 1"]),
    call=lambda case: case[0].host_labels(np.asarray(case[1])),
)


def test_labels_with_and_without_a_dim():
    """(rows,) and (rows, 1), and floats and bools that are classes."""
    head = estimator.BinaryClassHead()
    for labels in ([0, 1], [[0.0], [1.0]], [False, True]):
        found = head.host_labels(np.array(labels))
        assert found.dtype == np.int32
        assert found.shape == np.shape(labels)


test_weights_that_are_refused = refusals(
    InputError,
    ({"x": LOGITS}, ["weight_column='w'", "the features are ['x']"]),
    (LOGITS, ["weight_column='w'", "the features are an array"]),
    ({"w": THREE}, ["the feature 'w' of the shape (3, 3)", "one weight"]),
    call=lambda features: estimator.BinaryClassHead("w").loss(np.array([1, 0, 1]), LOGITS, features),
)


def test_weights_are_normalized_by_their_column():
    """A numeric column gives its key and its `normalizer_fn`."""
    labels, weights = np.array([1, 0, 1]), np.array([1.0, 2.0, 4.0], "float32")
    column = feature_column.numeric_column("w", normalizer_fn=lambda w: w / 2)
    losses = [
        float(estimator.BinaryClassHead(key).loss(labels, LOGITS, {"w": w}))
        for key, w in ((column, weights), ("w", weights / 2))
    ]
    assert losses[0] == losses[1] != float(estimator.BinaryClassHead("w").loss(labels, LOGITS, {"w": weights}))


def test_specifications_that_are_refused():
    """Logits of another shape, no labels, and both or no ways to train."""
    head, labels = estimator.BinaryClassHead(), np.array([1, 0, 1])
    with refused(InvalidArgumentError, ["logits of the shape (3, 3)", "(rows, 1)", "Dense(1)"]):
        head.create_estimator_spec({}, "infer", THREE)
    with refused(InputError, ["labels=None in mode 'eval'", "a loss needs labels"]):
        head.create_estimator_spec({}, "eval", LOGITS)
    for options in ({}, {"optimizer": keras.optimizers.SGD(), "train_op_fn": print}):
        with refused(InvalidArgumentError, ["create_estimator_spec(optimizer=", "exactly one of them"]):
            head.create_estimator_spec({}, "train", jnp.asarray(LOGITS), labels, **options)


def test_optimizer_and_regularization_of_a_head(tmp_path):
    """The losses of a regularizer are added, and the optimizer trains what is listed."""
    head = estimator.RegressionHead()

    def fn(features, labels, mode):
        weight, other = (keras.Variable(np.ones((1, 1)), name=name) for name in ("weight", "other"))
        logits = features["x"] @ weight.value + other.value
        penalty = [10 * keras.ops.sum(weight.value**2)]
        optimizer = keras.optimizers.SGD(0.01)
        return head.create_estimator_spec(
            features, mode, logits, labels, optimizer, trainable_variables=[weight], regularization_losses=penalty
        )

    data = [({"x": np.ones((2, 1), "float32")}, np.array([2.0, 2.0], "float32"))]
    model = made(tmp_path, fn).train(lambda: data)
    # The error is 0, and the gradient of the penalty 20.
    np.testing.assert_allclose(model.get_variable_value("weight"), [[0.8]], rtol=1e-6)
    np.testing.assert_allclose(model.get_variable_value("other"), [[1]])
