# SPDX-License-Identifier: Apache-2.0
"""The names of TensorFlow 1 that model functions use: a program changes only its import, `from phalanx.estimator import tf1`.

The functions take JAX arrays. The layers are Keras layers.
"""

from numpy import float32, float64, int32, int64

from phalanx import estimator, feature_column, summary
from phalanx.errors.names import suggest_names
from phalanx.estimator import inputs
from phalanx.estimator.loop.graph import identity
from phalanx.estimator.missing import INSTEAD
from phalanx.estimator.tf1 import data, distribute, layers, losses, metrics, nn, tpu, train
from phalanx.typing import PyTree


def group(*updates: PyTree) -> list[PyTree]:
    """Returns several updates as one `train_op`. Call it in a model function.

    Source: tf.group.

    Example:
      >>> from phalanx.estimator import tf1
      >>> tf1.group("first", "second")
      ['first', 'second']
    """
    return list(updates)


suggest_names(__name__, INSTEAD)
