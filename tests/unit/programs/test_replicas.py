"""Several steps in one program do what as many calls of `run` do, bit for bit."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import phalanx
from phalanx._src.options import InputOptions
from phalanx.errors import ContextError, InvalidArgumentError, OutOfRangeError, TraceError

pytestmark = pytest.mark.slow


def make_strategy(replicas):
    """The default strategy for 0 replicas, or one over the first CPU devices."""
    return phalanx.MirroredStrategy([f"cpu:{i}" for i in range(replicas)]) if replicas else phalanx.get_strategy()


def batches(strategy, rows, size, *options):
    """An iterator over consecutive numbers from zero, or over given rows."""
    rows = np.arange(float(rows)) if isinstance(rows, int) else rows
    return iter(strategy.experimental_distribute_dataset(rows, *options, batch_size=size))


def sums(strategy, iterator, steps, fn=jnp.sum):
    return strategy.reduce("SUM", strategy.run_steps(fn, iterator, steps), axis=None).tolist()


class Trainer:
    """A model with all kinds of state, and its step."""

    def __init__(self, replicas):
        self.strategy = make_strategy(replicas)
        keras.utils.set_random_seed(0)
        with self.strategy.scope():
            self.model = keras.Sequential(
                [
                    keras.Input((3,)),
                    keras.layers.Dense(4, activation="relu"),
                    keras.layers.BatchNormalization(momentum=0.7, center=False, scale=False),
                    keras.layers.Dropout(0.4),
                    keras.layers.Dense(1, use_bias=False),
                ]
            )
            self.optimizer, self.metric = keras.optimizers.Adam(0.1), keras.metrics.MeanSquaredError()
            self.optimizer.build(self.model.trainable_variables)
            self.seen = keras.Variable(0.0, synchronization="on_read", aggregation="sum", trainable=False)
            self.last = keras.Variable(0.0, aggregation="mean", trainable=False)

    def step(self, batch):
        x, y = batch
        mask = phalanx.get_replica_context().example_mask
        with phalanx.GradientTape() as tape:
            predicted = self.model(x, training=True)
            losses = jnp.square(predicted[:, 0] - y)
            loss = phalanx.nn.compute_average_loss(losses)
        gradients = tape.gradient(loss, self.model.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.model.trainable_variables, strict=True))
        self.metric.update_state(y[:, None], predicted, sample_weight=mask)
        self.seen.assign_add(float(len(losses)) if mask is None else mask.sum().astype("float32"))
        self.last.assign(loss)
        return {"loss": loss}

    def state(self):
        """The bits of everything, on each replica."""
        variables = [*self.model.variables, *self.optimizer.variables, *self.metric.variables, self.seen, self.last]
        return {
            f"{i}:{v.path}": [np.asarray(x).tobytes() for x in self.strategy.experimental_local_results(v)]
            for i, v in enumerate(variables)
        }

    def iterator(self, rows):
        """Batches of six, of which the last may be short."""
        random = np.random.default_rng(1)
        data = random.normal(size=(rows, 3)).astype("float32"), random.normal(size=rows).astype("float32")
        return batches(self.strategy, data, 6)


@pytest.mark.cover(["rows", "replicas"], {(25, 2), (7, 0)})
@pytest.mark.parametrize(
    ("rows", "steps", "replicas"), [(25, 2, 1), (25, 2, 2), (24, 3, 2), (7, 8, 3), (12, 2, 0), (7, 8, 0)]
)
def test_equals_as_many_runs(rows, steps, replicas):
    """Weights, Adam's state, metrics, moving statistics, dropout seeds, sums of the replicas: with short last groups and batches."""
    one, many = Trainer(replicas), Trainer(replicas)
    results = [one.strategy.run(one.step, args=(batch,)) for batch in one.iterator(rows)]
    losses = [float(one.strategy.reduce("SUM", r["loss"], axis=None)) for r in results]
    iterator, stacked = many.iterator(rows), []
    while iterator.get_state()["records"] != rows:
        result = many.strategy.run_steps(many.step, iterator, steps)
        stacked += many.strategy.reduce("SUM", result["loss"], axis=None).tolist()
    with pytest.raises(OutOfRangeError, match="the dataset has no further batch"):
        many.strategy.run_steps(many.step, iterator, steps)
    assert stacked == losses
    for (path, a), b in zip(one.state().items(), many.state().values(), strict=True):
        assert a == b, path
    assert float(many.seen) == rows


@pytest.mark.cover(["replicas"], {2})
@pytest.mark.parametrize("replicas", [1, 2])
def test_groups_of_any_length_share_a_trace(replicas):
    """Full and short ones; another is of a short batch; none is traced again in the next epoch."""
    strategy, calls, counts = make_strategy(replicas), [], []
    with strategy.scope():
        total = keras.Variable(0.0, trainable=False, aggregation="sum")

    def step(x):
        calls.append(1)
        total.assign_add(phalanx.nn.compute_average_loss(x))

    for _ in range(2):
        iterator = batches(strategy, np.ones(31), 6)
        for _ in range(3):
            strategy.run_steps(step, iterator, 4)
            counts.append(len(calls))
    assert counts[0] == counts[1] < counts[2] == counts[5]
    assert float(total) == pytest.approx(12)


@pytest.mark.cover(["replicas", "ahead"], {(0, 2), (1, 2), (2, 0)})
@pytest.mark.parametrize(("replicas", "ahead"), [(0, 0), (0, 2), (1, 2), (2, 0), (2, 2)])
def test_mixed_with_next(replicas, ahead):
    """On one iterator: no batch is lost or doubled when the form changes."""
    strategy = make_strategy(replicas)
    iterator = batches(strategy, 20, 2, InputOptions(experimental_per_replica_buffer_size=ahead))
    one = lambda: float(strategy.reduce("SUM", strategy.run(jnp.sum, args=(next(iterator),)), axis=None))  # noqa: E731
    found = [one(), *sums(strategy, iterator, 3), one(), one()]
    assert found + sums(strategy, iterator, 2) + sums(strategy, iterator, 9) == [4.0 * i + 1 for i in range(10)]
    assert next(iterator, None) is None


def test_positions_between_groups(strategy):
    """That of the last step that was done."""
    iterator, other = batches(strategy, 20, 4), batches(strategy, 20, 4)
    strategy.run_steps(jnp.sum, iterator, 3)
    assert iterator.get_state()["records"] == 12
    other.set_state(iterator.get_state())
    assert sums(strategy, other, 3) == [54, 70]


@pytest.mark.cover(["replicas"], {0, 2})
@pytest.mark.parametrize("replicas", [0, 1, 2])
def test_short_batches_begin_a_group(replicas):
    """The steps of a group have equal numbers of rows."""
    strategy = make_strategy(replicas)
    iterator = batches(strategy, 10, 4)
    for expected in ([1.5, 5.5], [8.5]):
        assert sums(strategy, iterator, 8, phalanx.nn.compute_average_loss) == expected
    assert next(iterator, None) is None


def test_results_are_stacked(strategy):
    """`[steps, ...]` per replica, or once if mirrored; of a short group as many as were done."""

    def step(x):
        total = phalanx.get_replica_context().all_reduce("SUM", x.sum())
        return {"rows": x * 2, "sum": x.sum(), "text": "same"}, phalanx.Mirrored({"total": total})

    iterator = batches(strategy, 12, 4)
    results, mirrored = strategy.run_steps(step, iterator, 2)
    assert [v.tolist() for v in results["rows"].values] == [[[0, 2], [8, 10]], [[4, 6], [12, 14]]]
    assert [v.tolist() for v in results["sum"].values] == [[1, 9], [5, 13]]
    assert results["text"] == "same"
    assert isinstance(mirrored, phalanx.Mirrored)
    assert mirrored.value["total"].tolist() == [6, 22]
    results, mirrored = strategy.run_steps(step, iterator, 2)
    assert [v.tolist() for v in results["rows"].values] == [[[16, 18]], [[20, 22]]]
    assert mirrored.value["total"].tolist() == [38]


@pytest.mark.cover(["replicas"], {3})
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_reduce_of_rows(replicas):
    """Dim 0 are the steps, dim 1 the rows, of which replicas may have different numbers."""
    strategy = make_strategy(replicas)
    rows = strategy.run_steps(lambda x: x * 10, batches(strategy, np.arange(1.0, 11.0), 5), 4)
    assert strategy.reduce("SUM", rows, axis=1).tolist() == [150, 400]
    assert strategy.reduce("MEAN", rows, axis=1).tolist() == [30, 80]
    assert float(strategy.reduce("MEAN", rows, axis=(0, 1))) == 55


@pytest.mark.parametrize("steps", [3, 4])
def test_mean_over_the_replicas_with_rows(steps):
    """In each step, as after `run`: also where the last group is short."""
    strategy, rows = make_strategy(3), np.arange(1.0, 7.0)
    mean = lambda results: strategy.reduce("MEAN", results, axis=None)  # noqa: E731
    each = [float(mean(strategy.run(jnp.sum, args=(b,)))) for b in batches(strategy, rows, 2)]
    assert mean(strategy.run_steps(jnp.sum, batches(strategy, rows, 2), steps)).tolist() == each == [1.5, 3.5, 5.5]


@pytest.mark.cover(["replicas"], {0, 2})
@pytest.mark.parametrize("replicas", [0, 1, 2])
def test_state_without_a_model(replicas):
    """What is assigned in one step is read in the next."""
    strategy = make_strategy(replicas)
    with strategy.scope():
        v = keras.Variable(1.0, aggregation="only_first_replica")

    def step(x):
        v.assign(v * 2)
        return v + 0 * x.sum()

    results = strategy.run_steps(step, batches(strategy, np.ones(6), 2), 3)
    assert strategy.reduce("MEAN", results, axis=None).tolist() == [2, 4, 8]
    assert float(v) == 8


@pytest.mark.cover(["replicas"], {0, 2})
@pytest.mark.parametrize("replicas", [0, 1, 2])
def test_stacked_batches_elsewhere(replicas):
    """`batches(steps=K)` and `run_steps` can be mixed too: they count in batches."""
    strategy = make_strategy(replicas)
    iterator = iter(strategy.experimental_distribute_dataset(np.arange(12.0), batch_size=2).batches(steps=2))
    first = next(iterator)
    assert jax.tree.leaves(first)[0].size == 4
    assert sums(strategy, iterator, 2) == [9, 13]


@pytest.mark.parametrize("steps", [0, 2.0, True, None])
def test_bad_steps_are_refused_before_reading(strategy, steps):
    """With their value, before a batch is read."""
    iterator = batches(strategy, 4, 2)
    with pytest.raises(InvalidArgumentError, match=f"steps={steps!r}: must be an integer of at least 1"):
        strategy.run_steps(jnp.sum, iterator, steps)
    assert len(list(iterator)) == 2


def test_only_distributed_iterators_are_taken(strategy):
    """A dataset would start from its beginning at each call."""
    dataset = strategy.experimental_distribute_dataset(np.arange(4.0), batch_size=2)
    for iterator in ([np.ones(2)], iter([np.ones(2)]), None, dataset):
        with pytest.raises(
            InvalidArgumentError, match="iterator=.*: must be an iterator of a distributed dataset.\nHINT"
        ):
            strategy.run_steps(jnp.sum, iterator, 2)


@pytest.mark.parametrize("where", ["run", "function", "merge_call"])
def test_in_another_context(strategy, where):
    """It is a program of its own."""
    iterator = batches(strategy, 4, 2)
    inner = lambda *args: strategy.run_steps(jnp.sum, iterator, 2)  # noqa: E731
    calls = {
        "run": lambda: strategy.run(inner),
        "function": phalanx.function(inner),
        "merge_call": lambda: strategy.run(lambda: phalanx.get_replica_context().merge_call(inner)),
    }
    with pytest.raises(ContextError, match="Strategy.run_steps was called in|in a traced step"):
        calls[where]()


def test_errors_reach_the_caller(strategy):
    """That of a step, and that of a source, when the steps before it are done."""

    def step(x):
        raise OSError("no such file")

    def source():
        yield from np.ones((3, 2))
        raise OSError("disk gone")

    with pytest.raises(OSError, match="no such file"):
        strategy.run_steps(step, batches(strategy, 4, 2), 2)
    iterator = iter(strategy.experimental_distribute_dataset(source))
    assert sums(strategy, iterator, 8) == [2, 2, 2]
    with pytest.raises(OSError, match="disk gone"):
        strategy.run_steps(jnp.sum, iterator, 8)


def of_another_mesh(value, *spec, kind=AxisType.Explicit):
    """An array whose type has the mesh of `jax.make_mesh`."""
    mesh = jax.make_mesh((2,), ("x",), (kind,))
    return jax.device_put(value, NamedSharding(mesh, PartitionSpec(*spec)))


@pytest.mark.cover(["kind"], {AxisType.Explicit})
@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def test_arrays_of_another_mesh(strategy, kind):
    """In all functions that take arrays; in a nest, and as a key or a number."""
    x = of_another_mesh(np.arange(4.0, dtype="float32"), "x", kind=kind)
    assert strategy.experimental_local_results(strategy.run(jnp.sum, (x,))) == (6, 6)
    key, three = (of_another_mesh(value, kind=kind) for value in (jax.random.key(0), 3.0))
    step = phalanx.function(lambda a, b: strategy.run(lambda a, b: a * b["b"][0] + jax.random.normal(b["key"]), (a, b)))
    expected = np.arange(4.0, dtype="float32") * 3 + jax.random.normal(jax.random.key(0))
    for result in strategy.experimental_local_results(step(x, {"b": [three], "key": key})):
        np.testing.assert_allclose(result, expected, rtol=1e-6)
    assert strategy.reduce("MEAN", x, axis=0) == 1.5
    np.testing.assert_array_equal(strategy.gather(x, axis=0), np.arange(4.0))
    rows = of_another_mesh(np.arange(8.0, dtype="float32").reshape(4, 2), "x", kind=kind)
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile("sgd", "mse")
    assert model.predict(rows, verbose=0).ravel().tolist() == [1, 5, 9, 13]
    y = of_another_mesh(np.ones((4, 1), "float32"), "x", kind=kind)
    assert model.fit(rows, y, batch_size=4, verbose=0).history["loss"] == [56.0]


def test_arrays_of_another_mesh_outside_the_arguments(strategy):
    x = of_another_mesh(np.ones(4), "x")
    with pytest.raises(
        TraceError, match=r"(?s)an array of another mesh in a replica function .*HINT: pass the array in args"
    ):
        strategy.run(lambda: x.sum())


def test_mesh_that_is_set(strategy):
    x = of_another_mesh(np.ones(4))
    with (
        jax.set_mesh(x.sharding.mesh),
        pytest.raises(ContextError, match=r"(?s)with jax.set_mesh: .* the axes x\..*HINT: call it outside"),
    ):
        strategy.run(jnp.sum, (np.ones(4),))
