"""`phalanx.function`: its options, and what may be inside."""

import jax
import jax.numpy as jnp
import keras
import pytest
from steps import variable

import phalanx
from phalanx.errors import InvalidArgumentError, TraceError

SPEC = jax.ShapeDtypeStruct


@pytest.mark.parametrize(
    "options", [{}, {"jit_compile": True}, {"autograph": False}, {"reduce_retracing": True}, {"jit_compile": None}]
)
def test_options_without_a_meaning(options):
    """What tf.function has and every phalanx.function is."""

    @phalanx.function(**options)
    def step(x):
        return x + 1

    assert float(step(1.0)) == 2
    assert float(phalanx.function(lambda x: x * 2, **options)(3.0)) == 6


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"jit_compile": False}, "leave jit_compile out. To debug a step, strategy.run"),
        ({"experimental_relax_shapes": True}, "leave experimental_relax_shapes out"),
        ({"experimental_implements": "a"}, "leave experimental_implements out"),
        ({"autograph": 3}, "leave autograph out"),
        ({"input_signature": 3}, r"input_signature=\[jax.ShapeDtypeStruct"),
        ({"input_signature": [3]}, r"input_signature=\[jax.ShapeDtypeStruct"),
        ({"input_signature": [SPEC((), "float32")] * 2}, "one spec per argument"),
    ],
)
def test_options_that_are_refused(options, hint):
    """They cannot be honoured."""
    with pytest.raises(InvalidArgumentError, match=rf"\nHINT: {hint}"):
        phalanx.function(lambda x: x, **options)


def test_a_function_that_is_not_callable():
    """`phalanx.function(step(x))` is a slip."""
    with pytest.raises(InvalidArgumentError, match="is not callable.\nHINT: @phalanx.function above"):
        phalanx.function(3)


def test_decorated_method_has_a_program_per_object(strategy):
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


def test_functions_may_call_functions(strategy):
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


def test_two_strategies_in_one_function(strategy):
    """A program runs on the devices of one."""
    other = phalanx.MirroredStrategy(["cpu:2", "cpu:3"])
    step = phalanx.function(lambda: (strategy.run(lambda: 1), other.run(lambda: 1)))
    with pytest.raises(TraceError, match="one program with the strategies .*cpu:0.*cpu:2") as e:
        step()
    assert "one phalanx.function per strategy" in e.value.hint


def test_eager_option_in_a_function(strategy):
    """The step around it is compiled."""
    step = phalanx.function(lambda: strategy.run(lambda: 1, options=phalanx.RunOptions(eager=True)))
    with pytest.raises(phalanx.errors.ContextError, match=r"RunOptions\(eager=True\)\) in phalanx.function"):
        step()


def test_lower_shows_the_program(strategy):
    """Its text, without running it."""
    v = variable(strategy)
    step = phalanx.function(lambda: strategy.run(lambda: v.assign_add(1.0)))
    assert "all_reduce" in step.lower().as_text()
    assert v.numpy() == 0


def test_prepare_traces_without_running():
    """Variables exist after it, nothing has changed, and the next call does not trace again."""
    traced, made = [], []

    @phalanx.function
    def step(x):
        traced.append(1)
        if not made:
            made.append(keras.Variable(1.0))
        made[0].assign_add(x)
        return made[0].value * 2

    step.prepare(3.0)
    count = len(traced)
    assert count
    assert float(made[0].value) == 1
    assert float(step(3.0)) == 8
    assert float(step(1.0)) == 10
    assert len(traced) == count


def test_prepare_with_a_signature():
    """The arguments must fit, as for a call."""
    step = phalanx.function(lambda x: x * 2, input_signature=[SPEC((None,), "float32")])
    step.prepare(jnp.ones(2))
    assert step(jnp.ones(3)).tolist() == [2, 2, 2]
    with pytest.raises(InvalidArgumentError, match="\nHINT: "):
        step.prepare("text")
