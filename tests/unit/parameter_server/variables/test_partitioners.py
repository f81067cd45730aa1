"""Partitioners, the division of rows, and placement: results of tf.distribute 2.21, NumPy, and properties by trying everything."""

import itertools
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from phalanx._src.parameter_server.variables.partitioners import (
    FixedShardsPartitioner,
    MaxSizePartitioner,
    MinSizePartitioner,
    Partitioner,
    check_partitions,
    place,
    split_rows,
)
from phalanx.errors import InvalidArgumentError
from phalanx.experimental import partitioners

OF_EACH_KIND = [FixedShardsPartitioner(5), MinSizePartitioner(4, max_shards=10), MaxSizePartitioner(8)]
SHAPES = st.lists(st.integers(0, 40), min_size=1, max_size=3).map(tuple)
BYTES, SHARDS = st.integers(1, 2000), st.integers(1, 50)


def shard_bytes(shape, shards):
    """The sizes of a float32 variable's shards, by NumPy."""
    return [part.nbytes for part in np.array_split(np.zeros(shape, "float32"), shards)]


@pytest.mark.parametrize(
    ("partitioner", "shape", "dtype", "expected"),
    [
        (FixedShardsPartitioner(5), (13, 1), "float32", [5, 1]),
        (FixedShardsPartitioner(5), (2, 3), "float32", [2, 1]),
        (MinSizePartitioner(), (1000, 1000), "float32", [1, 1]),
        (MinSizePartitioner(max_shards=50), (1024, 1024), "float32", [16, 1]),
        (MinSizePartitioner(4, max_shards=2), (6, 1), "float32", [2, 1]),
        (MinSizePartitioner(8, max_shards=10), (6, 1), "float32", [3, 1]),
        (MinSizePartitioner(4, max_shards=10), (0, 4), "float32", [1, 1]),
        (MinSizePartitioner(16, max_shards=10), (6, 1), "string", [6, 1]),
        (MinSizePartitioner(16, max_shards=10), (6, 1), "float64", [3, 1]),
        (MinSizePartitioner(16, max_shards=10), (6, 1), "bool", [1, 1]),
        (MaxSizePartitioner(8), (13, 1), "float32", [7, 1]),
        (MaxSizePartitioner(8, max_shards=2), (13, 1), "float32", [2, 1]),
        (MaxSizePartitioner(1024), (13, 1), "float32", [1, 1]),
        (MaxSizePartitioner(32), (6, 1), "string", [3, 1]),
        (MaxSizePartitioner(32), (6, 1), np.object_, [3, 1]),
        (MaxSizePartitioner(32, bytes_per_string=8), (6, 1), "string", [2, 1]),
        (MaxSizePartitioner(4), (6, 1), "bfloat16", [3, 1]),
    ],
)
def test_results_of_tf_distribute(partitioner, shape, dtype, expected):
    assert partitioner(shape, dtype) == expected


@pytest.mark.parametrize("partitioner", OF_EACH_KIND)
@pytest.mark.parametrize(("axis", "expected"), [(0, [2, 1]), (1, [1, 3]), (-1, [1, 3]), (-2, [2, 1])])
def test_axis_selects_the_divided_dimension(partitioner, axis, expected):
    """Another dim than the first may be divided."""
    assert partitioner((2, 3), "float32", axis) == expected
    assert partitioner((2, 3), dtype=np.float32, axis=axis) == expected


@pytest.mark.parametrize("partitioner", OF_EACH_KIND)
@pytest.mark.parametrize("shape", [(0,), (0, 4)])
def test_variable_without_rows_is_one_shard(partitioner, shape):
    """A variable without rows is one shard; in tf.distribute none, or a division by zero."""
    assert check_partitions(shape, partitioner(shape, "float32")) == 1


@given(SHAPES, BYTES, SHARDS)
def test_min_size_finds_most_shards(shape, size, most):
    """No number of shards that is larger, and allowed, has none that is too small."""
    [shards, *rest] = MinSizePartitioner(size, max_shards=most)(shape, "float32")
    allowed = [n for n in range(1, min(most, shape[0]) + 1) if min(shard_bytes(shape, n)) >= size]
    assert shards == max(allowed, default=1)
    assert rest == [1] * (len(shape) - 1)


@given(SHAPES, BYTES, st.none() | SHARDS)
def test_max_size_finds_fewest_shards(shape, size, most):
    """No smaller number of shards has none that is too large; but no more than there may be, nor than rows."""
    [shards, *rest] = MaxSizePartitioner(size, max_shards=most)(shape, "float32")
    allowed = [n for n in range(1, shape[0] + 1) if max(shard_bytes(shape, n)) <= size]
    assert shards == min(min(allowed, default=max(1, shape[0])), most or 99)
    assert rest == [1] * (len(shape) - 1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FixedShardsPartitioner(0), r"num_shards=0: must be a positive integer.\nHINT: num_shards=2"),
        (lambda: FixedShardsPartitioner(2.5), r"num_shards=2.5: must be a positive integer"),
        (lambda: MinSizePartitioner(0), "min_shard_bytes=0: must"),
        (lambda: MinSizePartitioner(4, 0), "max_shards=0: must"),
        (lambda: MinSizePartitioner(4, 1, 0), "bytes_per_string=0: must"),
        (lambda: MaxSizePartitioner(-1), "max_shard_bytes=-1: must"),
        (lambda: MaxSizePartitioner(4, 0), "max_shards=0: must"),
        (lambda: MaxSizePartitioner(4, 1, 0), "bytes_per_string=0: must"),
    ],
)
def test_sizes_must_be_positive(make, message):
    with pytest.raises(InvalidArgumentError, match=message):
        make()


@pytest.mark.parametrize("partitioner", OF_EACH_KIND)
@pytest.mark.parametrize(
    ("shape", "axis", "message"),
    [
        ((2, 3), 2, r"axis=2 of a variable of shape \(2, 3\): the variable has 2 dims.\nHINT: axis=0"),
        ((2, 3), -3, r"axis=-3 of a variable"),
        (
            (),
            0,
            r"axis=0 of a variable of shape \(\): a scalar cannot be sharded.\nHINT: use the partitioner for variables",
        ),
    ],
)
def test_axis_that_is_none(partitioner, shape, axis, message):
    """It is an error that says how many there are."""
    with pytest.raises(InvalidArgumentError, match=message):
        partitioner(shape, "float32", axis)


def test_dtype_that_is_none():
    with pytest.raises(InvalidArgumentError, match=r"dtype='float31': is not the dtype of a variable.\nHINT: dtype="):
        MaxSizePartitioner(8)((4,), "float31")


def test_partitioner_of_ones_own():
    """It has to say how."""

    class Mine(Partitioner):
        def __call__(self, shape, dtype, axis=0):
            return [3, 1]

    assert check_partitions((4, 4), Mine()((4, 4), "float32")) == 3
    with pytest.raises(TypeError, match="abstract"):
        Partitioner()


@pytest.mark.parametrize(
    ("shape", "counts", "expected"),
    [((13, 4), [5, 1], 5), ((2, 4), (5, 1), 2), ((7,), [1], 1), ((0, 4), [2, 1], 1), ((9,), [np.int64(4)], 4)],
)
def test_check_partitions_refuses_too_many_shards(shape, counts, expected):
    assert check_partitions(shape, counts) == expected


@pytest.mark.parametrize(
    "counts", [None, 2, "21", [0, 1], [-1, 1], [2], [2, 1, 1], [], [1, 2], [2, 0], [2.0, 1], {2: 1}]
)
def test_bad_answer_of_a_partitioner(counts):
    """It is shown, with one that would do."""
    with pytest.raises(InvalidArgumentError) as raised:
        check_partitions((13, 4), counts)
    assert raised.value.asked == f"variable_partitioner returned {counts!r} for a variable of shape (13, 4)"
    assert "one number per dim" in raised.value.found
    assert raised.value.hint == "return [2, 1]"


@given(st.integers(0, 500), st.integers(1, 60))
def test_rows_of_shards(rows, shards):
    """As NumPy divides them."""
    expected = [part.tolist() for part in np.array_split(np.arange(rows), shards)]
    assert [list(part) for part in split_rows(rows, shards)] == expected


def loads_of(sizes, servers, count):
    return [sum(size for size, server in zip(sizes, servers, strict=True) if server == i) for i in range(count)]


@given(st.lists(st.integers(0, 9), max_size=7), st.integers(1, 3))
@example([1, 1, 2], 2)
@example([32000, 144, 32000, 144], 2)  # Placed in turn, one server would get both tables.
def test_placement_is_near_the_best(sizes, count):
    """The fullest server holds at most 4/3 of what it would in the best of all placements."""
    servers = place(sizes, [0] * count)
    assert set(servers) <= set(range(count))
    best = min(max(loads_of(sizes, s, count)) for s in itertools.product(range(count), repeat=len(sizes)))
    assert 3 * max(loads_of(sizes, servers, count)) <= 4 * best


@given(st.integers(0, 30), st.integers(1, 8))
def test_placement_of_equals(things, count):
    """In turn, by their order."""
    assert place([7] * things, [0] * count) == [i % count for i in range(things)]


def test_placement_beside_what_is_there():
    """The server that holds least gets the next."""
    assert place([10, 10, 10], [25, 0, 12]) == [1, 1, 2]
    assert place([], [3, 4]) == []


@pytest.mark.slow
def test_public_names_need_no_jax():
    """The names of tf.distribute stand where they do there, and need no JAX."""
    names = {"FixedShardsPartitioner", "MaxSizePartitioner", "MinSizePartitioner", "Partitioner"}
    assert names == {*partitioners.__all__}
    assert partitioners.__all__ == sorted(partitioners.__all__)
    code = "import sys, phalanx._src.parameter_server.variables.partitioners; print({'jax', 'keras', 'ray'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("set()\n", "")
