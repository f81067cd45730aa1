# SPDX-License-Identifier: Apache-2.0
"""Reads the features of a batch as arrays of the host: numbers, or texts and integers of categories."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import jax
import keras
import numpy as np
from numpy.typing import NDArray

from phalanx.errors import ContextError, InvalidArgumentError, shown
from phalanx.typing import PyTree

Feature: TypeAlias = NDArray[Any] | jax.Array | keras.KerasTensor
"""An array of the host or of a device, or a symbol that has no value yet."""

A = TypeVar("A", NDArray[Any], jax.Array)

INTEGER, TEXT = "integer", "string"
_HINTS = {INTEGER: "dtype=int64", TEXT: "dtype=str"}


def is_symbolic(feature: object) -> bool:
    """Returns whether a feature has no value yet: in a function that JAX traces, or as an input of a Keras model."""
    return isinstance(feature, (jax.core.Tracer, keras.KerasTensor))


def is_integer(feature: Feature) -> bool:
    """Returns whether a feature that has no value yet will be of integers."""
    return np.dtype(str(feature.dtype)).kind in "iu"


def is_text(feature: object) -> bool:
    """Returns whether a feature is a NumPy array of strings or of other objects, which no device holds."""
    return isinstance(feature, np.ndarray) and feature.dtype.kind in "OSTU"


def array_of(feature: PyTree, key: str) -> Feature:
    """Returns a device array or a symbol unchanged, everything else as a NumPy array.

    Raises:
      InvalidArgumentError: its rows differ in length.
    """
    if isinstance(feature, (jax.Array, keras.KerasTensor)):
        return feature
    try:
        return np.asarray(feature)
    except ValueError as e:
        raise InvalidArgumentError(
            f"the feature {key!r}", "its rows differ in length.", 'rows of one length, padded with "" or -1'
        ) from e


def feature_of(features: Mapping[str, PyTree], key: str) -> Feature:
    """Returns a feature: a device array or a symbol unchanged, everything else as a NumPy array.

    Raises:
      InvalidArgumentError: there is no such feature, it has no batch dim, or its rows differ in length.
    """
    if key not in features:
        raise InvalidArgumentError(
            f"the feature {key!r} of a column",
            f"the features are {shown(sorted(map(str, features)))}.",
            f"features = {{{key!r}: ..., **features}}, or a column whose key is the name of a feature",
        )
    feature = array_of(features[key], key)
    if not feature.ndim:
        raise InvalidArgumentError(
            f"the feature {key!r} with the value {shown(feature)}", "it must have a batch dim.", f"{{{key!r}: [x]}}"
        )
    return feature


def numbers_of(features: Mapping[str, PyTree], key: str, dtype: str) -> Feature:
    """Returns a feature of real numbers as an array of a dtype; device arrays and symbols unchanged.

    Raises:
      InvalidArgumentError: the feature is missing, is not of real numbers, or loses its fractions in the dtype.
    """
    feature = feature_of(features, key)
    if not isinstance(feature, np.ndarray):
        return feature
    # ml_dtypes' bfloat16 has the kind V (void), although it is a number.
    if feature.dtype.kind not in "biuf" and feature.dtype.name != "bfloat16":
        raise InvalidArgumentError(
            f"the feature {key!r} of dtype {feature.dtype}", "its column needs real numbers.", "dtype=float32"
        )
    # A cast would drop the fractions without a warning.
    if feature.dtype.kind not in "biu" and np.dtype(dtype).kind in "iu":
        raise InvalidArgumentError(
            f"the feature {key!r} of dtype {feature.dtype}",
            f"the dtype of its column is {dtype}.",
            f'numeric_column({key!r}, dtype="float32")',
        )
    return feature.astype(dtype)


def on_host(feature: Feature, key: str) -> NDArray[Any]:
    """Returns a feature as a NumPy array.

    Raises:
      ContextError: the feature has no value yet.
    """
    # Hashes and vocabularies are Python on strings. A callback from the device would run once per step and replica.
    if is_symbolic(feature):
        raise ContextError(
            f"the raw feature {key!r} in a function that is being traced, or as an input of a Keras model",
            "its column computes ids on the host, before the program runs.",
            "features = phalanx.feature_column.prepare(features, columns) for each batch",
        )
    return np.asarray(feature)


def categories_of(features: Mapping[str, Any], key: str, kind: str | None) -> NDArray[Any]:
    """Returns a feature of categories, (batch, k): an array of int64, or of `str` objects in which "" is missing.

    Args:
      features: the features of a batch.
      key: the name of the feature.
      kind: `INTEGER` or `TEXT`. None for either.

    Raises:
      ContextError: the feature has no value yet.
      InvalidArgumentError: the feature is missing, or has other values, or more than two dims.
    """
    feature = on_host(feature_of(features, key), key)
    if feature.ndim > 2:
        raise InvalidArgumentError(
            f"the feature {key!r} of shape {feature.shape}", "categories have at most two dims.", "x.reshape(batch, -1)"
        )
    actual_kind = TEXT if is_text(feature) else INTEGER if feature.dtype.kind in "iu" else None
    if actual_kind is None or kind not in (None, actual_kind):
        raise InvalidArgumentError(
            f"the feature {key!r} of dtype {feature.dtype}",
            f"its column needs {'strings' if kind == TEXT else 'integers' if kind else 'strings or integers'}.",
            f"np.asarray(x, {_HINTS[kind or INTEGER]}), or a column for the dtype of the feature",
        )
    values = feature.astype(np.int64) if actual_kind == INTEGER else _texts(feature, key)
    return in_columns(values)


def in_columns(values: A) -> A:
    """Returns an array (batch, k) of one (batch, k) or (batch,), whose k is then 1. Other arrays stay as they are."""
    return values.reshape(-1, 1) if values.ndim == 1 else values


def _texts(feature: NDArray[Any], key: str) -> NDArray[np.object_]:
    # Objects and not <U: NumPy would pad every text to the longest one, and strip zeros at their ends.
    texts = np.empty(feature.size, object)
    texts[:] = [_text(value, key) for value in feature.ravel().tolist()]
    return texts.reshape(feature.shape)


def _text(value: object, key: str) -> str:
    if isinstance(value, bytes):
        # Bytes that are no UTF-8 must survive, because their hash is TensorFlow's
        # only if `encoded` gives the same bytes back.
        return value.decode("utf-8", "surrogateescape")
    if value is not None and not isinstance(value, str):
        raise InvalidArgumentError(
            f"the feature {key!r} with the value {shown(value)}",
            "an array of objects may contain strings, bytes and None.",
            'np.asarray(x, dtype=str), with "" for missing values',
        )
    # None is what pandas and JSON have for a missing text.
    return value or ""


def encoded(text: str) -> bytes:
    """Returns the bytes of a text, as `categories_of` read them."""
    return text.encode("utf-8", "surrogateescape")


def by_unique(values: NDArray[Any], compute: Callable[[list[Any]], Sequence[Any]]) -> NDArray[np.int64]:
    """Maps each value through `compute`, which is called once, with a list of the unique values."""
    flat = values.ravel().tolist()
    # A batch of categories repeats few values: hashing each once is the larger part of the speed.
    unique = list(dict.fromkeys(flat))
    numbers = dict(zip(unique, compute(unique), strict=True))
    return np.array([numbers[value] for value in flat], np.int64).reshape(values.shape)


def require_one_batch(sizes: Mapping[str, int]) -> None:
    """Refuses features that differ in the number of rows.

    Raises:
      InvalidArgumentError: they do.
    """
    if len(set(sizes.values())) > 1:
        raise InvalidArgumentError(
            f"features with {shown(sizes, 120)} rows", "all features of a batch have one number of rows.", "x[:batch]"
        )
