# SPDX-License-Identifier: Apache-2.0
"""Columns of numbers: `numeric_column` and `bucketized_column`."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from typing_extensions import override

from phalanx.errors import InvalidArgumentError, arguments, shown
from phalanx.feature_column.base import (
    AbstractCategoricalColumn,
    AbstractDenseColumn,
    AbstractInput,
    AbstractRawInput,
    Occurrences,
    Table,
)
from phalanx.feature_column.names import checked_key, dtype_name
from phalanx.feature_column.raw import A, Feature, numbers_of, on_host
from phalanx.typing import PyTree


@keras.saving.register_keras_serializable(package="phalanx")
@dataclass(frozen=True)
class NumericColumn(AbstractDenseColumn, AbstractRawInput):
    """The numbers of one feature."""

    key: str
    shape: tuple[int, ...]
    dtype: str
    normalizer_fn: Callable[[Any], Any] | None

    @property
    @override
    def name(self) -> str:
        return self.key

    @property
    @override
    def width(self) -> int:
        return math.prod(self.shape)

    @override
    def inputs(self) -> Iterator[AbstractInput]:
        yield self

    @override
    def array(self, features: Mapping[str, PyTree]) -> Feature:
        feature = numbers_of(features, self.key, self.dtype)
        # Only the size is compared: (rows, 4) and (rows, 2, 2) hold the same
        # numbers, and TensorFlow reshapes them as well.
        if math.prod(feature.shape[1:]) != self.width:
            raise InvalidArgumentError(
                f"the feature {self.key!r} of shape {tuple(feature.shape)}",
                f"its column has the shape {self.shape} per row.",
                f"numeric_column({self.key!r}, shape={tuple(feature.shape[1:])})",
            )
        return feature.reshape(len(feature), *self.shape) if isinstance(feature, np.ndarray) else feature

    @override
    def rows(self, prepared: Mapping[str, Any], tables: Mapping[Table, jax.Array]) -> jax.Array:
        feature = jnp.asarray(prepared[self.key])
        # The dtype of the column is for the normalizer. All dense columns are
        # concatenated, and TensorFlow does so in float32.
        return jnp.asarray(self.normalized(feature), jnp.float32).reshape(feature.shape[0], self.width)

    def normalized(self, feature: A) -> A:
        """Returns a feature, normalized."""
        feature = feature.reshape(feature.shape[0], *self.shape)
        return feature if self.normalizer_fn is None else self.normalizer_fn(feature)


@keras.saving.register_keras_serializable(package="phalanx")
@dataclass(frozen=True)
class BucketizedColumn(AbstractDenseColumn, AbstractCategoricalColumn):
    """The ranges that the numbers of one feature are in."""

    source_column: NumericColumn
    boundaries: tuple[float, ...]

    @property
    @override
    def name(self) -> str:
        return f"{self.source_column.name}_bucketized"

    @property
    @override
    def num_buckets(self) -> int:
        return self.source_column.width * (len(self.boundaries) + 1)

    @property
    @override
    def width(self) -> int:
        return self.num_buckets

    @override
    def inputs(self) -> Iterator[AbstractInput]:
        yield self.source_column

    @override
    def ids(self, prepared: Mapping[str, Any]) -> jax.Array:
        ids: jax.Array = self._ids(self.source_column.rows(prepared, {}), jnp)
        return ids

    @override
    def occurrences(self, features: Mapping[str, Any]) -> Occurrences:
        column = self.source_column
        # Only a cross asks for buckets on the host. The normalizer must then run there, too.
        numbers = np.asarray(column.normalized(on_host(column.array(features), column.key)), np.float32)
        ids = self._ids(numbers.reshape(len(numbers), column.width), np)
        return Occurrences(ids.astype(np.int64), np.ones(ids.shape, bool))

    def _ids(self, numbers: Any, numpy: Any) -> Any:
        """Returns the ids, computed by NumPy on the host or by JAX in a program. Each place of a row has its own ids."""
        # The right side puts a boundary into the bucket above it, as tf.raw_ops.Bucketize does.
        buckets = numpy.searchsorted(numpy.asarray(self.boundaries, np.float32), numbers, side="right")
        return buckets.astype(np.int32) + numpy.arange(numbers.shape[1], dtype=np.int32) * (len(self.boundaries) + 1)

    @override
    def rows(self, prepared: Mapping[str, Any], tables: Mapping[Table, jax.Array]) -> jax.Array:
        # Ids of different places differ, so that the sum is a row of ones and zeros.
        return jax.nn.one_hot(self.ids(prepared), self.num_buckets).sum(axis=1)


def numeric_column(
    key: str,
    shape: int | Sequence[int] = (1,),
    *,
    dtype: PyTree = "float32",
    normalizer_fn: Callable[[Any], Any] | None = None,
) -> NumericColumn:
    """Returns a column of the numbers of a feature. May be called in any context.

    Args:
      key: name of the feature.
      shape: shape of a row of the feature.
      dtype: integer or float dtype in which `normalizer_fn` gets the values. The column itself is float32.
      normalizer_fn: function of the batch, called in the program. It may use jax.numpy and keras.ops.

    Raises:
      InvalidArgumentError: an argument has the wrong type, or a dim is not positive.

    Source: tf.feature_column.numeric_column. The default for absent features is missing, because no examples are parsed.

    Example:
      >>> import phalanx
      >>> age = phalanx.feature_column.numeric_column("age", normalizer_fn=lambda x: (x - 40) / 10)
      >>> phalanx.feature_column.DenseFeatures([age])({"age": [30, 60]}).tolist()
      [[-1.0], [2.0]]
    """
    key, kind = checked_key(key), dtype_name(dtype)
    # TensorFlow allows neither bool nor complex for a numeric_column.
    if np.dtype(kind).kind not in "iuf":
        raise InvalidArgumentError(
            f"numeric_column({key!r}, dtype={shown(dtype)})", "must be an integer or float dtype.", 'dtype="float32"'
        )
    dims = tuple(shape) if isinstance(shape, (tuple, list)) else (shape,)
    dims = tuple(arguments.integer("shape", dim, kind="positive integers", hint="shape=(1,)") for dim in dims)
    if normalizer_fn is not None:
        arguments.function("normalizer_fn", normalizer_fn, "normalizer_fn=lambda x: (x - mean) / std")
    return NumericColumn(key, dims, kind, normalizer_fn)


def bucketized_column(source_column: NumericColumn, boundaries: Sequence[float]) -> BucketizedColumn:
    """Returns a column of the ranges that the numbers of a feature are in. May be called in any context.

    Bucket i has the numbers from `boundaries[i - 1]` to below `boundaries[i]`.

    Args:
      source_column: the column of `numeric_column`, with one dim at most.
      boundaries: the boundaries in increasing order.

    Raises:
      InvalidArgumentError: the source is another column or has more dims, or the boundaries do not increase.

    Source: tf.feature_column.bucketized_column.

    Example:
      >>> import phalanx
      >>> age = phalanx.feature_column.numeric_column("age")
      >>> ages = phalanx.feature_column.bucketized_column(age, [18, 65])
      >>> phalanx.feature_column.DenseFeatures([ages])({"age": [17, 18, 70]}).tolist()
      [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    """
    hint = 'bucketized_column(numeric_column("age"), [18, 65])'
    if not isinstance(source_column, NumericColumn) or len(source_column.shape) > 1:
        raise InvalidArgumentError(
            f"source_column={shown(source_column)}", "must be a numeric_column with one dim at most.", hint
        )
    is_list = isinstance(boundaries, (list, tuple, np.ndarray)) and getattr(boundaries, "ndim", 1) == 1
    is_list = is_list and not isinstance(boundaries, np.ma.MaskedArray) and all(np.ndim(x) == 0 for x in boundaries)
    numbers = np.asarray(boundaries) if is_list else np.zeros(0)
    if not len(numbers) or numbers.dtype.kind not in "iuf" or not (numbers[:-1] < numbers[1:]).all():
        raise InvalidArgumentError(f"boundaries={shown(boundaries)}", "must be numbers in increasing order.", hint)
    return BucketizedColumn(source_column, tuple(numbers.tolist()))
