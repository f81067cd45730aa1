# SPDX-License-Identifier: Apache-2.0
"""Columns of categories: integers, words of a vocabulary, and hashes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import keras
import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from phalanx.errors import InvalidArgumentError, arguments
from phalanx.feature_column.base import MISSING, AbstractHostColumn, Occurrences
from phalanx.feature_column.fingerprint import fingerprint64
from phalanx.feature_column.names import checked_buckets, checked_key, kind_of
from phalanx.feature_column.raw import (
    INTEGER,
    TEXT,
    by_unique,
    categories_of,
    encoded,
    in_columns,
    is_integer,
    is_symbolic,
)
from phalanx.typing import PyTree


class AbstractKeyedColumn(AbstractHostColumn):
    """A column of one feature, which names it."""

    key: str

    @property
    @override
    def name(self) -> str:
        return self.key

    @property
    @override
    def keys(self) -> tuple[str, ...]:
        return (self.key,)

    def present(self, features: Mapping[str, Any], kind: str) -> Occurrences:
        """Returns the raw values. "" and -1 are missing ones."""
        values = categories_of(features, self.key, kind)
        return Occurrences(values, np.asarray(values != ("" if kind == TEXT else MISSING), bool))


@keras.saving.register_keras_serializable(package="phalanx")
@dataclass(frozen=True)
class IdentityColumn(AbstractKeyedColumn):
    """Integers that are ids."""

    key: str
    number_buckets: int
    default_value: int | None

    kind: ClassVar[str] = "identity"

    @property
    @override
    def num_buckets(self) -> int:
        return self.number_buckets

    @override
    def add_to(self, prepared: dict[str, Any], features: Mapping[str, Any]) -> None:
        raw: PyTree = features.get(self.key)
        # Integers that are ids already need no host. Everything else about them is checked in the program.
        if self.prepared_key not in features and is_symbolic(raw) and is_integer(raw):
            prepared[self.key] = raw
        else:
            super().add_to(prepared, features)

    @override
    def occurrences(self, features: Mapping[str, Any]) -> Occurrences:
        values, is_present = self.present(features, INTEGER)
        if self.default_value is not None:
            # With a default, TensorFlow replaces every id that is out of range, including a negative one.
            is_valid = (values >= 0) & (values < self.num_buckets)
            return Occurrences(np.where(is_valid, values, self.default_value), is_present)
        if (values >= self.num_buckets).any():
            raise InvalidArgumentError(
                f"the feature {self.key!r} with the value {values.max()}",
                f"its column has the ids 0 to {self.num_buckets - 1}.",
                f"categorical_column_with_identity({self.key!r}, {values.max() + 1}), or a default_value",
            )
        return Occurrences(values, is_present)

    @override
    def ids(self, prepared: Mapping[str, Any]) -> jax.Array:
        if self.prepared_key in prepared:
            return super().ids(prepared)
        # A program cannot raise an error for an id that is too large, so that such an id is missing.
        values = in_columns(jnp.asarray(prepared[self.key]))
        default = MISSING if self.default_value is None else self.default_value
        is_kept = ((values >= 0) & (values < self.num_buckets)) | (values == MISSING)
        return jnp.where(is_kept, values, default).astype(jnp.int32)


@keras.saving.register_keras_serializable(package="phalanx")
@dataclass(frozen=True)
class HashedColumn(AbstractKeyedColumn):
    """Hashes of strings, or of integers as decimal strings."""

    key: str
    hash_bucket_size: int
    dtype: str

    kind: ClassVar[str] = "hashed"

    @property
    @override
    def num_buckets(self) -> int:
        return self.hash_bucket_size

    @override
    def occurrences(self, features: Mapping[str, Any]) -> Occurrences:
        values, is_present = self.present(features, self.dtype)
        # An empty string is hashed by TensorFlow's op, but it never gets there: it marks a missing value.
        return Occurrences(by_unique(values, lambda words: hashed(words, self.hash_bucket_size).tolist()), is_present)


def hashed(words: list[Any], num_buckets: int) -> NDArray[np.int64]:
    """Returns the id of each string, or of each integer as a decimal string."""
    # The modulo is unsigned, as in TensorFlow. After the cast, half of the
    # hashes would be negative, with other remainders.
    ids: NDArray[np.int64] = (fingerprint64([encoded(str(word)) for word in words]) % num_buckets).astype(np.int64)
    return ids


def categorical_column_with_identity(key: str, num_buckets: int, default_value: int | None = None) -> IdentityColumn:
    """Returns a column of integers that are ids. May be called in any context.

    The value -1 is a missing one, and other negative values count for nothing. A value that is too large is an error.

    Args:
      key: name of the feature.
      num_buckets: number of ids, which are 0 to `num_buckets - 1`.
      default_value: id of all other integers but -1.

    Raises:
      InvalidArgumentError: an argument has the wrong type, or a number is out of range.

    Source: tf.feature_column.categorical_column_with_identity.

    Example:
      >>> from phalanx import feature_column
      >>> kind = feature_column.categorical_column_with_identity("kind", 3)
      >>> feature_column.DenseFeatures([feature_column.indicator_column(kind)])({"kind": [0, 2]}).tolist()
      [[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]
    """
    key, num_buckets = checked_key(key), checked_buckets("num_buckets", num_buckets)
    if default_value is not None:
        kind = f"None or an integer from 0 to {num_buckets - 1}"
        default_value = arguments.integer("default_value", default_value, least=0, most=num_buckets - 1, kind=kind)
    return IdentityColumn(key, num_buckets, default_value)


def categorical_column_with_hash_bucket(key: str, hash_bucket_size: int, dtype: PyTree = "string") -> HashedColumn:
    """Returns a column of hashes, of strings or integers. May be called in any context.

    The hash is TensorFlow's: FarmHash's Fingerprint64 modulo `hash_bucket_size`. An integer is hashed as a decimal string.

    Args:
      key: name of the feature.
      hash_bucket_size: number of ids.
      dtype: str or an integer dtype.

    Raises:
      InvalidArgumentError: an argument has the wrong type, or `hash_bucket_size` is not positive.

    Source: tf.feature_column.categorical_column_with_hash_bucket.

    Example:
      >>> from phalanx import feature_column
      >>> town = feature_column.categorical_column_with_hash_bucket("town", 3)
      >>> feature_column.DenseFeatures([feature_column.indicator_column(town)])({"town": ["Cherbourg"]}).shape
      (1, 3)
    """
    key = checked_key(key)
    return HashedColumn(key, checked_buckets("hash_bucket_size", hash_bucket_size), kind_of(dtype, key))
