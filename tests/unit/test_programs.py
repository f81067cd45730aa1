"""Compiled steps: when they are reused, what goes in and out, and what happens to the state."""

import collections
import dataclasses
import functools
import gc
import re
import warnings

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import phalanx
from phalanx.errors import PhalanxError, RecompilationWarning, StateLostError, TraceError


@pytest.fixture
def strategy():
    """Two replicas."""
    return phalanx.MirroredStrategy(["cpu:0", "cpu:1"])


def variable(strategy, value=0.0, **kwargs):
    """A variable of the strategy, summed over the replicas."""
    with strategy.scope():
        return keras.Variable(value, **({"aggregation": "sum", "trainable": False} | kwargs))


def run_by(strategy, how):
    """`run` of a strategy, plain or inside `phalanx.function`."""
    if how == "run":
        return lambda fn, *args: strategy.run(fn, args=args)
    functions = {}

    def call(fn, *args):
        step = functions.setdefault(fn, phalanx.function(lambda *a: strategy.run(fn, args=a)))
        return step(*args)

    return call


class Counted:
    """A replica function that counts how often Python runs its body."""

    def __init__(self):
        self.calls = 0

    def __call__(self, *args):
        """Adds up what can be added."""
        self.calls += 1
        return sum(jnp.asarray(a, "float32").sum() for a in args if not isinstance(a, (str, bool, type(None))))


Point = collections.namedtuple("Point", ["x", "y"])


@pytest.mark.parametrize("how", ["run", "function"])
@pytest.mark.parametrize(
    ("first", "second", "again"),
    [
        ((1,), (2,), False),
        ((1.0,), (-3.5,), False),
        ((np.ones(3),), (np.zeros(3),), False),
        ((jnp.ones(3),), (jnp.zeros(3),), False),
        ((np.int32(1),), (np.int32(2),), False),
        (("a", 1), ("a", 2), False),
        ((True, 1), (True, 2), False),
        ((None, 1), (None, 2), False),
        ((1,), (1.0,), True),
        ((np.ones(3),), (np.ones(4),), True),
        ((np.ones(3, "int32"),), (np.ones(3, "float32"),), True),
        (("a", 1), ("b", 1), True),
        ((True, 1), (False, 1), True),
        ((None, 1), ("a", 1), True),
    ],
)
def test_reuse(strategy, how, first, second, again):
    """Numbers and arrays are inputs of the program; strings, bools, None, shapes and dtypes select it."""
    fn, call = Counted(), run_by(strategy, how)
    call(fn, *first)
    traced = fn.calls
    call(fn, *first)
    assert fn.calls == traced == 1
    result = call(fn, *second)
    assert (fn.calls > traced) == again
    expected = sum(np.sum(a) for a in second if not isinstance(a, (str, bool, type(None))))
    assert [float(v) for v in result.values] == [expected] * 2


def test_step_counter_is_traced(strategy):
    """A hundred steps are one program."""
    fn = Counted()
    total = sum(float(strategy.run(fn, args=(step, 1.0 / (step + 1))).values[0]) for step in range(100))
    assert fn.calls == 1
    np.testing.assert_allclose(total, sum(s + 1 / (s + 1) for s in range(100)), rtol=1e-5)


def test_run_under_one_device_and_default():
    """One device compiles, the default strategy calls."""
    one, default = Counted(), Counted()
    strategy = phalanx.OneDeviceStrategy("cpu:0")
    for step in range(3):
        assert float(strategy.run(one, args=(step,))) == phalanx.get_strategy().run(default, args=(step,)) == step
    assert (one.calls, default.calls) == (1, 3)


@pytest.mark.parametrize("replicas", [1, 2])
def test_nests_in_and_out(replicas):
    """Dicts, lists, tuples, namedtuples, None, strings, numbers and mirrored values keep their place."""
    strategy = phalanx.MirroredStrategy([f"cpu:{i}" for i in range(replicas)])

    def replica_fn(point, nest, *, flag):
        out = point.x + nest["a"][0]
        return Point(out, None), {"s": flag, "n": 5, "l": [out, (nest["b"],)]}, phalanx.Mirrored({"m": out * 2})

    args = (Point(1.0, 2), {"a": [np.ones(2)], "b": None})
    point, nest, mirrored = strategy.run(replica_fn, args=args, kwargs={"flag": "on"})
    assert type(point) is Point
    assert point.y is None
    assert (nest["s"], nest["n"], nest["l"][1]) == ("on", 5, (None,))
    for x in (point.x, nest["l"][0]):
        assert [v.tolist() for v in strategy.experimental_local_results(x)] == [[2, 2]] * replicas
    assert mirrored.value["m"].tolist() == [4, 4]


def test_registered_pytrees(strategy):
    """Dataclasses that jax knows go in and out."""
    state = State(jnp.ones(2), "name")
    result = strategy.run(lambda s: State(s.weight * 2, s.name), args=(state,))
    assert [v.tolist() for v in result.weight.values] == [[2, 2], [2, 2]]
    assert result.name == "name"


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
    """A pytree with a static field."""

    weight: jax.Array
    name: str = dataclasses.field(metadata={"static": True})


def test_closures_over_constants(strategy):
    """Captured arrays and per-call closures give the values of their own call."""

    def make(scale):
        return lambda x: x * scale

    double, triple = make(np.float32(2)), make(jnp.float32(3))
    assert float(strategy.run(double, args=(5.0,)).values[1]) == 10
    assert float(strategy.run(triple, args=(5.0,)).values[1]) == 15
    assert float(strategy.run(double, args=(7.0,)).values[1]) == 14


def test_lambda_made_anew_warns_once(strategy):
    """With file and line and what to write instead; the results are right all the same."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = [float(strategy.run(lambda x: x + i, args=(1.0,)).values[0]) for i in range(6)]  # noqa: B023
    assert results == [1, 2, 3, 4, 5, 6]
    (warning,) = [w for w in caught if w.category is RecompilationWarning]
    assert "test_programs.py" in str(warning.message)
    assert "HINT: define it once" in str(warning.message)


def test_partials_made_anew_warn(strategy):
    """Also wrapped in functools.partial."""
    for i in range(2):
        strategy.run(functools.partial(plus, i), args=(1.0,))
    with pytest.warns(RecompilationWarning, match="plus .* is made anew for each call"):
        strategy.run(functools.partial(plus, 2), args=(1.0,))


def plus(a, b):
    """A function to wrap."""
    return a + b


@dataclasses.dataclass
class Scale:
    """A callable that compares by value, so it has no hash."""

    factor: float

    def __call__(self, x):
        """Multiplies."""
        return x * self.factor


def test_unhashable_callables(strategy):
    """Told apart by identity."""
    two, three = Scale(2.0), Scale(3.0)
    assert [float(strategy.run(f, args=(5.0,)).values[0]) for f in (two, three, two)] == [10, 15, 10]


def test_numpy_bools_and_strings_are_static(strategy):
    """As Python's own are."""
    assert strategy.run(lambda flag: "yes" if flag else "no", args=(np.bool_(True),)) == "yes"
    assert strategy.run(lambda names: list(names), args=(np.array(["a", "b"]),)) == ["a", "b"]


def test_random_keys_are_arguments(strategy):
    """Keys of jax.random, one for all or one a replica, in and out."""
    key = jax.random.key(0)
    split = lambda k: jax.random.fold_in(k, phalanx.get_replica_context().replica_id_in_sync_group)  # noqa: E731
    keys = strategy.run(split, args=(key,))
    drawn = strategy.run(jax.random.normal, args=(keys,))
    expected = [float(jax.random.normal(jax.random.fold_in(key, i))) for i in range(2)]
    np.testing.assert_allclose([float(x) for x in drawn.values], expected, rtol=1e-6)
    assert float(phalanx.function(jax.random.normal)(key)) == float(jax.random.normal(key))


@pytest.mark.parametrize("verb", ["run", "reduce", "gather"])
@pytest.mark.parametrize("replicas", [3, 4])
def test_per_replica_of_another_strategy(strategy, replicas, verb):
    """With another number of replicas it does not fit; nothing is taken silently."""
    value = phalanx.MirroredStrategy([f"cpu:{i}" for i in range(replicas)]).run(lambda: jnp.ones(2))
    call = {
        "run": lambda: strategy.run(lambda x: x, args=(value,)),
        "reduce": lambda: strategy.reduce("SUM", value, axis=None),
        "gather": lambda: strategy.gather(value, axis=0),
    }[verb]
    with pytest.raises(PhalanxError, match=f"{replicas} components"):
        call()


def test_per_replica_moves_between_strategies_of_one_size(strategy):
    """To the devices of the strategy that runs."""
    value = phalanx.MirroredStrategy(["cpu:3", "cpu:2"]).run(
        lambda: phalanx.get_replica_context().replica_id_in_sync_group
    )
    assert [(int(x), x.device.id) for x in strategy.run(lambda x: x, args=(value,)).values] == [(0, 0), (1, 1)]


def test_methods_are_not_new_functions(strategy):
    """`self.step` is another object at each access, and the same function."""

    class Trainer:
        calls = 0

        def step(self, x):
            self.calls += 1
            return x

    trainer = Trainer()
    for i in range(5):
        strategy.run(trainer.step, args=(i,))
    assert trainer.calls == 1


def test_decorated_method(strategy):
    """`phalanx.function` on a method binds self; two objects are two programs."""

    class Trainer:
        def __init__(self, scale):
            self.scale, self.calls = scale, 0

        @phalanx.function
        def step(self, x):
            """Multiplies."""
            self.calls += 1
            return strategy.reduce("SUM", strategy.run(lambda x: x * self.scale, args=(x,)), axis=None)

    one, two = Trainer(1.0), Trainer(10.0)
    assert [float(one.step(2.0)), float(two.step(2.0)), float(one.step(3.0))] == [4, 40, 6]
    assert (one.calls, two.calls) == (1, 1)
    assert Trainer.step.__doc__ == "Multiplies."


def test_several_runs_and_reduces_in_one_function(strategy):
    """State flows from one to the next, in one program."""
    v = variable(strategy, 1.0)

    @phalanx.function
    def step(x):
        a = strategy.run(lambda: v.assign_add(x))
        v.assign(v.value * 10)
        b = strategy.run(lambda y: v * y, args=(a,))
        return strategy.reduce("SUM", b, axis=None), strategy.reduce("MEAN", a, axis=None), v.value

    total, mean, final = step(2.0)
    assert (float(total), float(mean), float(final), v.numpy()) == (500.0, 5.0, 50.0, 50.0)
    total, mean, final = step(0.0)
    assert (float(total), float(mean), float(final), v.numpy()) == (50000.0, 50.0, 500.0, 500.0)


def test_a_loop_of_runs_in_one_function(strategy):
    """Three optimizer steps a call."""
    v = variable(strategy)

    @phalanx.function
    def steps():
        for _ in range(3):
            strategy.run(lambda: v.assign_add(1))
        return v.value

    assert [float(steps()), float(steps())] == [6, 12]


def test_functions_nest(strategy):
    """An inner one is an ordinary call; also inside a replica function."""
    v = variable(strategy)
    inner = phalanx.function(lambda x: v.assign_add(x))
    outer = phalanx.function(lambda x: strategy.run(inner, args=(x,)))
    assert [float(x) for x in outer(2.0).values] == [4, 4]
    strategy.run(inner, args=(1.0,))
    inner(1.0)
    assert v.numpy() == 7


def test_function_without_a_strategy():
    """Reads and assigns variables of no strategy."""
    v = keras.Variable(1.0)
    step = phalanx.function(lambda x: v.assign(v * x))
    assert [float(step(2.0)), float(step(3.0)), v.numpy()] == [2, 6, 6]


def test_variable_made_anew_in_each_trace(strategy):
    """A typed error that says how to make it once; the strategy works on."""
    with pytest.raises(TraceError, match="each time the function is traced it makes or uses another variable") as e:
        strategy.run(lambda: keras.Variable(1.0, aggregation="sum").assign_add(1.0))
    assert "if self.v is None" in e.value.hint
    assert [int(x) for x in strategy.run(lambda: jnp.int32(1)).values] == [1, 1]


class Lazy:
    """Makes its variable at the first call."""

    v = None

    def __call__(self, x):
        """Adds to it."""
        if self.v is None:
            self.v = keras.Variable(10.0, aggregation="sum", trainable=False)
        return self.v.assign_add(x)


@pytest.mark.parametrize("how", ["run", "function"])
def test_variable_made_once(strategy, how):
    """With its own first value, mirrored; the first call counts once."""
    lazy = Lazy()
    with strategy.scope():
        call = run_by(strategy, how)
        assert [float(x) for x in call(lazy, 1.0).values] == [12, 12]
    call(lazy, 2.0)
    assert lazy.v.numpy() == 16
    assert len(lazy.v.value.devices()) == 2


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
    with jax.default_matmul_precision("highest"), pytest.raises(TraceError, match="it was used differently"):
        strategy.run(step)
    assert (v.numpy(), w.numpy()) == (2, 0)


def test_settings_of_jax_are_those_of_the_call(strategy):
    """A step that is called under others is traced for them, and again the one that it was."""
    fn, precisions = Counted(), ["highest", None, "highest"]
    for precision in precisions:
        with jax.default_matmul_precision(precision):
            assert float(strategy.run(fn, args=(2.0,)).values[0]) == 2
    assert fn.calls == 2


def test_what_makes_variables_is_traced_again(strategy):
    """The second trace is that of the calls that follow."""
    made, calls = [], []

    def step():
        calls.append(len(made))
        if not made:
            made.append(keras.Variable(lambda shape, dtype: jnp.full(shape, 10.0, dtype), (), aggregation="sum"))
        return made[0].assign_add(1.0)

    with strategy.scope():
        values = [float(strategy.run(step).values[0]) for _ in range(3)]
    assert values == [12, 14, 16]
    assert calls == [0, 1]


def test_held_values_stay_alive(strategy):
    """`v.value`, a NumPy view of it, and local results survive the steps after them."""
    v = variable(strategy, np.float32([10.0, 20.0]))
    strategy.run(v_add := (lambda: v.assign_add([1.0, 1.0])))
    ref, array = v.value, np.asarray(v.value)
    local = strategy.experimental_local_results(v)
    for _ in range(3):
        strategy.run(v_add)
    gc.collect()
    assert ref.tolist() == array.tolist() == local[1].tolist() == [12, 22]
    assert v.numpy().tolist() == [18, 28]


def test_numpy_view_alone_stays_alive(strategy):
    """The array behind it may not be donated, though nobody holds the jax array."""
    v = variable(strategy, np.zeros(1000, "float32"))
    strategy.run(v_add := (lambda: v.assign_add(jnp.ones(1000))))
    view = np.asarray(v.value)
    for _ in range(3):
        strategy.run(v_add)
    assert view.tolist() == [2.0] * 1000


def test_results_stay_alive(strategy):
    """What a step returned of a variable is not taken by the next one."""
    v = variable(strategy)

    @phalanx.function
    def step():
        strategy.run(lambda: v.assign_add(1.0))
        return v.value

    first = step()
    step()
    assert float(first) == 2


def test_target_assign_online(strategy):
    """Two variables that share an array part at the next step."""
    online, target = variable(strategy, 1.0), variable(strategy, 5.0)
    target.assign(online)
    train = lambda: online.assign_add(1.0)  # noqa: E731
    read = lambda: target.assign_add(0.5) * 1  # noqa: E731
    for _ in range(3):
        strategy.run(train)
    assert (online.numpy(), target.numpy()) == (7, 1)
    target.assign(online)
    strategy.run(read)
    strategy.run(train)
    assert (online.numpy(), target.numpy()) == (9, 8)


def compilations(caplog, fn, times):
    """How many programs of steps XLA compiles while `fn` is called."""
    with caplog.at_level("WARNING", logger="jax"), jax.log_compiles():
        for _ in range(times):
            fn()
    return sum("Finished XLA compilation of jit(_traced)" in r.getMessage() for r in caplog.records)


def test_scalar_variables_compile_once(strategy, caplog):
    """Their first values are weakly typed, what a program returns is not."""
    v = variable(strategy, 1.0)
    step = lambda: v.assign_add(1.0)  # noqa: E731
    assert compilations(caplog, lambda: strategy.run(step), 3) == 1


def test_training_compiles_once(strategy, caplog):
    """A model with an optimizer, with variables made in the scope and batches of one shape."""
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1), keras.layers.BatchNormalization()])
        optimizer = keras.optimizers.Adam(0.1)

    def step(x):
        with phalanx.GradientTape() as tape:
            loss = phalanx.nn.compute_average_loss(model(x, training=True))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    batches = iter(strategy.experimental_distribute_dataset([np.ones((4, 2), "float32")] * 3))
    assert compilations(caplog, lambda: strategy.run(step, args=(next(batches),)), 3) == 1


def test_a_thousand_variables(strategy):
    """Read, written and combined in one program."""
    with strategy.scope():
        variables = [keras.Variable(float(i), trainable=False) for i in range(1000)]

    def step():
        for v in variables:
            v.assign_add(1.0)

    for _ in range(2):
        strategy.run(step)
    assert [float(v.numpy()) for v in variables] == [i + 2.0 for i in range(1000)]


def test_replica_function_that_raises(strategy):
    """Its exception comes out unchanged; nothing was written; the next step works."""
    v = variable(strategy)

    class OwnError(Exception):
        pass

    def step(fail):
        v.assign_add(1.0)
        if fail:
            raise OwnError("mine")

    with pytest.raises(OwnError, match="mine"):
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


def test_state_lost(strategy):
    """When a value that the program needs is gone, the error names the variable and the remedy."""
    v = variable(strategy, np.zeros(4, "float32"), name="lost")
    strategy.run(step := (lambda: v.assign_add(jnp.ones(4))))
    v.value.delete()
    with pytest.raises(StateLostError, match=r"a step that writes 1 variables: .* the values of 1 of them \(lost") as e:
        strategy.run(step)
    assert "load the last checkpoint" in e.value.hint
    v.assign(np.zeros(4))
    strategy.run(step)
    assert v.numpy().tolist() == [2] * 4


def test_debug_nans(strategy):
    """JAX's search for NaNs finds them, and the state is as before."""
    v = variable(strategy, np.zeros(4, "float32"))
    step = lambda x: v.assign_add(jnp.log(x) * jnp.ones(4))  # noqa: E731
    strategy.run(step, args=(1.0,))
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan"):
        strategy.run(step, args=(-1.0,))
    assert v.numpy().tolist() == [0] * 4
    strategy.run(step, args=(np.e,))
    np.testing.assert_allclose(v.numpy(), [2] * 4, rtol=1e-6)


def test_program_called_under_jit(strategy):
    """jax.jit knows nothing of the variables."""
    v = variable(strategy)
    step = phalanx.function(lambda x: v.assign_add(x))
    with pytest.raises(TraceError, match="a phalanx program called on traced values"):
        jax.jit(step)(1.0)
    assert v.numpy() == 0


def test_python_objects_per_replica(strategy):
    """One program serves all replicas, so a per-replica argument is an array."""
    value = strategy.experimental_distribute_values_from_function(lambda c: "ab"[c.replica_id_in_sync_group])
    with pytest.raises(TraceError, match=r"an argument PerReplica\(\('a', 'b'\)\): its components are Python objects"):
        strategy.run(lambda x: 1, args=(value,))


def test_two_strategies_in_one_function(strategy):
    """A program runs on the devices of one."""
    other = phalanx.MirroredStrategy(["cpu:2", "cpu:3"])
    step = phalanx.function(lambda: (strategy.run(lambda: 1), other.run(lambda: 1)))
    with pytest.raises(TraceError, match="one program with the strategies .*cpu:0.*cpu:2") as e:
        step()
    assert "one phalanx.function for each strategy" in e.value.hint


def test_eager_option_in_a_function(strategy):
    """The step around it is compiled."""
    step = phalanx.function(lambda: strategy.run(lambda: 1, options=phalanx.RunOptions(eager=True)))
    with pytest.raises(phalanx.errors.ContextError, match=r"RunOptions\(eager=True\) in phalanx.function"):
        step()


def test_variables_from_outside_are_adopted(strategy):
    """Made without a scope, and assigned from outside between steps."""
    v = keras.Variable(1.0, aggregation="sum", trainable=False)
    strategy.run(step := (lambda: v.assign_add(1.0)))
    assert v.numpy() == 3
    v.assign(10.0)
    strategy.run(step)
    assert v.numpy() == 12


def test_one_variable_under_two_strategies(strategy):
    """It moves to the devices of the strategy that runs."""
    other = phalanx.MirroredStrategy(["cpu:2", "cpu:3", "cpu:4"])
    v = variable(strategy)
    step = lambda: v.assign_add(1.0)  # noqa: E731
    for s in (strategy, other, strategy):
        s.run(step)
    assert v.numpy() == 7
    assert sorted(d.id for d in v.value.devices()) == [0, 1]


def test_lower_shows_the_program(strategy):
    """Its text, without running it."""
    v = variable(strategy)
    step = phalanx.function(lambda: strategy.run(lambda: v.assign_add(1.0)))
    assert "all_reduce" in step.lower().as_text()
    assert v.numpy() == 0


def test_programs_are_forgotten_in_the_end(strategy):
    """More shapes than programs are kept for still work."""
    fn = Counted()
    with strategy.scope():
        for i in range(1, 4):
            strategy.run(fn, args=(np.ones(i),))
    assert fn.calls == 3


def test_the_current_context_selects_the_program(strategy):
    """A function called inside and outside a scope is traced for each."""
    seen = []

    @phalanx.function
    def step():
        seen.append(phalanx.get_strategy())
        return phalanx.get_strategy().num_replicas_in_sync

    outside = step()
    with strategy.scope():
        inside = step()
    assert (outside, inside) == (1, 2)


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

    with pytest.raises(TraceError, match="a gradient tape in a traced function: it was used differently") as e:
        strategy.run(replica_fn)
    assert "do not branch on Python state" in e.value.hint


def test_every_variable_keeps_its_buffer(strategy):
    """Also one of the size of a result: XLA would give the buffer to whichever comes first."""
    count, weight = variable(strategy, 0, dtype="int32"), variable(strategy, [0.0] * 3)
    step = phalanx.function(lambda: strategy.run(lambda: (count.assign_add(1), weight.assign_add([1.0] * 3))[1].sum()))
    shared = re.findall(r"\{(\d+)\}: \((\d+), \{\}, may-alias\)", step.lower().compile().as_text())
    assert shared == [("0", "0"), ("1", "1")]


def test_a_transposed_batch_is_copied_once(strategy):
    """As in a program that takes each replica's rows without a leading dim."""
    rows = np.ones((4, 8, 16), "float32")
    scan = lambda x: jax.lax.scan(lambda h, row: (h + row, None), x[:, 0], jnp.swapaxes(x, 0, 1))[0]  # noqa: E731
    batch = strategy.experimental_distribute_values_from_function(lambda context: rows)
    step = phalanx.function(lambda batch: strategy.run(scan, args=(batch,)))
    accessed = lambda lowered: lowered.compile().cost_analysis()["bytes accessed"]  # noqa: E731
    assert accessed(step.lower(batch)) <= accessed(jax.jit(scan).lower(rows))


def test_replicas_have_batches_of_random_keys(strategy):
    """Arrays of keys have no layout."""
    key = jax.random.key(0)
    batch = strategy.run(lambda: jax.random.split(key, (3, 4)))
    drawn = strategy.run(lambda keys: jax.random.uniform(keys[1, 2]), args=(batch,))
    assert [float(x) for x in drawn.values] == [float(jax.random.uniform(jax.random.split(key, (3, 4))[1, 2]))] * 2
