# SPDX-License-Identifier: Apache-2.0
"""`DNNLinearCombinedClassifier` and its siblings."""

import os
from collections.abc import Sequence
from typing import final

# The order of arguments in each class is that of dnn_linear_combined.py in
# tf.estimator: programs pass them by position.
from phalanx.estimator.config import RunConfig
from phalanx.estimator.heads.base import Head, WeightColumn
from phalanx.estimator.heads.regression import RegressionHead
from phalanx.estimator.loop.warm_start import WarmStartSettings
from phalanx.estimator.models.premade import Activation, Columns, HeadEstimator, Optimizer, class_head, combined_logits


@final
class DNNLinearCombinedClassifier(HeadEstimator):
    """A linear model and a deep network for classes, trained together. May be created outside all scopes.

    Args:
      model_dir: see `Estimator`.
      linear_feature_columns: feature columns of the linear part.
      linear_optimizer: optimizer of the linear part.
      dnn_feature_columns: feature columns of the deep part.
      dnn_optimizer: optimizer of the deep part.
      dnn_hidden_units: number of units of each hidden layer.
      dnn_activation_fn: activation function of the hidden layers.
      dnn_dropout: fraction of units to drop in each step. None to drop none.
      n_classes: number of classes.
      weight_column: name of the feature, or numeric column, with the weight of each row. None if all rows count the same.
      label_vocabulary: list of the classes, if labels are strings.
      config: see `Estimator`.
      warm_start_from: see `Estimator`.
      loss_reduction: `"sum_over_batch_size"` or `"sum"`.
      batch_norm: whether to add BatchNormalization after each hidden layer.
      linear_sparse_combiner: how to combine the weights of several categories in one feature.

    Raises:
      InvalidArgumentError: an argument has the wrong type or value.

    Source: tf.estimator.DNNLinearCombinedClassifier.

    Example:
      >>> import phalanx.estimator as estimator
      >>> from phalanx import feature_column
      >>> model = estimator.DNNLinearCombinedClassifier(linear_feature_columns=[feature_column.numeric_column("x")])
    """

    def __init__(
        self,
        model_dir: str | os.PathLike[str] | None = None,
        linear_feature_columns: Columns = None,
        linear_optimizer: Optimizer = "Ftrl",
        dnn_feature_columns: Columns = None,
        dnn_optimizer: Optimizer = "Adagrad",
        dnn_hidden_units: Sequence[int] | None = None,
        dnn_activation_fn: Activation = "relu",
        dnn_dropout: float | None = None,
        n_classes: int = 2,
        weight_column: WeightColumn = None,
        label_vocabulary: Sequence[str] | None = None,
        config: RunConfig | None = None,
        warm_start_from: str | WarmStartSettings | None = None,
        loss_reduction: str = "sum_over_batch_size",
        batch_norm: bool = False,
        linear_sparse_combiner: str = "sum",
    ) -> None:
        head = class_head(n_classes, weight_column, label_vocabulary, loss_reduction)
        logits_fn, columns = combined_logits(
            head,
            (linear_feature_columns, linear_optimizer, linear_sparse_combiner),
            (dnn_feature_columns, dnn_optimizer, dnn_hidden_units, dnn_activation_fn, dnn_dropout, batch_norm),
        )
        super().__init__(head, logits_fn, columns, model_dir, config, warm_start_from)


@final
class DNNLinearCombinedRegressor(HeadEstimator):
    """A linear model and a deep network for numbers, trained together. May be created outside all scopes.

    Args:
      model_dir: see `Estimator`.
      linear_feature_columns: feature columns of the linear part.
      linear_optimizer: optimizer of the linear part.
      dnn_feature_columns: feature columns of the deep part.
      dnn_optimizer: optimizer of the deep part.
      dnn_hidden_units: number of units of each hidden layer.
      dnn_activation_fn: activation function of the hidden layers.
      dnn_dropout: fraction of units to drop in each step. None to drop none.
      label_dimension: number of values per row.
      weight_column: name of the feature, or numeric column, with the weight of each row. None if all rows count the same.
      config: see `Estimator`.
      warm_start_from: see `Estimator`.
      loss_reduction: `"sum_over_batch_size"` or `"sum"`.
      batch_norm: whether to add BatchNormalization after each hidden layer.
      linear_sparse_combiner: how to combine the weights of several categories in one feature.

    Raises:
      InvalidArgumentError: an argument has the wrong type or value.

    Source: tf.estimator.DNNLinearCombinedRegressor.

    Example:
      >>> import phalanx.estimator as estimator
      >>> from phalanx import feature_column
      >>> model = estimator.DNNLinearCombinedRegressor(linear_feature_columns=[feature_column.numeric_column("x")])
    """

    def __init__(
        self,
        model_dir: str | os.PathLike[str] | None = None,
        linear_feature_columns: Columns = None,
        linear_optimizer: Optimizer = "Ftrl",
        dnn_feature_columns: Columns = None,
        dnn_optimizer: Optimizer = "Adagrad",
        dnn_hidden_units: Sequence[int] | None = None,
        dnn_activation_fn: Activation = "relu",
        dnn_dropout: float | None = None,
        label_dimension: int = 1,
        weight_column: WeightColumn = None,
        config: RunConfig | None = None,
        warm_start_from: str | WarmStartSettings | None = None,
        loss_reduction: str = "sum_over_batch_size",
        batch_norm: bool = False,
        linear_sparse_combiner: str = "sum",
    ) -> None:
        head = RegressionHead(label_dimension, weight_column, loss_reduction)
        logits_fn, columns = combined_logits(
            head,
            (linear_feature_columns, linear_optimizer, linear_sparse_combiner),
            (dnn_feature_columns, dnn_optimizer, dnn_hidden_units, dnn_activation_fn, dnn_dropout, batch_norm),
        )
        super().__init__(head, logits_fn, columns, model_dir, config, warm_start_from)


@final
class DNNLinearCombinedEstimator(HeadEstimator):
    """A linear model and a deep network with a head that you choose. May be created outside all scopes.

    Args:
      head: the loss, the metrics and the predictions.
      model_dir: see `Estimator`.
      linear_feature_columns: feature columns of the linear part.
      linear_optimizer: optimizer of the linear part.
      dnn_feature_columns: feature columns of the deep part.
      dnn_optimizer: optimizer of the deep part.
      dnn_hidden_units: number of units of each hidden layer.
      dnn_activation_fn: activation function of the hidden layers.
      dnn_dropout: fraction of units to drop in each step. None to drop none.
      config: see `Estimator`.
      batch_norm: whether to add BatchNormalization after each hidden layer.
      linear_sparse_combiner: how to combine the weights of several categories in one feature.

    Raises:
      InvalidArgumentError: an argument has the wrong type or value.

    Source: tf.estimator.DNNLinearCombinedEstimator.

    Example:
      >>> import phalanx.estimator as estimator
      >>> from phalanx import feature_column
      >>> model = estimator.DNNLinearCombinedEstimator(
      ...     estimator.BinaryClassHead(), linear_feature_columns=[feature_column.numeric_column("x")]
      ... )
    """

    def __init__(
        self,
        head: Head,
        model_dir: str | os.PathLike[str] | None = None,
        linear_feature_columns: Columns = None,
        linear_optimizer: Optimizer = "Ftrl",
        dnn_feature_columns: Columns = None,
        dnn_optimizer: Optimizer = "Adagrad",
        dnn_hidden_units: Sequence[int] | None = None,
        dnn_activation_fn: Activation = "relu",
        dnn_dropout: float | None = None,
        config: RunConfig | None = None,
        batch_norm: bool = False,
        linear_sparse_combiner: str = "sum",
    ) -> None:
        logits_fn, columns = combined_logits(
            head,
            (linear_feature_columns, linear_optimizer, linear_sparse_combiner),
            (dnn_feature_columns, dnn_optimizer, dnn_hidden_units, dnn_activation_fn, dnn_dropout, batch_norm),
        )
        super().__init__(head, logits_fn, columns, model_dir, config)
