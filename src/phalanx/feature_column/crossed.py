# SPDX-License-Identifier: Apache-2.0
"""Columns of combinations of categories: `crossed_column`."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import keras
import numpy as np
from typing_extensions import override

from phalanx.errors import InvalidArgumentError, arguments, shown
from phalanx.feature_column.base import AbstractCategoricalColumn, AbstractHostColumn, Occurrences
from phalanx.feature_column.categorical import HashedColumn
from phalanx.feature_column.fingerprint import concatenated, fingerprint64
from phalanx.feature_column.names import checked_buckets
from phalanx.feature_column.raw import (
    Feature,
    by_unique,
    categories_of,
    encoded,
    feature_of,
    is_symbolic,
    is_text,
    require_one_batch,
)
from phalanx.feature_column.weighted import WeightedColumn

# `_DEFAULT_HASH_KEY` in tensorflow/python/ops/sparse_ops.py. Another key would give other ids than TensorFlow's.
_HASH_KEY = 0xDECAFCAFFE
Key = str | AbstractCategoricalColumn


@keras.saving.register_keras_serializable(package="phalanx")
@dataclass(frozen=True)
class CrossedColumn(AbstractHostColumn):
    """Hashes of all combinations of the values of features and columns."""

    crossed: tuple[Key, ...]
    hash_bucket_size: int
    hash_key: int

    kind: ClassVar[str] = "crossed"

    @property
    @override
    def name(self) -> str:
        # TensorFlow's name for a cross, which is a part of the names of its variables.
        return "_X_".join(sorted(key if isinstance(key, str) else key.name for key in self._leaves()))

    @property
    @override
    def keys(self) -> tuple[str, ...]:
        columns = (key.inputs() for key in self._leaves() if not isinstance(key, str))
        of_columns = (key for inputs in columns for one in inputs for key in one.keys)
        return (*(key for key in self._leaves() if isinstance(key, str)), *of_columns)

    @property
    @override
    def num_buckets(self) -> int:
        return self.hash_bucket_size

    @override
    def occurrences(self, features: Mapping[str, Any]) -> Occurrences:
        # TensorFlow crosses the ids of columns before raw features, and takes every raw value for present.
        leaves = sorted(self._leaves(), key=lambda key: isinstance(key, str))
        parts = [_part(key, features) for key in leaves]
        names = (key if isinstance(key, str) else key.name for key in leaves)
        require_one_batch({name: len(part.values) for name, part in zip(names, parts, strict=True)})
        batch = len(parts[0].values)
        hashes, is_present = np.full((batch, 1), self.hash_key % 2**64, np.uint64), np.ones((batch, 1), bool)
        for values, exists in parts:
            shape = batch, hashes.shape[1] * values.shape[1]
            hashes = concatenated(hashes[:, :, None], values[:, None, :]).reshape(shape)
            is_present = (is_present[:, :, None] & exists[:, None, :]).reshape(shape)
        return Occurrences((hashes % self.hash_bucket_size).astype(np.int64), is_present)

    def _leaves(self) -> Iterator[Key]:
        for key in self.crossed:
            if isinstance(key, CrossedColumn):
                yield from key._leaves()
            else:
                yield key


def _part(key: Key, features: Mapping[str, Any]) -> Occurrences:
    """Returns the values to hash: fingerprints of strings, integers and ids themselves, and floats without their fractions."""
    if not isinstance(key, str):
        # A cross takes ids as integers. A -1 stays, and hashes like any other id, as in TensorFlow.
        ids, is_present = key.occurrences(features)
        return Occurrences(ids.view(np.uint64), is_present)
    values = categories_of({key: _whole(feature_of(features, key))}, key, None)
    integers = by_unique(values, _fingerprints) if is_text(values) else values
    return Occurrences(integers.view(np.uint64), np.ones(values.shape, bool))


def _whole(feature: Feature) -> Feature:
    """Returns floats without their fractions, and everything else unchanged."""
    if is_symbolic(feature) or feature.dtype.kind != "f":
        return feature
    with np.errstate(invalid="ignore"):
        return np.asarray(feature).astype(np.int64)  # NaN is the least integer, as in TensorFlow.


def _fingerprints(words: list[str]) -> Sequence[int]:
    return cast(Sequence[int], fingerprint64([encoded(word) for word in words]).view(np.int64).tolist())


def crossed_column(keys: Sequence[Key], hash_bucket_size: int, hash_key: int | None = None) -> CrossedColumn:
    """Returns a column of hashes of all combinations of categories. May be called in any context.

    The hashes are TensorFlow's.

    Args:
      keys: names of features of strings, integers or floats, and categorical columns, two or more. Fractions of floats are
        dropped, as in TensorFlow.
      hash_bucket_size: number of ids.
      hash_key: integer that is hashed first. None for the one that TensorFlow uses.

    Raises:
      InvalidArgumentError: there are fewer than two keys, or one is a hashed or weighted column or none at all, or
        `hash_bucket_size` is not positive.

    Source: tf.feature_column.crossed_column.

    Example:
      >>> from phalanx import feature_column
      >>> cross = feature_column.crossed_column(["town", "size"], 5)
      >>> layer = feature_column.DenseFeatures([feature_column.indicator_column(cross)])
      >>> layer({"town": ["Cherbourg"], "size": ["small"]}).shape
      (1, 5)
    """
    hint = f"crossed_column(['town', 'size'], {shown(hash_bucket_size)})"
    if not isinstance(keys, (list, tuple)) or len(keys) < 2:
        raise InvalidArgumentError(f"keys={shown(keys)}", "must be a list of two keys or more.", hint)
    for key in keys:
        if isinstance(key, HashedColumn):
            raise InvalidArgumentError(
                f"a cross of {shown(key)}",
                "hashes of hashes would collide.",
                f"crossed_column([{key.key!r}, ...], ...)",
            )
        if not isinstance(key, (str, AbstractCategoricalColumn)) or isinstance(key, WeightedColumn):
            raise InvalidArgumentError(
                f"a cross of {shown(key)}",
                "must be the name of a feature, or a categorical column without weights.",
                hint,
            )
    size = checked_buckets("hash_bucket_size", hash_bucket_size)
    if hash_key is not None:
        hash_key = arguments.integer("hash_key", hash_key, least=0, most=2**64 - 1, kind="an integer below 2**64")
    return CrossedColumn(tuple(keys), size, _HASH_KEY if hash_key is None else hash_key)
