"""`ClusterCoordinator`: what scheduled steps may do, what they return, and what becomes of their errors."""

import collections
import contextlib
import importlib
import re
import threading
import time

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import phalanx
from phalanx.coordinator import ClusterCoordinator, RemoteValue, experimental_get_current_worker_index
from phalanx.errors import (
    CancelledError,
    CheckpointError,
    ContextError,
    InvalidArgumentError,
    OutOfRangeError,
    RecompilationWarning,
    TraceError,
)

Pair = collections.namedtuple("Pair", ["a", "b"])


@pytest.fixture
def counter(strategy):
    """A variable that counts."""
    with strategy.scope():
        return keras.Variable(0, dtype="int32", trainable=False, aggregation="sum")


@pytest.fixture
def numbers():
    """A function that makes a dataset; not of this module, which workers cannot import."""
    return lambda: ({"x": np.float32(i)} for i in range(1_000_000))


def test_results_stay_what_they_were(strategy, coordinator):
    """A worker computes with values in memory that its server overwrites for the next step; what steps return is their own."""
    with strategy.scope():
        many = keras.Variable(np.zeros(100_000, "float32"), trainable=False, aggregation="sum")

    def step():
        before = many.value
        many.assign_add(jnp.ones(100_000, "float32"))
        return before

    found = coordinator.fetch([coordinator.schedule(step) for _ in range(60)])
    assert all((x == x[0]).all() for x in found)
    # Two workers may have computed with the same values.
    assert len({float(x[0]) for x in found}) > 20
    assert (many.numpy() == 60).all()


def take(iterator):
    """A step that returns the next batch."""
    return next(iterator)


def test_every_step_counts_once(calm, counter):
    """As many steps as were scheduled have been done, and none is left."""

    def step(amount):
        counter.assign_add(amount)
        return counter.value

    values = [calm.schedule(step, args=(1,)) for _ in range(300)]
    assert all(isinstance(v, RemoteValue) for v in values)
    calm.join()
    assert calm.done()
    assert int(counter.value) == 300
    assert {v.dtype for v in calm.fetch(values)} == {np.dtype("int32")}


def test_arguments_and_results(calm):
    """Nests go there and come back; what is no array comes back as it is."""

    def step(pair, scale, *, name):
        return {"sum": pair.a + pair.b, "pair": Pair(pair.b * scale, name), "list": [None, "text", pair.a]}

    value = calm.schedule(step, args=(Pair(np.arange(3.0), jnp.ones(3)), 2), kwargs={"name": "n"})
    fetched = calm.fetch((value, 7, "other"))
    assert fetched[1:] == (7, "other")
    result = fetched[0]
    np.testing.assert_array_equal(result["sum"], [1.0, 2.0, 3.0])
    assert isinstance(result["pair"], Pair)
    np.testing.assert_array_equal(result["pair"].a, [2.0, 2.0, 2.0])
    assert result["pair"].b == "n"
    assert result["list"][:2] == [None, "text"]
    assert isinstance(result["list"][2], np.ndarray)


def test_a_number_compiles_nothing_anew(calm):
    """A step counter among the arguments is traced once."""
    traces = []

    def step(number):
        traces.append(1)
        return number * 2

    assert calm.fetch([calm.schedule(step, args=(i,)) for i in range(5)]) == [0, 2, 4, 6, 8]
    once = len(traces)
    assert int(calm.schedule(step, args=(9,)).fetch()) == 18
    assert len(traces) == once


def test_methods_and_strategy_run(calm, strategy):
    """A method of an object, and `run` in a step: there is one replica."""

    class Steps:
        def __init__(self, factor):
            self.factor = factor

        def double(self, x):
            return strategy.run(lambda y: phalanx.get_replica_context().num_replicas_in_sync * self.factor * y, (x,))

    assert float(calm.schedule(Steps(2).double, args=(3.0,)).fetch()) == 6.0
    assert float(calm.schedule(Steps(5).double, args=(3.0,)).fetch()) == 15.0


def test_function_of_phalanx(calm, counter):
    """What `phalanx.function` returns can be scheduled."""

    @phalanx.function
    def step():
        counter.assign_add(2)
        return counter.value

    assert int(calm.schedule(step).fetch()) == 2


def test_the_first_error(calm, counter):
    """It is raised once, by `join`; what waited is cancelled, what failed raises its own; then all is as new."""

    def bad_dataset():
        yield np.float32(0)
        raise OSError("no such file: rows")

    iterator = iter(calm.create_per_worker_dataset(bad_dataset))

    def step(iterator):
        next(iterator)
        counter.assign_add(1)

    values = [calm.schedule(step, args=(iterator,)) for _ in range(3)]
    with pytest.raises(OSError, match="no such file: rows") as raised:
        calm.join()
    assert any("bad_dataset" in note for note in raised.value.__notes__)
    calm.join()
    errors = []
    for value in values:
        try:
            value.fetch()
        except (OSError, CancelledError) as e:
            errors.append(type(e))
    assert OSError in errors
    assert set(errors) <= {OSError, CancelledError}
    before = int(counter.value)
    calm.schedule(lambda: counter.assign_add(1))
    calm.join()
    assert int(counter.value) == before + 1


def until_failed(coordinator):
    """Waits until a scheduled step has failed, without asking the coordinator."""
    deadline = time.monotonic() + 60
    while coordinator.status().in_flight or coordinator.status().queued:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def fail(coordinator, warm):
    """Schedules a step whose dataset ends with an error, after `warm` batches."""

    def dataset():
        for _ in range(warm):
            yield np.float32(1)
        raise ZeroDivisionError("rows / 0")

    iterator = iter(coordinator.create_per_worker_dataset(dataset))
    return [coordinator.schedule(take, args=(iterator,)) for _ in range(2 * warm + 1)]


def test_schedule_raises_it(calm, counter):
    """`schedule` raises it too, and does not schedule then."""
    fail(calm, 1)
    until_failed(calm)
    with pytest.raises(ZeroDivisionError, match="rows / 0"):
        calm.schedule(lambda: counter.assign_add(1))
    calm.join()
    assert int(counter.value) == 0


def test_done_raises_it(calm):
    """And so does `done`."""
    fail(calm, 1)
    until_failed(calm)
    with pytest.raises(ZeroDivisionError, match="rows / 0"):
        calm.done()
    assert calm.done()


def test_fetch_of_a_cancelled_value(calm):
    """It says that it was cancelled, by what, and what to do."""

    def dataset():
        yield np.float32(1)
        # Until all are scheduled: `schedule` would raise what the others have met.
        time.sleep(3)

    iterator = iter(calm.create_per_worker_dataset(dataset))
    values = [calm.schedule(take, args=(iterator,)) for _ in range(400)]
    with pytest.raises(OutOfRangeError, match="no further batch"):
        calm.join()
    with pytest.raises(CancelledError, match=r"(?s)another step failed first: OutOfRangeError.*HINT: .*again"):
        values[-1].fetch()


def test_a_finite_dataset_ends(calm):
    """Each worker has the whole of it; the step after its last batch raises."""
    iterator = iter(calm.create_per_worker_dataset(lambda: iter([np.float32(i) for i in range(3)])))
    values = []

    def steps():
        values.extend(calm.schedule(take, args=(iterator,)) for _ in range(20))
        calm.join()

    with pytest.raises(OutOfRangeError, match=r"(?s)no further batch.*HINT: .*repeat"):
        steps()
    seen = collections.Counter()
    for value in values:
        try:
            seen[float(value.fetch())] += 1
        except (OutOfRangeError, CancelledError):
            continue
    assert set(seen) <= {0.0, 1.0, 2.0}
    assert max(seen.values()) <= 2


def test_a_dataset_function_that_is_a_phalanx_function(calm):
    """TensorFlow's tutorial of parameter servers puts `@tf.function` above it; the function is called as it is."""
    dataset_fn = phalanx.function(lambda: iter([np.float32(7)]))
    iterator = iter(calm.create_per_worker_dataset(dataset_fn))
    assert float(calm.schedule(take, args=(iterator,)).fetch()) == 7


def test_an_empty_dataset(calm):
    """It has no batch whose shape a step could have."""
    iterator = iter(calm.create_per_worker_dataset(lambda: iter([])))
    with pytest.raises(OutOfRangeError, match="no further batch"):
        calm.schedule(lambda iterator: next(iterator), args=(iterator,))


def test_workers_have_their_own_places(calm, numbers):
    """Each worker begins at the first batch, and a new iterator begins anew."""
    dataset = calm.create_per_worker_dataset(numbers)
    for _ in range(2):
        iterator = iter(dataset)
        batches = calm.fetch([calm.schedule(take, args=(iterator,)) for _ in range(200)])
        values = [float(b["x"]) for b in batches]
        assert set(collections.Counter(values).values()) <= {1, 2}
        assert min(values) == 0.0
        assert sorted(set(values)) == list(range(len(set(values))))


def test_datasets_that_are_given(calm):
    """A dataset instead of a function: an array of batches, a list, what has only __getitem__."""

    class Items:
        def __len__(self):
            return 2

        def __getitem__(self, i):
            return np.full((2,), i, "float32")

    def step(iterator):
        return next(iterator).sum()

    for dataset in (np.arange(4.0).reshape(2, 2), [np.zeros(2), np.ones(2)], Items()):
        iterator = iter(calm.create_per_worker_dataset(dataset))
        assert calm.schedule(step, args=(iterator,)).fetch() in (0.0, 1.0)


def test_several_batches_of_several_shapes(calm):
    """A step that takes two batches, and a last batch that is shorter than the others."""
    batches = [np.ones((4, 1)), np.ones((4, 1)), np.ones((4, 1)), np.ones((1, 1))]
    iterator = iter(calm.create_per_worker_dataset(lambda: iter(2 * batches)))

    def step(iterator):
        return next(iterator).sum() + 10 * next(iterator).sum()

    # Of three steps one worker does two.
    values = [float(calm.schedule(step, args=(iterator,)).fetch()) for _ in range(3)]
    assert set(values) == {44.0, 14.0}


def test_per_worker_values(calm, strategy):
    """Each worker has a value of its own, which a step gets as that of the worker that does it."""
    where = calm.create_per_worker_values(experimental_get_current_worker_index)

    def step(index):
        return index + 10

    seen = set(map(int, calm.fetch([calm.schedule(step, args=(where,)) for _ in range(300)])))
    assert seen <= {10, 11}
    assert seen


def test_the_index_in_a_dataset_function(calm):
    """A dataset function may ask on which worker it is."""

    def dataset():
        index = experimental_get_current_worker_index()
        return ({"worker": np.int32(index)} for _ in range(1000))

    iterator = iter(calm.create_per_worker_dataset(dataset))
    values = calm.fetch([calm.schedule(take, args=(iterator,)) for _ in range(200)])
    assert {int(v["worker"]) for v in values} <= {0, 1}


def test_the_index_elsewhere(calm):
    """At the coordinator, and in a step, which is one program for all workers, it is an error."""
    with pytest.raises(ContextError, match=r"(?s)this process is not a worker.*HINT: .*create_per_worker_values"):
        experimental_get_current_worker_index()
    with pytest.raises(ContextError, match="this process is not a worker"):
        calm.schedule(experimental_get_current_worker_index)


def test_dataset_functions_that_use_the_strategy(calm, strategy):
    """`distribute_datasets_from_function` in a dataset function, as in the guide of tf.distribute."""

    def dataset_fn(context):
        return (np.full((2,), 10 * context.num_input_pipelines + i, "float32") for i in range(100))

    def per_worker():
        return strategy.distribute_datasets_from_function(dataset_fn)

    iterator = iter(calm.create_per_worker_dataset(per_worker))
    assert calm.schedule(lambda it: next(it).sum(), args=(iterator,)).fetch() >= 20.0


def test_arguments_that_are_refused(calm):
    """The value of another step, what is no list, no function, no dataset."""
    value = calm.schedule(lambda: jnp.ones(()))
    with pytest.raises(InvalidArgumentError, match=r"(?s)RemoteValue.*HINT: .*fetch"):
        calm.schedule(lambda x: x, args=([value],))
    with pytest.raises(InvalidArgumentError, match=r"(?s)args=3: must be a list.*HINT"):
        calm.schedule(lambda x: x, args=3)
    with pytest.raises(InvalidArgumentError, match=r"(?s)fn=5: must be a function.*HINT"):
        calm.schedule(5)
    with pytest.raises(InvalidArgumentError, match=r"(?s)must be a dataset.*HINT"):
        calm.create_per_worker_dataset(5)
    with pytest.raises(InvalidArgumentError, match=r"(?s)fn=5: must be a function.*HINT"):
        calm.create_per_worker_values(5)


def test_iterators_are_refused_outside_their_context(calm, numbers):
    """`iter` belongs to the coordinator, `next` to a step."""
    dataset = calm.create_per_worker_dataset(numbers)
    with pytest.raises(ContextError, match=r"(?s)start the dataset from the beginning.*HINT"):
        calm.schedule(lambda: next(iter(dataset))["x"])
    with pytest.raises(ContextError, match=r"(?s)on the workers.*HINT: .*schedule"):
        next(iter(dataset))
    with pytest.raises(ContextError, match=r"(?s)on the workers.*HINT: .*schedule"):
        iter(dataset).get_next()


def test_the_spec_of_a_worker_dataset(calm):
    """It is that of a batch on a worker, which no step loses by it."""
    dataset = calm.create_per_worker_dataset(lambda: iter([{"x": np.zeros((3, 2), "float32"), "y": np.int32(1)}]))
    expected = {"x": jax.ShapeDtypeStruct((3, 2), "float32"), "y": jax.ShapeDtypeStruct((), "int32")}
    assert dataset.element_spec == expected
    batch = calm.schedule(lambda iterator: iterator.get_next(), args=(iter(dataset),)).fetch()
    assert {name: (x.shape, x.dtype) for name, x in batch.items()} == {
        n: (x.shape, x.dtype) for n, x in expected.items()
    }
    assert phalanx.coordinator.PerWorkerValue is phalanx.coordinator.PerWorkerValues


def test_a_dataset_function_that_returns_a_generator_function(calm):
    """Each worker calls it, as `experimental_distribute_dataset` does."""

    def dataset_fn():
        def rows():
            yield np.float32(4)

        return rows

    iterator = iter(calm.create_per_worker_dataset(dataset_fn))
    assert calm.schedule(lambda iterator: next(iterator) + 1, args=(iterator,)).fetch() == 5


def test_steps_that_cannot_be_programs(calm):
    """Python that needs values, and what calls back to Python: an error at once, and nothing is scheduled."""
    with pytest.raises(
        TraceError, match=r"(?s)test_coordinator.py:\d+: `calm.schedule.*HINT: .*phalanx.cond"
    ) as raised:
        calm.schedule(lambda x: 1 if x > 0 else 2, args=(1.0,))
    # Which is refused here.
    assert "jax.debug.print" not in str(raised.value)
    with pytest.raises(TraceError, match=r"(?s)jax.debug.print.*cannot call Python.*HINT: return the value"):
        calm.schedule(lambda x: jax.debug.print("{x}", x=x), args=(1.0,))
    with pytest.raises(KeyError, match="unknown"):
        calm.schedule(lambda: {}["unknown"])
    assert calm.done()


def test_a_dataset_function_that_cannot_be_sent(calm):
    """It says what cannot be pickled."""
    lock = threading.Lock()
    iterator = iter(calm.create_per_worker_dataset(lambda: iter([lock])))
    with pytest.raises(InvalidArgumentError, match=r"(?s)dataset.*lock.*HINT"):
        calm.schedule(lambda iterator: next(iterator), args=(iterator,))


def test_a_dataset_that_cannot_be_sent(calm):
    """It names the dataset."""
    generator = (np.zeros(2) for _ in range(3))
    iterator = iter(calm.create_per_worker_dataset(generator))
    with pytest.raises(InvalidArgumentError, match=r"(?s)<generator object.*cannot be pickled.*HINT: pass a function"):
        calm.schedule(lambda iterator: next(iterator), args=(iterator,))


@pytest.mark.parametrize("make", ["create_per_worker_dataset", "create_per_worker_values"])
def test_a_function_that_needs_arguments(calm, make):
    """Workers have none for it."""
    with pytest.raises(InvalidArgumentError, match=r"(?s)without arguments: .*'context'.*HINT: .*distribute_datasets"):
        getattr(calm, make)(lambda context: iter([context]))
    assert getattr(calm, make)(lambda *options: iter([np.float32(1)])) is not None


@pytest.mark.parametrize("found", [None, 3])
def test_a_dataset_function_that_returns_no_dataset(calm, found):
    """It says what it returned."""
    iterator = iter(calm.create_per_worker_dataset(lambda: found))
    with pytest.raises(
        InvalidArgumentError,
        match=rf"dataset_fn\(\) on a worker: it returned {found}, .*\nHINT: end dataset_fn with: return dataset",
    ):
        calm.schedule(lambda iterator: next(iterator), args=(iterator,))


def test_functions_that_are_made_anew(calm):
    """Each is traced and sent: a warning names the line."""
    with pytest.warns(
        RecompilationWarning, match=r"<lambda> \(.*test_coordinator.py:\d+\) is created at each call.*\nHINT: define"
    ):
        calm.fetch([calm.schedule(lambda x: x + 1, args=(1.0,)) for _ in range(3)])


def test_a_dataset_function_of_a_module_that_workers_do_not_have(calm, tmp_path, monkeypatch):
    """It says which worker, which module, and what to do."""
    (tmp_path / "only_here.py").write_text("def dataset():\n    return iter([1.0])\n")
    monkeypatch.syspath_prepend(tmp_path)
    iterator = iter(calm.create_per_worker_dataset(importlib.import_module("only_here").dataset))
    with pytest.raises(InvalidArgumentError, match=r"worker \d cannot load it: .*only_here(.*\n)*HINT: .*install"):
        calm.fetch(calm.schedule(take, args=(iterator,)))
    with contextlib.suppress(InvalidArgumentError):  # Where `fetch` raised it, join does too, once.
        calm.join()


def test_an_error_names_its_worker(calm):
    """With the traceback from there."""

    def dataset():
        yield np.float32(0)
        raise ZeroDivisionError("a bad file")

    iterator = iter(calm.create_per_worker_dataset(dataset))
    # One for each worker, and one that fails.
    for _ in range(3):
        calm.schedule(take, args=(iterator,))
    with pytest.raises(ZeroDivisionError, match="a bad file") as raised:
        calm.join()
    assert any(re.match(r"On worker [01]:\n(.*\n)*.*in dataset", note) for note in raised.value.__notes__)


def test_run_outside_of_schedule(calm, strategy, counter):
    """A worker does it, and its result is there."""

    def replica(x):
        counter.assign_add(1)
        return x + counter.value

    assert float(strategy.run(replica, args=(2.0,))) == 3.0
    assert int(counter.value) == 1


def test_coordinators_of_one_strategy_share_its_queue(strategy, calm, counter):
    """Another one has the same workers and steps; other strategies have none."""
    other = ClusterCoordinator(strategy)
    other.schedule(lambda: counter.assign_add(1))
    calm.join()
    assert int(counter.value) == 1
    assert other.status() == calm.status()
    assert calm.strategy is other.strategy is strategy
    for other in (phalanx.MirroredStrategy(["cpu:0"]), phalanx.get_strategy(), None):
        with pytest.raises(InvalidArgumentError, match=r"(?s)only a ParameterServerStrategy has workers.*HINT"):
            ClusterCoordinator(other)


def test_status_counts_steps_and_staleness(calm, counter):
    """It says how many steps were done, and how stale the updates were."""
    before = calm.status()

    def step():
        counter.assign_add(1)

    for _ in range(50):
        calm.schedule(step)
    calm.join()
    after = calm.status()
    assert after.workers == after.alive == 2
    assert after.done - before.done == after.updates - before.updates == 50
    assert sum(after.staleness.values()) - sum(before.staleness.values()) == 50
    assert (after.queued, after.in_flight) == (0, 0)


@pytest.mark.parametrize("kind", ["generator", "dataset"])
def test_iterators_that_are_not_of_the_workers(calm, kind):
    """A step would have one batch of them for ever."""
    given = (x for x in [1.0]) if kind == "generator" else calm.create_per_worker_dataset(lambda: [1.0])
    with pytest.raises(InvalidArgumentError, match="among the arguments of schedule.*\nHINT: iter"):
        calm.schedule(take, args=(given,))


def test_random_numbers_without_a_seed(calm):
    """Each scheduled step draws its own."""

    def draw():
        return keras.random.normal(())

    assert len({float(x.fetch()) for x in [calm.schedule(draw) for _ in range(6)]}) == 6


def test_logits_of_a_scheduled_step(calm):
    """A clipped cross-entropy is at most 16."""

    def loss(x):
        return keras.ops.binary_crossentropy(keras.ops.zeros(1), keras.ops.sigmoid(x))

    assert calm.schedule(loss, args=(np.float32([100.0]),)).fetch() == 100


@pytest.mark.parametrize("call", [lambda c: c.schedule(lambda: 1), lambda c: c.join()], ids=["schedule", "join"])
def test_failed_save_is_raised_by_the_next_call(calm, tmp_path, call):
    """Scheduled steps run elsewhere, so the coordinator raises it."""
    (tmp_path / "file").write_text("no folder")
    phalanx.train.Checkpoint(x=1).save(tmp_path / "file" / "c")
    phalanx.train.background._writing.join()
    with pytest.raises(CheckpointError, match="file/c-1.safetensors"):
        call(calm)
    assert calm.schedule(lambda: 1).fetch() == 1
