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
    """A variable."""
    return keras.Variable(value, dtype="float32", **options)


def taped(record, sources, gradient=None, **tape_options):
    """Takes a gradient in a compiled step; `record(tape)` returns the target."""

    @phalanx.function
    def step():
        with phalanx.GradientTape(**tape_options) as tape:
            target = record(tape)
        return tape.gradient(target, sources, **(gradient or {}))

    return jax.tree.map(np.asarray, step())


@pytest.fixture
def two_replicas():
    """The smallest strategy with collectives."""
    return phalanx.MirroredStrategy(["cpu:0", "cpu:1"])


# What a gradient is.


def stop(x):
    """Through no gradient."""
    return jax.lax.stop_gradient(jnp.asarray(x))


@jax.custom_vjp
def doubled_backwards(x):
    """Identity with twice the gradient."""
    return x


doubled_backwards.defvjp(lambda x: (x, None), lambda _, g: (2 * g,))


@jax.custom_vjp
def rounded_to_eighths(x):
    """Goes through integers; its gradient goes straight through."""
    return jnp.round(x * 8).astype("int8").astype("float32") / 8


rounded_to_eighths.defvjp(lambda x: (rounded_to_eighths(x), None), lambda _, g: (g,))


@jax.custom_jvp
def tripled_forwards(x):
    """Identity with three times the tangent."""
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
    """`output_gradients` multiplies what is summed."""
    v = floating()
    got = taped(lambda tape: v * ONE_TO_THREE, v, {"output_gradients": jnp.array([1.0, 10.0, 100.0])})
    assert got == 321


def test_output_gradients_come_as_a_pytree():
    """One for each target of a pytree."""
    v = floating()
    weights = {"a": 2.0, "b": jnp.ones(3)}
    assert taped(lambda tape: {"a": v * v, "b": v * ONE_TO_THREE}, v, {"output_gradients": weights}) == 18


def test_sources_come_back_as_a_pytree():
    """The result has the structure, shapes and dtypes of the sources."""
    a, b = floating(ONE_TO_THREE), keras.Variable([1.0, 2.0], dtype="bfloat16")
    got = taped(lambda tape: (a * a).sum() + keras.ops.sum(b), {"a": a, "pair": (b, [a])})
    np.testing.assert_array_equal(got["a"], 2 * ONE_TO_THREE)
    np.testing.assert_array_equal(got["pair"][1][0], 2 * ONE_TO_THREE)
    assert got["pair"][0].shape == (2,)
    assert got["pair"][0].dtype == jnp.bfloat16


def test_empty_sources_give_empty_list():
    """An empty list of sources gives an empty list."""
    v = floating()
    assert taped(lambda tape: v * v, []) == []


# What is connected.


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
    """A source that the target does not depend on gives None, or zeros if asked."""
    v, w = floating(ONE_TO_THREE), floating(2.0)
    assert taped(lambda tape: target(v, w), v) is None
    np.testing.assert_array_equal(
        taped(lambda tape: target(v, w), [v], {"unconnected_gradients": "zero"}), np.zeros((1, 3))
    )


def test_a_tape_around_run(two_replicas):
    """It sees through the replicas: each of them adds to the sum."""
    with two_replicas.scope():
        v = floating()

    def record(tape):
        return two_replicas.reduce("SUM", two_replicas.run(lambda: v * v), axis=None)

    assert taped(record, v) == 2 * (2 * 3)


@pytest.mark.parametrize(("num_sources", "traces"), [(1, 1), (2, 2)])
def test_a_gradient_that_is_none_takes_a_second_trace(num_sources, traces):
    """Only the trace shows which one it is."""
    v, w, calls = floating(), floating(), []
    taped(lambda tape: (calls.append(1), w * 2, v * v)[-1], [v, w][:num_sources])
    assert len(calls) == traces


def test_connected_and_unconnected_sources_together():
    """None stands in its place among the others."""
    a, b, c = floating(), floating(), floating()
    assert taped(lambda tape: a * c, [a, b, c]) == [3, None, 3]


def test_target_computed_after_the_tape():
    """What is computed after the tape closes is not recorded."""
    v = floating()

    @phalanx.function
    def step():
        with phalanx.GradientTape(persistent=True) as tape:
            inside = v * v
        return tape.gradient(2 * inside, v), tape.gradient(v * v, v), tape.gradient(inside, v)

    assert step() == (None, None, 6)


def test_targets_inside_and_after_the_tape():
    """Of several targets those count that the tape recorded."""
    v = floating()

    @phalanx.function
    def step():
        with phalanx.GradientTape() as tape:
            inside = v * v
        after = inside * v
        return tape.gradient([after, inside], v)

    assert step() == 6


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


def test_target_computed_before_the_tape():
    """Nor is what was computed before."""
    v = floating()

    @phalanx.function
    def step():
        before = v * v
        with phalanx.GradientTape() as tape:
            target = before * v
        return tape.gradient(target, v)

    assert step() == 9


# What is watched.


@pytest.mark.parametrize("watch", [True, False])
def test_tensor_is_source_once_watched(watch):
    """A tensor is a source if it was watched."""

    @phalanx.function
    def step(x):
        with phalanx.GradientTape() as tape:
            if watch:
                tape.watch(x)
            y = x * x
        return tape.gradient(y, x)

    got = step(ONE_TO_THREE)
    assert got is None if not watch else (np.asarray(got) == 2 * ONE_TO_THREE).all()


def test_tensor_computed_inside_the_tape():
    """An intermediate value can be watched; its gradient stops there, that of what it came from does not."""
    v = floating()

    @phalanx.function
    def step():
        with phalanx.GradientTape() as tape:
            middle = v * v
            tape.watch(middle)
            y = middle * middle
        return tape.gradient(y, [middle, v])

    assert step() == [18, 108]


def test_watch_takes_a_pytree():
    """Arrays and variables in one structure."""
    v = floating(trainable=False)

    @phalanx.function
    def step(x):
        with phalanx.GradientTape() as tape:
            tape.watch({"x": x, "v": [v]})
            y = x * v
        return tape.gradient(y, {"x": x, "v": v})

    assert step(5.0) == {"x": 3, "v": 5}


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
    """Trainable variables are watched by themselves unless the tape says no; others if asked."""
    v = floating(trainable=trainable)

    def record(tape):
        if watch:
            tape.watch(v)
        return v * v

    assert taped(record, v, **options) == wanted


def test_watched_variables_are_listed():
    """`watched_variables` lists the trainable ones that were used, and those that were watched."""
    a, b, unused = floating(), floating(trainable=False), floating()
    seen = []

    @phalanx.function
    def step():
        with phalanx.GradientTape() as tape:
            tape.watch(b)
            y = a * b
        seen[:] = tape.watched_variables()
        return y

    step()
    assert [any(v is s for s in seen) for v in (a, b, unused)] == [True, True, False]


@pytest.mark.parametrize("bad", [np.int32([1, 2]), np.float32(1.0), "text"])
def test_watch_refuses_other_values(bad):
    """Only floating arrays of the step can be watched."""
    with pytest.raises(TapeError, match="not a floating array of the traced step"):
        taped(lambda tape: tape.watch(bad), [])


def test_watch_refuses_a_closed_tape():
    """`watch` belongs inside the with block."""
    v = floating()

    @phalanx.function
    def step():
        with phalanx.GradientTape() as tape:
            v * v
        tape.watch(v)

    with pytest.raises(TapeError, match="the tape is not recording"):
        step()


# Assignments, order, several tapes.


def test_chain_goes_through_assignments():
    """What is assigned inside the tape and read again is part of the chain."""
    v, w = floating(3.0), floating(0.0, trainable=False)

    def record(tape):
        w.assign(v * v)
        return w * v

    assert taped(record, v) == 27
    assert float(w.value) == 9


def test_assignment_of_the_source():
    """The gradient is with respect to the value that the variable had when the tape was entered."""
    v = floating(3.0)

    def record(tape):
        v.assign(v * v)
        return v * 2

    assert taped(record, v) == 12
    assert float(v.value) == 9


def test_persistent_tape_answers_repeatedly():
    """A persistent tape can be asked as often as one likes."""
    v = floating()

    @phalanx.function
    def step():
        with phalanx.GradientTape(persistent=True) as tape:
            y = v * v
            z = y * v
        return tape.gradient(y, v), tape.gradient(z, v), tape.gradient([y, z], v)

    assert step() == (6, 27, 33)


@pytest.mark.parametrize(("order", "wanted"), [(1, 27), (2, 18), (3, 6)])
def test_nested_tapes_give_higher_derivatives(order, wanted):
    """Tapes inside tapes give higher derivatives."""
    v = floating()

    def derivative(n):
        if n == 0:
            return v**3
        with phalanx.GradientTape() as tape:
            lower = derivative(n - 1)
        return tape.gradient(lower, v)

    assert phalanx.function(lambda: derivative(order))() == wanted


def test_gradient_inside_the_with_block():
    """A tape may be asked before it closes."""
    v = floating()

    @phalanx.function
    def step():
        with phalanx.GradientTape() as tape:
            return tape.gradient(v * v, v)

    assert step() == 6


def test_tapes_that_overlap_in_part():
    """Of two tapes the one that opened first may close first."""
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

    @phalanx.function
    def step():
        with phalanx.GradientTape() as outer:
            with phalanx.GradientTape() as inner:
                loss = v * v
            v.assign_sub(0.1 * inner.gradient(loss, v))
            after = v * v
        return outer.gradient(after, v)

    np.testing.assert_allclose(step(), 2 * 0.8**2 * 3, rtol=1e-6)


# Where a tape cannot record.


def enter():
    """Enters a tape."""
    with phalanx.GradientTape():
        pass


@pytest.mark.parametrize(
    ("body", "name"),
    [
        (lambda: jax.lax.scan(lambda c, x: (enter(), (c, x))[1], 0.0, None, 2), "scan"),
        (lambda: jax.lax.cond(jnp.bool_(1) & (jnp.arange(2).sum() > 0), enter, lambda: None), "cond"),
        (lambda: jax.lax.while_loop(lambda n: n < 2, lambda n: (enter(), n + 1)[1], 0), "while_loop"),
        (lambda: jax.jit(enter)(), "jit"),
        (lambda: jax.vmap(lambda x: (enter(), x)[1])(jnp.ones(2)), "vmap"),
        (lambda: jax.grad(lambda x: (enter(), x)[1])(1.0), "grad"),
        (lambda: jax.checkpoint(lambda x: (enter(), x)[1])(1.0), "checkpoint"),
        (lambda: phalanx.scan(lambda c, x: (enter(), (c, x))[1], 0.0, None, 2), "phalanx.scan"),
        (lambda: phalanx.cond(True, enter, lambda: None), "phalanx.cond"),
        (lambda: phalanx.while_loop(lambda n: n < 2, lambda n: (enter(), n + 1)[1], 0), "phalanx.while_loop"),
        (lambda: phalanx.remat(lambda x: (enter(), x)[1])(1.0), "phalanx.remat"),
    ],
)
def test_tape_in_a_body(body, name):
    """A tape in the body of a loop, a branch or a transformation names this file and says what to write."""
    with pytest.raises(TapeError, match=r"(?s)test_tape\.py:\d+.*inside the body.*HINT: phalanx.value_and_grad"):
        phalanx.function(body)()


@pytest.mark.parametrize("name", ["scan", "jit"])
def test_gradient_in_a_body(name):
    """`gradient` belongs into the function in which the tape was entered."""
    v = floating()

    @phalanx.function
    def step():
        with phalanx.GradientTape() as tape:
            y = v * v
        if name == "jit":
            return jax.jit(lambda: tape.gradient(y, v))()
        return jax.lax.scan(lambda c, x: (c, tape.gradient(y, v)), 0.0, None, 2)

    with pytest.raises(TapeError, match="outside the function in which the tape was entered"):
        step()


def test_tape_outside_a_step():
    """Eager code has no program to differentiate."""
    with pytest.raises(TapeError, match=r"(?s)outside a traced step.*HINT: .*@phalanx.function"):
        enter()


def test_tape_that_left_its_step():
    """A tape does not outlive its step, and asking it leaks nothing."""
    v, kept = floating(), []

    @phalanx.function
    def step():
        with phalanx.GradientTape() as tape:
            y = v * v
        kept[:] = [tape, y]

    step()
    with pytest.raises(TapeError, match="outside the function in which the tape was entered"):
        kept[0].gradient(kept[1], v)


def misuse(persistent, calls):
    """Asks a tape so many times."""
    v = floating()

    def step():
        with phalanx.GradientTape(persistent=persistent) as tape:
            y = v * v
        return [tape.gradient(y, v) for _ in range(calls)]

    return phalanx.function(step)()


def test_second_use_of_a_tape():
    """A tape that is not persistent is used once."""
    assert misuse(persistent=False, calls=1) == [6]
    assert misuse(persistent=True, calls=2) == [6, 6]
    with pytest.raises(TapeError, match=r"(?s)can be differentiated only once.*persistent=True"):
        misuse(persistent=False, calls=2)


def test_entering_a_tape_again():
    """A tape records only one block."""

    def step():
        with phalanx.GradientTape() as tape:
            pass
        with tape:
            pass

    with pytest.raises(TapeError, match="records only one block"):
        phalanx.function(step)()


@pytest.mark.parametrize(
    "ask", [lambda t: t.gradient(1.0, []), lambda t: t.watch(1.0), lambda t: t.watched_variables()]
)
def test_tape_before_it_is_entered(ask):
    """A tape that was never entered has recorded nothing, and says so."""
    with pytest.raises(TapeError, match=r"GradientTape\."):
        ask(phalanx.GradientTape())


def test_unknown_unconnected_gradients():
    """An argument that no context accepts is a ValueError."""
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


# Strategies.


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


def test_each_replica_has_its_own_gradient(two_replicas):
    """A tape in a replica function gives the gradient of this replica's target."""
    with two_replicas.scope():
        v = floating()

    def step():
        with phalanx.GradientTape() as tape:
            y = v * (phalanx.get_replica_context().replica_id_in_sync_group + 1)
        return tape.gradient(y, v)

    assert [float(g) for g in two_replicas.run(step).values] == [1, 2]


@pytest.mark.parametrize(("op", "wanted"), [("SUM", [12, 12]), ("MEAN", [6, 6])])
def test_gradient_of_an_all_reduce(two_replicas, op, wanted):
    """The gradient of an all-reduce is the all-reduce of the gradient."""
    with two_replicas.scope():
        v = floating()

    def step():
        with phalanx.GradientTape() as tape:
            y = phalanx.get_replica_context().all_reduce(op, v * v)
        return tape.gradient(y, v)

    assert [float(g) for g in two_replicas.run(step).values] == wanted


def test_gradient_of_an_all_gather(two_replicas):
    """The gradient of an all-gather sums what every replica did with this replica's part."""
    weights = jnp.array([[1.0, 2.0], [3.0, 4.0]])

    def step():
        mine = jnp.ones(1) * weights[phalanx.get_replica_context().replica_id_in_sync_group, 0]
        with phalanx.GradientTape() as tape:
            tape.watch(mine)
            row = weights[phalanx.get_replica_context().replica_id_in_sync_group]
            y = phalanx.get_replica_context().all_gather(mine, axis=0) * row
        return tape.gradient(y, mine)

    assert [float(g[0]) for g in two_replicas.run(step).values] == [4, 6]


def test_eager_run_with_a_tape(two_replicas):
    """`RunOptions(eager=True)` gives the gradients of the compiled program."""
    with two_replicas.scope():
        v = floating()

    def step():
        with phalanx.GradientTape() as tape:
            y = v * v * v
        return tape.gradient(y, v)

    eager = two_replicas.run(step, options=phalanx.RunOptions(eager=True))
    assert [float(g) for g in eager.values] == [27, 27]


# value_and_grad.


def test_value_and_grad_outside_programs():
    """Works eagerly, and keeps what the function assigns."""
    v, count = floating(), floating(0.0, trainable=False)

    def loss(x):
        count.assign_add(1.0)
        return x * v * v

    value, grads = phalanx.value_and_grad(loss, [v])(2.0)
    assert (float(value), [float(g) for g in grads], float(count.value)) == (18, [12], 1)


def test_value_and_grad_with_aux():
    """`has_aux` hands the rest through."""
    v = floating()
    (value, aux), grads = phalanx.value_and_grad(lambda: (v * v, {"twice": v * 2}), [v], has_aux=True)()
    assert (float(value), float(aux["twice"]), float(grads[0])) == (9, 6, 6)


def test_value_and_grad_of_an_unconnected_variable():
    """As in jax the gradient is zero."""
    v, w = floating(), floating(ONE_TO_THREE)
    _, grads = phalanx.value_and_grad(lambda: v * v, [v, w])()
    np.testing.assert_array_equal(grads[1], np.zeros(3))


def descend(v):
    """One step of descent on v * v."""
    loss, grads = phalanx.value_and_grad(lambda: v * v, [v])()
    v.assign_sub(0.1 * grads[0])
    return loss


@pytest.mark.parametrize(
    "wrap",
    [
        pytest.param(lambda v: [descend(v) for _ in range(3)][-1], id="eager"),
        pytest.param(lambda v: phalanx.function(lambda: [descend(v) for _ in range(3)][-1])(), id="function"),
        pytest.param(lambda v: phalanx.scan(lambda c, x: (c, descend(v)), 0.0, None, 3)[1][-1], id="eager scan"),
        pytest.param(
            lambda v: phalanx.function(lambda: phalanx.scan(lambda c, x: (c, descend(v)), 0.0, None, 3)[1][-1])(),
            id="scan in a function",
        ),
        pytest.param(
            lambda v: phalanx.OneDeviceStrategy("cpu:0").run(lambda: [descend(v) for _ in range(3)][-1]), id="run"
        ),
    ],
)
def test_value_and_grad_everywhere(wrap):
    """Three steps of descent come out the same wherever they are written."""
    v = floating(1.0)
    np.testing.assert_allclose(wrap(v), 0.8**4, rtol=1e-6)
    np.testing.assert_allclose(v.value, 0.8**3, rtol=1e-6)


def test_value_and_grad_in_replicas(two_replicas):
    """In a scan in a replica function, with an optimizer that aggregates in the body."""
    with two_replicas.scope():
        v, optimizer = floating(1.0), keras.optimizers.SGD(0.1)
        optimizer.build([v])

    def body(carry, _):
        replica = phalanx.get_replica_context().replica_id_in_sync_group
        loss, grads = phalanx.value_and_grad(lambda: v * v * replica, [v])()
        optimizer.apply(grads, [v])
        return carry, loss

    two_replicas.run(lambda: phalanx.scan(body, 0.0, None, 3)[1])
    np.testing.assert_allclose(v.value, 0.8**3, rtol=1e-6)


def test_value_and_grad_inside_a_tape():
    """It nests with tapes to higher orders."""
    v = floating()
    assert taped(lambda tape: phalanx.value_and_grad(lambda: v**3, [v])()[1][0], v) == 18


def test_value_and_grad_in_a_raw_body_that_only_reads():
    """A raw `lax.scan` body may take gradients as long as it assigns nothing."""
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


def test_value_and_grad_refuses_integers():
    """Only floating variables have gradients."""
    count = keras.Variable(1, dtype="int32", trainable=False, name="count")
    with pytest.raises(TapeError, match=r"variable 'count' \(\) int32.*only floating variables"):
        phalanx.value_and_grad(lambda: 1.0, [count])


def test_value_and_grad_refuses_a_vector():
    """As in jax the function returns a scalar; the error leaves the variables as they were."""
    v = floating(ONE_TO_THREE)
    with pytest.raises(InvalidArgumentError, match="must return a floating scalar"):
        phalanx.value_and_grad(lambda: v * v, [v])()
    np.testing.assert_array_equal(v.value, ONE_TO_THREE)
