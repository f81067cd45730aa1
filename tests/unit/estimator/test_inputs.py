"""Input functions of `tf.compat.v1.estimator.inputs`."""

import itertools

import numpy as np
from refusals import refusals, refused

from phalanx.errors import InvalidArgumentError
from phalanx.estimator import inputs


def batches(count=None, **options):
    """Batches of five rows, as lists."""
    input_fn = inputs.numpy_input_fn({"x": np.arange(5)}, np.arange(5) * 10, **options)
    return [(x["x"].tolist(), y.tolist()) for x, y in itertools.islice(input_fn(), count)]


def test_batches_go_on_across_epochs():
    """Only the last batch is short, as TensorFlow documents it."""
    found = batches(batch_size=2, num_epochs=2, shuffle=False)
    assert found == [([a, b], [10 * a, 10 * b]) for a, b in ((0, 1), (2, 3), (4, 0), (1, 2), (3, 4))]
    assert batches(batch_size=3, shuffle=False)[-1] == ([3, 4], [30, 40])
    # Each epoch has all rows, and shuffled rows keep their labels.
    (epoch,) = batches(batch_size=5, shuffle=True)
    assert sorted(epoch[0]) == [0, 1, 2, 3, 4]
    assert epoch[1] == [10 * x for x in epoch[0]]
    # `num_epochs=None` has no limit; without labels, batches are features.
    assert batches(7, batch_size=5, num_epochs=None, shuffle=False)[6] == ([0, 1, 2, 3, 4], [0, 10, 20, 30, 40])
    (features,) = inputs.numpy_input_fn(np.arange(2), shuffle=False)()
    assert features.tolist() == [0, 1]


ROWS = np.arange(2)
# No rows would be no batch, forever.
test_arguments_that_are_refused = refusals(
    InvalidArgumentError,
    (lambda: inputs.numpy_input_fn(ROWS), ["shuffle=None", "must be a bool"]),
    (lambda: inputs.numpy_input_fn(ROWS, shuffle=False, batch_size=0), ["batch_size=0", "positive"]),
    (lambda: inputs.numpy_input_fn(ROWS, shuffle=False, num_epochs=0), ["num_epochs=0", "positive"]),
    (lambda: inputs.numpy_input_fn(ROWS, np.arange(3), shuffle=False), ["x and y with [2, 3] rows", "the same number"]),
    (lambda: inputs.numpy_input_fn(3, shuffle=False), ["x=3 and y=None", "arrays with rows"]),
    (lambda: inputs.numpy_input_fn(np.zeros((0, 2)), shuffle=False), ["x and y with [0] rows", "the same number"]),
)


class Column:
    def to_numpy(self):
        return np.arange(3)


class Table(dict):
    """A table with columns, as pandas has it."""

    columns = ("a", 3)

    def __getitem__(self, name):
        return Column()


def test_columns_of_a_table_are_features():
    """Their names become texts."""
    ((features, labels),) = inputs.pandas_input_fn(Table(), Column(), shuffle=False)()
    assert {name: x.tolist() for name, x in features.items()} == {"a": [0, 1, 2], "3": [0, 1, 2]}
    assert labels.tolist() == [0, 1, 2]
    with refused(InvalidArgumentError, ["x=3", "a pandas.DataFrame"]):
        inputs.pandas_input_fn(3, shuffle=False)
