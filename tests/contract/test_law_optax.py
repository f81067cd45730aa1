"""Law 1, for OptaxOptimizer: under every strategy a pytree of variables trains as in a loop of Optax on one device."""

import functools

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest
from strategy_table import DEVICES, ROWS, on
from test_divided_variables import sharded

import phalanx
from phalanx.keras import OptaxOptimizer

X = np.random.default_rng(0).normal(size=(10, 4)).astype("float32")
Y = X[:, :2].copy()
BATCH = 4
"""The last batch has two rows: with four replicas, two have none."""

KERNELS = {"hidden": {"w": True, "b": False}, "out": {"w": True, "b": False}}
GROUPS = {"hidden": {"w": "adam", "b": "sgd"}, "out": {"w": "sgd", "b": "adam"}}
TRANSFORMATIONS = {
    "sgd": lambda: optax.sgd(0.1),  # One step of LocalSGD is a step of it.
    "adamw": lambda: optax.adamw(optax.cosine_decay_schedule(0.1, 10), weight_decay=0.1, mask=KERNELS),
    "global_norm": lambda: optax.chain(optax.clip_by_global_norm(0.05), optax.adam(0.1)),
    "lamb": lambda: optax.lamb(0.1),
    "adafactor": lambda: optax.adafactor(0.1, min_dim_size_to_factor=2),
    "multi_steps": lambda: optax.MultiSteps(optax.adam(0.1), every_k_schedule=2),
    "if_finite": lambda: optax.apply_if_finite(optax.adam(0.1), 3),
    "schedule_free": lambda: optax.contrib.schedule_free_adamw(0.1),
    "multi_transform": lambda: optax.multi_transform({"adam": optax.adam(0.1), "sgd": optax.sgd(0.1, 0.9)}, GROUPS),
    "bfloat16": lambda: optax.adamw(0.1, mu_dtype=jnp.bfloat16),
}


def first_params():
    rng = np.random.default_rng(1)
    draw = lambda *shape: rng.normal(size=shape).astype("float32")  # noqa: E731
    return {"hidden": {"w": draw(4, 8), "b": draw(8)}, "out": {"w": draw(8, 2), "b": draw(2)}}


def errors_of(params, x, y):
    """The squared error of each row."""
    hidden = jnp.tanh(x @ params["hidden"]["w"] + params["hidden"]["b"])
    return ((hidden @ params["out"]["w"] + params["out"]["b"] - y) ** 2).mean(-1)


@functools.cache
def trained_by_optax(name, epochs=2):
    """Parameters and state after a loop without Phalanx."""
    tx, params = TRANSFORMATIONS[name](), jax.tree.map(jnp.asarray, first_params())

    @jax.jit
    def step(params, state, x, y):
        gradients = jax.grad(lambda p: errors_of(p, x, y).mean())(params)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for _ in range(epochs):
        for start in range(0, len(X), BATCH):
            params, state = step(params, state, X[start : start + BATCH], Y[start : start + BATCH])
    return params, state


class Trained:
    """A pytree of variables with an optimizer, trained in a custom step."""

    def __init__(self, strategy, transformation, params=None):
        self.strategy = strategy
        with strategy.scope():
            self.params = jax.tree.map(phalanx.Variable, params or first_params())
            self.optimizer = OptaxOptimizer(transformation)

    def step(self, batch):
        def loss_of(params):
            return phalanx.nn.compute_average_loss(errors_of(params, *batch))

        loss, gradients = jax.value_and_grad(loss_of)(jax.tree.map(lambda v: v.value, self.params))
        self.optimizer.apply(gradients, self.params)
        return loss

    def train(self, epochs=2):
        run = phalanx.function(lambda batch: self.strategy.run(self.step, args=(batch,)))
        for _ in range(epochs):
            for batch in self.strategy.experimental_distribute_dataset((X, Y), batch_size=BATCH):
                run(batch)
        return self


def assert_close(ours, theirs):
    for a, b in zip(ours, jax.tree.leaves(theirs), strict=True):
        a, b = np.asarray(a.value, "float32"), np.asarray(b, "float32")
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def assert_like_optax(trained, name):
    params, state = trained_by_optax(name)
    assert_close(jax.tree.leaves(trained.params), params)
    assert_close(trained.optimizer.variables[1:], state)  # The first one is Keras's count of steps.


@pytest.mark.cover(
    ["strategy", "name"],
    {("mirrored_x4", "global_norm"), ("one_device", "adamw"), ("central_x2", "adamw"), ("local_sgd_x2", "sgd")}
    | {("mirrored_x2_of_2", "global_norm"), ("weighted_x3", "adamw"), ("compressed_x2", "sgd"), ("default", "sgd")},
)
@pytest.mark.parametrize(
    ("strategy", "name"),
    [(row, name) for row in ROWS for name in ("sgd", "adamw", "global_norm") if name == "sgd" or row != "local_sgd_x2"],
    indirect=["strategy"],
)
def test_every_strategy_trains_like_optax(strategy, name):
    assert_like_optax(Trained(strategy, TRANSFORMATIONS[name]()).train(), name)


@on("sharded_x2", "sharded_x4")
@pytest.mark.cover(
    ["strategy", "name"],
    {(row, name) for row, name in zip(("sharded_x2", "sharded_x4") * 5, TRANSFORMATIONS, strict=True)},
)
@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_sharded_variables_train_like_optax(strategy, name):
    """Norms, factors, groups and masks see complete gradients in the structure of the user. Each replica has its shards."""
    trained = Trained(strategy, TRANSFORMATIONS[name]()).train()
    assert_like_optax(trained, name)
    count, kernel = strategy.num_replicas_in_sync, trained.params["hidden"]["w"]
    like = [v for v in trained.optimizer.variables if v.shape == (4, 8)]
    assert all(v.value.sharding == kernel.value.sharding for v in like)
    assert bool(like) is (name not in ("sgd", "adafactor"))
    assert all(v.value.addressable_shards[0].data.shape == (4 // count, 8) for v in [*like, kernel])


def test_rules_shard_states_like_their_variables():
    """A rule that fits a matrix does not match the two vectors of Adafactor for it."""
    rules = {"kernel": (None, "model")}
    strategy = phalanx.MirroredStrategy(DEVICES[:4], model_axis=("model", 2), layout=rules)
    with strategy.scope():
        kernel = phalanx.Variable(np.ones((8, 4), "float32"), name="kernel")
    for transformation in (optax.adam(0.1), optax.adafactor(0.1, min_dim_size_to_factor=2)):
        with strategy.scope():
            optimizer = OptaxOptimizer(transformation)
        strategy.run(lambda: optimizer.apply([jnp.ones((8, 4))], [kernel]))  # noqa: B023
        specs = {tuple(v.shape): tuple(v.value.sharding.spec) for v in optimizer.variables}
        assert specs.get((8, 4), (None, "model")) == (None, "model")
        assert not any(spec for shape, spec in specs.items() if shape != (8, 4))


def test_flax_module_trains_like_optax():
    """The parameters of a module of flax.linen, as variables in shards."""
    nn = pytest.importorskip("flax.linen")
    module, tx = nn.Sequential([nn.Dense(8), nn.tanh, nn.Dense(2)]), optax.adamw(0.1)
    first = module.init(jax.random.key(0), X)
    strategy = sharded()
    with strategy.scope():
        params, optimizer = jax.tree.map(phalanx.Variable, first), OptaxOptimizer(tx)

    def step(x):
        loss_of = lambda p: phalanx.nn.compute_average_loss((module.apply(p, x) ** 2).mean(-1))  # noqa: E731
        optimizer.apply(jax.grad(loss_of)(jax.tree.map(lambda v: v.value, params)), params)

    state = tx.init(first)
    for batch in strategy.experimental_distribute_dataset(X, batch_size=5):
        strategy.run(step, args=(batch,))
    for start in (0, 5):
        gradients = jax.grad(lambda p, x: (module.apply(p, x) ** 2).mean())(first, X[start : start + 5])
        updates, state = tx.update(gradients, state, first)
        first = optax.apply_updates(first, updates)
    assert_close(jax.tree.leaves(params), first)


def test_checkpoint_of_four_replicas_in_two(tmp_path):
    """Whether the optimizer was built before or not, with the momentum of each variable."""
    saved = Trained(sharded(4), TRANSFORMATIONS["global_norm"]()).train()
    path = phalanx.train.Checkpoint(params=saved.params, optimizer=saved.optimizer).save(tmp_path / "ckpt")
    assert "optimizer/1_0_mu:params/hidden/w" in dict(phalanx.train.list_variables(path))
    saved.train()
    for is_built in (True, False):
        other = Trained(sharded(2), TRANSFORMATIONS["global_norm"](), jax.tree.map(np.zeros_like, first_params()))
        if is_built:
            other.optimizer.build(other.params)
        status = phalanx.train.Checkpoint(params=other.params, optimizer=other.optimizer).restore(path)
        other.train()
        status.assert_existing_objects_matched()
        assert_close(jax.tree.leaves(other.params), [v.value for v in jax.tree.leaves(saved.params)])


def mlp():
    layers = [keras.layers.Dense(8, "tanh", name="hidden"), keras.layers.Dense(2, name="out")]
    model = keras.Sequential([keras.Input((4,)), *layers], name="net")
    model.set_weights([first_params()[layer][kind] for layer in ("hidden", "out") for kind in "wb"])
    return model


@on("one_device", "mirrored_x2", "central_x2", "sharded_x2", "sharded_x4")
@pytest.mark.cover(["strategy"], {"mirrored_x2", "sharded_x4"})
def test_fit_trains_like_optax(strategy):
    """Clipping by the global norm, with a short last batch."""
    with strategy.scope():
        model = mlp()
        model.compile(OptaxOptimizer(TRANSFORMATIONS["global_norm"]()), "mse")
    model.fit(X, Y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    params, _ = trained_by_optax("global_norm")
    assert_close(model.variables, [params[layer][kind] for layer in ("hidden", "out") for kind in "wb"])
