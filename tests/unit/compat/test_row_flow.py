"""What a function does with the rows of a batch, told from its traces. Whatever is not known mixes rows."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

from phalanx._src.compat.row_flow import CONSTANT, MEAN, ROWS, SUM, adds_up, kind_of

ops = keras.ops
Y, P = jnp.zeros((6, 3)), jnp.ones((6, 3)) / 3
CLASSES = jnp.zeros((6, 5), "int32")
LOGITS = jnp.ones((6, 5, 7))
WEIGHTS = np.arange(3, dtype="float32")
STATE = [jnp.zeros(()), jnp.zeros((3,), "int32")]


def errors(y, p):
    return ops.mean(ops.square(y - p), axis=-1)


def cross_entropy(y, p):
    return keras.losses.sparse_categorical_crossentropy(y, p, from_logits=True)


def picked(y, p):
    return -jnp.take_along_axis(jax.nn.log_softmax(p), y[..., None], axis=-1)[..., 0]


class Scaled(keras.losses.Loss):
    """Reads a variable, as a loss with a temperature does."""

    def __init__(self):
        super().__init__()
        self.scale = keras.Variable(2.0)

    def call(self, y, p):
        return errors(y, p) * self.scale


SCALED = Scaled()

PER_ROW = {
    "errors": (errors, Y, P),
    "weighted": (lambda y, p: ops.sum(ops.square(y - p) * WEIGHTS, axis=-1), Y, P),
    "masked in its row": (
        lambda y, p: ops.sum(ops.where(y > 0, y - p, 0.0), axis=-1) / (1 + ops.sum(y > 0, axis=-1)),
        Y,
        P,
    ),
    "tokens": (cross_entropy, CLASSES, LOGITS),
    "tokens by their numbers": (picked, CLASSES, LOGITS),
    "flattened tokens": (
        lambda y, p: ops.reshape(cross_entropy(ops.reshape(y, (-1,)), ops.reshape(p, (-1, 7))), (-1, 5)),
        CLASSES,
        LOGITS,
    ),
    "sorted in its row": (lambda y, p: ops.sort(p, axis=-1)[:, 0], Y, P),
    "a variable": (SCALED.call, Y, P),
    "vmap": (lambda y, p: jax.vmap(lambda a, b: jnp.dot(a, b))(y, p), Y, P),
    "kernel": (lambda y, p: ops.sum(ops.matmul(p, ops.ones((3, 2))), axis=-1), Y, P),
    "huber": (lambda y, p: ops.mean(ops.where(ops.abs(y - p) > 1, ops.abs(y - p), ops.square(y - p)), axis=-1), Y, P),
    "lists": (lambda y, p: errors(y[0], p["a"]) + errors(y[1], p["b"]), [Y, Y], {"a": P, "b": P}),
}

MEANS = {
    "hinge": (lambda y, p: jnp.mean(jax.nn.relu(1.0 - y * p)), Y, P),
    "softplus": (lambda y, p: jnp.mean(jax.nn.softplus(p) - y * p) * 3.0, Y, P),
    "silu of a logit": (lambda y, p: jnp.mean(jax.nn.silu(jax.nn.log_softmax(p)) * y), Y, P),
    "a loss of Keras with a penalty": (
        lambda y, p: ops.sum([keras.losses.MeanSquaredError()(y, p), ops.sum(WEIGHTS)]),
        Y,
        P,
    ),
    "mean": (lambda y, p: ops.mean(ops.square(y - p)), Y, P),
    "mean of tokens": (lambda y, p: ops.mean(cross_entropy(y, p)), CLASSES, LOGITS),
    "sum by the number of rows": (lambda y, p: ops.sum(errors(y, p)) / y.shape[0], Y, P),
    "rows by their number": (lambda y, p: ops.sum(errors(y, p) / y.shape[0]), Y, P),
    "sum by a counted number": (lambda y, p: ops.sum(errors(y, p)) / ops.sum(ops.ones_like(y[:, 0])), Y, P),
    "two means": (lambda y, p: 0.3 * ops.mean(ops.abs(y - p)) - ops.mean(errors(y, p)) / 2, Y, P),
    "mean and a constant": (lambda y, p: (ops.mean(errors(y, p)) + 0.5) * 2, Y, P),
    "dot": (lambda y, p: ops.sum(ops.matmul(ops.transpose(y), p)) / y.shape[0], Y, P),
    "mean of means": (lambda y, p: ops.mean(ops.mean(y * p, axis=0) * WEIGHTS), Y, P),
    "remat": (lambda y, p: jax.checkpoint(lambda a, b: ops.mean(errors(a, b)))(y, p), Y, P),
    "jit": (lambda y, p: jax.jit(lambda a, b: ops.mean(errors(a, b)))(y, p), Y, P),
}


def masked_mean(real):
    return lambda y, p: ops.sum(errors(y, p) * real(y)[:, 0]) / ops.sum(real(y)[:, 0])


MIXED = {
    **{
        f"mean where {name}": (masked_mean(real), Y, P)
        for name, real in {
            "y != -100": lambda y: ops.cast(y != -100, "float32"),
            "y > 0": lambda y: ops.cast(y > 0, "float32"),
            "finite": lambda y: ops.cast(ops.isfinite(y), "float32"),
        }.items()
    },
    "at least one": (
        lambda y, p: (
            ops.sum(errors(y, p) * (y[:, 0] > 0.5)) / ops.maximum(ops.sum(ops.cast(y[:, 0] > 0.5, "float32")), 1)
        ),
        Y,
        P,
    ),
    "mean by a mean": (lambda y, p: ops.mean(errors(y, p)) / ops.mean(ops.cast(y != -1, "float32")), Y, P),
    "scaled by the largest": (lambda y, p: ops.mean(errors(y, p)) / ops.maximum(ops.max(y), 1), Y, P),
    "rows by the mean of a mask": (lambda y, p: errors(y, p) / ops.mean(ops.cast(y != -100, "float32")), Y, P),
    "root": (lambda y, p: ops.sqrt(ops.mean(errors(y, p))), Y, P),
    "product of means": (lambda y, p: ops.mean(y) * ops.mean(p), Y, P),
    "sum and a mean": (lambda y, p: ops.sum(y) + ops.mean(p), Y, P),
    "mean and a number": (lambda y, p: ops.mean(p) + y.shape[0], Y, P),
    "sum by the root of the number": (lambda y, p: ops.sum(errors(y, p)) / y.shape[0] ** 0.5, Y, P),
    "count": (lambda y, p: ops.sum(ops.ones_like(y)), Y, P),
    "largest": (lambda y, p: ops.max(errors(y, p)), Y, P),
    "pairs of rows": (lambda y, p: ops.mean(ops.square(p[::2] - p[1::2])), Y, P),
    "rows in groups": (lambda y, p: ops.mean(ops.max(ops.reshape(p, (-1, 6)), axis=-1)), Y, P),
    "neighbours": (lambda y, p: ops.mean(ops.square(p[1:] - p[:-1])), Y, P),
    "reversed": (lambda y, p: ops.mean(y * p[::-1]), Y, P),
    "moved": (lambda y, p: ops.mean(y * ops.roll(p, 1, axis=0)), Y, P),
    "added up": (lambda y, p: ops.cumsum(errors(y, p)), Y, P),
    "sorted": (lambda y, p: ops.mean(ops.sort(p, axis=0) * y), Y, P),
    "turned and joined": (lambda y, p: ops.sum(ops.reshape(ops.transpose(y), (-1, 3)) * p) / y.shape[0], Y, P),
    "all pairs": (lambda y, p: ops.mean(ops.matmul(p, ops.transpose(p)), axis=-1), Y, P),
    "contrastive with a variable": (
        lambda y, p: ops.logsumexp(ops.matmul(p, ops.transpose(p)) * SCALED.scale, axis=-1),
        Y,
        P,
    ),
    "centred": (lambda y, p: errors(y, p - ops.mean(p, axis=0)), Y, P),
    "by position": (lambda y, p: errors(y, p) * ops.arange(y.shape[0]), Y, P),
    "by a position of NumPy": (lambda y, p: errors(y, p) * np.arange(y.shape[0]), Y, P),
    "first rows": (lambda y, p: ops.mean(errors(y, p)[:4]), Y, P),
    "scan": (lambda y, p: jax.lax.scan(lambda c, x: (c + x.sum(), None), 0.0, p)[0] / y.shape[0], Y, P),
    "noise": (lambda y, p: ops.mean(p * jax.random.uniform(jax.random.key(0), p.shape)), Y, P),
    "another function of many rows": (lambda y, p: ops.mean(p) if y.shape[0] < 10 else ops.max(p), Y, P),
    "a size that must be": (lambda y, p: ops.mean(ops.reshape(p, (6, 3))), Y, P),
    "values that are read": (lambda y, p: ops.mean(p) if float(y[0, 0]) else ops.max(p), Y, P),
    "a mean as an integer": (lambda y, p: ops.cast(ops.mean(30 * p), "int32"), Y, P),
    "whether any": (lambda y, p: ops.cast(ops.sum(y), "bool"), Y, P),
    "an integer division": (lambda y, p: jax.lax.div(ops.sum(ops.cast(p, "int32")), y.shape[0]), Y, P),
    "rows in the second place": (lambda y, p: ops.transpose(p), Y, P),
}


def with_gradient(value, gradient):
    """A function of two arrays with a gradient of its own for the second one, given what comes back, and both."""
    fn = jax.custom_vjp(value)
    fn.defvjp(lambda y, p: (value(y, p), (y, p)), lambda rest, g: (jnp.zeros_like(rest[0]), gradient(g, *rest)))
    return fn


def column(g):
    return g[:, None]


OWN_GRADIENTS = {
    "clipped in its row": (errors, lambda g, y, p: column(g) * jnp.clip(p - y, -1, 1), ROWS),
    "by the mean of what comes back": (errors, lambda g, y, p: jnp.mean(g) * (p - y), None),
    "centered": (errors, lambda g, y, p: column(g) * (p - p.mean(0)), None),
    "mean": (lambda y, p: errors(y, p).mean(), lambda g, y, p: g * (p - y) / p.size, MEAN),
    "of a constant": (lambda y, p: jnp.zeros(()), lambda g, y, p: g * (p - p.mean(0)) / p.size, None),
    "mean with the gradient of a sum": (lambda y, p: errors(y, p).mean(), lambda g, y, p: g * (p - y), None),
    "mean with the norm of all": (
        lambda y, p: errors(y, p).mean(),
        lambda g, y, p: g * (p - y) / jnp.linalg.norm(p - y),
        None,
    ),
}


@pytest.mark.parametrize("case", OWN_GRADIENTS)
def test_gradients_that_a_function_defines(case):
    """What a function returns per row may have a gradient that depends on all rows."""
    value, gradient, kind = OWN_GRADIENTS[case]
    fn = with_gradient(value, gradient)
    assert kind_of(value, Y, P) in (ROWS, MEAN, CONSTANT)
    for each in (fn, jax.jit(fn), lambda y, p: fn(y, jax.nn.relu(p)) * 2.0):
        assert (kind_of(each, Y, P) if kind else kind_of(each, Y, P).name) == (kind or "mixed")


@pytest.mark.parametrize("case", PER_ROW)
def test_values_of_single_rows(case):
    assert kind_of(*PER_ROW[case]) == ROWS


@pytest.mark.parametrize("case", MEANS)
def test_means_over_rows(case):
    assert kind_of(*MEANS[case]) == MEAN


@pytest.mark.parametrize("case", MIXED)
def test_functions_that_mix_rows(case):
    assert kind_of(*MIXED[case]) not in (ROWS, MEAN, CONSTANT)


ASSIGNED = {
    "moving mean": (lambda v, y, p: v * 0.9 + 0.1 * ops.mean(errors(y, p)), True),
    "calls": (lambda v, y, p: v + 1, True),
    "maximum": (lambda v, y, p: ops.maximum(v, ops.max(p)), False),
    "rows": (lambda v, y, p: v + y.shape[0], False),
    "sum": (lambda v, y, p: v + ops.sum(p), False),
    "first row": (lambda v, y, p: p[0, 0], False),
}


@pytest.mark.parametrize("case", ASSIGNED)
def test_variables_that_a_function_assigns(case):
    """Replicas average a variable without an aggregation. One with an aggregation is combined by it."""
    value, is_mean = ASSIGNED[case]

    def kind_with(aggregation):
        variable = keras.Variable(1.0, trainable=False, aggregation=aggregation)

        def assigning(y, p):
            variable.assign(value(variable, y, p))
            return errors(y, p)

        kind = kind_of(assigning, Y, P)
        assert float(variable) == 1.0
        return kind

    assert kind_with("sum") == ROWS
    assert kind_with("none") == ROWS if is_mean else kind_with("none").name == "mixed"


BY_NUMBER = {
    "half of the number": lambda y, p: ops.sum(errors(y, p)) / (y.shape[0] // 2),
    "at least four": lambda y, p: ops.sum(errors(y, p)) / max(y.shape[0], 4),
    "first rows": lambda y, p: ops.mean(errors(y[:16], p[:16])),
    "most of many": lambda y, p: ops.mean(p) if y.shape[0] < 20 else ops.max(p),
    "exponent": lambda y, p: ops.mean(jax.lax.integer_pow(p, y.shape[0])),
    "loop": lambda y, p: ops.mean(p) * jax.lax.fori_loop(1, y.shape[0], lambda i, x: x + 1 / i, 0.0),
}


@pytest.mark.parametrize("case", BY_NUMBER)
def test_numbers_of_rows_that_decide(case):
    """A function may do another thing with the rows of a batch than with those of a replica."""
    assert kind_of(BY_NUMBER[case], Y, P, sizes=(25, 13, 3)).name == "mixed"
    assert not adds_up(lambda s, y, p: [s[0] + y.shape[0] * BY_NUMBER[case](y, p)], STATE[:1], Y, P, sizes=(25, 3))


def test_states_that_only_many_rows_have():
    """Code that takes more rows than a replica has is not one value per class."""
    largest = lambda s, y, p: [s[0] + ops.sum(ops.top_k(p[:, 0], 12)[0])]  # noqa: E731
    assert not adds_up(largest, STATE[:1], Y, P, sizes=(24, 8))


def test_constants_and_sums():
    assert kind_of(lambda y, p: ops.ones(()), Y, P) == CONSTANT
    assert kind_of(lambda y, p: ops.zeros_like(y), Y, P) == CONSTANT
    assert kind_of(lambda y, p: ops.sum(y * p), Y, P) == SUM


ADDED = {
    "sums": lambda s, y, p: [s[0] + ops.sum(y * p), s[1] + ops.sum(ops.cast(y > p, "int32"), axis=0)],
    "numbers of rows": lambda s, y, p: [s[0] + y.shape[0], s[1] + 2 * y.shape[0]],
    "decayed": lambda s, y, p: [0.5 * s[0] + ops.sum(p), s[1]],
    "the last sum": lambda s, y, p: [ops.sum(p), s[1]],
    "classes": lambda s, y, p: [s[0] + ops.sum(ops.cast(ops.argmax(p, -1) == ops.argmax(y, -1), "float32")), s[1]],
    "the best two": lambda s, y, p: [s[0] + ops.sum(ops.top_k(p, 2)[0]), s[1]],
    "values per class instead of rows": lambda s, y, p: [s[0], s[1] + ops.cast(y[:, 0] * np.ones(6), "int32")[:3]],
}
NOT_ADDED = {
    "calls": lambda s, y, p: [s[0] + 1, s[1]],
    "largest": lambda s, y, p: [ops.maximum(s[0], ops.max(p)), s[1]],
    "means": lambda s, y, p: [s[0] + ops.mean(p), s[1]],
    "ratios": lambda s, y, p: [s[0] + ops.sum(p) / ops.sum(y), s[1]],
    "a constant": lambda s, y, p: [ops.ones(()), s[1]],
    "the best row": lambda s, y, p: [s[0] + ops.sum(ops.top_k(ops.transpose(p), 1)[0]), s[1]],
    "one of two": lambda s, y, p: [s[0] + ops.sum(p), ops.maximum(s[1], 3)],
    "products": lambda s, y, p: [s[0] * ops.sum(p), s[1]],
    "a sum as an integer": lambda s, y, p: [s[0], s[1] + ops.cast(3 * ops.sum(p), "int32")],
}


@pytest.mark.parametrize("case", ADDED)
def test_states_that_add_up(case):
    assert adds_up(ADDED[case], STATE, Y, P)


@pytest.mark.parametrize("case", NOT_ADDED)
def test_states_that_do_not_add_up(case):
    assert not adds_up(NOT_ADDED[case], STATE, Y, P)
