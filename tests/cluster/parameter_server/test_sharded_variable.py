"""`ShardedVariable`: what each server holds of a variable."""

import keras
import numpy as np
import pytest

import phalanx
from phalanx.coordinator import ClusterCoordinator
from phalanx.errors import InvalidArgumentError
from phalanx.experimental import ShardedVariable, partitioners


@pytest.fixture(scope="module")
def strategy():
    """One worker, and two servers between which variables of 64 bytes and more are divided."""
    strategy = phalanx.ParameterServerStrategy(
        variable_partitioner=partitioners.MinSizePartitioner(min_shard_bytes=32, max_shards=2), workers=1, ps=2
    )
    yield strategy
    strategy.close()


def test_shards_follow_each_other(strategy):
    """Thirteen rows on two servers are seven and six; the whole is what the variable is."""
    rows = np.arange(26, dtype=np.float32).reshape(13, 2)
    with strategy.scope():
        v = keras.Variable(rows, name="table")
    shards = ShardedVariable(v, strategy)
    assert (shards.shape, shards.dtype, shards.name, len(shards)) == ((13, 2), "float32", "table", 2)
    assert sorted((s.start, s.stop, s.shape) for s in shards) == [(0, 7, (7, 2)), (7, 13, (6, 2))]
    assert {s.server for s in shards} == {0, 1}
    for shard in shards:
        np.testing.assert_array_equal(shard.numpy(), rows[shard.start : shard.stop])
    np.testing.assert_array_equal(shards.numpy(), rows)
    assert "rows 0 to 6 on server" in repr(shards)


def test_a_shard_is_assigned(strategy):
    """It is seen in the variable, and in a step."""
    with strategy.scope():
        v = keras.Variable(np.zeros((10, 4), np.float32))
    first, second = ShardedVariable(v, strategy)
    second.assign(np.ones((5, 4)))
    np.testing.assert_array_equal(np.asarray(v.value), [[0] * 4] * 5 + [[1] * 4] * 5)
    total = ClusterCoordinator(strategy).schedule(lambda: keras.ops.sum(v.value)).fetch()
    assert total == 20
    with pytest.raises(InvalidArgumentError, match=r"rows 0 to 4 of .*: the shard has the shape \(5, 4\).\nHINT"):
        first.assign(np.ones((4, 4)))


def test_a_small_variable_is_one_shard(strategy):
    """The partitioner leaves it whole."""
    with strategy.scope():
        v = keras.Variable([1.0, 2.0])
    (shard,) = ShardedVariable(v, strategy)
    assert (shard.start, shard.stop) == (0, 2)


@pytest.mark.parametrize("value", [3.0, [1.0]])
def test_other_variables_are_refused(value):
    """Those of no parameter server."""
    with pytest.raises(InvalidArgumentError, match="must be a variable on parameter servers"):
        ShardedVariable(keras.Variable(value))
