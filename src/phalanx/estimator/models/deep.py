# SPDX-License-Identifier: Apache-2.0
"""`DNNClassifier` and its siblings."""

import os
from collections.abc import Sequence
from typing import final

# The order of arguments in each class is that of dnn.py in tf.estimator: programs pass them by position.
from phalanx.estimator.config import RunConfig
from phalanx.estimator.heads.base import Head, WeightColumn
from phalanx.estimator.heads.regression import RegressionHead
from phalanx.estimator.loop.warm_start import WarmStartSettings
from phalanx.estimator.models.premade import Activation, Columns, HeadEstimator, Optimizer, class_head, dnn_logits
from phalanx.feature_column.names import checked_columns


@final
class DNNClassifier(HeadEstimator):
    """A deep network for classes. May be created outside all scopes.

    Args:
      hidden_units: number of units of each hidden layer.
      feature_columns: the model's inputs, as feature columns.
      model_dir: see `Estimator`.
      n_classes: number of classes.
      weight_column: name of the feature, or numeric column, with the weight of each row. None if all rows count the same.
      label_vocabulary: list of the classes, if labels are strings.
      optimizer: an optimizer, its name, or a function that creates it.
      activation_fn: activation function of the hidden layers.
      dropout: fraction of units to drop in each step. None to drop none.
      config: see `Estimator`.
      warm_start_from: see `Estimator`.
      loss_reduction: `"sum_over_batch_size"` or `"sum"`.
      batch_norm: whether to add BatchNormalization after each hidden layer.

    Raises:
      InvalidArgumentError: an argument has the wrong type or value.

    Source: tf.estimator.DNNClassifier.

    Example:
      >>> import phalanx.estimator as estimator
      >>> from phalanx import feature_column
      >>> model = estimator.DNNClassifier([8], [feature_column.numeric_column("x")], n_classes=3)
    """

    def __init__(
        self,
        hidden_units: Sequence[int],
        feature_columns: Columns,
        model_dir: str | os.PathLike[str] | None = None,
        n_classes: int = 2,
        weight_column: WeightColumn = None,
        label_vocabulary: Sequence[str] | None = None,
        optimizer: Optimizer = "Adagrad",
        activation_fn: Activation = "relu",
        dropout: float | None = None,
        config: RunConfig | None = None,
        warm_start_from: str | WarmStartSettings | None = None,
        loss_reduction: str = "sum_over_batch_size",
        batch_norm: bool = False,
    ) -> None:
        head = class_head(n_classes, weight_column, label_vocabulary, loss_reduction)
        columns = checked_columns(feature_columns)
        logits_fn = dnn_logits(head, hidden_units, columns, optimizer, activation_fn, dropout, batch_norm)
        super().__init__(head, logits_fn, columns, model_dir, config, warm_start_from)


@final
class DNNRegressor(HeadEstimator):
    """A deep network for numbers. May be created outside all scopes.

    Args:
      hidden_units: number of units of each hidden layer.
      feature_columns: the model's inputs, as feature columns.
      model_dir: see `Estimator`.
      label_dimension: number of values per row.
      weight_column: name of the feature, or numeric column, with the weight of each row. None if all rows count the same.
      optimizer: an optimizer, its name, or a function that creates it.
      activation_fn: activation function of the hidden layers.
      dropout: fraction of units to drop in each step. None to drop none.
      config: see `Estimator`.
      warm_start_from: see `Estimator`.
      loss_reduction: `"sum_over_batch_size"` or `"sum"`.
      batch_norm: whether to add BatchNormalization after each hidden layer.

    Raises:
      InvalidArgumentError: an argument has the wrong type or value.

    Source: tf.estimator.DNNRegressor.

    Example:
      >>> import phalanx.estimator as estimator
      >>> from phalanx import feature_column
      >>> model = estimator.DNNRegressor([8], [feature_column.numeric_column("x")])
    """

    def __init__(
        self,
        hidden_units: Sequence[int],
        feature_columns: Columns,
        model_dir: str | os.PathLike[str] | None = None,
        label_dimension: int = 1,
        weight_column: WeightColumn = None,
        optimizer: Optimizer = "Adagrad",
        activation_fn: Activation = "relu",
        dropout: float | None = None,
        config: RunConfig | None = None,
        warm_start_from: str | WarmStartSettings | None = None,
        loss_reduction: str = "sum_over_batch_size",
        batch_norm: bool = False,
    ) -> None:
        head = RegressionHead(label_dimension, weight_column, loss_reduction)
        columns = checked_columns(feature_columns)
        logits_fn = dnn_logits(head, hidden_units, columns, optimizer, activation_fn, dropout, batch_norm)
        super().__init__(head, logits_fn, columns, model_dir, config, warm_start_from)


@final
class DNNEstimator(HeadEstimator):
    """A deep network with a head that you choose. May be created outside all scopes.

    Args:
      head: the loss, the metrics and the predictions.
      hidden_units: number of units of each hidden layer.
      feature_columns: the model's inputs, as feature columns.
      model_dir: see `Estimator`.
      optimizer: an optimizer, its name, or a function that creates it.
      activation_fn: activation function of the hidden layers.
      dropout: fraction of units to drop in each step. None to drop none.
      config: see `Estimator`.
      warm_start_from: see `Estimator`.
      batch_norm: whether to add BatchNormalization after each hidden layer.

    Raises:
      InvalidArgumentError: an argument has the wrong type or value.

    Source: tf.estimator.DNNEstimator.

    Example:
      >>> import phalanx.estimator as estimator
      >>> from phalanx import feature_column
      >>> model = estimator.DNNEstimator(estimator.BinaryClassHead(), [8], [feature_column.numeric_column("x")])
    """

    def __init__(
        self,
        head: Head,
        hidden_units: Sequence[int],
        feature_columns: Columns,
        model_dir: str | os.PathLike[str] | None = None,
        optimizer: Optimizer = "Adagrad",
        activation_fn: Activation = "relu",
        dropout: float | None = None,
        config: RunConfig | None = None,
        warm_start_from: str | WarmStartSettings | None = None,
        batch_norm: bool = False,
    ) -> None:
        columns = checked_columns(feature_columns)
        logits_fn = dnn_logits(head, hidden_units, columns, optimizer, activation_fn, dropout, batch_norm)
        super().__init__(head, logits_fn, columns, model_dir, config, warm_start_from)
