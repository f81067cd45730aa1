# SPDX-License-Identifier: Apache-2.0
"""The public names of `tf.estimator.export`: what an exported model receives."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, final

import jax
import numpy as np
from numpy.typing import DTypeLike

from phalanx.errors import InvalidArgumentError, shown
from phalanx.errors.names import suggest_names
from phalanx.estimator.missing import INSTEAD
from phalanx.typing import PyTree

__all__ = ["ServingInputReceiver", "build_parsing_serving_input_receiver_fn", "build_raw_serving_input_receiver_fn"]


@final
@dataclass(frozen=True)
class ServingInputReceiver:
    """The features that an exported model receives. May be created in any context.

    Args:
      features: array, or dict of arrays, (rows, ...), with text where the feature is text. Only shapes and dtypes count, without
        the number of rows.
      receiver_tensors: must be None or equal to `features`, because an exported model receives the features themselves.
      receiver_tensors_alternatives: must be None.

    Raises:
      InvalidArgumentError: `features` are not arrays, or another argument is not supported.

    Source: tf.estimator.export.ServingInputReceiver.

    Example:
      >>> import numpy as np
      >>> import phalanx.estimator as estimator
      >>> receiver = estimator.export.ServingInputReceiver({"x": np.zeros((1, 4), "float32")})
    """

    features: PyTree
    receiver_tensors: PyTree = None
    receiver_tensors_alternatives: None = None

    def __post_init__(self) -> None:
        leaves = jax.tree.leaves(self.features)
        # The first dim is the rows, which become symbolic. A scalar has none to make symbolic.
        if not leaves or not all(np.ndim(x) for x in leaves):
            raise InvalidArgumentError(
                f"features={shown(self.features)}", "must be arrays with rows.", '{"x": np.zeros((1, 4), "float32")}'
            )
        # TensorFlow parses receiver_tensors into features. Equal ones need no
        # parsing, and many programs pass the features twice.
        if self.receiver_tensors is not None and _specs(self.receiver_tensors) != _specs(self.features):
            raise InvalidArgumentError(
                f"receiver_tensors={shown(self.receiver_tensors)}",
                "an exported model receives the features themselves.",
                "ServingInputReceiver(features)",
            )
        if self.receiver_tensors_alternatives is not None:
            raise InvalidArgumentError(
                f"receiver_tensors_alternatives={shown(self.receiver_tensors_alternatives)}",
                "an exported model receives the features themselves.",
                "omit it",
            )


def _specs(tree: PyTree) -> tuple[Any, list[Any]]:
    """Returns the structure, the shapes and the dtypes of arrays."""
    arrays = [np.asarray(x) for x in jax.tree.leaves(tree)]
    return jax.tree.structure(tree), [(x.shape, x.dtype) for x in arrays]


def build_raw_serving_input_receiver_fn(
    features: Mapping[str, Any], default_batch_size: int | None = None
) -> Callable[[], ServingInputReceiver]:
    """Returns a function for `export_saved_model`, for a model that receives these features. May be called in any context.

    Args:
      features: dict of arrays (rows, ...), or of scalars for (rows,). Only shapes and dtypes count, without the number of rows.
      default_batch_size: has no effect, because an exported model takes any number of rows.

    Raises:
      InvalidArgumentError: `features` is not a dict.

    Source: tf.estimator.export.build_raw_serving_input_receiver_fn.

    Example:
      >>> import numpy as np
      >>> import phalanx.estimator as estimator
      >>> receiver_fn = estimator.export.build_raw_serving_input_receiver_fn({"x": np.zeros((1, 4), "float32")})
    """
    if not isinstance(features, Mapping):
        raise InvalidArgumentError(f"features={shown(features)}", "must be a dict of arrays.", '{"x": x[:1]}')
    # A scalar stands for (rows,): the example of one row that users have at hand.
    return lambda: ServingInputReceiver({name: np.atleast_1d(x) for name, x in features.items()})


def build_parsing_serving_input_receiver_fn(
    feature_spec: Mapping[str, Any], default_batch_size: int | None = None
) -> Callable[[], ServingInputReceiver]:
    """Returns a function for `export_saved_model`, from the shapes and dtypes of features. May be called in any context.

    The exported model receives a dict of arrays, and not serialized examples.

    Args:
      feature_spec: dict from names to objects with `shape` (of one row) and `dtype`, such as `jax.ShapeDtypeStruct`.
      default_batch_size: has no effect, because an exported model takes any number of rows.

    Raises:
      InvalidArgumentError: `feature_spec` is something else.

    Source: tf.estimator.export.build_parsing_serving_input_receiver_fn.

    Example:
      >>> import jax, phalanx
      >>> import phalanx.estimator as estimator
      >>> receiver_fn = estimator.export.build_parsing_serving_input_receiver_fn({"x": jax.ShapeDtypeStruct((4,), "float32")})
    """
    ok = isinstance(feature_spec, Mapping) and all(
        hasattr(x, "shape") and hasattr(x, "dtype") for x in feature_spec.values()
    )
    if not ok:
        raise InvalidArgumentError(
            f"feature_spec={shown(feature_spec)}",
            "must be a dict of shapes and dtypes.",
            '{"x": jax.ShapeDtypeStruct((4,), "float32")}',
        )
    # One row of zeros or of empty text: only the shapes and dtypes count.
    examples = {
        name: np.full((1, *spec.shape), "", object) if is_text(spec.dtype) else np.zeros((1, *spec.shape), spec.dtype)
        for name, spec in feature_spec.items()
    }
    return lambda: ServingInputReceiver(examples)


def is_text(dtype: DTypeLike) -> bool:
    """Returns whether arrays of a dtype contain text, which no device holds."""
    # O: pandas and NumPy hold text of any length as objects.
    return np.dtype(dtype).kind in "OSU"


suggest_names(__name__, INSTEAD)
