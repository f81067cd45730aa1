"""`phalanx.elastic.steps` outside an elastic group is a plain loop. Inside: tests/cluster/test_elastic.py."""

import gc

import keras
import numpy as np
import pytest

import phalanx
from phalanx.errors import InvalidArgumentError


@pytest.fixture
def strategy():
    """Two replicas."""
    return phalanx.MirroredStrategy(["cpu:0", "cpu:1"])


def test_results_of_all_epochs(strategy):
    """One per batch, in order, short batches too."""
    with strategy.scope():
        total = keras.Variable(0.0, aggregation="sum")

    @phalanx.function
    def step(batch):
        strategy.run(lambda x: total.assign_add(1.0), args=(batch,))
        return total.value

    dataset = strategy.experimental_distribute_dataset(np.arange(10.0), batch_size=4)
    found = [float(x) for x in phalanx.elastic.steps(step, dataset, epochs=2)]
    assert found == [2.0 * i for i in range(1, 7)]


def test_nothing_is_read_before_the_loop(strategy):
    """But wrong arguments are refused at once."""
    dataset = strategy.experimental_distribute_dataset(np.arange(4.0), batch_size=2)
    calls = []
    loop = phalanx.elastic.steps(calls.append, dataset)
    assert calls == []
    assert len(list(loop)) == 2
    with pytest.raises(InvalidArgumentError, match=r"epochs=0: must be a positive integer\.\nHINT: epochs=3"):
        phalanx.elastic.steps(calls.append, dataset, epochs=0)


def test_dataset_whose_strategy_is_gone():
    """The error says what to keep."""
    strategy = phalanx.MirroredStrategy(["cpu:0", "cpu:1"])
    dataset = strategy.experimental_distribute_dataset(np.arange(4.0), batch_size=2)
    del strategy
    gc.collect()
    with pytest.raises(InvalidArgumentError, match="its strategy no longer exists"):
        next(phalanx.elastic.steps(lambda batch: batch, dataset))
