"""`phalanx.elastic.steps` outside an elastic group is a plain loop. Inside: tests/cluster/test_elastic.py."""

import keras
import numpy as np
import pytest

import phalanx
from phalanx._src.elastic.steps import _Loop
from phalanx.errors import ContextError, InvalidArgumentError


@pytest.fixture
def strategy():
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


def test_dataset_whose_strategy_is_gone(collect):
    strategy = phalanx.MirroredStrategy(["cpu:0", "cpu:1"])
    dataset = strategy.experimental_distribute_dataset(np.arange(4.0), batch_size=2)
    del strategy
    collect()
    with pytest.raises(InvalidArgumentError, match="its strategy no longer exists"):
        next(phalanx.elastic.steps(lambda batch: batch, dataset))


def test_loop_ends_after_steps(strategy):
    """In the middle of an epoch; the next epoch begins as often as necessary. Without data it ends too."""
    dataset = strategy.experimental_distribute_dataset(np.arange(10), batch_size=4)
    loop = phalanx.elastic.steps(lambda batch: batch.values[0][0], dataset, epochs=None, max_steps=5)
    assert [(int(first), loop.epoch) for first in loop] == [(0, 0), (4, 0), (8, 0), (0, 1), (4, 1)]
    short = phalanx.elastic.steps(lambda batch: batch, dataset, epochs=1, max_steps=5)
    assert len(list(short)) == 3
    empty = strategy.experimental_distribute_dataset(lambda: iter(()))
    assert list(phalanx.elastic.steps(lambda batch: batch, empty, epochs=None, max_steps=5)) == []


def test_checkpoint_restores_the_position(strategy, tmp_path):
    """In the middle of an epoch, also of another loop; the limit counts the steps before it too."""
    dataset = strategy.experimental_distribute_dataset(np.arange(10), batch_size=4)

    def loop():
        return phalanx.elastic.steps(lambda batch: int(batch.values[0][0]), dataset, epochs=None, max_steps=8)

    first, second = loop(), loop()
    firsts = [next(first) for _ in range(5)]
    path = phalanx.train.Checkpoint(loop=first).save(tmp_path / "ckpt")
    phalanx.train.Checkpoint(loop=second).restore(path)
    assert second.epoch == 1
    assert firsts + list(second) == firsts + list(first) == [0, 4, 8, 0, 4, 8, 0, 4]


def test_step_that_is_undone_is_taken_again(strategy):
    """Its batch is read again, and it is not counted twice."""
    dataset = strategy.experimental_distribute_dataset(np.arange(10), batch_size=4)
    loop, other = (_Loop(dataset, epochs=None, max_steps=3) for _ in range(2))
    before = [int(loop.next()[0].values[0][0]) for _ in range(2)]
    other.set_position(loop.get_position(undone=True))
    after = [int(batch.values[0][0]) for (batch,) in iter(other.next, None)]
    assert (before, after) == ([0, 4], [4, 8])


def test_position_of_a_loop_that_has_begun(strategy):
    """It cannot be set. A position of something else cannot either."""
    dataset = strategy.experimental_distribute_dataset(np.arange(10), batch_size=4)
    loop = phalanx.elastic.steps(lambda batch: batch, dataset)
    with pytest.raises(InvalidArgumentError, match=r"state=\{'rows': 1\}: is not a position"):
        loop.set_state({"rows": 1})
    next(loop)
    with pytest.raises(ContextError, match=r"that have begun: .*\nHINT: restore the checkpoint before the loop"):
        loop.set_state(loop.get_state())


def test_loop_without_an_end(strategy):
    dataset = strategy.experimental_distribute_dataset(np.arange(10), batch_size=4)
    with pytest.raises(InvalidArgumentError, match="epochs=None and max_steps=None: the loop would never end"):
        phalanx.elastic.steps(lambda batch: batch, dataset, epochs=None)
