"""Control flow whose bodies assign variables: lifted by Phalanx, and refused with a typed error in raw bodies of jax."""

import gc
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from keras import layers

import phalanx
from phalanx.errors import InvalidArgumentError, NestedWriteError, TraceError

X = np.random.default_rng(1).normal(size=(3, 8, 4)).astype("float32")

WHERE = {
    "eager": lambda fn: fn(),
    "function": lambda fn: phalanx.function(fn)(),
    "run": lambda fn: phalanx.OneDeviceStrategy("cpu:0").run(fn),
}
everywhere = pytest.mark.parametrize("call", WHERE.values(), ids=WHERE)


def counter(value=0.0, name="counter"):
    return keras.Variable(value, dtype="float32", trainable=False, name=name)


def bump(variable):
    variable.assign_add(1.0)
    return variable.value * 1.0


@pytest.mark.parametrize("options", [{}, {"reverse": True}, {"unroll": 2}], ids=str)
def test_scan_options_are_those_of_jax(options):
    v = counter()
    assert phalanx.scan(lambda c, x: (c, bump(v)), 0.0, length=3, **options)[1].shape == (3,)
    assert float(v.value) == 3


@everywhere
@pytest.mark.parametrize(("taken", "wanted"), [(True, (1, 10)), (False, (0, 11))])
def test_cond_writes_only_in_taken_branch(call, taken, wanted):
    """The branch that is taken writes, the other one does not, whichever variables they write."""
    a, b = counter(0.0), counter(10.0)
    call(lambda: phalanx.cond(jnp.array(taken), lambda: bump(a), lambda: bump(b)))
    assert (float(a.value), float(b.value)) == wanted


def test_cond_on_a_variable_with_operands():
    """The predicate may be read from a variable, and the branches get operands."""
    v = counter(2.0)
    step = phalanx.function(lambda x: phalanx.cond(v > 0, lambda y: v.assign_sub(y), lambda y: v.value + y, x))
    assert [float(step(1.0)) for _ in range(3)] == [1, 0, 1]
    assert float(v.value) == 0


@everywhere
def test_while_loop_condition_reads_writes(call):
    v = counter()
    state = call(lambda: phalanx.while_loop(lambda n: v < 5, lambda n: (bump(v), n + 2)[1], 0))
    assert (int(state), float(v.value)) == (10, 5)


@everywhere
def test_checkpoint_writes_once(call):
    """A checkpointed function that writes has its gradient, and writes once."""
    w, v = keras.Variable(3.0), counter()
    block = phalanx.remat(lambda x: x * w * w + 0 * bump(v))
    value, grads = call(lambda: phalanx.value_and_grad(block, [w])(2.0))
    assert (float(value), float(grads[0]), float(v.value)) == (18, 12, 1)


@everywhere
def test_bodies_nest_inside_bodies(call):
    """Each step of a scan sees what the step before wrote."""
    v = counter()

    def body(carry, x):
        phalanx.cond(x > 1, lambda: phalanx.scan(lambda c, _: (c, bump(v)), 0.0, None, 10)[0], lambda: 0 * bump(v))
        return carry + x, v.value * 1.0

    carry, seen = call(lambda: phalanx.scan(body, 0.0, jnp.arange(4.0)))
    assert (float(carry), seen.tolist(), float(v.value)) == (6, [1, 2, 12, 22], 22)


def looped(step):
    xs = jnp.asarray(X)
    return phalanx.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, step(xs[s[0]])), (0, jnp.zeros((8, 4))))[1]


WAYS = {
    "scanned": lambda step: phalanx.scan(lambda c, x: (c, step(x)), 0.0, X)[1][-1],
    "looped": looped,
    "branched": lambda step: [phalanx.cond(jnp.array(True), step, lambda x: x, x) for x in X][-1],
    "checkpointed": lambda step: [phalanx.remat(step)(x) for x in X][-1],
}


@pytest.mark.cover(["call"], [WHERE["function"]])
@pytest.mark.parametrize("call", [WHERE["eager"], WHERE["function"]], ids=["eager", "function"])
def test_layers_that_write(call):
    """Dropout, BatchNormalization and a metric do in a body what they do in three steps in Python."""

    def outcome(way):
        model = keras.Sequential([layers.Input((4,)), layers.BatchNormalization(), layers.Dropout(0.5, seed=3)])
        mean = keras.metrics.Mean()

        def step(x):
            y = model(x, training=True)
            mean.update_state(y)
            return y

        last = call(lambda: way(step))
        return [last, mean.result(), *(v.value for v in model.variables)]

    unrolled = outcome(lambda step: [step(x) for x in X][-1])
    for name, way in WAYS.items():
        for got, wanted in zip(outcome(way), unrolled, strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.filterwarnings("ignore:A step trains on an array")
def test_training_loop_in_a_scan(strategy):
    """A whole training loop in one scan in the replicas equals a loop of steps."""

    def trained(whole):
        with strategy.scope():
            w, optimizer = keras.Variable(jnp.ones(4)), keras.optimizers.Adam(0.1)
            optimizer.build([w])

        def step(x):
            loss, grads = phalanx.value_and_grad(lambda: ((x * w) ** 2).mean(), [w])()
            optimizer.apply(grads, [w])
            return loss

        if whole:
            strategy.run(lambda: phalanx.scan(lambda c, x: (c, step(x)), 0.0, X)[1])
        else:
            for x in X:
                strategy.run(step, args=(x,))
        return np.asarray(w.value)

    np.testing.assert_allclose(trained(True), trained(False), rtol=1e-6)


@pytest.mark.parametrize(("aggregation", "wanted"), [("sum", 6), ("mean", 3), ("only_first_replica", 3), ("none", 4.5)])
def test_policies_hold_in_bodies(strategy, aggregation, wanted):
    """A write in a body follows the variable's row of the policy table: three increments of 1 and of 2 ("none": mean)."""
    with strategy.scope():
        v = keras.Variable(0.0, trainable=False, aggregation=aggregation)

    def step():
        amount = 1.0 if aggregation != "none" else phalanx.get_replica_context().replica_id_in_sync_group + 1.0
        return phalanx.scan(lambda c, _: (c, v.assign_add(amount)), 0.0, None, 3)[0]

    strategy.run(step)
    assert float(v.value) == wanted


@everywhere
@pytest.mark.parametrize("skips", [False, True])
def test_bodies_may_return_variables(call, skips):
    """They are the values that the variables have at the end of the body. `apply_gradients` returns one."""
    v, optimizer = keras.Variable(1.0), keras.optimizers.SGD(0.5)
    optimizer.build([v])

    def step():
        updates = phalanx.cond(
            jnp.bool_(skips), lambda: optimizer.iterations, lambda: optimizer.apply_gradients([(jnp.ones(()), v)])
        )
        (_, total), vs = phalanx.scan(
            lambda c, x: ((v.assign_add(x), c[1] + v), v), (v.value, 0.0), jnp.float32([1, 2])
        )
        state = phalanx.while_loop(lambda s: s < 9.0, lambda s: (v.assign(s * 2.0), v)[1], v.value)
        return updates, total, vs, state, phalanx.remat(lambda x: {"v": v, "x": x})(v.value)

    start = 1.0 if skips else 0.5
    updates, total, vs, state, results = call(step)
    assert (int(updates), float(total), vs.tolist()) == (0 if skips else 1, 2 * start + 4, [start + 1, start + 3])
    assert float(state) == float(results["v"]) == float(results["x"]) == float(v) == 4 * (start + 3)


def test_branch_of_one_replica(strategy):
    """Replicas may take different branches; what diverged is combined when the program ends."""
    with strategy.scope():
        v = keras.Variable(0.0, trainable=False, synchronization="on_read", aggregation="sum")

    def step():
        replica = phalanx.get_replica_context().replica_id_in_sync_group
        return phalanx.cond(replica == 1, lambda: v.assign_add(5.0), lambda: v.value * 1.0)

    for _ in range(2):
        strategy.run(step)
    assert float(v.value) == 10
    assert [float(x) for x in strategy.experimental_local_results(v)] == [0, 10]


def test_variable_made_in_a_body():
    """A layer that is built in a body has concrete weights afterwards."""
    dense = layers.Dense(2)
    phalanx.function(lambda: phalanx.scan(lambda c, x: (c, dense(x)), 0.0, X)[1])()
    assert np.isfinite(np.asarray(dense.kernel.value)).all()


RAW = {
    "scan": lambda fn: jax.lax.scan(lambda c, x: (c + fn(), x), 0.0, jnp.arange(2.0))[0],
    "cond": lambda fn: jax.lax.cond(jnp.arange(2).sum() > 0, fn, lambda: 0.0),
    "switch": lambda fn: jax.lax.switch(jnp.arange(2).sum(), [fn, lambda: 0.0]),
    "while_loop": lambda fn: jax.lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, fn()), (0, 0.0))[1],
    "fori_loop": lambda fn: jax.lax.fori_loop(0, 2, lambda i, c: c + fn(), 0.0),
    "map": lambda fn: jax.lax.map(lambda x: x + fn(), jnp.arange(2.0)).sum(),
    "vmap": lambda fn: jax.vmap(lambda x: x + fn())(jnp.arange(2.0)).sum(),
    "jit": lambda fn: jax.jit(fn)(),
    "grad": lambda fn: jax.grad(lambda x: x * fn())(1.0),
    "checkpoint": lambda fn: jax.checkpoint(fn)(),
    "jvp": lambda fn: jax.jvp(lambda x: x * fn(), (1.0,), (1.0,))[1],
    "linearize": lambda fn: jax.linearize(lambda x: x * fn(), 1.0)[0],
    "eval_shape": lambda fn: jnp.zeros(jax.eval_shape(fn).shape),
    "scan in phalanx.scan": lambda fn: phalanx.scan(lambda c, x: (c, RAW["scan"](fn)), 0.0, None, 2)[1].sum(),
}
raw = pytest.mark.parametrize("wrap", RAW.values(), ids=RAW)


@raw
@pytest.mark.parametrize("call", [WHERE["function"], WHERE["run"]], ids=["function", "run"])
def test_raw_body_that_writes(wrap, call):
    """It raises an error with variable, line of this file and remedy, and no variable holds a tracer afterwards."""
    first, v = counter(name="first"), counter(7.0, name="stuck")

    def step():
        bump(first)
        return wrap(lambda: v.assign_add(1.0) * 1.0)

    line = step.__code__.co_firstlineno + 2
    message = rf"(?s)variable 'stuck'.*{re.escape(__file__)}:{line}.*HINT: phalanx.scan"
    with pytest.raises(NestedWriteError, match=message):
        call(step)
    for variable, value in ((first, 0), (v, 7)):
        assert not isinstance(variable.value, jax.core.Tracer)
        assert float(variable.value) == value
    assert float(call(lambda: bump(v))) == 8


WRITERS = {
    "seed_generator": lambda: layers.Dropout(0.5),
    "batch_normalization": lambda: layers.BatchNormalization(name="batch_normalization"),
    "mean_metric": lambda: keras.metrics.Mean("mean_metric"),
}


@pytest.mark.parametrize("name", WRITERS)
def test_layer_in_a_raw_body(name):
    """The error for a layer's own write names its variable and the user's line, not a line of Keras."""
    layer = WRITERS[name]()

    def body(carry, x):
        layer(x, training=True) if isinstance(layer, layers.Layer) else layer.update_state(x)
        return carry, x

    with pytest.raises(NestedWriteError, match=rf"(?s)variable '{name}.*test_control_flow\.py:\d+"):
        phalanx.function(lambda: jax.lax.scan(body, 0.0, X))()


@pytest.mark.cover(
    ["wrap"], [RAW[name] for name in ("scan", "cond", "while_loop", "vmap", "jit", "grad", "checkpoint")]
)
@raw
def test_named_body_that_reads(wrap):
    """The same function may be the body in several programs, around a write, and outside; it reads the present value."""
    v = counter(3.0)

    def body():
        return v.value * 1.0

    at = lambda value: float(wrap(lambda: jnp.float32(value) * 1.0))  # noqa: E731

    def step():
        before = wrap(body)
        v.assign_add(1.0)
        return before, wrap(body)

    assert [float(x) for x in phalanx.function(step)()] == [at(3), at(4)]
    assert [float(x) for x in phalanx.OneDeviceStrategy("cpu:0").run(step)] == [at(4), at(5)]
    assert float(v.value) == 5
    assert float(wrap(body)) == at(5)


@pytest.mark.parametrize("kind", ["body", "jit"])
def test_remembered_functions_read_the_present_value(kind):
    """jax remembers what it traced of a body or a helper, which serves several programs, each with the value that is there."""
    v = counter(3.0)
    body = lambda carry, _: (carry + v, None)  # noqa: E731
    twice = jax.jit(lambda: 2.0 * v) if kind == "jit" else lambda: phalanx.scan(body, 0.0, None, 2)[0]
    assert [float(phalanx.function(lambda: twice() + i)()) for i in range(2)] == [6, 7]
    assert float(phalanx.function(lambda: (twice(), bump(v), twice())[2])()) == 8
    v.assign(5.0)
    assert float(phalanx.function(lambda: twice() + 2)()) == 12


def test_jitted_helper_that_asks_for_its_context(strategy):
    """A helper under `jax.jit` serves replicas and all of them, of several strategies, each with what holds there."""

    @jax.jit
    def helper(x):
        replica = phalanx.get_replica_context()
        if replica is None:
            return x + 100 * phalanx.get_strategy().num_replicas_in_sync
        return x + 10 * replica.num_replicas_in_sync + replica.replica_id_in_sync_group

    one = phalanx.OneDeviceStrategy("cpu:0")
    for offset in range(2):
        step = lambda: helper(0) + offset  # noqa: B023, E731
        assert [int(x) for x in strategy.run(step).values] == [20 + offset, 21 + offset]
        assert int(one.run(step)) == 10 + offset
        for current, number in ((strategy, 2), (one, 1)):
            with current.scope():
                assert int(phalanx.function(lambda: step())()) == 100 * number + offset  # noqa: B023


def test_jitted_helper_around_a_body(strategy):
    """A helper under `jax.jit` with a body of Phalanx inside reads the present value in each program."""
    with strategy.scope():
        v = counter(3.0)
    helper = jax.jit(lambda x: phalanx.scan(lambda c, _: (c * v, None), x, None, 2)[0])
    for value in (3.0, 5.0):
        v.assign(value)
        step = lambda: helper(2.0) + phalanx.value_and_grad(helper, [])(1.0)[0]  # noqa: E731
        assert [float(x) for x in strategy.run(step).values] == [3 * value**2] * 2


def test_helper_of_several_threads():
    """Programs that are traced in several threads at once share no value that a helper under `jax.jit` has read."""
    v = counter(3.0)
    helper = jax.jit(lambda x: x * v)
    at_once = threading.Barrier(4, timeout=300)

    def results():
        at_once.wait()
        return [float(phalanx.function(lambda: helper(2.0) + i)()) for i in range(12)]  # noqa: B023

    with ThreadPoolExecutor(4) as pool:
        for found in [pool.submit(results) for _ in range(4)]:
            assert found.result(timeout=300) == [6.0 + i for i in range(12)]


@pytest.mark.slow
def test_models_leave_nothing_in_the_caches_of_jax():
    """What is traced for a model that is gone serves the next one; an engine with a key for each program kept 4,000 objects."""
    strategy = phalanx.OneDeviceStrategy("cpu:0")
    x, y = np.ones((8, 4), "float32"), np.ones((8, 1), "float32")

    def objects_after_a_model():
        with strategy.scope():
            model = keras.Sequential([keras.layers.Dense(3, activation="relu"), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        model.fit(x, y, batch_size=4, verbose=0)
        del model
        gc.collect()
        return len(gc.get_objects())

    counts = [objects_after_a_model() for _ in range(6)]
    assert counts[5] - counts[3] < 500, counts


@pytest.mark.parametrize(
    "total",
    [
        pytest.param(lambda x: phalanx.get_replica_context().all_reduce("SUM", x), id="all_reduce"),
        pytest.param(
            lambda x: phalanx.get_replica_context().merge_call(
                lambda strategy, x: strategy.extended.reduce_to("SUM", x, x), args=(x,)
            ),
            id="merge_call",
        ),
    ],
)
@pytest.mark.parametrize(
    ("wrap", "wanted"),
    [
        pytest.param(lambda f, x: f(x), 3, id="plain"),
        pytest.param(lambda f, x: jax.jit(f)(x), 3, id="jit"),
        pytest.param(lambda f, x: jax.lax.cond(jnp.arange(2).sum() > 0, f, lambda y: -y, x), 3, id="cond"),
        pytest.param(lambda f, x: jax.lax.scan(lambda c, _: (f(c), None), x, None, 2)[0], 6, id="scan"),
        pytest.param(lambda f, x: jax.lax.fori_loop(0, 2, lambda _, c: f(c), x), 6, id="fori_loop"),
        pytest.param(lambda f, x: jax.vmap(f)(x[None])[0], 3, id="vmap"),
        pytest.param(lambda f, x: jax.checkpoint(f)(x), 3, id="checkpoint"),
        pytest.param(lambda f, x: jax.grad(f)(x) + 1, 3, id="grad"),
        pytest.param(lambda f, x: phalanx.scan(lambda c, _: (f(c), None), x, None, 2)[0], 6, id="phalanx.scan"),
        pytest.param(lambda f, x: phalanx.cond(True, f, lambda y: -y, x), 3, id="phalanx.cond"),
        pytest.param(lambda f, x: phalanx.remat(f)(x), 3, id="phalanx.remat"),
    ],
)
def test_collective_in_a_body(strategy, total, wrap, wanted):
    """`merge_call` and `all_reduce` work inside bodies and transformations."""
    step = lambda: wrap(total, phalanx.get_replica_context().replica_id_in_sync_group + 1.0)  # noqa: E731
    assert [float(x) for x in strategy.run(step).values] == [wanted, wanted]


def test_write_in_a_merge_call_in_a_raw_body(strategy):
    """A merge function in a raw body is a raw body."""
    with strategy.scope():
        v = counter(name="stuck")
    merge = lambda strategy: v.assign_add(1.0)  # noqa: E731
    step = lambda: jax.jit(lambda: phalanx.get_replica_context().merge_call(merge))()  # noqa: E731
    with pytest.raises(NestedWriteError, match="variable 'stuck'"):
        strategy.run(step)
    assert float(v.value) == 0


def test_run_in_a_body(strategy):
    """`Strategy.run` cannot start in the middle of a loop, and says so."""
    step = lambda: phalanx.scan(lambda c, _: (c, strategy.run(lambda: 1.0)), 0.0, None, 2)  # noqa: E731
    with pytest.raises(
        TraceError, match=r"(?s)Strategy.run was called inside a control-flow body.*HINT: strategy.run around"
    ):
        phalanx.function(step)()


@everywhere
@pytest.mark.parametrize("fails_at", [1, 2, 3])
def test_failing_body_changes_no_variable(call, fails_at):
    """An exception in a body, at whichever trace of it, comes out as it is and changes no variable."""
    v, traces = counter(), []

    def body(carry, _):
        traces.append(1)
        bump(v)
        if len(traces) == fails_at:
            raise KeyError("mine")
        return carry, None

    def step():
        return phalanx.scan(body, 0.0, None, 2)[0] + phalanx.scan(body, 0.0, None, 2)[0]

    if call is WHERE["eager"] and fails_at == 3:
        step = lambda: phalanx.scan(lambda c, _: (body(c, _), body(c, _), body(c, _))[0], 0.0, None, 2)  # noqa: E731
    with pytest.raises(KeyError, match="mine"):
        call(step)
    assert float(v.value) == 0


def test_branches_that_do_not_match():
    """The errors for branches and assignments of different shapes come through, and nothing changes."""
    v = counter()
    step = phalanx.function(lambda: phalanx.cond(v < 9, lambda: (bump(v), jnp.ones(2))[1], lambda: jnp.ones(3)))
    with pytest.raises(
        InvalidArgumentError, match=r"(?s)cond branches must have equal output types.*test_control_flow\.py:\d+"
    ):
        step()
    with pytest.raises(ValueError, match="shape"):
        phalanx.function(lambda: phalanx.scan(lambda c, _: (c, v.assign(jnp.ones(2))), 0.0, None, 2))()
    assert float(v.value) == 0


@pytest.mark.parametrize(
    ("loop", "message"),
    [
        (lambda: phalanx.cond(True, lambda: 1.0, lambda: None), "cond.*HINT: functions that return arrays of the same"),
        (
            lambda: phalanx.while_loop(lambda x: x > 0, lambda x: x, jnp.ones(2)),
            "while_loop.*HINT: .*a bool of cond_fun",
        ),
        (lambda: phalanx.while_loop(lambda x: x > 0, lambda x: (x, x), 1.0), "while_loop.*HINT: .*a state of body_fun"),
        (lambda: phalanx.scan(lambda c, x: (None, x), 1.0, jnp.ones(2)), "scan.*HINT: .*a carry like init"),
        (
            lambda: phalanx.cond(True, lambda x: x, lambda x: x, {1: 2, "a": 3}),
            "a nest of type.*HINT: dicts whose keys",
        ),
    ],
    ids=["branches", "condition", "state", "carry", "keys"],
)
def test_what_jax_refuses_has_a_hint(loop, message):
    """Outside of steps, and in them."""
    for call in (loop, phalanx.function(loop)):
        with pytest.raises(InvalidArgumentError, match=f"(?s){message}"):
            call()
