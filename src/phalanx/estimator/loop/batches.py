# SPDX-License-Identifier: Apache-2.0
"""Batches of an input function."""

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, final

import jax
import numpy as np
from jax.tree_util import KeyPath
from jax.typing import ArrayLike

from phalanx import feature_column
from phalanx._src.mesh.arrays import is_array
from phalanx.errors import InputError, arguments, shown
from phalanx.feature_column.base import AbstractColumn
from phalanx.typing import PyTree

InputFn = Callable[..., Any]
# *args and **kwargs accept anything, so that they need no value.
_REST = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def check_input_fn(input_fn: object) -> None:
    """Checks that an input function can be called.

    Raises:
      InvalidArgumentError: it is not a function.
    """
    arguments.function("input_fn", input_fn, "input_fn=lambda: dataset")


def dataset_of(
    input_fn: InputFn, values: Mapping[str, Any], columns: Sequence[Any], labels_fn: Callable[[PyTree], PyTree] | None
) -> "Batches":
    """Calls an input function.

    Args:
      input_fn: the function.
      values: arguments by name, such as `params`. The function receives the ones that it has parameters for.
      columns: feature columns. They replace categories by their numbers.
      labels_fn: function that replaces the classes of labels by their numbers. None if labels have no classes.

    Returns:
      A dataset of batches `(features, labels)`. Labels are None if the function returns no labels.

    Raises:
      InputError: the function has another parameter, or returns no dataset.
    """
    # By name, as tf.estimator's function_utils.fn_args does: an input_fn takes what it needs and no more.
    parameters = inspect.signature(input_fn).parameters
    unknown = [
        p.name for p in parameters.values() if p.name not in values and p.default is p.empty and p.kind not in _REST
    ]
    if unknown:
        raise InputError(
            f"an input_fn with the parameters {list(parameters)}",
            f"{unknown[0]!r} has no value; the parameters may be {sorted(values)}.",
            f"functools.partial(input_fn, {unknown[0]}=...)",
        )
    dataset = input_fn(**{name: value for name, value in values.items() if name in parameters})
    if dataset is None:
        raise InputError("an input_fn that returns None", "there is no data.", "return dataset, in the input_fn")
    if isinstance(dataset, (str, bytes)) or not (isinstance(dataset, Iterable) or is_array(dataset)):
        raise InputError(
            f"an input_fn that returns {shown(dataset)}",
            "it is not a dataset.",
            "return [(features, labels)], in the input_fn",
        )
    return Batches(dataset, columns, labels_fn)


@final
class Batches:
    """The batches of a dataset, as NumPy arrays.

    Args:
      dataset: iterable of batches: a pair of features and labels, or features. Or such a batch, which is repeated forever.
      columns: feature columns. They replace categories by their numbers.
      labels_fn: function that replaces the classes of labels by their numbers. None if labels have no classes.
    """

    def __init__(self, dataset: PyTree, columns: Sequence[Any], labels_fn: Callable[[PyTree], PyTree] | None) -> None:
        self._dataset, self._columns, self._labels_fn = dataset, list(columns), labels_fn

    def __iter__(self) -> Iterator[PyTree]:
        # An input_fn of TensorFlow 1 may return tensors instead of a dataset. They give the same batch at each step.
        batches = itertools.repeat(self._dataset) if _is_batch(self._dataset) else iter(self._dataset)
        first: dict[str, tuple[str, tuple[int, ...]]] | None = None
        for batch in batches:
            features, labels = _split(batch)
            _require_names(features)
            spec = _spec_of(features, labels)
            first = spec if first is None else first
            # A tf.data.Dataset fixes names, dtypes and shapes once. An iterable of
            # Python can change them from batch to batch.
            _require_alike(spec, first)
            # Labels may be text. No device holds text, so classes become numbers before the batch is distributed.
            if labels is not None and self._labels_fn is not None:
                labels = self._labels_fn(_to_numpy(labels))
            yield self._prepared(features), _numbers(labels, "labels")

    def _prepared(self, features: PyTree) -> PyTree:
        if self._columns and isinstance(features, Mapping):
            features = feature_column.prepare(dict(features), self._columns)
        return _numbers(features, "features")


def is_column(value: object) -> bool:
    """Returns whether a value is a feature column."""
    return isinstance(value, AbstractColumn)


def columns_in(params: PyTree) -> list[Any]:
    """Returns the feature columns among the parameters of a model function."""
    leaves = jax.tree.leaves(params, is_leaf=is_column)
    columns: list[Any] = []
    for leaf in leaves:
        # Wide and deep models list a column twice. Equal columns are equal dataclasses, and one array serves both.
        if is_column(leaf) and leaf not in columns:
            columns.append(leaf)
    return columns


def _is_batch(dataset: object) -> bool:
    """Whether an input function has returned one batch instead of a dataset."""
    return isinstance(dataset, (tuple, Mapping)) or is_array(dataset)


def _split(batch: PyTree) -> tuple[PyTree, PyTree]:
    # A pair is features and labels, as in tf.data. Features that are a pair need a dict.
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    if isinstance(batch, (tuple, list)) and len(batch) != 1:
        raise InputError(
            f"a batch of {len(batch)} parts", "must be features, or (features, labels).", "return features, labels"
        )
    return (batch[0] if isinstance(batch, (tuple, list)) else batch), None


def _require_names(features: PyTree) -> None:
    if isinstance(features, Mapping) and not all(isinstance(name, str) for name in features):
        raise InputError(
            f"features of the names {shown(list(features))}", "names must be strings.", '{"age": ages, "name": names}'
        )


def _to_numpy(tree: PyTree) -> PyTree:
    return jax.tree.map(np.asarray, tree)


def _numbers(tree: PyTree, name: str) -> PyTree:
    """Returns arrays of numbers.

    Raises:
      InputError: an array contains text.
    """

    def checked(path: KeyPath, leaf: ArrayLike) -> np.ndarray:
        array = np.asarray(leaf)
        if array.dtype.kind in "OSU":
            raise InputError(
                f"{name}{jax.tree_util.keystr(path)} of {array.dtype}",
                "a device cannot compute with text.",
                'params={"feature_columns": [feature_column.categorical_column_with_vocabulary_list(name, words)]}',
            )
        return array

    return jax.tree_util.tree_map_with_path(checked, tree)


def _spec_of(features: PyTree, labels: PyTree) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Returns the kind of dtype and the shape of a row, by the names of the arrays of a batch."""
    # Shapes without the number of rows: the last batch may be short.
    named = {"features": features} | ({} if labels is None else {"labels": labels})
    return {
        name + jax.tree_util.keystr(path): (_KINDS.get(x.dtype.kind, str(x.dtype)), x.shape[1:])
        for name, part in named.items()
        for path, x in jax.tree_util.tree_leaves_with_path(_to_numpy(part))
    }


# Kinds and not dtypes: int32 in one batch and int64 in another is what NumPy makes of small and large numbers.
_KINDS = {
    "b": "bools",
    "f": "floats",
    "i": "integers",
    "u": "unsigned integers",
    "U": "texts",
    "S": "texts",
    "O": "texts",
}


def _require_alike(spec: Mapping[str, Any], first: Mapping[str, Any]) -> None:
    for name in [*first, *spec]:
        if spec.get(name) != first.get(name):
            raise InputError(
                f"a batch with {_told(name, spec)}",
                f"the first batch has {_told(name, first)}.",
                "return features and labels of the same names, dtypes and shapes in each batch",
            )


def _told(name: str, spec: Mapping[str, Any]) -> str:
    if name not in spec:
        return f"no {name}"
    kind, shape = spec[name]
    return f"{kind} of shape {('rows', *shape)} as {name}".replace("'", "", 2)


def require_steps(name: str, value: object) -> None:
    """Checks a number of steps.

    Raises:
      InvalidArgumentError: it is neither None nor a positive integer.
    """
    if value is not None:
        arguments.integer(name, value, kind="positive, and an integer; or None", hint=f"{name}=100")
