# SPDX-License-Identifier: Apache-2.0
"""Heads of classes."""

import functools
from collections.abc import Iterable, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import keras
import numpy as np
from typing_extensions import override

from phalanx.errors import InputError, InvalidArgumentError, arguments, shown
from phalanx.estimator.heads.base import Head, LossFn, WeightColumn, column
from phalanx.typing import PyTree


class _ClassHead(Head):
    """A head of classes."""

    def __init__(
        self,
        n_classes: int,
        weight_column: WeightColumn,
        label_vocabulary: Sequence[str] | None,
        loss_reduction: str,
        loss_fn: LossFn | None,
        name: str | None,
    ) -> None:
        super().__init__(weight_column, loss_reduction, loss_fn, name)
        self._n_classes = n_classes
        if label_vocabulary is not None and (
            not isinstance(label_vocabulary, (list, tuple)) or len(label_vocabulary) != n_classes
        ):
            raise InvalidArgumentError(
                f"label_vocabulary={shown(label_vocabulary)}",
                f"must be a list of the {n_classes} classes.",
                'label_vocabulary=["no", "yes"]',
            )
        self._vocabulary = None if label_vocabulary is None else [str(word) for word in label_vocabulary]
        if self._vocabulary and len(set(self._vocabulary)) < n_classes:
            raise InvalidArgumentError(
                f"label_vocabulary={shown(label_vocabulary)}",
                "it contains a class twice.",
                'label_vocabulary=["no", "yes"]',
            )

    @override
    def host_labels(self, labels: PyTree) -> PyTree:
        """Returns the numbers of classes. See `Head.host_labels`."""
        # On the host: unknown labels can raise an error here, but not in a program.
        array = np.asarray(labels)
        # One-hot labels are a frequent mistake. With the sparse loss they would train on the columns of the array.
        if array.ndim > 1 and array.size != len(array):
            raise InputError(
                f"labels of the shape {array.shape}", "a row has one class.", "labels of the shape (rows,) or (rows, 1)"
            )
        if self._vocabulary is not None:
            return _numbers_of(array, self._vocabulary)
        if array.dtype.kind not in "iufb":
            raise InputError(
                f"labels of {array.dtype}",
                "classes are numbers, starting at 0.",
                "label_vocabulary=[...], with the classes",
            )
        # Also catches NaN and 0.5, which a cast to int32 would turn into the class 0.
        wrong = array[~np.isin(array, range(self._n_classes))]
        if wrong.size:
            raise InputError(
                f"the label {wrong.flat[0]}",
                f"labels are integers from 0 to {self._n_classes - 1}.",
                "n_classes, the largest label + 1; or label_vocabulary",
            )
        return array.astype(np.int32)

    @override
    def host_predictions(self, predictions: dict[str, Any]) -> dict[str, Any]:
        """Returns predictions with the names of classes. See `Head.host_predictions`."""
        return with_classes(predictions, self.classes)

    @property
    @override
    def classes(self) -> list[str]:
        """The names of the classes."""
        return self._vocabulary or [str(i) for i in range(self._n_classes)]


def with_classes(predictions: dict[str, Any], classes: Sequence[str]) -> dict[str, Any]:
    """Returns predictions, with the names of classes as bytes."""
    # Bytes, because tf.estimator's predictions are string tensors, which NumPy shows as bytes.
    names = np.array([word.encode() for word in classes], object)
    ids = predictions["class_ids"]
    return {
        **predictions,
        "classes": names[ids],
        # The same row for each example, as in tf.estimator: `predict` splits every prediction into rows.
        "all_class_ids": np.tile(np.arange(len(classes), dtype=np.int32), (len(ids), 1)),
        "all_classes": np.tile(names, (len(ids), 1)),
    }


def _numbers_of(labels: np.ndarray, vocabulary: Sequence[str]) -> np.ndarray:
    places = {word: i for i, word in enumerate(vocabulary)}
    # pandas gives objects, NumPy str, files bytes: the same word in each case.
    words = [x.decode() if isinstance(x, bytes) else str(x) for x in labels.ravel()]
    unknown = next((word for word in words if word not in places), None)
    if unknown is not None:
        raise InputError(f"the label {unknown!r}", f"label_vocabulary is {shown(vocabulary)}.", "add the label to it")
    return np.array([places[word] for word in words], np.int32).reshape(labels.shape)


def _is_fraction(value: object) -> bool:
    return isinstance(value, (float, np.floating)) and 0 < float(value) < 1


@final
class BinaryClassHead(_ClassHead):
    """A head for two classes, with one logit. May be created in any context.

    Args:
      weight_column: name of the feature, or numeric column, with the weight of each row. None if all rows count the same.
      thresholds: more thresholds between 0 and 1 for accuracy, precision and recall.
      label_vocabulary: list of the two classes, if labels are strings.
      loss_reduction: `"sum_over_batch_size"` or `"sum"`.
      loss_fn: function of `labels` and `logits`. Returns losses. None for the cross-entropy.
      name: suffix for metric names. None for no suffix.

    Raises:
      InvalidArgumentError: an argument has the wrong type or value.

    Source: tf.estimator.BinaryClassHead.

    Example:
      >>> import phalanx.estimator as estimator
      >>> estimator.BinaryClassHead(label_vocabulary=["no", "yes"]).logits_dimension
      1
    """

    def __init__(
        self,
        weight_column: WeightColumn = None,
        thresholds: Iterable[float] | None = None,
        label_vocabulary: Sequence[str] | None = None,
        loss_reduction: str = "sum_over_batch_size",
        loss_fn: LossFn | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(2, weight_column, label_vocabulary, loss_reduction, loss_fn, name)
        if thresholds is not None and not (isinstance(thresholds, Iterable) and all(map(_is_fraction, thresholds))):
            raise InvalidArgumentError(
                f"thresholds={shown(thresholds)}", "must be numbers between 0 and 1.", "thresholds=[0.5]"
            )
        self._thresholds = () if thresholds is None else tuple(thresholds)

    @property
    @override
    def logits_dimension(self) -> int:
        """The number of logits per row."""
        return 1

    @override
    def predictions(self, logits: jax.Array) -> dict[str, Any]:
        """Returns the predictions. See `Head.predictions`."""
        # The logit of class 0 is 0: softmax over both is then the sigmoid, as in binary_class_head.py of tf.estimator.
        both = jnp.concatenate([jnp.zeros_like(logits), logits], axis=-1)
        return {
            "logits": logits,
            "logistic": jax.nn.sigmoid(logits),
            "probabilities": jax.nn.softmax(both),
            "class_ids": jnp.argmax(both, axis=-1)[:, None],
        }

    @override
    def _losses(self, labels: jax.Array, logits: jax.Array) -> jax.Array:
        labels = column(labels).astype(logits.dtype)
        # The stable form of the cross-entropy: log(sigmoid) would be -inf for large negative logits.
        return (jax.nn.softplus(logits) - labels * logits)[:, 0]

    @override
    def _metrics(
        self, labels: jax.Array, logits: jax.Array, weights: jax.Array | None
    ) -> dict[str, keras.metrics.Metric]:
        y = column(labels).astype(jnp.float32)
        predictions = self.predictions(logits)
        ids, probability = predictions["class_ids"], predictions["logistic"]
        update = functools.partial(_updated, weights=weights)
        metrics = {
            "accuracy": update(keras.metrics.Accuracy(name="accuracy"), y, ids),
            "precision": update(keras.metrics.Precision(name="precision"), y, ids),
            "recall": update(keras.metrics.Recall(name="recall"), y, ids),
            "prediction/mean": self._mean("prediction/mean", probability[:, 0], weights),
            "label/mean": self._mean("label/mean", y[:, 0], weights),
            # The mean of the labels, turned into the accuracy of the best constant answer when it is read.
            "accuracy_baseline": _Baseline(name="accuracy_baseline"),
            "auc": update(keras.metrics.AUC(name="auc"), y, probability),
            "auc_precision_recall": update(keras.metrics.AUC(curve="PR", name="auc_precision_recall"), y, probability),
        }
        metrics["accuracy_baseline"].update_state(y[:, 0], sample_weight=weights)
        for t in self._thresholds:
            # Names of metric_keys.py in tf.estimator, such as
            # `accuracy/positive_threshold_0.5_mean`: dashboards look for them.
            at = f"positive_threshold_{t:g}"
            accuracy = keras.metrics.BinaryAccuracy(name=f"accuracy_{at}", threshold=t)
            metrics[f"accuracy/{at}_mean"] = update(accuracy, y, probability)
            metrics[f"precision/{at}"] = update(keras.metrics.Precision(t, name=f"precision_{at}"), y, probability)
            metrics[f"recall/{at}"] = update(keras.metrics.Recall(t, name=f"recall_{at}"), y, probability)
        return metrics


@final
class _Baseline(keras.metrics.Mean):
    """The accuracy of always predicting the more frequent of two classes."""

    @override
    def result(self) -> jax.Array:
        """Returns the accuracy."""
        # Computed from the mean over all batches: the larger class of one batch may be the smaller one of the data.
        mean = super().result()
        return jnp.maximum(mean, 1 - mean)


def _updated(
    metric: keras.metrics.Metric, y_true: jax.Array, y_pred: jax.Array, weights: jax.Array | None
) -> keras.metrics.Metric:
    metric.update_state(y_true, y_pred, sample_weight=weights)
    return metric


@final
class MultiClassHead(_ClassHead):
    """A head for more than two classes, with one logit per class. May be created in any context.

    Args:
      n_classes: number of classes, more than 2.
      weight_column: name of the feature, or numeric column, with the weight of each row. None if all rows count the same.
      label_vocabulary: list of the classes, if labels are strings.
      loss_reduction: `"sum_over_batch_size"` or `"sum"`.
      loss_fn: function of `labels` and `logits`. Returns losses. None for the cross-entropy.
      name: suffix for metric names. None for no suffix.

    Raises:
      InvalidArgumentError: an argument has the wrong type or value.

    Source: tf.estimator.MultiClassHead.

    Example:
      >>> import phalanx.estimator as estimator
      >>> estimator.MultiClassHead(n_classes=3).logits_dimension
      3
    """

    def __init__(
        self,
        n_classes: int,
        weight_column: WeightColumn = None,
        label_vocabulary: Sequence[str] | None = None,
        loss_reduction: str = "sum_over_batch_size",
        loss_fn: LossFn | None = None,
        name: str | None = None,
    ) -> None:
        arguments.integer("n_classes", n_classes, least=3, kind="more than 2 classes", hint="BinaryClassHead()")
        super().__init__(n_classes, weight_column, label_vocabulary, loss_reduction, loss_fn, name)

    @property
    @override
    def logits_dimension(self) -> int:
        """The number of logits per row."""
        return self._n_classes

    @override
    def predictions(self, logits: jax.Array) -> dict[str, Any]:
        """Returns the predictions. See `Head.predictions`."""
        ids = jnp.argmax(logits, axis=-1)[:, None]
        return {"logits": logits, "probabilities": jax.nn.softmax(logits), "class_ids": ids}

    @override
    def _losses(self, labels: jax.Array, logits: jax.Array) -> jax.Array:
        ids = column(labels).astype(jnp.int32)
        # One gather per row. A product with one-hot labels would need memory for rows times classes.
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), ids, axis=-1)[:, 0]

    @override
    def _metrics(
        self, labels: jax.Array, logits: jax.Array, weights: jax.Array | None
    ) -> dict[str, keras.metrics.Metric]:
        ids = self.predictions(logits)["class_ids"]
        return {"accuracy": _updated(keras.metrics.Accuracy(name="accuracy"), column(labels), ids, weights)}
