"""Distributed datasets and their iterators, as a user sees them."""

import threading

import grain
import jax
import keras
import numpy as np
import pytest
from simulation import DEADLINE_S, content, mirrored, prefetching

import phalanx
from phalanx._src.typed_jax import OpenSpec
from phalanx.errors import CardinalityError, ContextError, InputError, InvalidArgumentError, OutOfRangeError
from phalanx.testing import assert_restores_everywhere


class Pairs(keras.utils.PyDataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        return np.arange(3 * i, 3 * i + (3 if i < 3 else 1))


def flat(batches):
    return [int(x) for batch in batches for part in batch.values for x in part]


@pytest.mark.parametrize("steps", [1, 2, 3, 9])
def test_stacked_steps_restore_everywhere(strategy, steps):
    dataset = strategy.experimental_distribute_dataset(np.arange(10), batch_size=3).batches(steps=steps)
    assert len(dataset) == -(-3 // steps) + 1  # The last batch is short.
    assert_restores_everywhere(dataset)


def test_the_law_finds_what_does_not_restore(strategy):
    """A source that gives other batches each time fails it."""
    counter = iter(range(99))
    dataset = strategy.experimental_distribute_dataset(lambda: (np.full(2, next(counter)) for _ in range(3)))
    with pytest.raises(AssertionError, match="batch 0, read after restoring the position behind batch -1, is"):
        assert_restores_everywhere(dataset)


def test_default_strategy_passes_batches_through():
    batches = [np.ones(3), np.zeros(2)]
    got = list(phalanx.get_strategy().experimental_distribute_dataset(batches))
    assert all(a is b for a, b in zip(got, batches, strict=True))


def test_iterators_are_independent(strategy):
    """Each starts the dataset again, also within a pass, as evaluation within training does."""
    dataset = strategy.experimental_distribute_dataset([np.array([i, i]) for i in range(3)])
    one, two = iter(dataset), iter(dataset)
    assert content(next(one)) == content(two.get_next_as_optional().get_value()) == content(next(iter(dataset)))
    assert iter(one) is one
    assert [flat(dataset) for _ in one] == [[0, 0, 1, 1, 2, 2]] * 2
    assert content(two.get_next()) == [[1], [1]]


def test_end_is_reported_again_and_again(strategy):
    """As StopIteration, as OutOfRangeError, or as an optional without value."""
    iterator = iter(strategy.experimental_distribute_dataset([np.ones(2)]))
    assert iterator.get_next_as_optional().has_value()
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(iterator)
        message = r"iterator.get_next\(\): the dataset has no further batch.\nHINT: get_"
        with pytest.raises(OutOfRangeError, match=message):
            iterator.get_next()
        optional = iterator.get_next_as_optional()
        assert not optional.has_value()
        with pytest.raises(OutOfRangeError, match=r"Optional.get_value\(\): the optional has no value"):
            optional.get_value()


@pytest.mark.parametrize(
    ("dataset", "kwargs", "cardinality"),
    [
        (np.arange(10), {"batch_size": 4}, 3),
        (np.arange(10), {"batch_size": 4, "drop_remainder": True}, 2),
        ([np.ones(4)] * 5, {}, 5),
        ([], {}, 0),
        (grain.MapDataset.range(10).batch(4), {}, 3),
        (grain.MapDataset.range(10).repeat(), {"batch_size": 4}, phalanx.data.INFINITE_CARDINALITY),
        (lambda: iter([]), {}, phalanx.data.UNKNOWN_CARDINALITY),
        (Pairs(), {}, 4),
    ],
)
def test_cardinality_counts_global_batches(strategy, dataset, kwargs, cardinality):
    """`len` works if that is a number."""
    distributed = strategy.experimental_distribute_dataset(dataset, **kwargs)
    assert distributed.cardinality == cardinality
    if cardinality >= 0:
        assert len(distributed) == len(list(distributed)) == cardinality
    else:
        message = f"its number of batches is (unknown|infinite) .cardinality {cardinality}"
        with pytest.raises(CardinalityError, match=message):
            len(distributed)


@pytest.mark.parametrize(("replicas", "drop", "rows"), [(1, True, 4), (2, True, 2), (3, True, None), (2, False, None)])
def test_element_spec_loses_no_batch(replicas, drop, rows):
    """What one replica gets, without a number of rows that may differ; no batch is lost by asking."""
    dataset = mirrored(replicas).experimental_distribute_dataset(
        {"x": np.ones((10, 3)), "y": np.arange(10)}, batch_size=4, drop_remainder=drop
    )
    assert dataset.element_spec == {
        "x": OpenSpec((rows, 3), "float32"),
        "y": OpenSpec((rows,), "int32"),
    }
    iterator = iter(dataset)
    next(iterator)
    assert iterator.element_spec["y"].shape == (rows,)
    assert iterator.get_state()["records"] == 4
    assert len(list(iterator)) == 2 - drop


def test_element_spec_of_a_one_shot_generator(strategy):
    """Its first batch is still there afterwards. A second pass is refused instead of being empty."""
    dataset = strategy.experimental_distribute_dataset(np.full(2, i) for i in range(3))
    assert dataset.element_spec.shape == (None,)
    assert dataset.element_spec.shape == (None,)
    assert flat(dataset) == [0, 0, 1, 1, 2, 2]
    with pytest.raises(InputError, match="a second pass over an iterator: an iterator can be read only once"):
        iter(dataset)


def test_reduce_of_a_dataset(strategy):
    dataset = strategy.experimental_distribute_dataset(np.arange(10.0), batch_size=4)
    assert dataset.reduce(0.0, lambda s, x: s + float(strategy.reduce("SUM", x, axis=0))) == 45.0
    assert strategy.experimental_distribute_dataset([]).reduce("start", lambda s, x: x) == "start"


def test_position_in_a_checkpoint(strategy, tmp_path):
    """Another iterator continues from it, on other replicas. An iterator can go back, even from the end."""
    iterator = iter(strategy.experimental_distribute_dataset(np.arange(10), batch_size=3))
    start = iterator.get_state()
    next(iterator)
    path = phalanx.train.Checkpoint(iterator=iterator).write(tmp_path / "position")
    other = iter(mirrored(3).experimental_distribute_dataset(np.arange(10), batch_size=3))
    phalanx.train.Checkpoint(iterator=other).read(path).assert_consumed()
    assert flat(other) == flat(iterator) == list(range(3, 10))
    iterator.set_state(start)
    assert flat(iterator) == list(range(10))


def test_batches_that_are_not_fetched(strategy):
    """They are NumPy arrays in the same layout, with the same results."""
    options = phalanx.InputOptions(experimental_fetch_to_device=False)
    with strategy.scope():
        total = keras.Variable(0.0, aggregation="sum")

    def step(x):
        total.assign_add(phalanx.nn.compute_average_loss(x))

    for kwargs in ({}, {"options": options}):
        for batch in strategy.experimental_distribute_dataset(np.arange(10.0), batch_size=3, **kwargs):
            assert isinstance(batch.data, np.ndarray if kwargs else jax.Array)
            assert not kwargs or [type(v) for v in batch.values] == [np.ndarray] * 2
            strategy.run(step, args=(batch,))
    assert float(total) == 2 * (1 + 4 + 7 + 9)


@pytest.mark.parametrize("fetch", [True, False])
def test_where_batches_of_one_device_are(fetch):
    options = phalanx.InputOptions(experimental_fetch_to_device=fetch)
    (batch,) = phalanx.OneDeviceStrategy("cpu:1").experimental_distribute_dataset([np.ones(2)], options)
    assert batch.device.id == 1 if fetch else type(batch) is np.ndarray


@pytest.mark.parametrize("ahead", [0, 1, 4])
def test_read_ahead_changes_nothing(strategy, ahead):
    options = phalanx.InputOptions(experimental_per_replica_buffer_size=ahead)
    dataset = strategy.experimental_distribute_dataset(np.arange(10), options, batch_size=3)
    assert flat(dataset) == list(range(10))
    assert_restores_everywhere(dataset)


def test_stacked_steps_have_a_leading_dimension(strategy):
    """A replica's leaves are `[steps, rows, ...]`; the last stack has as many as are left."""
    one, two = strategy.experimental_distribute_dataset(np.arange(10), batch_size=4).batches(steps=2)
    assert (one.data.shape, two.data.shape) == ((2, 2, 2), (2, 1, 1))
    assert one.values[1].tolist() == [[2, 3], [6, 7]]
    assert int(strategy.reduce("SUM", one, axis=(0, 1))) == 28


def test_stacked_steps_of_the_default_strategy():
    """They are arrays `[steps, rows, ...]`, of batches of equal size."""
    eight, six = (phalanx.get_strategy().experimental_distribute_dataset(np.arange(n), batch_size=4) for n in (8, 6))
    assert [b.tolist() for b in eight.batches(steps=2)] == [[[0, 1, 2, 3], [4, 5, 6, 7]]]
    assert [b.tolist() for b in six.batches(steps=2)] == [[[0, 1, 2, 3]], [[4, 5]]]


@pytest.mark.parametrize("steps", [0, -1, 1.5, True, None])
def test_bad_steps_are_shown(strategy, steps):
    with pytest.raises(InvalidArgumentError, match=f"steps={steps!r}: must be an integer of at least 1"):
        strategy.experimental_distribute_dataset([np.ones(2)]).batches(steps=steps)


def test_make_experimental_numpy_dataset(strategy):
    """Rows, to be batched before or while they are distributed."""
    rows = strategy.make_experimental_numpy_dataset((np.arange(10), [1.0] * 10))
    for dataset in (
        strategy.experimental_distribute_dataset(rows.batch(4)),
        strategy.experimental_distribute_dataset(rows, batch_size=4),
    ):
        x, y = next(iter(dataset))
        assert (content(x), y.data.shape) == ([[0, 1], [2, 3]], (2, 2))
    with pytest.raises(InvalidArgumentError, match="session='s': must be None: Phalanx has no sessions"):
        strategy.make_experimental_numpy_dataset(np.ones(3), "s")


def test_nothing_is_read_before_it_is_asked_for(strategy):
    """`iter` starts no thread, nor does distributing."""
    read = []
    iterator = iter(strategy.experimental_distribute_dataset(read.append(i) or np.ones(2) for i in range(3)))
    assert (read, prefetching()) == ([], [])
    assert len(list(iterator)) == 3


def test_iteration_in_another_thread(strategy):
    """A loader thread may pull batches while the main thread steps."""
    got = []
    dataset = strategy.experimental_distribute_dataset([np.full(2, i) for i in range(20)])
    thread = threading.Thread(target=lambda: got.extend(dataset))
    thread.start()
    step = lambda: phalanx.get_replica_context().all_reduce("SUM", 1.0)  # noqa: E731
    for _ in range(20):
        strategy.run(step)
    thread.join(DEADLINE_S)
    assert [content(b)[0][0] for b in got] == list(range(20))


@pytest.mark.cover(["replicas", "kind"], {(1, "arrays"), (2, "generator"), (3, "grain"), (4, "arrays")})
@pytest.mark.parametrize(
    ("replicas", "kind"), [(1, "arrays"), (2, "arrays"), (3, "arrays"), (4, "arrays"), (2, "generator"), (3, "grain")]
)
def test_evaluation_is_exact(replicas, kind):
    """1,000 rows at batch 48: loss and accuracy are those of NumPy over all rows."""
    strategy, random = mirrored(replicas), np.random.default_rng(0)
    x, y = random.normal(size=1000).astype("float32"), random.integers(0, 2, 1000)
    pairs = {
        "arrays": (x, y),
        "generator": lambda: zip(x, y, strict=True),
        "grain": grain.MapDataset.range(1000).map(lambda i: (x[i], y[i])),
    }
    with strategy.scope():
        loss, accuracy = keras.metrics.Mean(), keras.metrics.BinaryAccuracy()

    def step(batch):
        xs, ys = batch
        mask = phalanx.get_replica_context().example_mask
        loss.update_state((xs - ys) ** 2, sample_weight=mask)
        accuracy.update_state(ys[:, None], xs[:, None], sample_weight=mask)

    for batch in strategy.experimental_distribute_dataset(pairs[kind], batch_size=48):
        strategy.run(step, args=(batch,))
    assert float(loss.result()) == pytest.approx(((x - y) ** 2).mean(), rel=1e-6)
    assert float(accuracy.result()) == pytest.approx(((x > 0.5) == y).mean(), rel=1e-6)


@pytest.mark.parametrize("wrapped", [lambda x: x, lambda x: (x, x), lambda x: {"a": [x]}], ids=["one", "pair", "dict"])
@pytest.mark.parametrize("batched", [True, False], ids=["batches", "rows"])
def test_values_of_replicas_are_no_dataset(wrapped, batched):
    """JAX would take the replicas for rows, because a `PerReplica` is a pytree."""
    strategy = mirrored(2)
    batch = wrapped(next(iter(strategy.experimental_distribute_dataset(np.arange(8.0), batch_size=4))))
    call = lambda dataset, **size: list(strategy.experimental_distribute_dataset(dataset, **size))  # noqa: E731
    with pytest.raises(ContextError, match="a PerReplica used as an array.*\nHINT: .*strategy.gather"):
        call([batch]) if batched else call(batch, batch_size=2)


def test_mirrored_values_are_arrays_of_rows():
    strategy = mirrored(2)
    rows = strategy.run(lambda: phalanx.Mirrored(keras.ops.arange(3)))
    assert flat(strategy.experimental_distribute_dataset(rows, batch_size=2)) == [0, 1, 2]
    scalar = strategy.run(lambda: phalanx.Mirrored(keras.ops.ones(())))
    with pytest.raises(InputError, match="every leaf must be an array"):
        strategy.experimental_distribute_dataset(scalar, batch_size=2)
