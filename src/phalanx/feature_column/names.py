# SPDX-License-Identifier: Apache-2.0
"""Checks of the names, dtypes and columns that the builders of columns take."""

from collections.abc import Iterable

import numpy as np

from phalanx.errors import InvalidArgumentError, arguments, shown
from phalanx.feature_column.base import AbstractCategoricalColumn, AbstractColumn
from phalanx.feature_column.raw import INTEGER, TEXT

# The combiners of tf.nn.embedding_lookup_sparse.
_COMBINERS = ("mean", "sqrtn", "sum")


def checked_key(key: object, name: str = "key") -> str:
    """Returns the name of a feature.

    Raises:
      InvalidArgumentError: it is not a string, or empty.
    """
    if not isinstance(key, str) or not key:
        raise InvalidArgumentError(f"{name}={shown(key)}", "must be the name of a feature.", f'{name}="age"')
    return key


def checked_buckets(name: str, value: object, least: int = 1) -> int:
    """Returns a number of ids, which are int32.

    Raises:
      InvalidArgumentError: it is not an integer, or out of range.
    """
    # JAX looks rows up by int32 unless 64 bits are enabled. A larger id would wrap around without an error.
    kind = f"an integer from {least} to 2**31 - 1"
    return arguments.integer(name, value, least=least, most=2**31 - 1, kind=kind, hint=f"{name}=100")


def dtype_name(dtype: object, usual: str = "float32") -> str:
    """Returns the name of a dtype of NumPy, or of another library: "float32", "int64", "string". The HINT shows `usual`.

    Raises:
      InvalidArgumentError: it is not a dtype.
    """
    # Dtypes of other libraries, such as `tf.string`, have a name. Arrays and variables have a dtype, and are none.
    name = dtype if isinstance(dtype, (str, np.dtype, type)) else getattr(dtype, "name", None)
    if isinstance(name, str) and name == TEXT:
        return "str"
    try:
        if (
            not isinstance(name, (str, np.dtype, type))
            or hasattr(dtype, "shape")
            and not isinstance(dtype, (np.dtype, type))
        ):
            raise TypeError
        kind = np.dtype(name)
    except (TypeError, ValueError) as e:
        raise InvalidArgumentError(f"dtype={shown(dtype)}", "is not a dtype.", f'dtype="{usual}"') from e
    return "str" if kind.kind in "OSTU" else kind.name


def kind_of(dtype: object, key: str) -> str:
    """Returns `INTEGER` or `TEXT`.

    Raises:
      InvalidArgumentError: the dtype is another one.
    """
    kind = np.dtype(dtype_name(dtype, "int64")).kind
    if kind not in "iuU":
        raise InvalidArgumentError(
            f"dtype={shown(dtype)} of the column of {key!r}", "must be a string or an integer.", 'dtype="int64"'
        )
    return TEXT if kind == "U" else INTEGER


def checked_combiner(combiner: object, name: str = "combiner") -> str:
    """Returns the name of a combiner.

    Raises:
      InvalidArgumentError: there is no such combiner.
    """
    if not isinstance(combiner, str) or combiner not in _COMBINERS:
        raise InvalidArgumentError(f"{name}={shown(combiner)}", 'must be "mean", "sqrtn" or "sum".', f'{name}="mean"')
    return str(combiner)


def checked_categorical(column: object) -> AbstractCategoricalColumn:
    """Returns a categorical column.

    Raises:
      InvalidArgumentError: it is not one.
    """
    if not isinstance(column, AbstractCategoricalColumn):
        raise InvalidArgumentError(
            f"categorical_column={shown(column)}",
            "must be a categorical column.",
            'categorical_column_with_vocabulary_list("size", ["small", "large"])',
        )
    return column


def checked_columns(columns: object, name: str = "feature_columns") -> list[AbstractColumn]:
    """Returns columns as a list.

    Args:
      columns: a column, or an iterable of columns.
      name: name of the argument, for messages.

    Raises:
      InvalidArgumentError: an item is not a column, or there is no item.
    """
    hint = f'{name}=[phalanx.feature_column.numeric_column("age")]'
    if isinstance(columns, AbstractColumn):
        return [columns]
    # Iterable, but never of columns: the message should name the argument and not its first letter.
    if isinstance(columns, (str, bytes, dict)) or hasattr(columns, "dtype") or not isinstance(columns, Iterable):
        raise InvalidArgumentError(f"{name}={shown(columns)}", "must be a list of columns.", hint)
    items = list(columns)
    wrong = [column for column in items if not isinstance(column, AbstractColumn)]
    if wrong or not items:
        item = shown(wrong[0]) if wrong else "[]"
        raise InvalidArgumentError(f"{name} with {item}", "must be a list of columns, not empty.", hint)
    return items


def sorted_columns(columns: object) -> list[AbstractColumn]:
    """Returns columns in the order of their names.

    Raises:
      InvalidArgumentError: an item is not a column, there is no column, or two columns have the same name.
    """
    by_name = sorted(checked_columns(columns), key=lambda column: column.name)
    # Sorted by name, as in feature_column_v2.py: the order in the list does not change the model or its checkpoint.
    for one, other in zip(by_name, by_name[1:], strict=False):
        if one.name == other.name:
            raise InvalidArgumentError(
                f"two columns with the name {one.name!r}",
                "the names of columns must differ.",
                "one of them, or a copy of the feature with another name",
            )
    return by_name
