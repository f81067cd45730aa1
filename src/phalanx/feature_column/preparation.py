# SPDX-License-Identifier: Apache-2.0
"""Prepares features for a program: strings and categories become integers on the host."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from phalanx.errors import InvalidArgumentError, shown
from phalanx.feature_column.base import AbstractColumn, AbstractHostColumn, AbstractInput
from phalanx.feature_column.names import checked_columns
from phalanx.feature_column.numeric import NumericColumn
from phalanx.feature_column.raw import array_of, is_text, require_one_batch
from phalanx.typing import PyTree


def prepare(features: Mapping[str, PyTree], feature_columns: PyTree) -> dict[str, Any]:
    """Returns the features of a batch as arrays that a program can read. May be called in any context, best on the host.

    Each categorical column has an int32 array (batch, k) of ids, whose name is that of the column and its kind, such as
    "size:vocabulary". The id -1 is a missing value. Each numeric column has its feature, with the shape of its rows.
    Features that were prepared before stay as they are. Other features stay too, except strings.

    Args:
      features: dict from names to lists or arrays, (batch,) or (batch, k). "" and -1 are missing values of categories.
      feature_columns: a column, or an iterable of columns. A column may be in it more than once.

    Raises:
      ContextError: a feature that must be prepared on the host is traced.
      InvalidArgumentError: a feature is missing or does not fit to its column, or features differ in the number of rows.

    Example:
      >>> import phalanx
      >>> size = phalanx.feature_column.categorical_column_with_vocabulary_list("size", ["small", "large"])
      >>> prepared = phalanx.feature_column.prepare({"size": ["large", "small", ""]}, [size])
      >>> {name: ids.tolist() for name, ids in prepared.items()}
      {'size:vocabulary': [[1], [0], [-1]]}
    """
    columns = checked_columns(feature_columns)
    prepared = prepared_inputs(features, columns)
    used = {key for column in columns for one in column.inputs() for key in one.keys}
    unused = {key: array_of(value, key) for key, value in features.items() if key not in used}
    # Strings that no column reads cannot go to a device, and other features may be read by the model itself.
    return {key: value for key, value in unused.items() if not is_text(value)} | prepared


def prepared_inputs(features: Mapping[str, PyTree], columns: Iterable[AbstractColumn]) -> dict[str, Any]:
    """Returns only what a program reads for the columns. Raw features that are traced stay raw if their columns allow it.

    Raises:
      ContextError: a feature that must be prepared on the host is traced.
      InvalidArgumentError: a feature is missing or does not fit to its column, or features differ in the number of rows.
    """
    if not isinstance(features, Mapping):
        raise InvalidArgumentError(
            f"features={shown(features)}", "must be a dict from names to arrays.", 'features={"age": [30, 60]}'
        )
    prepared: dict[str, Any] = {}
    owners: dict[str, AbstractInput] = {}
    for one in (one for column in columns for one in column.inputs()):
        owner = owners.get(one.prepared_key)
        if owner != one:
            _require_same_array(owner, one)
            owners[one.prepared_key] = one
            one.add_to(prepared, features)
    require_one_batch({key: value.shape[0] for key, value in prepared.items()})
    return prepared


def on_host_only(columns: Iterable[AbstractColumn]) -> list[AbstractColumn]:
    """Returns columns that prepare the same arrays, without what only a program computes: the normalizers of numbers."""
    return [_without_normalizers(column) for column in columns]


def _without_normalizers(column: AbstractColumn) -> AbstractColumn:
    if isinstance(column, AbstractHostColumn):
        return column
    changes: dict[str, Any] = {"normalizer_fn": None} if isinstance(column, NumericColumn) else {}
    for one in dataclasses.fields(column):  # type: ignore[arg-type]
        # A normalizer may be a lambda, which cannot be saved. The exported program contains it, so the host needs none.
        if isinstance(value := getattr(column, one.name), AbstractColumn):
            changes[one.name] = _without_normalizers(value)
    return dataclasses.replace(column, **changes)  # type: ignore[type-var]


def _require_same_array(owner: AbstractInput | None, other: AbstractInput) -> None:
    """Refuses two columns whose ids would have one name. Numbers are the same for all columns."""
    if isinstance(owner, AbstractHostColumn):
        raise InvalidArgumentError(
            f"two columns whose ids are named {owner.prepared_key!r}: {shown(owner)} and {shown(other)}",
            "a program could read only one of them.",
            "a copy of the feature with another name for one of the columns",
        )
