"""Compiled steps: what goes in and out, and what happens if one fails."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from steps import Counted, run_by, variable

import phalanx
from phalanx.errors import PhalanxError, TraceError

Point = collections.namedtuple("Point", ["x", "y"])


def test_run_under_one_device_and_default():
    """One device compiles, the default strategy calls."""
    one, default = Counted(), Counted()
    strategy = phalanx.OneDeviceStrategy("cpu:0")
    for step in range(3):
        assert float(strategy.run(one, args=(step,))) == phalanx.get_strategy().run(default, args=(step,)) == step
    assert (one.calls, default.calls) == (1, 3)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
    weight: jax.Array
    name: str = dataclasses.field(metadata={"static": True})


@pytest.mark.parametrize("replicas", [1, 2])
def test_nests_in_and_out(replicas):
    """Dicts, lists, tuples, namedtuples, dataclasses that jax knows, None, strings, numbers and mirrored values keep their place."""
    strategy = phalanx.MirroredStrategy([f"cpu:{i}" for i in range(replicas)])

    def replica_fn(point, nest, state, *, flag):
        out = point.x + nest["a"][0]
        nests = {"s": flag, "n": 5, "l": [out, (nest["b"],)]}
        return Point(out, None), nests, State(state.weight * 2, state.name), phalanx.Mirrored({"m": out * 2})

    args = (Point(1.0, 2), {"a": [np.ones(2)], "b": None}, State(jnp.ones(2), "name"))
    point, nest, state, mirrored = strategy.run(replica_fn, args=args, kwargs={"flag": "on"})
    assert type(point) is Point
    assert (point.y, state.name) == (None, "name")
    assert (nest["s"], nest["n"], nest["l"][1]) == ("on", 5, (None,))
    for x in (point.x, nest["l"][0], state.weight):
        assert [v.tolist() for v in strategy.experimental_local_results(x)] == [[2, 2]] * replicas
    assert mirrored.value["m"].tolist() == [4, 4]


def test_closures_over_constants(strategy):
    """Captured arrays and per-call closures give the values of their own call."""
    double, triple = (lambda x, scale=scale: x * scale for scale in (np.float32(2), jnp.float32(3)))
    found = [float(strategy.run(fn, args=(x,)).values[1]) for fn, x in ((double, 5.0), (triple, 5.0), (double, 7.0))]
    assert found == [10, 15, 14]


def test_random_keys_are_arguments(strategy):
    """Keys of jax.random, one for all or one per replica, or arrays of them, which have no layout, in and out."""
    key = jax.random.key(0)
    split = lambda k: jax.random.fold_in(k, phalanx.get_replica_context().replica_id_in_sync_group)  # noqa: E731
    keys, many = strategy.run(lambda k: (split(k), jax.random.split(k, (3, 4))), args=(key,))
    drawn = strategy.run(lambda k, many: (jax.random.normal(k), jax.random.uniform(many[1, 2])), args=(keys, many))
    expected = [float(jax.random.normal(jax.random.fold_in(key, i))) for i in range(2)]
    np.testing.assert_allclose([float(x) for x in drawn[0].values], expected, rtol=1e-6)
    expected = float(jax.random.uniform(jax.random.split(key, (3, 4))[1, 2]))
    assert [float(x) for x in drawn[1].values] == [expected] * 2
    assert float(phalanx.function(jax.random.normal)(key)) == float(jax.random.normal(key))


@pytest.mark.parametrize("replicas", [3, 4])
def test_per_replica_of_another_strategy(strategy, replicas):
    """With another number of replicas it does not fit; nothing is taken silently."""
    value = phalanx.MirroredStrategy([f"cpu:{i}" for i in range(replicas)]).run(lambda: jnp.ones(2))
    for call in (
        lambda: strategy.run(lambda x: x, args=(value,)),
        lambda: strategy.reduce("SUM", value, axis=None),
        lambda: strategy.gather(value, axis=0),
    ):
        with pytest.raises(PhalanxError, match=f"{replicas} components"):
            call()


def test_values_move_to_the_strategy_that_runs(strategy):
    """Per-replica values of a strategy with as many replicas, and variables of any strategy."""
    number = lambda: phalanx.get_replica_context().replica_id_in_sync_group  # noqa: E731
    value = phalanx.MirroredStrategy(["cpu:3", "cpu:2"]).run(number)
    assert [(int(x), x.device.id) for x in strategy.run(lambda x: x, args=(value,)).values] == [(0, 0), (1, 1)]
    v = variable(strategy)
    step = lambda: v.assign_add(1.0)  # noqa: E731
    for s in (strategy, phalanx.MirroredStrategy(["cpu:2", "cpu:3", "cpu:4"]), strategy):
        s.run(step)
    assert v.numpy() == 7
    assert sorted(d.id for d in v.value.devices()) == [0, 1]


def test_variable_made_anew_in_each_trace(strategy):
    """A typed error that says how to make it once, with the user's line for a metric; the strategy works on."""
    with pytest.raises(TraceError, match="the function creates or uses another variable each time it is traced") as e:
        strategy.run(lambda: keras.Variable(1.0, aggregation="sum").assign_add(1.0))
    assert "if self.v is None" in e.value.hint

    def step(x):
        mean = keras.metrics.Mean(name="mean")
        mean.update_state(x)

    match = (
        r"'mean/total' \(\) float32 in a traced function \(.*test_program.py:\d+: `mean = .*`\): the function creates(.|\n)*"
        r"HINT: create the metric, layer or optimizer outside the step, in strategy.scope\(\), and call metric.upd"
    )
    with pytest.raises(TraceError, match=match):
        strategy.run(step, args=(1.0,))
    assert [int(x) for x in strategy.run(lambda: jnp.int32(1)).values] == [1, 1]


@pytest.mark.parametrize("how", ["run", "function"])
def test_variable_made_once(strategy, how):
    """With its own first value, mirrored; the first call counts once. The second trace is that of the calls that follow."""
    made, calls = [], []

    def lazy(x):
        calls.append(len(made))
        if not made:
            made.append(keras.Variable(lambda shape, dtype: jnp.full(shape, 10.0, dtype), (), aggregation="sum"))
        return made[0].assign_add(x)

    with strategy.scope():
        call = run_by(strategy, how)
        values = [float(call(lazy, 1.0).values[i]) for i in (0, 1, 0)]
    assert (values, calls) == ([12, 14, 16], [0, 1])
    call(lazy, 2.0)
    assert made[0].numpy() == 20
    assert len(made[0].value.devices()) == 2


def test_model_optimizer_and_metric_built_lazily(strategy):
    """All in the first step, which trains as later ones do."""
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(4, activation="relu"), keras.layers.Dense(1)])
        optimizer, metric = keras.optimizers.Adam(0.05), keras.metrics.Mean()
    x = np.random.default_rng(0).normal(size=(16, 3)).astype("float32")

    def step(x):
        with phalanx.GradientTape() as tape:
            loss = phalanx.nn.compute_average_loss((model(x)[:, 0] - x.sum(1)) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        metric.update_state(loss)
        return loss

    (batch,) = strategy.experimental_distribute_dataset([x])
    losses = [float(strategy.reduce("SUM", strategy.run(step, args=(batch,)), axis=None)) for _ in range(30)]
    assert losses[-1] < 0.5 * losses[0]
    assert int(optimizer.iterations.numpy()) == 30
    np.testing.assert_allclose(float(metric.result()), np.mean(losses) / 2, rtol=1e-4)
    assert {len(v.value.devices()) for v in model.variables} == {2}


def test_set_by_tracing_and_changed(strategy):
    """Code that branches on what it changed itself is refused where jax compiles again, not compiled wrongly."""
    v, w = variable(strategy), variable(strategy)
    flags = iter([True, False])
    step = lambda: (v if next(flags) else w).assign_add(1.0)  # noqa: E731
    strategy.run(step)
    with jax.default_matmul_precision("highest"), pytest.raises(TraceError, match="the function used it differently"):
        strategy.run(step)
    assert (v.numpy(), w.numpy()) == (2, 0)


def test_hundreds_of_variables(strategy):
    """Read, written and combined in one program."""
    with strategy.scope():
        variables = [keras.Variable(float(i), trainable=False) for i in range(200)]

    def step():
        for v in variables:
            v.assign_add(1.0)

    for _ in range(2):
        strategy.run(step)
    assert [float(v.numpy()) for v in variables] == [i + 2.0 for i in range(200)]


def test_replica_function_that_raises(strategy):
    """Its exception comes out unchanged; nothing was written; the next step works."""
    v = variable(strategy)

    def step(fail):
        v.assign_add(1.0)
        if fail:
            raise ArithmeticError("mine")

    with pytest.raises(ArithmeticError, match="mine"):
        strategy.run(step, args=(True,))
    assert v.numpy() == 0
    strategy.run(step, args=(False,))
    assert v.numpy() == 2


def test_callback_that_raises_keeps_the_state(strategy):
    """A program with host callbacks does not take the variables' arrays with it."""
    v = variable(strategy)
    fail = []

    def step():
        v.assign_add(1.0)
        jax.debug.callback(lambda: 1 / 0 if fail else None)

    strategy.run(step)
    fail.append(True)
    with pytest.raises(Exception, match="division by zero"):
        strategy.run(step)
    fail.clear()
    assert v.numpy() == 2
    strategy.run(step)
    assert v.numpy() == 4


def test_debug_nans_keep_the_state(strategy):
    """JAX's search for NaNs finds them, and the state is as before."""
    v = variable(strategy, np.zeros(4, "float32"))
    step = lambda x: v.assign_add(jnp.log(x) * jnp.ones(4))  # noqa: E731
    strategy.run(step, args=(1.0,))
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan"):
        strategy.run(step, args=(-1.0,))
    assert v.numpy().tolist() == [0] * 4
    strategy.run(step, args=(np.e,))
    np.testing.assert_allclose(v.numpy(), [2] * 4, rtol=1e-6)


def test_python_objects_per_replica(strategy):
    """One program serves all replicas, so a per-replica argument is an array."""
    value = strategy.experimental_distribute_values_from_function(lambda c: "ab"[c.replica_id_in_sync_group])
    with pytest.raises(
        TraceError, match=r"PerReplica\(\('a', 'b'\)\) was passed to a step: its components are Python objects"
    ):
        strategy.run(lambda x: 1, args=(value,))


def test_variables_from_outside_are_adopted(strategy):
    """Made without a scope, and assigned from outside between steps."""
    v = keras.Variable(1.0, aggregation="sum", trainable=False)
    strategy.run(step := (lambda: v.assign_add(1.0)))
    assert v.numpy() == 3
    v.assign(10.0)
    strategy.run(step)
    assert v.numpy() == 12


@pytest.mark.parametrize("read", ["new variable", "used variable", "metric", "argument"])
def test_counters_from_outside_can_be_counted_anywhere(strategy, read):
    """In a function that runs nothing, whatever it reads of a strategy; alone before that, and by the replicas after it."""
    count, v = keras.Variable(0, trainable=False, aggregation="only_first_replica"), variable(strategy, 3.0)
    with strategy.scope():
        metric = keras.metrics.Sum()
    metric.update_state(3.0)
    argument = strategy.replicate(3.0).value
    if read == "used variable":
        strategy.run(lambda: v.assign_add(0.0))
    alone = phalanx.function(lambda: count.assign_add(1))

    @phalanx.function
    def step(argument):
        count.assign_add(1)
        return (argument if read == "argument" else metric.result() if read == "metric" else v.value) * count

    alone(), alone()
    assert [float(step(argument)), float(step(argument)), float(count + argument)] == [9, 12, 7]
    strategy.run(lambda: count.assign_add(1))
    alone()
    assert int(count.numpy()) == 6


def test_branching_on_what_tracing_changes(strategy):
    """A second trace, for a gradient that is none, that takes another way is refused."""
    with strategy.scope():
        v, w = keras.Variable(1.0), keras.Variable(1.0)
    calls = []

    def replica_fn():
        calls.append(1)
        with phalanx.GradientTape(persistent=True) as tape:
            _, loss = w + 1, v * v
        return [tape.gradient(loss, w) for _ in calls]

    with pytest.raises(TraceError, match="a gradient tape in a traced function: the function used it differently") as e:
        strategy.run(replica_fn)
    assert "do not branch on Python state" in e.value.hint


def test_a_transposed_batch_is_copied_once(strategy):
    """As in a program that takes each replica's rows without a leading dim."""
    rows = np.ones((4, 8, 16), "float32")
    scan = lambda x: jax.lax.scan(lambda h, row: (h + row, None), x[:, 0], jnp.swapaxes(x, 0, 1))[0]  # noqa: E731
    batch = strategy.experimental_distribute_values_from_function(lambda context: rows)
    step = phalanx.function(lambda batch: strategy.run(scan, args=(batch,)))
    accessed = lambda lowered: lowered.compile().cost_analysis()["bytes accessed"]  # noqa: E731
    assert accessed(step.lower(batch)) <= accessed(jax.jit(scan).lower(rows))
