"""Functions of pytrees drawn at random, without Keras: `run` sums what each replica gives on its rows."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
from drawn_trainings import LABELS, ROWS, WIDTH, X, parts_of
from flax import linen
from tests.draws import draws

import phalanx

CLASSES = LABELS["one hot"].shape[1]


class Net(linen.Module):
    """A module of flax: its parameters are a pytree."""

    @linen.compact
    def __call__(self, x):
        return linen.Dense(CLASSES)(jnp.tanh(linen.LayerNorm()(linen.Dense(4)(x))))


def tree(params, x):
    """The same kind of model without any library."""
    return jnp.tanh(x @ params["in"]) @ params["out"] + params["bias"]


def initial_tree():
    random = np.random.default_rng(4)
    shapes = {"in": (WIDTH, 4), "out": (4, CLASSES), "bias": (CLASSES,)}
    return {name: random.normal(size=shape).astype("float32") for name, shape in shapes.items()}


MODELS = {
    "flax": (Net().apply, lambda: jax.tree.map(np.asarray, Net().init(jax.random.key(0), X[:1]))),
    "tree": (tree, initial_tree),
}

LOSSES = {
    "sum": lambda d: jnp.sum(d) / 16,
    "mean": jnp.mean,
    "root": lambda d: jnp.sqrt(jnp.mean(d) + 0.1),
    "ratio": lambda d: jnp.sum(d[:, 0]) / jnp.sum(1 + d),
    "hardest": lambda d: jnp.mean(jnp.sort(d.mean(1))[len(d) // 2 :]),
    "contrast": lambda d: jnp.mean(jax.nn.logsumexp(d @ d.T, axis=1)) / len(d),
    "looped": lambda d: jax.lax.fori_loop(0, len(d), lambda i, total: 0.5 * total + d[i].sum(), 0.0),
}
"""Of the squares of a replica's own rows. No result of one device is meant for most of them."""


def step_of(model, loss):
    """The loss of a replica and its gradients, by `jax.grad`."""

    def value_and_grad(params, x, y):
        return jax.value_and_grad(lambda p: LOSSES[loss](jnp.square(MODELS[model][0](p, x) - y)))(params)

    return value_and_grad


def updated(params, gradients):
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)


@draws(5, 500)
@hypothesis.given(
    st.sampled_from(sorted(MODELS)),
    st.sampled_from(sorted(LOSSES)),
    st.lists(st.integers(0, ROWS), min_size=1, max_size=3),
    st.integers(1, 5),
)
def test_replicas_train_on_their_rows(model, loss, sizes, replicas):
    """The state is an argument and a result; batches may be empty."""
    step = step_of(model, loss)

    def replica(state, batch):
        context = phalanx.get_replica_context()
        value, gradients = step(state["params"], *batch)
        new = {"params": updated(state["params"], context.all_reduce("SUM", gradients)), "steps": state["steps"] + 1}
        return value, phalanx.Mirrored(new), context.all_reduce("SUM", len(batch[0]))

    strategy = phalanx.MirroredStrategy([f"cpu:{i}" for i in range(replicas)])
    params = MODELS[model][1]()
    state = strategy.replicate({"params": params, "steps": np.int32(0)})
    alone = jax.jit(step)
    for size in sizes:
        data = X[:size], LABELS["one hot"][:size]
        (batch,) = strategy.experimental_distribute_dataset([data])
        value, state, total = strategy.run(replica, args=(state, batch))
        expected = [alone(params, *(x[part] for x in data)) for part in parts_of(size, replicas)]
        values = strategy.experimental_local_results(value)
        np.testing.assert_allclose(values[: len(expected)], [x for x, _ in expected], rtol=1e-4, atol=1e-5)
        assert {int(x) for x in strategy.experimental_local_results(total)} == {size}
        if expected:
            params = updated(params, jax.tree.map(lambda *each: sum(each), *(x for _, x in expected)))
    assert int(state.value["steps"]) == len(sizes)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), state.value["params"], params)
