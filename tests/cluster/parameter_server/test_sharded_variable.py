"""`ShardedVariable`: what each server holds of a variable."""

import keras
import numpy as np
import pytest
from processes import DIVIDED

from phalanx.errors import InvalidArgumentError
from phalanx.experimental import ShardedVariable


@pytest.fixture
def strategy(strategy_of):
    return strategy_of(**DIVIDED)


def test_shards_follow_each_other(strategy):
    """Thirteen rows on two servers are seven and six; the whole is what the variable is. A small variable is one shard."""
    rows = np.arange(26, dtype=np.float32).reshape(13, 2)
    with strategy.scope():
        v, small = keras.Variable(rows, name="table"), keras.Variable([1.0, 2.0])
    shards = ShardedVariable(v, strategy)
    assert (shards.shape, shards.dtype, shards.name, len(shards)) == ((13, 2), "float32", "table", 2)
    assert sorted((s.start, s.stop, s.shape) for s in shards) == [(0, 7, (7, 2)), (7, 13, (6, 2))]
    assert {s.server for s in shards} == {0, 1}
    for shard in shards:
        np.testing.assert_array_equal(shard.numpy(), rows[shard.start : shard.stop])
    np.testing.assert_array_equal(shards.numpy(), rows)
    assert "rows 0 to 6 on server" in repr(shards)
    assert [(shard.start, shard.stop) for shard in ShardedVariable(small, strategy)] == [(0, 2)]


def test_a_shard_is_assigned(strategy, coordinator):
    """It is seen in the variable, and in a step."""
    with strategy.scope():
        v = keras.Variable(np.zeros((10, 4), np.float32))
    first, second = ShardedVariable(v, strategy)
    second.assign(np.ones((5, 4)))
    np.testing.assert_array_equal(np.asarray(v.value), [[0] * 4] * 5 + [[1] * 4] * 5)
    assert coordinator.schedule(lambda: keras.ops.sum(v.value)).fetch() == 20
    with pytest.raises(InvalidArgumentError, match=r"rows 0 to 4 of .*: the shard has the shape \(5, 4\).\nHINT"):
        first.assign(np.ones((4, 4)))


@pytest.mark.parametrize("value", [3.0, [1.0]])
def test_other_variables_are_refused(value):
    """Those of no parameter server."""
    with pytest.raises(InvalidArgumentError, match="must be a variable on parameter servers"):
        ShardedVariable(keras.Variable(value))
