"""What `GradientTape` and `value_and_grad` mean: as in TensorFlow, and typed errors where a tape cannot record."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import phalanx
from phalanx.errors import InvalidArgumentError, TapeError

ONE_TO_THREE = np.float32([1, 2, 3])


def floating(value=3.0, **options):
    return keras.Variable(value, dtype="float32", **options)


def taped(record, sources, gradient=None, **tape_options):
    """Takes a gradient in a compiled step; `record(tape)` returns the target."""

    @phalanx.function
    def step():
        with phalanx.GradientTape(**tape_options) as tape:
            target = record(tape)
        return tape.gradient(target, sources, **(gradient or {}))

    return jax.tree.map(np.asarray, step())


def stop(x):
    return jax.lax.stop_gradient(jnp.asarray(x))


@jax.custom_vjp
def doubled_backwards(x):
    return x


doubled_backwards.defvjp(lambda x: (x, None), lambda _, g: (2 * g,))


@jax.custom_vjp
def rounded_to_eighths(x):
    """Goes through integers; its gradient goes straight through."""
    return jnp.round(x * 8).astype("int8").astype("float32") / 8


rounded_to_eighths.defvjp(lambda x: (rounded_to_eighths(x), None), lambda _, g: (g,))


@jax.custom_jvp
def tripled_forwards(x):
    return x


tripled_forwards.defjvp(lambda primals, tangents: (primals[0], 3 * tangents[0]))


@pytest.mark.parametrize(
    ("target", "wanted"),
    [
        pytest.param(lambda v: v * v, 6, id="scalar"),
        pytest.param(lambda v: v * ONE_TO_THREE, 6, id="a target that is no scalar is summed"),
        pytest.param(lambda v: [v * v, 2 * v], 8, id="several targets are summed"),
        pytest.param(lambda v: {"a": v * ONE_TO_THREE, "b": (v,)}, 7, id="a pytree of targets"),
        pytest.param(lambda v: v + stop(v) * v, 4, id="partly stopped"),
        pytest.param(lambda v: doubled_backwards(v * v), 12, id="custom_vjp"),
        pytest.param(lambda v: tripled_forwards(v * v), 18, id="custom_jvp"),
        pytest.param(lambda v: rounded_to_eighths(v * 1.0) * v, 6, id="custom_vjp through integers"),
        pytest.param(
            lambda v: jax.checkpoint(lambda x: jnp.sin(x) * x)(v * 1.0), np.sin(3) + 3 * np.cos(3), id="remat"
        ),
        pytest.param(lambda v: jax.jit(lambda x: x**3)(v.value), 27, id="jit"),
        pytest.param(lambda v: jax.jit(lambda: v**3)(), 27, id="jit that reads the variable itself"),
        pytest.param(lambda v: jax.vmap(lambda x: x * v)(ONE_TO_THREE), 6, id="vmap that reads the variable itself"),
        pytest.param(lambda v: jax.lax.scan(lambda c, x: (c * v, x), 1.0, None, 3)[0], 27, id="scan"),
        pytest.param(lambda v: jax.lax.cond(v > 0, lambda: v * v, lambda: -v), 6, id="cond"),
        pytest.param(lambda v: jax.lax.fori_loop(0, 3, lambda _, c: c * v, 1.0), 27, id="fori_loop"),
        pytest.param(lambda v: phalanx.scan(lambda c, x: (c * v, x), 1.0, None, 3)[0], 27, id="phalanx.scan"),
        pytest.param(lambda v: phalanx.cond(v > 0, lambda: v * v, lambda: -v), 6, id="phalanx.cond"),
        pytest.param(lambda v: phalanx.remat(lambda x: x * v)(v * 1.0), 6, id="phalanx.remat"),
        pytest.param(lambda v: jax.grad(lambda x: x**3)(v.value), 18, id="jax.grad inside"),
        pytest.param(lambda v: phalanx.value_and_grad(lambda: v**3, [v])()[1][0], 18, id="value_and_grad inside"),
        pytest.param(lambda v: keras.ops.stop_gradient(v) * v, 3, id="keras.ops.stop_gradient"),
    ],
)
def test_gradient_of_summed_target(target, wanted):
    """The gradient of the sum of the target, at v = 3."""
    v = floating()
    got = taped(lambda tape: target(v), v)
    np.testing.assert_allclose(got, wanted, rtol=1e-6)
    assert got.shape == ()


def test_output_gradients_weigh_the_targets():
    """`output_gradients` multiplies what is summed: an array for one target, a pytree for several."""
    v = floating()
    assert taped(lambda tape: v * ONE_TO_THREE, v, {"output_gradients": jnp.array([1.0, 10.0, 100.0])}) == 321
    weights = {"a": 2.0, "b": jnp.ones(3)}
    assert taped(lambda tape: {"a": v * v, "b": v * ONE_TO_THREE}, v, {"output_gradients": weights}) == 18


def test_sources_come_back_as_a_pytree():
    """The result has the structure, shapes and dtypes of the sources."""
    a, b = floating(ONE_TO_THREE), keras.Variable([1.0, 2.0], dtype="bfloat16")
    got = taped(lambda tape: (a * a).sum() + keras.ops.sum(b), {"a": a, "pair": (b, [a])})
    np.testing.assert_array_equal(got["a"], 2 * ONE_TO_THREE)
    np.testing.assert_array_equal(got["pair"][1][0], 2 * ONE_TO_THREE)
    assert (got["pair"][0].shape, got["pair"][0].dtype) == ((2,), jnp.bfloat16)
    assert taped(lambda tape: a * a, []) == []


@pytest.mark.parametrize(
    "target",
    [
        pytest.param(lambda v, w: w * w, id="another variable"),
        pytest.param(lambda v, w: jnp.float32(1.0), id="a constant"),
        pytest.param(lambda v, w: stop(v * v), id="stopped"),
        pytest.param(lambda v, w: keras.ops.stop_gradient(v) * w, id="stopped, of a product"),
        pytest.param(lambda v, w: (v * v).astype("int32"), id="an integer target"),
        pytest.param(lambda v, w: v > 0, id="a boolean target"),
        pytest.param(lambda v, w: (v > 0).astype("float32") * w, id="through a comparison"),
        pytest.param(lambda v, w: jax.jit(lambda a, b: b * 2)(v.value, w.value), id="an unused argument of a jit"),
    ],
)
def test_unconnected_source_gives_none_or_zeros(target):
    v, w = floating(ONE_TO_THREE), floating(2.0)
    assert taped(lambda tape: target(v, w), v) is None
    zeros = taped(lambda tape: target(v, w), [v], {"unconnected_gradients": "zero"})
    np.testing.assert_array_equal(zeros, np.zeros((1, 3)))


def test_a_tape_around_run(strategy):
    """It sees through the replicas: each of them adds to the sum."""
    with strategy.scope():
        v = floating()
    assert taped(lambda tape: strategy.reduce("SUM", strategy.run(lambda: v * v), axis=None), v) == 2 * (2 * 3)


@pytest.mark.parametrize(("num_sources", "traces"), [(1, 1), (2, 2)])
def test_a_gradient_that_is_none_takes_a_second_trace(num_sources, traces):
    """Only the trace shows which one it is."""
    v, w, calls = floating(), floating(), []
    taped(lambda tape: (calls.append(1), w * 2, v * v)[-1], [v, w][:num_sources])
    assert len(calls) == traces


def test_connected_and_unconnected_sources_together():
    a, b, c = floating(), floating(), floating()
    assert taped(lambda tape: a * c, [a, b, c]) == [3, None, 3]


def test_only_what_a_tape_records_has_gradients():
    """Values computed before the tape are constants, those computed after it are unknown. A persistent tape is asked again."""
    v = floating()

    @phalanx.function
    def step():
        before = v * v
        with phalanx.GradientTape(persistent=True) as tape:
            scaled, inside = before * v, v * v
            cubed = inside * v
        targets = [scaled, 2 * inside, v * v, inside, cubed, [inside, cubed], [inside * v, inside]]
        return [tape.gradient(target, v) for target in targets]

    assert step() == [9, None, None, 6, 27, 33, 6]


@pytest.mark.parametrize("target", ["none", "integer", "no sources"])
def test_tape_that_has_nothing_to_differentiate(target):
    """A tape that is not asked, or asked in vain, leaves nothing in the program."""
    v = floating()

    @phalanx.function
    def step():
        with phalanx.GradientTape() as tape:
            y = v * v
            n = y.astype("int32")
        if target != "none":
            tape.gradient(*((n, v) if target == "integer" else (y, [])))
        return y

    assert step() == 9


def test_watched_values_are_sources():
    """Arrays and variables in one structure, and intermediate values, whose gradient stops there. Other arrays are not."""
    v = floating(trainable=False)

    @phalanx.function
    def step(x, y):
        with phalanx.GradientTape() as tape:
            tape.watch({"x": x, "v": [v]})
            middle = x * v
            tape.watch(middle)
            target = middle * middle * y
        return tape.gradient(target, {"x": x, "y": y, "v": v, "middle": middle})

    assert step(5.0, 1.0) == {"x": 2 * 15 * 3, "y": None, "v": 2 * 15 * 5, "middle": 2 * 15}


@pytest.mark.parametrize(
    ("options", "trainable", "watch", "wanted"),
    [
        ({}, True, False, 6),
        ({}, False, False, None),
        ({}, False, True, 6),
        ({"watch_accessed_variables": False}, True, False, None),
        ({"watch_accessed_variables": False}, True, True, 6),
        ({"watch_accessed_variables": False}, False, True, 6),
    ],
)
def test_trainable_variables_are_watched(options, trainable, watch, wanted):
    v = floating(trainable=trainable)
    assert taped(lambda tape: (tape.watch(v) if watch else None, v * v)[1], v, **options) == wanted


def test_watched_variables_are_listed():
    """`watched_variables` lists the trainable ones that were used, and those that were watched."""
    a, b, unused = floating(), floating(trainable=False), floating()
    seen = []

    @phalanx.function
    def step():
        with phalanx.GradientTape() as tape:
            tape.watch(b)
            a * b
        seen[:] = tape.watched_variables()

    step()
    assert [any(v is s for s in seen) for v in (a, b, unused)] == [True, True, False]


@pytest.mark.parametrize("bad", [np.int32([1, 2]), np.float32(1.0), "text"])
def test_watch_refuses_other_values(bad):
    with pytest.raises(TapeError, match="not a floating array of the traced step"):
        taped(lambda tape: tape.watch(bad), [])


def test_chain_goes_through_assignments():
    """What is assigned inside the tape and read again is part of the chain; the source is the value at its beginning."""
    v, w = floating(3.0), floating(0.0, trainable=False)
    assert taped(lambda tape: (w.assign(v * v), w * v)[1], v) == 27
    assert float(w.value) == 9
    assert taped(lambda tape: (v.assign(v * v), v * 2)[1], v) == 12
    assert float(v.value) == 9


@pytest.mark.parametrize(("order", "wanted"), [(1, 27), (2, 18), (3, 6)])
def test_nested_tapes_give_higher_derivatives(order, wanted):
    v = floating()

    def derivative(n):
        if n == 0:
            return v**3
        with phalanx.GradientTape() as tape:
            lower = derivative(n - 1)
        return tape.gradient(lower, v)

    assert phalanx.function(lambda: derivative(order))() == wanted


def test_tape_is_asked_before_it_closes():
    v = floating()

    @phalanx.function
    def step():
        with phalanx.GradientTape() as tape:
            return tape.gradient(v * v, v)

    assert step() == 6


def test_tape_that_opened_first_may_close_first():
    a, b = floating(3.0), floating(5.0)

    @phalanx.function
    def step():
        first, second = phalanx.GradientTape(), phalanx.GradientTape()
        with first:
            x = a * b
            second.__enter__()
            y = x * a
        z = b * b
        second.__exit__(None, None, None)
        return first.gradient(y, [a, b]), second.gradient([y, z], [a, b])

    assert step() == ([30, 9], [15, 10])


def test_a_tape_around_an_update():
    """A tape sees through an optimizer's update: the gradient of the loss after one step of descent."""
    v = floating(3.0)

    def record(tape):
        with phalanx.GradientTape() as inner:
            loss = v * v
        v.assign_sub(0.1 * inner.gradient(loss, v))
        return v * v

    np.testing.assert_allclose(taped(record, v), 2 * 0.8**2 * 3, rtol=1e-6)


def enter():
    with phalanx.GradientTape():
        pass


BODIES = {
    "scan": lambda: jax.lax.scan(lambda c, x: (enter(), (c, x))[1], 0.0, None, 2),
    "cond": lambda: jax.lax.cond(jnp.bool_(1) & (jnp.arange(2).sum() > 0), enter, lambda: None),
    "while_loop": lambda: jax.lax.while_loop(lambda n: n < 2, lambda n: (enter(), n + 1)[1], 0),
    "jit": lambda: jax.jit(enter)(),
    "vmap": lambda: jax.vmap(lambda x: (enter(), x)[1])(jnp.ones(2)),
    "grad": lambda: jax.grad(lambda x: (enter(), x)[1])(1.0),
    "checkpoint": lambda: jax.checkpoint(lambda x: (enter(), x)[1])(1.0),
    "phalanx.scan": lambda: phalanx.scan(lambda c, x: (enter(), (c, x))[1], 0.0, None, 2),
    "phalanx.cond": lambda: phalanx.cond(True, enter, lambda: None),
    "phalanx.while_loop": lambda: phalanx.while_loop(lambda n: n < 2, lambda n: (enter(), n + 1)[1], 0),
    "phalanx.remat": lambda: phalanx.remat(lambda x: (enter(), x)[1])(1.0),
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_tape_in_a_body(body):
    """A tape in the body of a loop, a branch or a transformation names this file and says what to write."""
    with pytest.raises(TapeError, match=r"(?s)test_tape\.py:\d+.*inside the body.*HINT: phalanx.value_and_grad"):
        phalanx.function(body)()


OUTSIDE = "outside the function in which the tape was entered"


@pytest.mark.parametrize(
    ("misuse", "match"),
    [
        pytest.param(lambda tape, y, v: tape.watch(v), "the tape is not recording", id="watch after the block"),
        pytest.param(lambda tape, y, v: tape.__enter__(), "records only one block", id="second block"),
        pytest.param(
            lambda tape, y, v: [tape.gradient(y, v) for _ in range(2)],
            r"(?s)can be differentiated only once.*persistent=True",
            id="second gradient",
        ),
        pytest.param(lambda tape, y, v: jax.jit(lambda: tape.gradient(y, v))(), OUTSIDE, id="gradient in a jit"),
        pytest.param(
            lambda tape, y, v: jax.lax.scan(lambda c, x: (c, tape.gradient(y, v)), 0.0, None, 2),
            OUTSIDE,
            id="gradient in a scan",
        ),
    ],
)
def test_misuse_of_a_tape_is_refused(misuse, match):
    v = floating()

    @phalanx.function
    def step():
        with phalanx.GradientTape() as tape:
            y = v * v
        misuse(tape, y, v)

    with pytest.raises(TapeError, match=match):
        step()


def test_tape_outside_a_step():
    """Eager code has no program to differentiate, and a tape does not outlive its step; asking it leaks nothing."""
    with pytest.raises(TapeError, match=r"(?s)outside a traced step.*HINT: .*@phalanx.function"):
        enter()
    v, tapes = floating(), []
    assert taped(lambda tape: (tapes.append((tape, y := v * v)), y)[1], v) == 6
    tape, y = tapes[0]
    with pytest.raises(TapeError, match=OUTSIDE):
        tape.gradient(y, v)


@pytest.mark.parametrize(
    "ask", [lambda t: t.gradient(1.0, []), lambda t: t.watch(1.0), lambda t: t.watched_variables()]
)
def test_tape_before_it_is_entered(ask):
    with pytest.raises(TapeError, match=r"GradientTape\."):
        ask(phalanx.GradientTape())


def test_unknown_unconnected_gradients():
    v = floating()
    with pytest.raises(InvalidArgumentError, match='must be "none" or "zero"'):
        taped(lambda tape: v * v, v, {"unconnected_gradients": "nil"})


def test_exception_inside_a_tape():
    """The user's exception comes out as it is, and the next step works."""
    v = floating()
    fails = [True]

    def record(tape):
        if fails:
            raise KeyError("mine")
        return v * v

    with pytest.raises(KeyError, match="mine"):
        taped(record, v)
    fails.clear()
    assert taped(record, v) == 6


def test_default_strategy_runs_a_tape_and_earlier_writes_once():
    """The default strategy compiles a step with a tape; what the step did before the tape is done once."""
    v, count = floating(), keras.Variable(0, dtype="int32", trainable=False)

    def step():
        count.assign_add(1)
        with phalanx.GradientTape() as tape:
            y = v * v
        return tape.gradient(y, v)

    for calls in (1, 2, 3):
        assert phalanx.get_strategy().run(step) == 6
        assert int(count.value) == calls


@pytest.mark.parametrize(
    ("target", "eager", "wanted"),
    [
        pytest.param(lambda v, replica: v * v * (replica.replica_id_in_sync_group + 1), False, [6, 12], id="its own"),
        pytest.param(lambda v, replica: replica.all_reduce("SUM", v * v), False, [12, 12], id="sum"),
        pytest.param(lambda v, replica: replica.all_reduce("MEAN", v * v), False, [6, 6], id="mean"),
        pytest.param(lambda v, replica: v * v * v, True, [27, 27], id="eager"),
    ],
)
def test_gradients_in_replicas(strategy, target, eager, wanted):
    """Each has that of its own target, and the gradient of an all-reduce is the all-reduce of the gradient; eagerly too."""
    with strategy.scope():
        v = floating()

    def step():
        with phalanx.GradientTape() as tape:
            y = target(v, phalanx.get_replica_context())
        return tape.gradient(y, v)

    assert [float(g) for g in strategy.run(step, options=phalanx.RunOptions(eager=eager)).values] == wanted


def test_value_and_grad_outside_programs():
    """Works eagerly, and keeps what the function assigns. As in jax, an unconnected variable has a gradient of zero."""
    v, w, count = floating(), floating(ONE_TO_THREE), floating(0.0, trainable=False)

    def loss(x):
        count.assign_add(1.0)
        return x * v * v

    value, grads = phalanx.value_and_grad(loss, [v, w])(2.0)
    assert (float(value), float(grads[0]), grads[1].tolist(), float(count.value)) == (18, 12, [0] * 3, 1)


def test_value_and_grad_with_aux():
    v = floating()
    (value, aux), grads = phalanx.value_and_grad(lambda: (v * v, {"twice": v * 2}), [v], has_aux=True)()
    assert (float(value), float(aux["twice"]), float(grads[0])) == (9, 6, 6)


def descend(v):
    """One step of descent on v * v."""
    loss, grads = phalanx.value_and_grad(lambda: v * v, [v])()
    v.assign_sub(0.1 * grads[0])
    return loss


def three_steps(v):
    return [descend(v) for _ in range(3)][-1]


def three_in_a_scan(v):
    return phalanx.scan(lambda c, x: (c, descend(v)), 0.0, None, 3)[1][-1]


@pytest.mark.parametrize(
    "wrap",
    [
        pytest.param(three_steps, id="eager"),
        pytest.param(lambda v: phalanx.function(lambda: three_steps(v))(), id="function"),
        pytest.param(three_in_a_scan, id="eager scan"),
        pytest.param(lambda v: phalanx.function(lambda: three_in_a_scan(v))(), id="scan in a function"),
        pytest.param(lambda v: phalanx.OneDeviceStrategy("cpu:0").run(lambda: three_steps(v)), id="run"),
    ],
)
def test_value_and_grad_everywhere(wrap):
    v = floating(1.0)
    np.testing.assert_allclose(wrap(v), 0.8**4, rtol=1e-6)
    np.testing.assert_allclose(v.value, 0.8**3, rtol=1e-6)


def test_value_and_grad_in_a_raw_body_that_only_reads():
    v = floating()

    def body(carry, _):
        return carry, phalanx.value_and_grad(lambda: v * v, [v])()[1][0]

    assert phalanx.function(lambda: jax.lax.scan(body, 0.0, None, 2)[1])().tolist() == [6, 6]


def test_jitted_function_before_and_inside_a_tape():
    """What jax remembers of a function that reads a variable does not hide the variable from the tape."""
    v = floating()
    squared = jax.jit(lambda: v**2)

    @phalanx.function
    def step():
        before = squared()
        with phalanx.GradientTape() as tape:
            y = squared()
        return before, tape.gradient(y, v)

    assert step() == (9, 6)


def test_value_and_grad_refuses_integers_and_vectors():
    """Only floating variables have gradients, and as in jax of a scalar; the error leaves the variables as they were."""
    count = keras.Variable(1, dtype="int32", trainable=False, name="count")
    with pytest.raises(TapeError, match=r"variable 'count' \(\) int32.*only floating variables"):
        phalanx.value_and_grad(lambda: 1.0, [count])
    v = floating(ONE_TO_THREE)
    with pytest.raises(InvalidArgumentError, match="must return a floating scalar"):
        phalanx.value_and_grad(lambda: v * v, [v])()
    np.testing.assert_array_equal(v.value, ONE_TO_THREE)
