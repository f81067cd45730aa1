"""Compiled programs: which calls share one, and which need another."""

import dataclasses
import functools
import warnings

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from steps import Counted, run_by, variable

import phalanx
from phalanx.errors import RecompilationWarning


@pytest.mark.parametrize("how", ["run", "function"])
@pytest.mark.parametrize(
    ("first", "second", "again"),
    [
        ((1,), (2,), False),
        ((1.0,), (-3.5,), False),
        ((np.ones(3),), (np.zeros(3),), False),
        ((jnp.ones(3),), (jnp.zeros(3),), False),
        ((np.int32(1),), (np.int32(2),), False),
        (("a", True, None, 1), ("a", True, None, 2), False),
        ((1,), (1.0,), True),
        ((np.ones(3),), (np.ones(4),), True),
        ((np.ones(3, "int32"),), (np.ones(3, "float32"),), True),
        (("a", 1), ("b", 1), True),
        ((True, 1), (False, 1), True),
        ((None, 1), ("a", 1), True),
    ],
)
def test_values_reuse_programs_and_shapes_select_them(strategy, how, first, second, again):
    """Numbers and arrays are inputs of the program; strings, bools, None, shapes and dtypes select it."""
    fn, call = Counted(), run_by(strategy, how)
    call(fn, *first)
    call(fn, *first)
    assert fn.calls == 1
    result = call(fn, *second)
    assert (fn.calls > 1) == again
    expected = sum(np.sum(a) for a in second if not isinstance(a, (str, bool, type(None))))
    assert [float(v) for v in result.values] == [expected] * 2


def test_step_counter_is_traced(strategy):
    """A hundred steps are one program. Numpy's bools and strings are static, as Python's own are."""
    fn = Counted()
    total = sum(float(strategy.run(fn, args=(step, 1.0 / (step + 1))).values[0]) for step in range(100))
    assert fn.calls == 1
    np.testing.assert_allclose(total, sum(s + 1 / (s + 1) for s in range(100)), rtol=1e-5)
    assert strategy.run(lambda flag: "yes" if flag else "no", args=(np.bool_(True),)) == "yes"
    assert strategy.run(lambda names: list(names), args=(np.array(["a", "b"]),)) == ["a", "b"]


def test_lambda_made_anew_warns_once(strategy):
    """With file and line and what to write instead; the results are right all the same."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = [float(strategy.run(lambda x: x + i, args=(1.0,)).values[0]) for i in range(6)]  # noqa: B023
    assert results == [1, 2, 3, 4, 5, 6]
    (warning,) = [w for w in caught if w.category is RecompilationWarning]
    assert "test_cache.py" in str(warning.message)
    assert "\nHINT: define it once" in str(warning.message)
    assert warning.filename == __file__


def test_partials_made_anew_warn(strategy):
    def plus(a, b):
        return a + b

    for i in range(2):
        strategy.run(functools.partial(plus, i), args=(1.0,))
    with pytest.warns(RecompilationWarning, match="plus .* is created at each call"):
        strategy.run(functools.partial(plus, 2), args=(1.0,))


@dataclasses.dataclass
class Scale:
    """A callable that compares by value, so it has no hash."""

    factor: float

    def __call__(self, x):
        return x * self.factor


def test_unhashable_callables_differ_by_identity(strategy):
    two, three = Scale(2.0), Scale(3.0)
    assert [float(strategy.run(f, args=(5.0,)).values[0]) for f in (two, three, two)] == [10, 15, 10]


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


def test_settings_of_jax_are_those_of_the_call(strategy):
    """A step that is called under others is traced for them, and again the one that it was."""
    fn, precisions = Counted(), ["highest", None, "highest"]
    for precision in precisions:
        with jax.default_matmul_precision(precision):
            assert float(strategy.run(fn, args=(2.0,)).values[0]) == 2
    assert fn.calls == 2


def test_training_compiles_once(strategy, caplog):
    """A model with an optimizer, with batches of one shape. First values of scalars are weakly typed, what a program returns is not."""
    v = variable(strategy, 1.0)
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1), keras.layers.BatchNormalization()])
        optimizer = keras.optimizers.Adam(0.1)

    def step(x):
        with phalanx.GradientTape() as tape:
            loss = phalanx.nn.compute_average_loss(model(x, training=True))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        v.assign_add(1.0)

    with caplog.at_level("WARNING", logger="jax"), jax.log_compiles():
        for batch in strategy.experimental_distribute_dataset([np.ones((4, 2), "float32")] * 3):
            strategy.run(step, args=(batch,))
    assert sum("Finished XLA compilation of jit(compute)" in r.getMessage() for r in caplog.records) == 1


def test_the_current_context_selects_the_program(strategy):
    seen = []

    @phalanx.function
    def step():
        seen.append(phalanx.get_strategy())
        return phalanx.get_strategy().num_replicas_in_sync

    outside = step()
    with strategy.scope():
        inside = step()
    assert (outside, inside) == (1, 2)
