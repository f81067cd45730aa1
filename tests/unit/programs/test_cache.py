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
def test_values_reuse_programs_and_shapes_select_them(strategy, how, first, second, again):
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
    """Also wrapped in functools.partial."""
    for i in range(2):
        strategy.run(functools.partial(plus, i), args=(1.0,))
    with pytest.warns(RecompilationWarning, match="plus .* is created at each call"):
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


def test_unhashable_callables_differ_by_identity(strategy):
    """Told apart by identity."""
    two, three = Scale(2.0), Scale(3.0)
    assert [float(strategy.run(f, args=(5.0,)).values[0]) for f in (two, three, two)] == [10, 15, 10]


def test_numpy_bools_and_strings_are_static(strategy):
    """As Python's own are."""
    assert strategy.run(lambda flag: "yes" if flag else "no", args=(np.bool_(True),)) == "yes"
    assert strategy.run(lambda names: list(names), args=(np.array(["a", "b"]),)) == ["a", "b"]


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
