"""`tf1.data.Dataset`: the methods that input functions use."""

import itertools
import sys

import numpy as np
from refusals import refusals, refused

from phalanx.errors import InvalidArgumentError, MissingDependencyError
from phalanx.estimator.tf1.data import AUTOTUNE, Dataset


def values(dataset):
    return [np.asarray(x).tolist() for x in dataset]


NUMBERS = Dataset.from_tensor_slices(np.arange(6))


def test_elements_in_order():
    """Slices, repetitions, parts and batches, as tf.data documents them."""
    assert values(NUMBERS) == [0, 1, 2, 3, 4, 5]
    assert values(NUMBERS.take(2).repeat(2)) == [0, 1, 0, 1]
    assert values(NUMBERS.skip(4)) == [4, 5]
    assert values(NUMBERS.shard(3, 1)) == [1, 4]
    assert values(NUMBERS.batch(4)) == [[0, 1, 2, 3], [4, 5]]
    assert values(NUMBERS.batch(4, drop_remainder=True)) == [[0, 1, 2, 3]]
    assert values(NUMBERS.map(lambda x: x * 2).prefetch(AUTOTUNE).cache()) == [0, 2, 4, 6, 8, 10]
    assert len(NUMBERS) == 6
    for forever in (None, -1):
        assert values(itertools.islice(NUMBERS.repeat(forever), 13))[-1] == 0


def test_pairs_and_dicts_of_rows():
    """Lists of floats are single; `map` gets the parts of a pair."""
    dataset = Dataset.from_tensor_slices(({"x": [1.0, 2.0]}, [3, 4]))
    ((features, label), _) = dataset
    assert (features["x"].dtype, label) == (np.float32, 3)
    assert values(dataset.map(lambda features, label: features["x"] + label)) == [4, 6]
    assert values(Dataset.from_tensors([1, 2]).repeat(2)) == [[1, 2], [1, 2]]


def test_shuffled_epochs_differ():
    """Each epoch has all elements, in another order; a seed gives the same orders."""
    found = values(NUMBERS.shuffle(6, seed=1).repeat(3))
    epochs = [found[i : i + 6] for i in (0, 6, 12)]
    assert all(sorted(epoch) == [0, 1, 2, 3, 4, 5] for epoch in epochs)
    assert epochs[0] != epochs[1] or epochs[1] != epochs[2]
    assert values(NUMBERS.shuffle(6, seed=1).repeat(3)) == found
    assert sorted(values(NUMBERS.shuffle(1))) == [0, 1, 2, 3, 4, 5]


test_arguments_that_are_refused = refusals(
    InvalidArgumentError,
    (lambda d: Dataset.from_tensor_slices(([1], [1, 2])), ["from_tensor_slices(", "the same number of rows"]),
    (lambda d: Dataset.from_tensor_slices(3), ["from_tensor_slices(3)", "the same number of rows"]),
    (lambda d: Dataset.from_tensor_slices([]), ["from_tensor_slices([])", "the same number of rows"]),
    (lambda d: d.batch(0), ["batch_size=0", "positive"]),
    (lambda d: d.take("a"), ["count='a'", "integer"]),
    (lambda d: d.skip(1.5), ["count=1.5", "integer"]),
    (lambda d: d.repeat("a"), ["count='a'", "integer"]),
    (lambda d: d.shard(0, 0), ["num_shards=0", "positive"]),
    (lambda d: d.shard(2, 2), ["index=2", "0 to 1"]),
    (lambda d: d.map(3), ["map_func=3", "not callable"]),
    call=lambda call: call(NUMBERS),
)


def test_library_that_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "grain", None)
    with refused(MissingDependencyError, ["tf1.data.Dataset", "the library grain"]):
        Dataset.from_tensors([1])
