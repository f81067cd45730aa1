# SPDX-License-Identifier: Apache-2.0
"""Names of `tf.compat.v1.tpu` that model functions of a `TPUEstimator` use."""

from typing import TypeVar

from phalanx.errors import InvalidArgumentError, shown
from phalanx.estimator.tf1.losses import Reduction

T = TypeVar("T")


def CrossShardOptimizer(opt: T, reduction: str = Reduction.MEAN, group_assignment: None = None) -> T:
    """Returns the optimizer itself, because a strategy averages gradients over its replicas. May be called in any context.

    Args:
      opt: the optimizer.
      reduction: must be `losses.Reduction.MEAN`.
      group_assignment: must be None.

    Raises:
      InvalidArgumentError: an argument is not supported.

    Source: tf.compat.v1.tpu.CrossShardOptimizer.

    Example:
      >>> from phalanx.estimator import tf1
      >>> optimizer = tf1.tpu.CrossShardOptimizer(tf1.train.AdagradOptimizer(0.05))
    """
    # SUM would need a loss that the model function has divided by itself. Nothing here could check that.
    if reduction != Reduction.MEAN or group_assignment is not None:
        raise InvalidArgumentError(
            f"CrossShardOptimizer(reduction={shown(reduction)}, group_assignment={shown(group_assignment)})",
            "gradients are averaged over all replicas.",
            "CrossShardOptimizer(optimizer)",
        )
    return opt
