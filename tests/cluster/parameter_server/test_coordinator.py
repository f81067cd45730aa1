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
from processes import wait_until

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
    with strategy.scope():
        return keras.Variable(0, dtype="int32", trainable=False, aggregation="sum")


@pytest.fixture
def numbers():
    """A function that makes a dataset; not of this module, which workers cannot import."""
    return lambda: ({"x": np.float32(i)} for i in range(1_000_000))


@pytest.fixture
def batches_of(coordinator):
    """A function that returns an iterator over the batches of a dataset on the workers."""
    return lambda given: iter(coordinator.create_per_worker_dataset(given))


def raising(error, flag):
    """A function that makes a dataset of one batch, and an error as soon as a file says that all steps are scheduled."""

    def bad_dataset():
        yield np.float32(0)
        # Before, `schedule` would raise the error.
        while not flag.exists():
            time.sleep(0.01)
        if error:
            raise error

    return bad_dataset


def take(iterator):
    """A step that returns the next batch."""
    return next(iterator)


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


def test_every_step_counts_once(coordinator, counter):
    """As many steps as were scheduled have been done, none is left, and the status says how stale the updates were."""
    before = coordinator.status()

    def step(amount):
        counter.assign_add(amount)
        return counter.value

    values = [coordinator.schedule(step, args=(1,)) for _ in range(300)]
    assert all(isinstance(v, RemoteValue) for v in values)
    coordinator.join()
    assert coordinator.done()
    assert int(counter.value) == 300
    assert {v.dtype for v in coordinator.fetch(values)} == {np.dtype("int32")}
    after = coordinator.status()
    assert after.workers == after.alive == 2
    assert after.done - before.done == after.updates - before.updates == 300
    assert sum(after.staleness.values()) - sum(before.staleness.values()) == 300
    assert (after.queued, after.in_flight) == (0, 0)


def test_arguments_and_results(coordinator):
    """Nests go there and come back; what is no array comes back as it is. A number compiles nothing anew."""
    traces = []

    def step(pair, scale, *, name):
        traces.append(scale)
        return {"sum": pair.a + pair.b, "pair": Pair(pair.b * scale, name), "list": [None, "text", pair.a]}

    value = coordinator.schedule(step, args=(Pair(np.arange(3.0), jnp.ones(3)), 2), kwargs={"name": "n"})
    fetched = coordinator.fetch((value, 7, "other"))
    assert fetched[1:] == (7, "other")
    result = fetched[0]
    np.testing.assert_array_equal(result["sum"], [1.0, 2.0, 3.0])
    assert isinstance(result["pair"], Pair)
    np.testing.assert_array_equal(result["pair"].a, [2.0, 2.0, 2.0])
    assert result["pair"].b == "n"
    assert result["list"][:2] == [None, "text"]
    assert isinstance(result["list"][2], np.ndarray)
    once = len(traces)
    value = coordinator.schedule(step, args=(Pair(np.arange(3.0), jnp.ones(3)), 9), kwargs={"name": "n"})
    assert value.fetch()["pair"].a.tolist() == [9, 9, 9]
    assert len(traces) == once


def test_methods_and_strategy_run(coordinator, strategy, counter):
    """A method of an object, `run` in a step, where there is one replica, and `run` alone, which a worker does."""

    class Steps:
        def __init__(self, factor):
            self.factor = factor

        def double(self, x):
            return strategy.run(lambda y: phalanx.get_replica_context().num_replicas_in_sync * self.factor * y, (x,))

    def replica(x):
        counter.assign_add(1)
        return x + counter.value

    assert float(coordinator.schedule(Steps(2).double, args=(3.0,)).fetch()) == 6.0
    assert float(coordinator.schedule(Steps(5).double, args=(3.0,)).fetch()) == 15.0
    assert float(strategy.run(replica, args=(2.0,))) == 3.0
    assert int(counter.value) == 1


def test_the_first_error(coordinator, counter, batches_of, tmp_path):
    """It is raised once, by `join`; what waited is cancelled, what failed raises its own; then all is as new."""
    flag = tmp_path / "all are scheduled"
    iterator = batches_of(raising(OSError("no such file: rows"), flag))

    def step(iterator):
        next(iterator)
        counter.assign_add(1)

    values = [coordinator.schedule(step, args=(iterator,)) for _ in range(3)]
    flag.touch()
    with pytest.raises(OSError, match="no such file: rows") as raised:
        coordinator.join()
    assert any(re.match(r"On worker [01]:\n(.*\n)*.*in bad_dataset", note) for note in raised.value.__notes__)
    coordinator.join()
    errors = []
    for value in values:
        try:
            value.fetch()
        except (OSError, CancelledError) as e:
            errors.append(type(e))
    assert OSError in errors
    assert set(errors) <= {OSError, CancelledError}
    before = int(counter.value)
    coordinator.schedule(lambda: counter.assign_add(1))
    coordinator.join()
    assert int(counter.value) == before + 1


def test_schedule_and_done_raise_it(coordinator, counter, batches_of, tmp_path):
    """And `schedule` does not schedule then."""
    calls = {"schedule": lambda: coordinator.schedule(lambda: counter.assign_add(1)), "done": coordinator.done}
    for name, call in calls.items():
        iterator = batches_of(raising(ZeroDivisionError("rows / 0"), tmp_path / name))
        for _ in range(3):
            coordinator.schedule(take, args=(iterator,))
        (tmp_path / name).touch()
        wait_until(lambda: not coordinator.status().in_flight + coordinator.status().queued)
        with pytest.raises(ZeroDivisionError, match="rows / 0"):
            call()
        assert coordinator.done()
        coordinator.join()
    assert int(counter.value) == 0


def test_fetch_of_a_cancelled_value(coordinator, batches_of, tmp_path):
    """It says that it was cancelled, by what, and what to do."""
    flag = tmp_path / "all are scheduled"
    iterator = batches_of(raising(None, flag))
    values = [coordinator.schedule(take, args=(iterator,)) for _ in range(400)]
    flag.touch()
    with pytest.raises(OutOfRangeError, match="no further batch"):
        coordinator.join()
    with pytest.raises(CancelledError, match=r"(?s)another step failed first: OutOfRangeError.*HINT: .*again"):
        values[-1].fetch()


def test_a_finite_dataset_ends(coordinator, batches_of):
    """Each worker has the whole of it; the step after its last batch raises."""
    iterator = batches_of(lambda: iter([np.float32(i) for i in range(3)]))
    values = []

    def steps():
        values.extend(coordinator.schedule(take, args=(iterator,)) for _ in range(20))
        coordinator.join()

    with pytest.raises(OutOfRangeError, match=r"(?s)no further batch.*HINT: .*repeat"):
        steps()
    seen = collections.Counter()
    for value in values:
        with contextlib.suppress(OutOfRangeError, CancelledError):
            seen[float(value.fetch())] += 1
    assert set(seen) <= {0.0, 1.0, 2.0}
    assert max(seen.values()) <= 2


def test_datasets_of_all_kinds(coordinator, strategy, batches_of):
    """Functions, as the guide and the tutorial of tf.distribute have them, and datasets that are given."""

    def dataset_fn(context):
        return (np.full((2,), 10 * context.num_input_pipelines + i, "float32") for i in range(100))

    def rows():
        yield np.float32(4)

    class Items:
        def __len__(self):
            return 2

        def __getitem__(self, i):
            return np.full((2,), i, "float32")

    def step(iterator):
        return next(iterator).sum()

    for dataset, least, most in (
        (phalanx.function(lambda: iter([np.float32(7)])), 7, 7),  # It is called as it is.
        (lambda: strategy.distribute_datasets_from_function(dataset_fn), 20, 22),
        (lambda: rows, 4, 4),  # Each worker calls it, as `experimental_distribute_dataset` does.
        (np.arange(4.0).reshape(2, 2), 1, 1),
        ([np.zeros(2), np.ones(2)], 0, 0),
        (Items(), 0, 0),
    ):
        assert least <= coordinator.schedule(step, args=(batches_of(dataset),)).fetch() <= most


def test_workers_have_their_own_places(coordinator, numbers):
    """Each worker begins at the first batch, and a new iterator begins anew."""
    dataset = coordinator.create_per_worker_dataset(numbers)
    for _ in range(2):
        iterator = iter(dataset)
        batches = coordinator.fetch([coordinator.schedule(take, args=(iterator,)) for _ in range(200)])
        values = [float(b["x"]) for b in batches]
        assert set(collections.Counter(values).values()) <= {1, 2}
        assert min(values) == 0.0
        assert sorted(set(values)) == list(range(len(set(values))))


def test_several_batches_of_several_shapes(coordinator, batches_of):
    """A step that takes two batches, and a last batch that is shorter than the others."""
    batches = [np.ones((4, 1)), np.ones((4, 1)), np.ones((4, 1)), np.ones((1, 1))]
    iterator = batches_of(lambda: iter(2 * batches))

    def step(iterator):
        return next(iterator).sum() + 10 * next(iterator).sum()

    # Of three steps one worker does two.
    values = [float(coordinator.schedule(step, args=(iterator,)).fetch()) for _ in range(3)]
    assert set(values) == {44.0, 14.0}


def test_number_of_batches_depends_on_their_shapes(coordinator, batches_of):
    """A step that takes a second batch if the first has three rows. The last batch of a dataset may be a single one."""
    two, three = np.ones((2, 1)), np.ones((3, 1))
    iterator = batches_of(lambda: iter([two, three, three, two, three, three, two]))

    def step(iterator):
        batch = next(iterator)
        return batch.sum() + 10 * next(iterator).sum() if len(batch) == 3 else batch.sum()

    # Of five steps one worker does three.
    values = [float(coordinator.schedule(step, args=(iterator,)).fetch()) for _ in range(5)]
    assert set(values) == {2.0, 33.0}


def test_workers_know_their_index(coordinator, batches_of):
    """In a value that each worker has of its own, and in a dataset function. A step gets those of the worker that does it."""

    def dataset():
        index = experimental_get_current_worker_index()
        return ({"worker": np.int32(index)} for _ in range(1000))

    def step(index, iterator):
        return index, next(iterator)["worker"]

    args = (coordinator.create_per_worker_values(experimental_get_current_worker_index), batches_of(dataset))
    seen = {tuple(map(int, pair)) for pair in coordinator.fetch([coordinator.schedule(step, args) for _ in range(300)])}
    assert seen
    assert seen <= {(0, 0), (1, 1)}


def test_arguments_that_are_refused(coordinator, batches_of):
    """The value of another step, what is no list, no function, no dataset; iterators of which a step would have one batch."""
    value = coordinator.schedule(lambda: jnp.ones(()))
    for words, call in (
        (r"(?s)RemoteValue.*HINT: .*fetch", lambda: coordinator.schedule(lambda x: x, args=([value],))),
        (r"(?s)args=3: must be a list.*HINT", lambda: coordinator.schedule(lambda x: x, args=3)),
        (r"(?s)fn=5: must be a function.*HINT", lambda: coordinator.schedule(5)),
        (r"(?s)must be a dataset.*HINT", lambda: coordinator.create_per_worker_dataset(5)),
        (r"(?s)fn=5: must be a function.*HINT", lambda: coordinator.create_per_worker_values(5)),
    ):
        with pytest.raises(InvalidArgumentError, match=words):
            call()
    for given in ((x for x in [1.0]), coordinator.create_per_worker_dataset(lambda: [1.0])):
        with pytest.raises(InvalidArgumentError, match="among the arguments of schedule.*\nHINT: iter"):
            coordinator.schedule(take, args=(given,))
    for make in (coordinator.create_per_worker_dataset, coordinator.create_per_worker_values):
        words = r"(?s)without arguments: .*'context'.*HINT: .*distribute_datasets"
        with pytest.raises(InvalidArgumentError, match=words):
            make(lambda context: iter([context]))
        assert make(lambda *options: iter([np.float32(1)])) is not None


def test_what_belongs_to_another_place(coordinator, numbers):
    """`iter` belongs to the coordinator, `next` to a step, and the index of a worker to neither: a step is one program for all."""
    dataset = coordinator.create_per_worker_dataset(numbers)
    no_worker = r"(?s)this process is not a worker.*HINT: .*create_per_worker_values"
    for words, call in (
        (no_worker, experimental_get_current_worker_index),
        (no_worker, lambda: coordinator.schedule(experimental_get_current_worker_index)),
        (r"(?s)start the dataset from the beginning.*HINT", lambda: coordinator.schedule(lambda: next(iter(dataset)))),
        (r"(?s)on the workers.*HINT: .*schedule", lambda: next(iter(dataset))),
        (r"(?s)on the workers.*HINT: .*schedule", lambda: iter(dataset).get_next()),
    ):
        with pytest.raises(ContextError, match=words):
            call()


def test_the_spec_of_a_worker_dataset(coordinator):
    """It is that of a batch on a worker, which no step loses by it."""
    dataset = coordinator.create_per_worker_dataset(
        lambda: iter([{"x": np.zeros((3, 2), "float32"), "y": np.int32(1)}])
    )
    expected = {"x": jax.ShapeDtypeStruct((3, 2), "float32"), "y": jax.ShapeDtypeStruct((), "int32")}
    assert dataset.element_spec == expected
    batch = coordinator.schedule(lambda iterator: iterator.get_next(), args=(iter(dataset),)).fetch()
    assert jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch) == expected
    assert phalanx.coordinator.PerWorkerValue is phalanx.coordinator.PerWorkerValues


def test_steps_that_cannot_be_programs(coordinator):
    """Python that needs values, and what calls back to Python: an error at once, and nothing is scheduled."""
    with pytest.raises(
        TraceError, match=r"(?s)test_coordinator.py:\d+: `coordinator.schedule.*HINT: .*phalanx.cond"
    ) as raised:
        coordinator.schedule(lambda x: 1 if x > 0 else 2, args=(1.0,))
    # Which is refused here.
    assert "jax.debug.print" not in str(raised.value)
    with pytest.raises(TraceError, match=r"(?s)jax.debug.print.*cannot call Python.*HINT: return the value"):
        coordinator.schedule(lambda x: jax.debug.print("{x}", x=x), args=(1.0,))
    with pytest.raises(KeyError, match="unknown"):
        coordinator.schedule(lambda: {}["unknown"])
    assert coordinator.done()


@pytest.mark.filterwarnings("ignore:.* is created at each call")  # Each case has a step of its own.
@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: lambda: iter([]), OutOfRangeError, "no further batch"),
        (
            lambda: lambda lock=threading.Lock(): iter([lock]),  # noqa: B008
            InvalidArgumentError,
            r"(?s)dataset.*lock.*HINT",
        ),
        (
            lambda: (np.zeros(2) for _ in range(3)),
            InvalidArgumentError,
            r"(?s)<generator object.*cannot be pickled.*HINT: pass a function",
        ),
        *(
            (
                lambda found=found: lambda: found,
                InvalidArgumentError,
                rf"dataset_fn\(\) on a worker: it returned {found}, .*\nHINT: end dataset_fn with: return dataset",
            )
            for found in (None, 3)
        ),
    ],
    ids=["without batches", "function cannot be sent", "dataset cannot be sent", "returns None", "returns no dataset"],
)
def test_datasets_that_are_none(coordinator, batches_of, make, error, words):
    """The error names what is wrong with it: there is no batch whose shape a step could have."""
    with pytest.raises(error, match=words):
        coordinator.schedule(lambda iterator: next(iterator), args=(batches_of(make()),))


def test_functions_that_are_made_anew(coordinator):
    """Each is traced and sent: a warning names the line."""
    with pytest.warns(
        RecompilationWarning, match=r"<lambda> \(.*test_coordinator.py:\d+\) is created at each call.*\nHINT: define"
    ):
        coordinator.fetch([coordinator.schedule(lambda x: x + 1, args=(1.0,)) for _ in range(3)])


def test_a_dataset_function_of_a_module_that_workers_do_not_have(coordinator, batches_of, tmp_path, monkeypatch):
    """It says which worker, which module, and what to do."""
    (tmp_path / "only_here.py").write_text("def dataset():\n    return iter([1.0])\n")
    monkeypatch.syspath_prepend(tmp_path)
    iterator = batches_of(importlib.import_module("only_here").dataset)
    with pytest.raises(InvalidArgumentError, match=r"worker \d cannot load it: .*only_here(.*\n)*HINT: .*install"):
        coordinator.fetch(coordinator.schedule(take, args=(iterator,)))
    with contextlib.suppress(InvalidArgumentError):  # Where `fetch` raised it, join does too, once.
        coordinator.join()


def test_coordinators_of_one_strategy_share_its_queue(strategy, coordinator, counter):
    """Another one has the same workers and steps; other strategies have none."""
    other = ClusterCoordinator(strategy)
    other.schedule(lambda: counter.assign_add(1))
    coordinator.join()
    assert int(counter.value) == 1
    assert other.status() == coordinator.status()
    assert coordinator.strategy is other.strategy is strategy
    for other in (phalanx.MirroredStrategy(["cpu:0"]), phalanx.get_strategy(), None):
        with pytest.raises(InvalidArgumentError, match=r"(?s)only a ParameterServerStrategy has workers.*HINT"):
            ClusterCoordinator(other)


def test_logits_of_a_scheduled_step(coordinator):
    """A clipped cross-entropy is at most 16."""

    def loss(x):
        return keras.ops.binary_crossentropy(keras.ops.zeros(1), keras.ops.sigmoid(x))

    assert coordinator.schedule(loss, args=(np.float32([100.0]),)).fetch() == 100


@pytest.mark.parametrize("call", [lambda c: c.schedule(lambda: 1), lambda c: c.join()], ids=["schedule", "join"])
def test_failed_save_is_raised_by_the_next_call(coordinator, tmp_path, call):
    """Scheduled steps run elsewhere, so the coordinator raises it."""
    (tmp_path / "file").write_text("no folder")
    phalanx.train.Checkpoint(x=1).save(tmp_path / "file" / "c")
    phalanx._src.checkpoint.background._writing.join()
    with pytest.raises(CheckpointError, match="file/c-1.safetensors"):
        call(coordinator)
    assert coordinator.schedule(lambda: 1).fetch() == 1
