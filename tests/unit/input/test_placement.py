"""Batches on the devices: the rows of each replica, and no others."""

import functools

import jax
import keras
import numpy as np
import pytest
from simulation import content, mirrored, workers

import phalanx
from phalanx._src.input.feed import Feed, Step
from phalanx._src.input.landing import Landing
from phalanx._src.input.placement import Placement
from phalanx._src.input.sources.adapt import source_of
from phalanx._src.input.sources.base import Owner, Piece
from phalanx._src.mesh import arrays
from phalanx._src.mesh.memory import Pool
from phalanx._src.mesh.topology import Topology
from phalanx._src.mesh.values import ComponentSizes
from phalanx._src.options import AutoShardPolicy
from phalanx.errors import InvalidArgumentError
from phalanx.experimental import ValueContext

LANDING = Landing(Owner.NOBODY, Pool(), fits_devices=False)


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
    """On its own device: every row once and in order, for short batches too; batches as in tf.data."""
    strategy = mirrored(replicas)
    dataset = strategy.experimental_distribute_dataset(np.arange(n), batch_size=batch_size)
    parts = [strategy.experimental_local_results(b) for b in dataset]
    assert [[np.asarray(v).tolist() for v in values] for values in parts] == expected
    assert all([v.device.id for v in values] == list(range(replicas)) for values in parts)
    assert len(dataset) == len(expected)


def test_mean_over_rows_is_exact(strategy):
    for n in range(1, 6):
        (batch,) = strategy.experimental_distribute_dataset([np.arange(n, dtype="float32")])
        assert float(strategy.reduce("MEAN", batch, axis=0)) == np.arange(n).mean()


def test_nests_keep_their_structure(strategy):
    """Dicts, tuples, lists and dtypes; all leaves of a batch have the same numbers of rows."""
    batch = {"x": (np.ones((3, 2), "float16"), [np.arange(3)]), "y": np.array([True, False, True])}
    (got,) = strategy.experimental_distribute_dataset(lambda: iter([batch]))
    assert jax.tree.structure(jax.tree.map(lambda v: 0, got, is_leaf=lambda v: isinstance(v, phalanx.PerReplica))) == (
        jax.tree.structure(jax.tree.map(lambda v: 0, batch))
    )
    assert [got["x"][0].dtype, got["x"][1][0].data.dtype, got["y"].dtype] == ["float16", "int32", "bool"]
    assert got["x"][0].rows == got["x"][1][0].rows == got["y"].rows == ComponentSizes(((2,), (1,)))


def test_zero_rows_keep_shape_and_dtype(strategy):
    """A batch without rows keeps its shape and dtype, and every replica has none."""
    (batch,) = strategy.experimental_distribute_dataset([np.zeros((0, 3), "float32")])
    assert [v.shape for v in batch.values] == [(0, 3), (0, 3)]
    assert strategy.gather(batch, axis=0).shape == (0, 3)
    assert strategy.reduce("SUM", batch, axis=0).tolist() == [0, 0, 0]


def test_stacks_end_before_a_short_batch(strategy):
    """All steps of a stack have equal numbers of rows."""
    stacks = list(strategy.experimental_distribute_dataset(np.arange(23), batch_size=4).batches(steps=2))
    assert [x.data.shape for x in stacks] == [(2, 2, 2)] * 2 + [(2, 1, 2)] * 2
    assert [x.rows for x in stacks] == [None, None, None, ComponentSizes(((1, 2), (1, 1)))]
    assert [x.tolist() for x in stacks[-1].values] == [[[20, 21]], [[22]]]


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_full_batches_have_no_rows_to_tell(replicas):
    """If the replicas divide a batch, they have equal numbers of rows, whatever the other batches."""
    dataset = mirrored(replicas).experimental_distribute_dataset(np.arange(9), batch_size=4)
    *full, short = dataset
    for batch in full:
        assert isinstance(batch, jax.Array) if replicas == 1 else batch.rows is None
    assert isinstance(short, jax.Array) if replicas == 1 else short.rows.counts == (1,) + (0,) * (replicas - 1)
    assert len(full) == 2


@pytest.mark.cover(["replicas", "n"], {(1, 30), (2, 35), (2, 3), (3, 24), (3, 35), (4, 3)})
@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
@pytest.mark.parametrize("n", [24, 30, 35, 3])
def test_one_program_for_each_size_of_batch(replicas, n):
    """The Python body is called while the first batch of a size is traced, and never again, even in the next epoch."""
    strategy, calls = mirrored(replicas), []

    def step(x):
        calls.append(1)
        return phalanx.nn.compute_average_loss(x)

    dataset = strategy.experimental_distribute_dataset(np.arange(n, dtype="float32"), batch_size=12)
    means = [strategy.run(step, args=(batch,)) for batch in dataset]
    first = len(calls)
    means += [strategy.run(step, args=(batch,)) for batch in dataset]
    assert len(calls) == first
    expected = [np.arange(i, min(i + 12, n)).mean() for i in range(0, n, 12)] * 2
    assert [float(strategy.reduce("SUM", x, axis=None)) for x in means] == pytest.approx(expected)


def test_batches_have_room_for_their_rows(strategy):
    """And for no others: their sizes may vary."""
    one, two, three = strategy.experimental_distribute_dataset(lambda: iter([np.arange(2), np.arange(7), np.arange(3)]))
    assert [b.data.shape for b in (one, two, three)] == [(2, 1), (2, 4), (2, 2)]
    assert [content(b) for b in (one, two, three)] == [[[0], [1]], [[0, 1, 2, 3], [4, 5, 6]], [[0, 1], [2]]]


def test_padding_is_a_real_row(strategy):
    """So a function that is finite on the data is finite on the padding."""
    *_, short = strategy.experimental_distribute_dataset(np.arange(1.0, 6.0), batch_size=4)
    assert np.asarray(short.data).min() > 0


def placed(dataset, shape, batch_size=None):
    """Returns the batches of each worker, as NumPy arrays in their layout: `[step][worker]`."""
    topology, source = Topology.of(["cpu:0"]), source_of(dataset, batch_size)
    feeds = [Feed(source.open(w, AutoShardPolicy.DATA, None)) for w in workers(*shape)]
    places = [Placement(topology, w, LANDING, fetches=False) for w in workers(*shape)]
    result = []
    while any(read := [feed.read(1) for feed in feeds]):
        result.append([p.place(s, None) for p, s in zip(places, read, strict=True)])
    return result


@pytest.mark.parametrize("shape", [(1, 2), (2, 1), (2, 2), (3, 1), (4, 4)])
@pytest.mark.parametrize(("n", "b"), [(32, 16), (40, 16), (33, 17)])
def test_parts_of_workers_fit_together(shape, n, b):
    """To one global array, whose rows are all rows, in order; all workers know the rows of each other."""
    got = []
    for parts, i in zip(placed(np.arange(n), shape, b), range(0, n, b), strict=True):
        assert {p.data.shape for p in parts} == {(shape[1], -(-min(b, n - i) // (shape[0] * shape[1])))}
        assert len({p.rows for p in parts}) == 1
        assert parts[0].rows is None or sum(parts[0].rows.counts) == min(b, n - i)
        got += [x for p in parts for component in p.values for x in component.tolist()]
    assert got == list(range(n))


@pytest.mark.parametrize("steps", [1, 2])
def test_rows_that_workers_have_agreed_on(steps):
    """The numbers of rows are those of all workers, even if this worker's replicas are full."""
    worker = workers(2, 1)[0]
    (step,) = Feed(source_of(np.arange(8), 8).open(worker, AutoShardPolicy.DATA, None)).read(1)
    placement = Placement(Topology.of(["cpu:0"]), worker, LANDING, fetches=False)
    for counts in ((4, 4), (4, 0), (4, 2)):
        batch = placement.place([step._replace(rows=sum(counts), counts=counts)] * steps, None if steps == 1 else steps)
        sizes = [(count,) if steps == 1 else (steps, count) for count in counts]
        assert batch.rows == (None if counts == (4, 4) else ComponentSizes(tuple(sizes)))


@pytest.mark.parametrize(("shape", "n", "b"), [((2, 1), 1, 4), ((2, 2), 6, 2), ((4, 1), 5, 3), ((3, 2), 13, 12)])
@pytest.mark.parametrize("kind", ["arrays", "stream"])
def test_workers_without_a_row(shape, n, b, kind):
    """A worker may have none in the first batch, or in any: it goes on with a batch of padding."""
    batches = lambda: iter([np.arange(i, min(i + b, n)) for i in range(0, n, b)])  # noqa: E731
    dataset = placed(np.arange(n), shape, b) if kind == "arrays" else placed(batches, shape)
    assert [x for parts in dataset for p in parts for y in p.values for x in y.tolist()] == list(range(n))


def test_feed_keeps_failures_in_their_place():
    """Steps before a failure are delivered; put back, they come again."""

    def batches():
        yield np.ones(2)
        yield np.ones(2)
        raise OSError("disk gone")

    feed = Feed(source_of(batches).open(workers(1, 1)[0], AutoShardPolicy.DATA, None))
    steps = feed.read(5)
    assert [s.rows for s in steps] == [2, 2]
    feed.put_back(steps)
    assert feed.read(5) == steps
    with pytest.raises(OSError, match="disk gone"):
        feed.read(5)


def test_a_worker_that_has_run_out():
    """Its batches have room for the rows of another worker, and none of its own."""
    worker = workers(2, 2)[1]
    placement = Placement(Topology.of(["cpu:0"]), worker, LANDING, fetches=False)
    ended = placement.place([Step(Piece([np.array([9])], [0, 0], 0), 3, [2, 1, 0, 0], None)], None)
    assert ended.data.tolist() == [[9, 9], [9, 9]]
    assert [x.tolist() for x in ended.values] == [[], []]


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


def test_values_from_function(strategy):
    """One call a replica, with its number; nests and Python objects; numbers become arrays."""
    seen = []

    def value_fn(c):
        seen.append(c)
        return {"a": c.replica_id_in_sync_group * 2, "b": [None, np.ones(2)]}

    value = strategy.experimental_distribute_values_from_function(value_fn)
    assert seen == [ValueContext(0, 2), ValueContext(1, 2)]
    assert str(seen[1]) == "ValueContext(replica 1 of 2)"
    assert [int(v) for v in value["a"].values] == [0, 2]
    assert value["b"][0].values == (None, None)
    assert value["b"][1].data.shape == (2, 2)


@pytest.mark.parametrize("replicas", [1, 2])
def test_values_keep_the_numbers_that_the_function_returned(replicas):
    """It may fill one array for each replica and each call. A CPU device would share the memory of an aligned array."""
    strategy, buffer = phalanx.MirroredStrategy([f"cpu:{i}" for i in range(replicas)]), arrays.empty((1000,), "float32")

    def filled(call, c):
        buffer[:] = 10 * call + c.replica_id_in_sync_group
        return buffer

    functions = [functools.partial(filled, call) for call in range(3)]
    values = list(map(strategy.experimental_distribute_values_from_function, functions))
    parts = [[float(x[-1]) for x in strategy.experimental_local_results(value)] for value in values]
    assert parts == [[10 * call + i for i in range(replicas)] for call in range(3)]


@pytest.mark.parametrize("replicas", [1, 2])
def test_replicated_and_reduced_arrays_do_not_change_with_the_caller(replicas):
    """Nor do they share its memory."""
    strategy, buffer = phalanx.MirroredStrategy([f"cpu:{i}" for i in range(replicas)]), arrays.empty((1000,), "float32")
    buffer[:] = 1
    replicated, reduced = strategy.replicate({"w": buffer}), strategy.reduce("MEAN", buffer, axis=None)
    buffer[:] = 9
    sums = strategy.run(lambda tree: tree["w"].sum(), args=(replicated,))
    assert [float(x) for x in strategy.experimental_local_results(sums)] == [1000] * replicas
    assert float(reduced[-1]) == 1


def test_values_from_function_with_one_replica():
    for strategy in (phalanx.get_strategy(), phalanx.OneDeviceStrategy("cpu:0")):
        assert strategy.experimental_distribute_values_from_function(lambda c: [c.num_replicas_in_sync]) == [1]


@pytest.mark.parametrize(
    ("value_fn", "match"),
    [
        (
            lambda c: [1] * (c.replica_id_in_sync_group + 1),
            r"it returned different structures: .*\[\*\].* and .*\[\*, \*\]",
        ),
        (lambda c: np.ones((2, c.replica_id_in_sync_group + 1)), r"shapes \[\(2, 1\), \(2, 2\)\]"),
        (lambda c: np.ones([2] * c.replica_id_in_sync_group), r"shapes \[\(\), \(2,\)\]"),
    ],
)
def test_values_that_do_not_fit(strategy, value_fn, match):
    with pytest.raises(InvalidArgumentError, match=match):
        strategy.experimental_distribute_values_from_function(value_fn)


def test_uneven_values_from_function(strategy):
    """Components may have different numbers of rows, none included."""
    value = strategy.experimental_distribute_values_from_function(
        lambda c: np.arange(3 * c.replica_id_in_sync_group, dtype="float32")
    )
    assert [v.tolist() for v in value.values] == [[], [0, 1, 2]]
    assert float(strategy.reduce("MEAN", value, axis=0)) == 1.0
