"""Batches on their way to the replicas."""

import threading
import time

import jax
import keras
import numpy as np
import pytest

import phalanx
from phalanx.errors import ContextError, InputError, InvalidArgumentError
from phalanx.experimental import ValueContext


@pytest.fixture
def strategy():
    """Two replicas."""
    return phalanx.MirroredStrategy(["cpu:0", "cpu:1"])


def rows(strategy, batch):
    """The real rows of each replica."""
    return [v.tolist() for v in strategy.experimental_local_results(batch)]


@pytest.mark.parametrize(
    ("n", "batch_size", "replicas", "expected"),
    [
        (7, 4, 2, [[[0, 1], [2, 3]], [[4, 5], [6]]]),
        (10, 4, 2, [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8], [9]]]),
        (13, 5, 2, [[[0, 1, 2], [3, 4]], [[5, 6, 7], [8, 9]], [[10, 11], [12]]]),
        (5, 8, 2, [[[0, 1, 2], [3, 4]]]),
        (10, 3, 2, [[[0, 1], [2]], [[3, 4], [5]], [[6, 7], [8]], [[9], []]]),
        (4, 2, 3, [[[0], [1], []], [[2], [3], []]]),
        (7, 4, 3, [[[0, 1], [2], [3]], [[4], [5], [6]]]),
        (4, 3, 1, [[[0, 1, 2]], [[3]]]),
    ],
)
def test_rows_of_each_replica(n, batch_size, replicas, expected):
    """Every row once and in order, for short batches too; batches as in tf.data."""
    strategy = phalanx.MirroredStrategy([f"cpu:{i}" for i in range(replicas)])
    dataset = strategy.experimental_distribute_dataset(np.arange(n), batch_size=batch_size)
    assert [rows(strategy, batch) for batch in dataset] == expected
    assert len(dataset) == len(expected)


def test_mean_over_rows_is_exact(strategy):
    """However the rows are spread."""
    for n in range(1, 6):
        (batch,) = strategy.experimental_distribute_dataset([np.arange(n, dtype="float32")])
        assert float(strategy.reduce("MEAN", batch, axis=0)) == np.arange(n).mean()


def test_nests_keep_their_structure(strategy):
    """Dicts, tuples, lists and dtypes; all leaves of a padded batch share one mask."""
    batch = {"x": (np.ones((3, 2), "float16"), [np.arange(3)]), "y": np.array([True, False, True])}
    (got,) = strategy.experimental_distribute_dataset([batch])
    assert jax.tree.structure(jax.tree.map(lambda v: 0, got, is_leaf=lambda v: isinstance(v, phalanx.PerReplica))) == (
        jax.tree.structure(jax.tree.map(lambda v: 0, batch))
    )
    assert [v.dtype for v in jax.tree.leaves(got)[:1]] == ["float16"]
    assert got["x"][0].rows is got["x"][1][0].rows is got["y"].rows


def test_batches_lie_on_the_replicas_devices(strategy):
    """Each replica's rows on its own device."""
    (batch,) = strategy.experimental_distribute_dataset([np.arange(4)])
    assert [v.device.id for v in batch.values] == [0, 1]


def test_default_strategy_passes_batches_through():
    """The same objects."""
    batches = [np.ones(3), np.zeros(2)]
    got = list(phalanx.get_strategy().experimental_distribute_dataset(batches))
    assert all(a is b for a, b in zip(got, batches, strict=True))


def test_iterators_are_independent(strategy):
    """Each starts the dataset again."""
    dataset = strategy.experimental_distribute_dataset([np.array([i, i]) for i in range(3)])
    one, two = iter(dataset), iter(dataset)
    assert rows(strategy, next(one)) == rows(strategy, two.get_next()) == [[0], [0]]
    assert iter(one) is one
    assert len(list(one)) == 2


def test_end_of_data(strategy):
    """StopIteration, again and again."""
    iterator = iter(strategy.experimental_distribute_dataset([np.ones(2)]))
    next(iterator)
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(iterator)


def test_one_batch_ahead(strategy):
    """The next batch is fetched when one is handed out, no more."""
    fetched = []

    def batches():
        for i in range(5):
            fetched.append(i)
            yield np.ones(2)

    iterator = iter(strategy.experimental_distribute_dataset(batches()))
    next(iterator)
    deadline = time.monotonic() + 10
    while fetched != [0, 1]:
        assert time.monotonic() < deadline, fetched
        time.sleep(0.01)
    time.sleep(0.1)
    assert fetched == [0, 1]


def test_error_of_the_source_belongs_to_its_batch(strategy):
    """Batches before it are delivered; then it is raised unchanged."""

    def batches():
        yield np.ones(2)
        yield np.ones(2)
        raise OSError("disk gone")

    iterator = iter(strategy.experimental_distribute_dataset(batches()))
    next(iterator)
    next(iterator)
    with pytest.raises(OSError, match="disk gone"):
        next(iterator)


@pytest.mark.parametrize("where", ["run", "function"])
def test_next_in_a_traced_step(strategy, where):
    """It would be baked in."""
    iterator = iter(strategy.experimental_distribute_dataset([np.ones(2)] * 9))
    step = phalanx.function(lambda: next(iterator)) if where == "function" else lambda: next(iterator)
    with pytest.raises(ContextError, match="next.iterator. in a traced step: the step would be compiled"):
        strategy.run(step)


@pytest.mark.parametrize(
    ("data", "match"),
    [
        ([np.float32(1)], r"a batch of shapes \[\(\)\]: every leaf must be an array"),
        ([{}], r"a batch of shapes \[\]: every leaf must be an array"),
        ([(np.ones(2), np.ones(3))], r"a batch of shapes \[\(2,\), \(3,\)\]: its leaves have \[2, 3\] rows"),
        (np.ones(4), "dataset=ndarray: not an iterable of batches.\nHINT: batch_size=n"),
        (3, "dataset=int: not an iterable of batches"),
        ([np.array(["a", "b"])], "a batch of dtype .*U1"),
        ([np.array(["2020-01-01"], dtype="M8[D]")], "a batch of dtype .*datetime64"),
    ],
)
def test_data_that_cannot_be_split(strategy, data, match):
    """At the latest when the batch is asked for."""
    with pytest.raises(InputError, match=match):
        list(strategy.experimental_distribute_dataset(data))


@pytest.mark.parametrize("size", [0, -3, 2.5, True, "4"])
def test_bad_batch_size(strategy, size):
    """With its value."""
    with pytest.raises(InvalidArgumentError, match=f"batch_size={size!r}: must be"):
        strategy.experimental_distribute_dataset(np.ones(4), batch_size=size)


def test_options_must_be_none(strategy):
    """There are none yet; what is given is not ignored."""
    with pytest.raises(InvalidArgumentError, match="options='fast'"):
        strategy.experimental_distribute_dataset([np.ones(4)], "fast")


def test_distributed_twice(strategy):
    """The message says which one to pass."""
    dataset = strategy.experimental_distribute_dataset([np.ones(2)])
    with pytest.raises(InputError, match="this dataset is distributed already"):
        strategy.experimental_distribute_dataset(dataset)


def test_zero_rows(strategy):
    """A batch without rows keeps its shape and dtype, and every replica has none."""
    (batch,) = strategy.experimental_distribute_dataset([np.zeros((0, 3), "float32")])
    assert [v.shape for v in batch.values] == [(0, 3), (0, 3)]
    assert strategy.gather(batch, axis=0).shape == (0, 3)
    assert strategy.reduce("SUM", batch, axis=0).tolist() == [0, 0, 0]


def test_jax_arrays_are_batches_too(strategy):
    """On whatever device they are."""
    (batch,) = strategy.experimental_distribute_dataset([jax.numpy.arange(4)])
    assert rows(strategy, batch) == [[0, 1], [2, 3]]


def test_iteration_in_another_thread(strategy):
    """A loader thread may pull batches while the main thread steps."""
    got = []
    dataset = strategy.experimental_distribute_dataset([np.full(2, i) for i in range(20)])
    thread = threading.Thread(target=lambda: got.extend(dataset))
    thread.start()
    for _ in range(20):
        strategy.run(one)
    thread.join(timeout=30)
    assert [rows(strategy, b)[0][0] for b in got] == list(range(20))


def one():
    """A replica function that communicates."""
    return phalanx.get_replica_context().all_reduce("SUM", 1.0)


def test_values_from_function(strategy):
    """One call a replica, with its number; nests and Python objects; numbers become arrays."""
    seen = []

    def value_fn(c):
        seen.append(c)
        return {"a": c.replica_id_in_sync_group * 2, "b": [None, np.ones(2)]}

    value = strategy.experimental_distribute_values_from_function(value_fn)
    assert seen == [ValueContext(0, 2), ValueContext(1, 2)]
    assert [int(v) for v in value["a"].values] == [0, 2]
    assert value["b"][0].values == (None, None)
    assert value["b"][1].data.shape == (2, 2)


def test_values_from_function_with_one_replica():
    """As it is."""
    for strategy in (phalanx.get_strategy(), phalanx.OneDeviceStrategy("cpu:0")):
        assert strategy.experimental_distribute_values_from_function(lambda c: [c.num_replicas_in_sync]) == [1]


@pytest.mark.parametrize(
    ("value_fn", "match"),
    [
        (lambda c: [1] * (c.replica_id_in_sync_group + 1), r"it returned the structures .*\[\*\].* and .*\[\*, \*\]"),
        (lambda c: np.ones((2, c.replica_id_in_sync_group + 1)), r"shapes \[\(2, 1\), \(2, 2\)\]"),
        (lambda c: np.ones([2] * c.replica_id_in_sync_group), r"shapes \[\(\), \(2,\)\]"),
    ],
)
def test_values_that_do_not_fit(strategy, value_fn, match):
    """The message shows what came back."""
    with pytest.raises(InvalidArgumentError, match=match):
        strategy.experimental_distribute_values_from_function(value_fn)


def test_uneven_values_from_function(strategy):
    """Components may have different numbers of rows, none included."""
    value = strategy.experimental_distribute_values_from_function(
        lambda c: np.arange(3 * c.replica_id_in_sync_group, dtype="float32")
    )
    assert [v.tolist() for v in value.values] == [[], [0, 1, 2]]
    assert float(strategy.reduce("MEAN", value, axis=0)) == 1.0


def test_three_levels_of_inputs(strategy):
    """A nest of nests of distributed values, mirrored ones, variables and plain arguments."""
    with strategy.scope():
        v = keras.Variable(100.0)
    (batch,) = strategy.experimental_distribute_dataset([{"a": [(np.arange(4.0), np.arange(4.0) + 10)]}])

    def replica_fn(nest, *, extra):
        (x, y) = nest["data"]["a"][0]
        return {"out": [x + y + nest["m"].sum() + nest["v"] + extra["k"]]}

    nest = {"data": batch, "m": strategy.replicate(np.ones(2)), "v": v}
    result = strategy.run(replica_fn, args=(nest,), kwargs={"extra": {"k": 1000.0}})
    assert [x.tolist() for x in result["out"][0].values] == [[1112, 1114], [1116, 1118]]
