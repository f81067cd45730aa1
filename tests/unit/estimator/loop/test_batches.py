"""Batches of an input function."""

import itertools

import numpy as np
from one_weight import X, Y
from refusals import refusals, refused

from phalanx import feature_column
from phalanx.errors import InputError, InvalidArgumentError
from phalanx.estimator.loop import batches


def read(dataset, columns=(), labels_fn=None):
    return list(batches.Batches(dataset, columns, labels_fn))


test_input_functions_that_are_refused = refusals(
    InputError,
    (lambda: None, ["returns None", "no data"]),
    (lambda: 3, ["returns 3", "it is not a dataset"]),
    (lambda: "text", ["returns 'text'", "it is not a dataset"]),
    (lambda batch_size: [], ["the parameters ['batch_size']", "'batch_size' has no value", "functools.partial"]),
    call=lambda input_fn: batches.dataset_of(input_fn, {"params": {}, "mode": "train"}, (), None),
)


def test_input_function_gets_what_it_asks_for():
    """Parameters of known names get their values; others keep their defaults."""

    def input_fn(params, size=2, *others, **options):
        assert (size, others, options) == (2, (), {})
        return [(params["x"], Y)]

    ((x, _),) = batches.dataset_of(input_fn, {"params": {"x": Y}, "mode": "train"}, (), None)
    np.testing.assert_array_equal(x, Y)
    with refused(InvalidArgumentError, ["input_fn=3", "is not callable"]):
        batches.check_input_fn(3)


test_batches_that_are_refused = refusals(
    InputError,
    ([(X, Y, Y)], ["a batch of 3 parts", "(features, labels)"]),
    ([({"x": np.array(["a"])}, Y)], ["features['x'] of <U1", "a device cannot compute with text", "feature_columns"]),
    ([(X, np.array(["a", "b"]))], ["labels of <U1", "a device cannot compute with text"]),
    ([({3: Y}, Y)], ["features of the names [3]", "names must be strings"]),
    ([({"x": Y, 3: Y}, Y)], ["features of the names ['x', 3]", "names must be strings"]),
    (
        [(X, Y), ({"y": Y}, Y)],
        ["a batch with no features['x']", "the first batch has floats of shape (rows,) as features['x']"],
    ),
    ([(X, Y), (X, Y.astype(int))], ["a batch with integers of shape (rows,) as labels", "the first batch has floats"]),
    (
        [(X, Y), ({"x": np.ones((2, 3))}, Y)],
        ["a batch with floats of shape (rows, 3) as features['x']", "the first batch has floats of shape (rows,)"],
    ),
    ([(X, Y), X], ["a batch with no labels", "the first batch has floats of shape (rows,) as labels"]),
    call=read,
)


def test_batches_with_and_without_labels():
    """A batch is a pair, or features; one batch instead of a dataset is repeated."""
    assert read([X])[0][1] is read([(X,)])[0][1] is None
    for batch in ((X, Y), X, Y):
        first, second = itertools.islice(batches.Batches(batch, (), None), 2)
        np.testing.assert_array_equal(np.ravel(first[0]["x"] if isinstance(first[0], dict) else first[0])[0] > 0, True)
        assert first[0] is not second[0] or first[0] is Y
    ((_, labels),) = read([(X, Y)], labels_fn=lambda labels: labels * 2)
    np.testing.assert_array_equal(labels, Y * 2)
    # The last batch may be short.
    assert len(read([(Y, Y), (Y[:1], Y[:1])])) == 2


def test_columns_replace_categories():
    """Text of a column becomes numbers, and columns are found among parameters."""
    column = feature_column.categorical_column_with_vocabulary_list("s", ["a", "b"])
    nested = {"feature_columns": [column, feature_column.indicator_column(column)], "units": 3}
    assert batches.columns_in(nested) == nested["feature_columns"]
    ((features, _),) = read([({"s": np.array(["b", "a"])}, Y)], [column])
    assert all(np.asarray(x).dtype.kind in "iuf" for x in features.values())


def test_numbers_of_steps_are_positive_integers():
    batches.require_steps("steps", None)
    for steps in (0, -1, 1.5, "a", True):
        with refused(InvalidArgumentError, [f"steps={steps!r}", "positive"]):
            batches.require_steps("steps", steps)
