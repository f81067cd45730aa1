"""Replicas may assign weights that the trace shows to be equal on all of them, and no others."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from jax import lax

import phalanx
from phalanx.errors import AggregationError

ROWS = np.arange(4.0, dtype="float32")


def all_reduced(x):
    return phalanx.get_replica_context().all_reduce("SUM", x.sum())


def gradient_of(target, v):
    with phalanx.GradientTape() as tape:
        loss = target()
    return tape.gradient(loss, v)


# Functions of the rows of a replica, ROWS[:2] or ROWS[2:], and of the variable, which holds 10; and what all replicas assign.
EQUAL = {
    "a constant": (lambda x, v: 3.0, 3),
    "another value of the variable": (lambda x, v: jnp.minimum(v.value, 7), 7),
    "an all-reduced value": (lambda x, v: all_reduced(x) * 2, 12),
    "a mean in a narrow dtype": (
        lambda x, v: phalanx.get_replica_context().all_reduce(
            "MEAN", x.sum(), phalanx.experimental.CommunicationOptions(wire_dtype="bfloat16")
        ),
        3,
    ),
    "gathered rows": (lambda x, v: phalanx.get_replica_context().all_gather(x, axis=0)[3], 3),
    "an all-reduced gradient": (lambda x, v: all_reduced(gradient_of(lambda: v * x.sum(), v)), 6),
    "a called function": (lambda x, v: jax.jit(lambda y: y + 1)(all_reduced(x)), 7),
    "a loop": (lambda x, v: lax.scan(lambda total, _: (total + all_reduced(x), None), 0.0, length=2)[0], 12),
    "a loop with a condition": (lambda x, v: lax.while_loop(lambda y: y < 20, lambda y: 2 * y, all_reduced(x)), 24),
    "a branch": (lambda x, v: lax.cond(all_reduced(x) > 5, lambda: 1.0, lambda: 2.0), 1),
}

DIFFERENT = {
    "a row": lambda x, v: x[0],
    "the number of the replica": lambda x, v: lax.axis_index("replica") * 1.0,
    "a value of the next replica": lambda x, v: lax.ppermute(v.value, "replica", [(0, 1)]),
    "a gradient": lambda x, v: gradient_of(lambda: v * x.sum(), v),
    "a gradient of an all-reduced loss": lambda x, v: gradient_of(lambda: all_reduced(v * x), v),
    "a random number": lambda x, v: keras.random.normal(()),
    "a called function": lambda x, v: jax.jit(lambda y: y + 1)(x[0]),
    "a loop that takes a row later": lambda x, v: lax.scan(lambda c, _: ((c[1], x[0]), None), (0.0, 0.0), length=3)[0][
        0
    ],
    "a loop of unequal length": lambda x, v: lax.while_loop(
        lambda y: y[0] < 3, lambda y: (y[0] + 1, y[1] + 1), (x[0], 0.0)
    )[1],
    "a branch that depends on a row": lambda x, v: lax.cond(x[0] > 1, lambda: 1.0, lambda: 2.0),
}


@pytest.fixture
def variable(strategy):
    with strategy.scope():
        return keras.Variable(10.0, name="weight")


@pytest.fixture
def rows(strategy):
    return next(iter(strategy.experimental_distribute_dataset([ROWS])))


@pytest.mark.parametrize("name", EQUAL)
def test_equal_values_are_assigned(strategy, variable, rows, name):
    value, expected = EQUAL[name]
    strategy.run(lambda x: variable.assign(value(x, variable)), args=(rows,))
    assert float(variable) == expected
    assert [float(x) for x in strategy.run(lambda: variable.value * 1).values] == [expected] * 2


@pytest.mark.parametrize("name", DIFFERENT)
def test_other_values_are_refused(strategy, variable, rows, name):
    """The error comes from the line of the assignment, and nothing is changed."""

    def step(x):
        variable.assign(DIFFERENT[name](x, variable))

    with pytest.raises(AggregationError, match=r"assign to variable 'weight' \(\) float32 in replica context") as e:
        strategy.run(step, args=(rows,))
    assert "step" in [entry.name for entry in e.traceback]
    assert float(variable) == 10


@pytest.mark.filterwarnings("ignore::phalanx.errors.SlipWarning")
def test_values_that_depend_on_the_number_of_rows(strategy, variable):
    """They differ if replicas have different numbers of rows, and only then. Other values may be assigned for any numbers."""
    strategy_rows = lambda count: next(iter(strategy.experimental_distribute_dataset([ROWS[:count]])))  # noqa: E731
    count = lambda x: variable.assign(0.5 * keras.ops.shape(x)[0])  # noqa: E731
    strategy.run(count, args=(strategy_rows(4),))
    assert float(variable) == 1
    with pytest.raises(AggregationError, match="the value may differ between replicas"):
        strategy.run(count, args=(strategy_rows(3),))
    assert float(variable) == 1

    def all_equal(x):
        for value, _ in EQUAL.values():
            variable.assign(value(x, variable))
        variable.assign(jax.jit(all_reduced)(x) / variable)

    variable.assign(1.0)
    strategy.run(all_equal, args=(strategy_rows(3),))
    assert np.isfinite(float(variable))


@pytest.mark.parametrize(("is_equal", "expected"), [(True, 16), (False, None)])
def test_assignments_in_the_body_of_a_loop(strategy, variable, rows, is_equal, expected):
    """A branch that only some replicas take may not assign, even if its value is equal."""

    def step(x):
        total = all_reduced(x)
        phalanx.cond(
            total > 5 if is_equal else x[0] > 1, lambda: variable.assign_add(total), lambda: variable.assign(0.0)
        )

    if is_equal:
        strategy.run(step, args=(rows,))
        assert float(variable) == expected
    else:
        with pytest.raises(AggregationError, match="the value may differ between replicas"):
            strategy.run(step, args=(rows,))


def test_an_update_after_an_assignment(strategy, variable, rows):
    """A replica perturbs a weight, takes the gradient there and goes back, as in sharpness-aware minimization."""
    optimizer = keras.optimizers.SGD(0.5)

    def step(x):
        perturbation = all_reduced(gradient_of(lambda: variable * variable * x.sum(), variable)) / 60
        variable.assign_add(perturbation)
        gradient = gradient_of(lambda: variable * variable * x.sum(), variable)
        variable.assign_sub(perturbation)
        optimizer.apply_gradients([(gradient, variable)])

    strategy.run(step, args=(rows,))
    # The gradient of 6 w ** 2 is 12 w: 120 at 10, and 144 at 12.
    assert float(variable) == 10 - 0.5 * 144


@pytest.mark.cover(["layout"], [None])
@pytest.mark.parametrize("layout", [None, phalanx.fully_sharded()])
def test_layer_that_assigns_its_weights(layout):
    """SpectralNormalization on two replicas trains as on one device."""

    def fitted(strategy):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            layers = [
                keras.Input((3,)),
                keras.layers.SpectralNormalization(keras.layers.Dense(4)),
                keras.layers.Dense(1),
            ]
            model = keras.Sequential(layers)
            model.compile(keras.optimizers.SGD(0.1), "mse")
        x = np.random.default_rng(0).normal(size=(12, 3)).astype("float32")
        model.fit(x, x[:, :1], batch_size=4, epochs=2, shuffle=False, verbose=0)
        return model.get_weights()

    ours = fitted(phalanx.MirroredStrategy(["cpu:0", "cpu:1"], layout=layout))
    for weight, expected in zip(ours, fitted(phalanx.OneDeviceStrategy("cpu:0")), strict=True):
        np.testing.assert_allclose(weight, expected, rtol=1e-4, atol=1e-5)
