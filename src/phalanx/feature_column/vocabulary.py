# SPDX-License-Identifier: Apache-2.0
"""Columns of the words of a vocabulary, in a list or a file."""

import os
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import keras
import numpy as np
from typing_extensions import override

from phalanx._src.cluster.untrusted import read_data
from phalanx.errors import InvalidArgumentError, arguments, shown
from phalanx.feature_column.base import MISSING, Occurrences
from phalanx.feature_column.categorical import AbstractKeyedColumn, hashed
from phalanx.feature_column.names import checked_buckets, checked_key, kind_of
from phalanx.feature_column.raw import INTEGER, by_unique, categories_of
from phalanx.typing import PyTree


class _VocabularyColumn(AbstractKeyedColumn):
    """Words of a vocabulary. Other words have the default id, or one of the ids after the vocabulary."""

    key: str
    dtype: str
    default_value: int
    num_oov_buckets: int

    kind: ClassVar[str] = "vocabulary"

    @property
    @abstractmethod
    def vocabulary_size(self) -> int:
        """The number of words."""

    @property
    @abstractmethod
    def table(self) -> dict[Any, int]:
        """The id of each word."""

    @property
    @override
    def num_buckets(self) -> int:
        return self.vocabulary_size + self.num_oov_buckets

    @override
    def occurrences(self, features: Mapping[str, Any]) -> Occurrences:
        values, is_present = self.present(features, self.dtype)
        return Occurrences(by_unique(values, self._found), is_present)

    def _found(self, words: list[Any]) -> Sequence[int]:
        if not self.num_oov_buckets:
            return [self.table.get(word, self.default_value) for word in words]
        buckets = (self.vocabulary_size + hashed(words, self.num_oov_buckets)).tolist()
        return [self.table.get(word, bucket) for word, bucket in zip(words, buckets, strict=True)]


@keras.saving.register_keras_serializable(package="phalanx")
@dataclass(frozen=True)
class VocabularyListColumn(_VocabularyColumn):
    """Words of a vocabulary that is a tuple."""

    key: str
    vocabulary_list: tuple[Any, ...]
    dtype: str
    default_value: int
    num_oov_buckets: int

    @property
    @override
    def vocabulary_size(self) -> int:
        return len(self.vocabulary_list)

    @cached_property
    @override
    def table(self) -> dict[Any, int]:
        return {word: number for number, word in enumerate(self.vocabulary_list)}


@keras.saving.register_keras_serializable(package="phalanx")
@dataclass(frozen=True)
class VocabularyFileColumn(_VocabularyColumn):
    """Words of a vocabulary that is a text file with a word per line."""

    key: str
    vocabulary_file: str
    size: int
    dtype: str
    default_value: int
    num_oov_buckets: int

    @property
    @override
    def vocabulary_size(self) -> int:
        return self.size

    @cached_property
    @override
    def table(self) -> dict[Any, int]:
        lines = _lines(self.key, self.vocabulary_file)[: self.size]
        try:
            words = [int(line) for line in lines] if self.dtype == INTEGER else lines
        except ValueError as e:
            raise InvalidArgumentError(
                f"vocabulary_file={self.vocabulary_file!r}", "a line is not an integer.", "dtype=str"
            ) from e
        table = {word: number for number, word in enumerate(words)}
        # Both shift ids without an error: a file that was cut, and a word that is there twice.
        if len(lines) < self.size or len(table) < len(lines):
            raise InvalidArgumentError(
                f"vocabulary_file={self.vocabulary_file!r} of the column of {self.key!r}",
                f"it must have {self.size} different lines, and has {len(table)}.",
                f"vocabulary_size={len(table)}" if len(table) == len(lines) else "a file without duplicates",
            )
        return table


def _lines(key: str, path: str) -> list[str]:
    try:
        content = read_data(Path(path))
    except (OSError, ValueError) as e:
        raise InvalidArgumentError(
            f"vocabulary_file={path!r} of the column of {key!r}",
            f"it cannot be read: {getattr(e, 'strerror', None) or e}.",
            "a text file with a word per line",
        ) from e
    # TensorFlow's TextFileInitializer splits at \n and drops \r. An empty line is a word.
    lines = content.decode("utf-8", "surrogateescape").replace("\r", "").split("\n")
    return lines[:-1] if not lines[-1] else lines


def _oov_of(key: str, size: int, default_value: object, num_oov_buckets: object) -> tuple[int, int]:
    """Returns the default id and the number of other buckets, of which a column has one at most."""
    num_oov = checked_buckets("num_oov_buckets", 0 if num_oov_buckets is None else num_oov_buckets, 0)
    default = MISSING if default_value is None else default_value
    default = arguments.integer(
        "default_value", default, least=MISSING, most=size - 1, kind=f"an integer from -1 to {size - 1}"
    )
    # TensorFlow's rule: an unknown word cannot have both a fixed id and a hashed one.
    if num_oov and default != MISSING:
        raise InvalidArgumentError(
            f"num_oov_buckets={num_oov} and default_value={default} of the column of {key!r}",
            "a word that is not in the vocabulary has either one.",
            "num_oov_buckets=1",
        )
    return default, num_oov


def categorical_column_with_vocabulary_list(
    key: str, vocabulary_list: Sequence[Any], dtype: PyTree = None, default_value: int = -1, num_oov_buckets: int = 0
) -> VocabularyListColumn:
    """Returns a column of words, whose ids are their places in a list. May be called in any context.

    Args:
      key: name of the feature.
      vocabulary_list: all words, strings or integers.
      dtype: str or an integer dtype. None for the dtype of the list.
      default_value: id of words that are not in the list. -1 if they are missing values.
      num_oov_buckets: number of ids for words that are not in the list, after the ids of the list. A hash chooses between them.

    Raises:
      InvalidArgumentError: the list is empty or has a duplicate, or an argument has the wrong type.

    Source: tf.feature_column.categorical_column_with_vocabulary_list.

    Example:
      >>> from phalanx import feature_column
      >>> size = feature_column.categorical_column_with_vocabulary_list("size", ["small", "large"], num_oov_buckets=1)
      >>> feature_column.DenseFeatures([feature_column.indicator_column(size)])({"size": ["large", "huge"]}).tolist()
      [[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    """
    key = checked_key(key)
    try:
        array = np.asarray(vocabulary_list)
    except (RuntimeError, TypeError, ValueError):  # A ragged list, a deleted array, or random keys.
        array = np.zeros(0)
    if array.ndim != 1 or not array.size or array.dtype.names:
        raise InvalidArgumentError(
            f"vocabulary_list={shown(vocabulary_list)} of the column of {key!r}",
            "must be a list of words, not empty.",
            'vocabulary_list=["small", "large"]',
        )
    kind = kind_of(array.dtype, key)
    if dtype is not None and kind_of(dtype, key) != kind:
        raise InvalidArgumentError(
            f"dtype={shown(dtype)} of the column of {key!r}", f"the words have the dtype {array.dtype}.", "dtype=None"
        )
    words = tuple(categories_of({key: array}, key, kind)[:, 0].tolist())
    if len(set(words)) < len(words):
        raise InvalidArgumentError(
            f"vocabulary_list={shown(vocabulary_list)} of the column of {key!r}",
            "has a word twice.",
            "list(dict.fromkeys(words))",
        )
    return VocabularyListColumn(key, words, kind, *_oov_of(key, len(words), default_value, num_oov_buckets))


def categorical_column_with_vocabulary_file(
    key: str,
    vocabulary_file: str | os.PathLike[str],
    vocabulary_size: int | None = None,
    dtype: PyTree = "string",
    default_value: int | None = None,
    num_oov_buckets: int = 0,
) -> VocabularyFileColumn:
    """Returns a column of words, whose ids are their lines in a text file. May be called in any context.

    Args:
      key: name of the feature.
      vocabulary_file: path of a text file with a word per line. It must still exist when a saved model is loaded.
      vocabulary_size: number of lines that count. None for all lines.
      dtype: str or an integer dtype.
      default_value: id of words that are not in the file. None if they are missing values.
      num_oov_buckets: number of ids for words that are not in the file, after the ids of the file. A hash chooses between them.

    Raises:
      InvalidArgumentError: the file cannot be read, is too short or has a duplicate, or an argument has the wrong type.

    Source: tf.feature_column.categorical_column_with_vocabulary_file. Files of TFRecords cannot be read.

    Example:
      >>> import tempfile
      >>> from phalanx import feature_column
      >>> with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
      ...     print("small", "large", sep=chr(10), file=file, flush=True)
      ...     size = feature_column.categorical_column_with_vocabulary_file("size", file.name)
      >>> feature_column.DenseFeatures([feature_column.indicator_column(size)])({"size": ["large", "huge"]}).tolist()
      [[0.0, 1.0], [0.0, 0.0]]
    """
    key, path, kind = checked_key(key), arguments.path("vocabulary_file", vocabulary_file), kind_of(dtype, key)
    size = len(_lines(key, path)) if vocabulary_size is None else vocabulary_size
    size = checked_buckets("vocabulary_size", size)
    column = VocabularyFileColumn(key, path, size, kind, *_oov_of(key, size, default_value, num_oov_buckets))
    # Read when the column is created: an error at the first batch would come after the cluster has started.
    assert column.table  # Reads the file.
    return column
