# SPDX-License-Identifier: Apache-2.0
"""`BaselineClassifier` and its siblings."""

import os
from collections.abc import Sequence
from typing import final

# The order of arguments in each class is that of baseline.py in tf.estimator: programs pass them by position.
from phalanx.estimator.config import RunConfig
from phalanx.estimator.heads.base import Head, WeightColumn
from phalanx.estimator.heads.regression import RegressionHead
from phalanx.estimator.models.premade import HeadEstimator, Optimizer, baseline_logits, class_head


@final
class BaselineClassifier(HeadEstimator):
    """Predicts the frequencies of classes and ignores the features. May be created outside all scopes.

    Args:
      model_dir: see `Estimator`.
      n_classes: number of classes.
      weight_column: name of the feature, or numeric column, with the weight of each row. None if all rows count the same.
      label_vocabulary: list of the classes, if labels are strings.
      optimizer: an optimizer, its name, or a function that creates it.
      config: see `Estimator`.
      loss_reduction: `"sum_over_batch_size"` or `"sum"`.

    Raises:
      InvalidArgumentError: an argument has the wrong type or value.

    Source: tf.estimator.BaselineClassifier.

    Example:
      >>> import phalanx.estimator as estimator
      >>> model = estimator.BaselineClassifier(n_classes=3)
    """

    def __init__(
        self,
        model_dir: str | os.PathLike[str] | None = None,
        n_classes: int = 2,
        weight_column: WeightColumn = None,
        label_vocabulary: Sequence[str] | None = None,
        optimizer: Optimizer = "Ftrl",
        config: RunConfig | None = None,
        loss_reduction: str = "sum_over_batch_size",
    ) -> None:
        head = class_head(n_classes, weight_column, label_vocabulary, loss_reduction)
        logits_fn = baseline_logits(head, optimizer)
        super().__init__(head, logits_fn, [], model_dir, config)


@final
class BaselineRegressor(HeadEstimator):
    """Predicts the mean of the labels and ignores the features. May be created outside all scopes.

    Args:
      model_dir: see `Estimator`.
      label_dimension: number of values per row.
      weight_column: name of the feature, or numeric column, with the weight of each row. None if all rows count the same.
      optimizer: an optimizer, its name, or a function that creates it.
      config: see `Estimator`.
      loss_reduction: `"sum_over_batch_size"` or `"sum"`.

    Raises:
      InvalidArgumentError: an argument has the wrong type or value.

    Source: tf.estimator.BaselineRegressor.

    Example:
      >>> import phalanx.estimator as estimator
      >>> model = estimator.BaselineRegressor()
    """

    def __init__(
        self,
        model_dir: str | os.PathLike[str] | None = None,
        label_dimension: int = 1,
        weight_column: WeightColumn = None,
        optimizer: Optimizer = "Ftrl",
        config: RunConfig | None = None,
        loss_reduction: str = "sum_over_batch_size",
    ) -> None:
        head = RegressionHead(label_dimension, weight_column, loss_reduction)
        logits_fn = baseline_logits(head, optimizer)
        super().__init__(head, logits_fn, [], model_dir, config)


@final
class BaselineEstimator(HeadEstimator):
    """Predicts a constant with a head that you choose, and ignores the features. May be created outside all scopes.

    Args:
      head: the loss, the metrics and the predictions.
      model_dir: see `Estimator`.
      optimizer: an optimizer, its name, or a function that creates it.
      config: see `Estimator`.

    Raises:
      InvalidArgumentError: an argument has the wrong type or value.

    Source: tf.estimator.BaselineEstimator.

    Example:
      >>> import phalanx.estimator as estimator
      >>> model = estimator.BaselineEstimator(estimator.RegressionHead())
    """

    def __init__(
        self,
        head: Head,
        model_dir: str | os.PathLike[str] | None = None,
        optimizer: Optimizer = "Ftrl",
        config: RunConfig | None = None,
    ) -> None:
        logits_fn = baseline_logits(head, optimizer)
        super().__init__(head, logits_fn, [], model_dir, config)
