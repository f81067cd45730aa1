"""Batches on the devices: one layout for all, and one mask for all leaves."""

import jax
import keras
import numpy as np
import pytest
from simulation import content, mirrored, workers

import phalanx
from phalanx._src.input.feed import Feed, Step
from phalanx._src.input.placement import Placement
from phalanx._src.input.sources.adapt import source_of
from phalanx._src.input.sources.base import Facts, Piece
from phalanx._src.mesh.topology import Topology
from phalanx._src.options import AutoShardPolicy
from phalanx.errors import InvalidArgumentError
from phalanx.experimental import ValueContext


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
    """Dicts, tuples, lists and dtypes; all leaves of a padded batch share one mask."""
    batch = {"x": (np.ones((3, 2), "float16"), [np.arange(3)]), "y": np.array([True, False, True])}
    (got,) = strategy.experimental_distribute_dataset(lambda: iter([batch]))
    assert jax.tree.structure(jax.tree.map(lambda v: 0, got, is_leaf=lambda v: isinstance(v, phalanx.PerReplica))) == (
        jax.tree.structure(jax.tree.map(lambda v: 0, batch))
    )
    assert [got["x"][0].dtype, got["x"][1][0].data.dtype, got["y"].dtype] == ["float16", "int32", "bool"]
    assert got["x"][0].rows is got["x"][1][0].rows is got["y"].rows
    assert int(got["y"].rows.count) == 3


def test_zero_rows_keep_shape_and_dtype(strategy):
    """A batch without rows keeps its shape and dtype, and every replica has none."""
    (batch,) = strategy.experimental_distribute_dataset([np.zeros((0, 3), "float32")])
    assert [v.shape for v in batch.values] == [(0, 3), (0, 3)]
    assert strategy.gather(batch, axis=0).shape == (0, 3)
    assert strategy.reduce("SUM", batch, axis=0).tolist() == [0, 0, 0]


@pytest.mark.parametrize("steps", [None, 2])
def test_full_batches_share_one_mask(strategy, steps):
    """It is put on the devices once, for stacks too; the short batch has its own."""
    n, counts = (10, [4, 2]) if steps is None else (18, [[4, 4], [2]])
    dataset = strategy.experimental_distribute_dataset({"x": np.arange(n), "y": np.arange(n)}, batch_size=4)
    one, two, short = dataset if steps is None else dataset.batches(steps=steps)
    assert one["x"].rows is one["y"].rows is two["x"].rows is two["y"].rows
    assert short["x"].rows is short["y"].rows is not one["x"].rows
    assert [np.asarray(batch["x"].rows.count).tolist() for batch in (one, short)] == counts


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_no_mask_where_nothing_is_short(replicas):
    """The replicas divide the batch size, and the batch size divides the rows; or a short batch is dropped."""
    for n, kwargs in [(8, {}), (9, {"drop_remainder": True})]:
        dataset = mirrored(replicas).experimental_distribute_dataset(np.arange(n), batch_size=4, **kwargs)
        for batch in dataset:
            assert isinstance(batch, jax.Array) if replicas == 1 else batch.rows is None
        assert len(list(dataset)) == 2


def test_a_mask_where_the_batch_size_does_not_divide():
    """In all batches: they are one layout."""
    for batch in mirrored(2).experimental_distribute_dataset(np.arange(6), batch_size=3):
        assert (int(batch.rows.count), batch.data.shape) == (3, (2, 2))
        assert batch.rows.mask.tolist() == [[True, True], [True, False]]


@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
@pytest.mark.parametrize("n", [24, 30, 35, 3])
def test_one_program_for_all_batches(replicas, n):
    """The Python body is called while the first batch is traced, and never again, even in the next epoch."""
    strategy, calls = mirrored(replicas), []

    def step(x):
        calls.append(1)
        return phalanx.nn.compute_average_loss(x)

    dataset = strategy.experimental_distribute_dataset(np.arange(n, dtype="float32"), batch_size=12)
    iterator, means = iter(dataset), []
    means.append(strategy.run(step, args=(next(iterator),)))
    first = len(calls)
    means += [strategy.run(step, args=(batch,)) for batch in (*iterator, *dataset)]
    assert len(calls) == first
    expected = [np.arange(i, min(i + 12, n)).mean() for i in range(0, n, 12)] * 2
    assert [float(strategy.reduce("SUM", x, axis=None)) for x in means] == pytest.approx(expected)


def test_larger_batches_grow_the_layout(strategy):
    """Later ones stay as large."""
    one, two, three = strategy.experimental_distribute_dataset(lambda: iter([np.arange(2), np.arange(7), np.arange(3)]))
    assert [b.data.shape for b in (one, two, three)] == [(2, 1), (2, 4), (2, 4)]
    assert [content(b) for b in (one, two, three)] == [[[0], [1]], [[0, 1, 2, 3], [4, 5, 6]], [[0, 1], [2]]]


def test_padding_is_a_real_row(strategy):
    """So a function that is finite on the data is finite on the padding."""
    *_, short = strategy.experimental_distribute_dataset(np.arange(1.0, 6.0), batch_size=4)
    assert np.asarray(short.data).min() > 0


def placed(dataset, shape, batch_size=None):
    """Returns the batches of each worker, as NumPy arrays in their layout: `[step][worker]`."""
    topology, source = Topology.of(["cpu:0"]), source_of(dataset, batch_size)
    feeds = [Feed(source.open(w, AutoShardPolicy.DATA, None)) for w in workers(*shape)]
    places = [Placement(topology, w, source.facts, fetches=False, agreed=False) for w in workers(*shape)]
    result = []
    while any(read := [feed.read(1) for feed in feeds]):
        result.append([p.place(s, None) for p, s in zip(places, read, strict=True)])
    return result


@pytest.mark.parametrize("shape", [(1, 2), (2, 1), (2, 2), (3, 1), (4, 4)])
@pytest.mark.parametrize(("n", "b"), [(32, 16), (40, 16), (33, 17)])
def test_workers_have_one_layout(shape, n, b):
    """Their parts fit together to one global array, whose real rows are all rows."""
    got, counts = [], []
    for parts in placed(np.arange(n), shape, b):
        data = np.concatenate([p.data for p in parts])
        assert data.shape == (shape[0] * shape[1], -(-b // (shape[0] * shape[1])))
        masks = [p.rows.mask if p.rows else np.ones_like(p.data, bool) for p in parts]
        got += data[np.concatenate(masks)].tolist()
        counts.append({int(p.rows.count) if p.rows else b for p in parts})
    assert got == list(range(n))
    assert counts == [{min(b, n - i)} for i in range(0, n, b)]


@pytest.mark.parametrize("steps", [1, 2])
def test_a_full_part_of_a_short_batch(steps):
    """The number of rows is that of all workers, even if this worker's replicas are full."""
    worker = workers(2, 1)[0]
    (step,) = Feed(source_of(np.arange(8), 8).open(worker, AutoShardPolicy.DATA, None)).read(1)
    placement = Placement(Topology.of(["cpu:0"]), worker, Facts(batch_size=8), fetches=False, agreed=True)
    room = None if steps == 1 else steps
    for rows in (8, 4, 8):
        batch = placement.place([step._replace(rows=rows)] * steps, room)
        assert np.ravel(batch.rows.count).tolist() == [rows] * steps


@pytest.mark.parametrize(("shape", "n", "b"), [((2, 1), 1, 4), ((2, 2), 6, 2), ((4, 1), 5, 3), ((3, 2), 13, 12)])
@pytest.mark.parametrize("kind", ["arrays", "stream"])
def test_workers_without_a_row(shape, n, b, kind):
    """A worker may have none in the first batch, or in any: it continues with a batch that is all padding."""
    batches = lambda: iter([np.arange(i, min(i + b, n)) for i in range(0, n, b)])  # noqa: E731
    dataset = placed(np.arange(n), shape, b) if kind == "arrays" else placed(batches, shape)
    got = []
    for parts in dataset:
        data, mask = (np.concatenate(x) for x in ([p.data for p in parts], [p.rows.mask for p in parts]))
        got += data[mask].tolist()
    assert got == list(range(n))


def test_workers_grow_together():
    """A later batch is larger, by a row that one worker alone has."""
    _, parts = placed(lambda: iter([np.arange(4), np.arange(5)]), (2, 1))
    assert {p.data.shape for p in parts} == {(1, 3)}


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
    """Its batches keep the layout, and are masked throughout."""
    (worker,) = workers(1, 2)
    (step,) = Feed(source_of(np.arange(4), 4).open(worker, AutoShardPolicy.DATA, None)).read(1)
    placement = Placement(Topology.of(["cpu:0"]), worker, Facts(batch_size=4), fetches=False, agreed=True)
    full = placement.place([step], None)
    ended = placement.place([Step(Piece([np.array([9])], [0, 0], 0), 3, 2, None)], None)
    assert ended.data.shape == full.data.shape
    assert (ended.rows.mask.any(), int(ended.rows.count), ended.data.tolist()) == (False, 3, [[9, 9], [9, 9]])


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
