# SPDX-License-Identifier: Apache-2.0
"""`LinearClassifier` and its siblings."""

import os
from collections.abc import Sequence
from typing import final

# The order of arguments in each class is that of linear.py in tf.estimator: programs pass them by position.
from phalanx.estimator.config import RunConfig
from phalanx.estimator.heads.base import Head, WeightColumn
from phalanx.estimator.heads.regression import RegressionHead
from phalanx.estimator.loop.warm_start import WarmStartSettings
from phalanx.estimator.models.premade import Columns, HeadEstimator, Optimizer, class_head, linear_logits
from phalanx.feature_column.names import checked_columns


@final
class LinearClassifier(HeadEstimator):
    """A linear model for classes. May be created outside all scopes.

    Args:
      feature_columns: the model's inputs, as feature columns.
      model_dir: see `Estimator`.
      n_classes: number of classes.
      weight_column: name of the feature, or numeric column, with the weight of each row. None if all rows count the same.
      label_vocabulary: list of the classes, if labels are strings.
      optimizer: an optimizer, its name, or a function that creates it.
      config: see `Estimator`.
      warm_start_from: see `Estimator`.
      loss_reduction: `"sum_over_batch_size"` or `"sum"`.
      sparse_combiner: how to combine the weights of several categories in one feature: `"sum"`, `"mean"` or `"sqrtn"`.

    Raises:
      InvalidArgumentError: an argument has the wrong type or value.

    Source: tf.estimator.LinearClassifier.

    Example:
      >>> import phalanx.estimator as estimator
      >>> from phalanx import feature_column
      >>> model = estimator.LinearClassifier([feature_column.numeric_column("x")])
    """

    def __init__(
        self,
        feature_columns: Columns,
        model_dir: str | os.PathLike[str] | None = None,
        n_classes: int = 2,
        weight_column: WeightColumn = None,
        label_vocabulary: Sequence[str] | None = None,
        optimizer: Optimizer = "Ftrl",
        config: RunConfig | None = None,
        warm_start_from: str | WarmStartSettings | None = None,
        loss_reduction: str = "sum_over_batch_size",
        sparse_combiner: str = "sum",
    ) -> None:
        head = class_head(n_classes, weight_column, label_vocabulary, loss_reduction)
        columns = checked_columns(feature_columns)
        logits_fn = linear_logits(head, columns, optimizer, sparse_combiner)
        super().__init__(head, logits_fn, columns, model_dir, config, warm_start_from)


@final
class LinearRegressor(HeadEstimator):
    """A linear model for numbers. May be created outside all scopes.

    Args:
      feature_columns: the model's inputs, as feature columns.
      model_dir: see `Estimator`.
      label_dimension: number of values per row.
      weight_column: name of the feature, or numeric column, with the weight of each row. None if all rows count the same.
      optimizer: an optimizer, its name, or a function that creates it.
      config: see `Estimator`.
      warm_start_from: see `Estimator`.
      loss_reduction: `"sum_over_batch_size"` or `"sum"`.
      sparse_combiner: how to combine the weights of several categories in one feature: `"sum"`, `"mean"` or `"sqrtn"`.

    Raises:
      InvalidArgumentError: an argument has the wrong type or value.

    Source: tf.estimator.LinearRegressor.

    Example:
      >>> import phalanx.estimator as estimator
      >>> from phalanx import feature_column
      >>> model = estimator.LinearRegressor([feature_column.numeric_column("x")])
    """

    def __init__(
        self,
        feature_columns: Columns,
        model_dir: str | os.PathLike[str] | None = None,
        label_dimension: int = 1,
        weight_column: WeightColumn = None,
        optimizer: Optimizer = "Ftrl",
        config: RunConfig | None = None,
        warm_start_from: str | WarmStartSettings | None = None,
        loss_reduction: str = "sum_over_batch_size",
        sparse_combiner: str = "sum",
    ) -> None:
        head = RegressionHead(label_dimension, weight_column, loss_reduction)
        columns = checked_columns(feature_columns)
        logits_fn = linear_logits(head, columns, optimizer, sparse_combiner)
        super().__init__(head, logits_fn, columns, model_dir, config, warm_start_from)


@final
class LinearEstimator(HeadEstimator):
    """A linear model with a head that you choose. May be created outside all scopes.

    Args:
      head: the loss, the metrics and the predictions.
      feature_columns: the model's inputs, as feature columns.
      model_dir: see `Estimator`.
      optimizer: an optimizer, its name, or a function that creates it.
      config: see `Estimator`.
      sparse_combiner: how to combine the weights of several categories in one feature: `"sum"`, `"mean"` or `"sqrtn"`.
      warm_start_from: see `Estimator`.

    Raises:
      InvalidArgumentError: an argument has the wrong type or value.

    Source: tf.estimator.LinearEstimator.

    Example:
      >>> import phalanx.estimator as estimator
      >>> from phalanx import feature_column
      >>> model = estimator.LinearEstimator(estimator.RegressionHead(), [feature_column.numeric_column("x")])
    """

    def __init__(
        self,
        head: Head,
        feature_columns: Columns,
        model_dir: str | os.PathLike[str] | None = None,
        optimizer: Optimizer = "Ftrl",
        config: RunConfig | None = None,
        sparse_combiner: str = "sum",
        warm_start_from: str | WarmStartSettings | None = None,
    ) -> None:
        columns = checked_columns(feature_columns)
        logits_fn = linear_logits(head, columns, optimizer, sparse_combiner)
        super().__init__(head, logits_fn, columns, model_dir, config, warm_start_from)
