"""`phalanx.function`: its options, and what may be inside."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from steps import variable

import phalanx
from phalanx.errors import InvalidArgumentError, TraceError

SPEC = jax.ShapeDtypeStruct


@pytest.mark.parametrize(
    "options",
    [{}, *({"jit_compile": value} for value in (True, False, None)), {"autograph": False}, {"reduce_retracing": True}],
)
def test_options_without_a_meaning(options):
    """What tf.function has and every phalanx.function is. A function needs no strategy, as a decorator or called."""
    v = keras.Variable(1.0)

    @phalanx.function(**options)
    def step(x):
        return v.assign(v * x)

    assert [float(step(2.0)), float(step(3.0)), v.numpy()] == [2, 6, 6]
    assert float(phalanx.function(lambda x: x * 2, **options)(3.0)) == 6


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"jit_compile": 0}, "leave jit_compile out"),
        ({"experimental_relax_shapes": True}, "leave experimental_relax_shapes out"),
        ({"experimental_implements": "a"}, "leave experimental_implements out"),
        ({"autograph": 3}, "leave autograph out"),
        ({"input_signature": 3}, r"input_signature=\[keras.KerasTensor"),
        ({"input_signature": [3]}, r"input_signature=\[keras.KerasTensor"),
        ({"input_signature": [SPEC((), "float32")] * 2}, "one spec per argument"),
    ],
)
def test_options_that_are_refused(options, hint):
    """They cannot be honoured; and `phalanx.function(step(x))` is a slip."""
    with pytest.raises(InvalidArgumentError, match=rf"\nHINT: {hint}"):
        phalanx.function(lambda x: x, **options)
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


def test_values_that_a_function_closes_over(strategy):
    """They are reduced, gathered and given to replicas like arguments, also by a program that JAX compiles again."""
    rows, short = np.float32([[1, 2], [3, 5]]), np.float32([4, 6, 8])
    (value,) = strategy.experimental_distribute_dataset([rows])
    (batch,) = strategy.experimental_distribute_dataset([short])

    @phalanx.function
    def step(x):
        scaled = strategy.run(lambda v: v * x, args=(value,))
        return strategy.gather(value, axis=1), strategy.reduce("SUM", scaled, axis=0), strategy.reduce("MEAN", batch, 0)

    for precision in ("default", "highest"):
        with jax.default_matmul_precision(precision):
            found = jax.tree.map(np.asarray, step(2.0))
        assert [x.tolist() for x in found] == [rows.reshape(1, 4).tolist(), (rows.sum(0) * 2).tolist(), short.mean()]
    alone = phalanx.function(lambda: strategy.reduce("SUM", value, axis=None))
    assert alone().tolist() == [rows.sum(0).tolist()]
    assert "dense<[[" not in alone.lower().as_text()


def test_several_runs_and_reduces_in_one_function(strategy):
    """State flows from one to the next, in one program, also in a loop. `lower` shows it without running it."""
    v = variable(strategy, 1.0)

    @phalanx.function
    def step(x):
        for _ in range(2):
            a = strategy.run(lambda: v.assign_add(x))
        v.assign(v.value * 10)
        b = strategy.run(lambda y: v * y, args=(a,))
        return strategy.reduce("SUM", b, axis=None), strategy.reduce("MEAN", a, axis=None), v.value

    assert "all_reduce" in step.lower(2.0).as_text()
    assert v.numpy() == 1
    assert [*map(float, step(2.0)), v.numpy()] == [2 * 90 * 9, 9, 90, 90]
    assert [*map(float, step(0.0)), v.numpy()] == [2 * 900 * 90, 90, 900, 900]


def test_functions_may_call_functions(strategy):
    """An inner one is an ordinary call; also inside a replica function."""
    v = variable(strategy)
    inner = phalanx.function(lambda x: v.assign_add(x))
    outer = phalanx.function(lambda x: strategy.run(inner, args=(x,)))
    assert [float(x) for x in outer(2.0).values] == [4, 4]
    strategy.run(inner, args=(1.0,))
    inner(1.0)
    assert v.numpy() == 7


def test_two_strategies_in_one_function(strategy):
    """A program runs on the devices of one."""
    other = phalanx.MirroredStrategy(["cpu:2", "cpu:3"])
    step = phalanx.function(lambda: (strategy.run(lambda: 1), other.run(lambda: 1)))
    match = "one program with the strategies .*cpu:0.*cpu:2(.|\n)*HINT: .*one phalanx.function per strategy"
    with pytest.raises(TraceError, match=match):
        step()


def test_eager_option_in_a_function(strategy):
    """The step around it is compiled."""
    step = phalanx.function(lambda: strategy.run(lambda: 1, options=phalanx.RunOptions(eager=True)))
    with pytest.raises(phalanx.errors.ContextError, match=r"RunOptions\(eager=True\)\) in phalanx.function"):
        step()


def test_prepare_traces_without_running():
    """Variables exist after it, nothing has changed, and the next call does not trace again. The arguments must fit a signature."""
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
    assert [float(step(3.0)), float(step(1.0))] == [8, 10]
    assert len(traced) == count

    doubled = phalanx.function(lambda x: x * 2, input_signature=[keras.KerasTensor((None,), "float32")])
    doubled.prepare(jnp.ones(2))
    assert doubled(jnp.ones(3)).tolist() == [2, 2, 2]
    with pytest.raises(InvalidArgumentError, match="\nHINT: "):
        doubled.prepare("text")


@pytest.mark.parametrize("value", [{1, 2}, bytearray(b"ab")])
def test_arguments_that_change(value):
    """Sets and bytearrays with other items are other programs, although they have no hash."""
    length = phalanx.function(len)
    assert length(value) == 2
    value.add(3) if isinstance(value, set) else value.append(3)
    assert length(value) == 3


def test_equal_items_of_other_types():
    """They are other programs, as numbers themselves are."""
    first = phalanx.function(lambda items: type(next(iter(items))).__name__)
    assert [first({x}) for x in (1, 1.0, True)] == ["int", "float", "bool"]
