"""Variables in parts: over the replicas, with the update after all have done their part; over the devices of a replica."""

import functools
import re

import jax
import keras
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from strategy_table import DEVICES, devices

import phalanx
import phalanx.testing
from phalanx._src import compat
from phalanx.errors import DivergenceError, InvalidArgumentError, VariableError

X = np.random.default_rng(0).normal(size=(12, 4)).astype("float32")
Y = X[:, :2].copy()


def sharded(count=2, **options):
    """Replicas with parts of every variable that can be divided."""
    return phalanx.MirroredStrategy(devices(count), layout=phalanx.fully_sharded(min_size=1), **options)


def with_rules(rules):
    """Two replicas of two devices."""
    return phalanx.MirroredStrategy(devices(4), model_axis=("model", 2), layout=rules)


def net():
    layers = [keras.layers.Dense(8, activation="tanh", name="first"), keras.layers.Dense(2, name="second")]
    return keras.Sequential([keras.layers.Input((4,)), *layers], name="net")


def made(strategy, optimizer):
    keras.utils.set_random_seed(3)
    with strategy.scope():
        return net(), optimizer()


def sharded_net():
    strategy = sharded()
    return strategy, *made(strategy, adam)


def gradients_of(model, x):
    with phalanx.GradientTape() as tape:
        loss = phalanx.nn.compute_average_loss((model(x, training=True) ** 2).mean(-1))
    return loss, tape.gradient(loss, model.trainable_variables)


def step_of(model, optimizer):
    def step(x):
        loss, gradients = gradients_of(model, x)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    return step


def batch_of(strategy, x=X):
    return next(iter(strategy.experimental_distribute_dataset([x])))


def train(strategy, step):
    for _ in range(3):
        strategy.run(step, args=(batch_of(strategy),))


@functools.cache
def trained_by_keras(optimizer, steps=3):
    """Weights and slots after some steps of plain Keras on one device."""
    keras.utils.set_random_seed(3)
    model = net()
    optimizer = optimizer()
    optimizer.build(model.trainable_variables)

    @jax.jit
    def step(weights, slots):
        gradients = jax.grad(lambda w: (model.stateless_call(w, [], X)[0] ** 2).mean())(weights)
        return optimizer.stateless_apply(slots, gradients, weights)

    weights, slots = ([v.value for v in each] for each in (model.variables, optimizer.variables))
    for _ in range(steps):
        weights, slots = step(weights, slots)
    return [np.asarray(x) for x in [*weights, *slots]]


def assert_like_keras(variables, optimizer, steps=3):
    for v, wanted in zip(variables, trained_by_keras(optimizer, steps), strict=True):
        np.testing.assert_allclose(v.numpy(), wanted, rtol=1e-5, atol=1e-6, err_msg=v.path)


def adam():
    return keras.optimizers.Adam(0.1)


OPTIMIZERS = {
    "global_clipnorm": lambda: keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.05),
    "lamb": lambda: keras.optimizers.Lamb(0.01),
    "ema": lambda: keras.optimizers.Adam(0.1, use_ema=True, ema_overwrite_frequency=2),
    "adafactor": lambda: keras.optimizers.Adafactor(0.01),
    "accumulation": lambda: keras.optimizers.Adam(0.1, gradient_accumulation_steps=3),
}


@pytest.mark.cover(["name"], {"global_clipnorm", "adafactor"})
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_equal_those_of_whole_variables(name):
    """Those that look at all of a gradient, too, do what they do with whole variables."""
    strategy = sharded()
    model, optimizer = made(strategy, OPTIMIZERS[name])
    train(strategy, step_of(model, optimizer))
    assert_like_keras([*model.variables, *optimizer.variables], OPTIMIZERS[name])


def test_loss_scaling_skips_steps_that_overflow():
    """A step with gradients that are not finite is left out, by all replicas."""
    strategy = sharded()
    model, optimizer = made(strategy, lambda: keras.optimizers.LossScaleOptimizer(adam()))
    before = model.get_weights()
    strategy.run(step_of(model, optimizer), args=(batch_of(strategy, X * np.inf),))
    for a, b in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    assert float(optimizer.dynamic_scale) < 2**15


def test_slots_follow_their_variables():
    """Wherever they are made: in the scope, in the step, or before the strategy."""
    strategy = with_rules({".*kernel": (None, "model")})
    for in_scope in (True, False):
        keras.utils.set_random_seed(3)
        model, optimizer = made(strategy if in_scope else phalanx.get_strategy(), adam)
        strategy.run(step_of(model, optimizer), args=(batch_of(strategy),))
        for v in [*model.variables, *optimizer.variables]:
            assert v.value.sharding.spec == (P(None, "model") if "kernel" in v.path else P()), v.path
        assert strategy.extended.variable_created_in_scope(model.variables[0]) == in_scope


def test_rules_over_both_axes():
    """A dim over the replicas and one over the devices of each; or one dim over both."""
    rules = {".*kernel": ("replica", "model"), "net/first/bias": (("replica", "model"),)}
    strategy = with_rules(rules)
    model, optimizer = made(strategy, adam)
    train(strategy, step_of(model, optimizer))
    assert model.variables[0].value.addressable_shards[0].data.shape == (2, 4)
    assert model.variables[1].value.addressable_shards[0].data.shape == (2,)
    assert_like_keras([*model.variables, *optimizer.variables], adam)


def test_auto_layout_trains_as_one_device(caplog):
    """Its kernels are divided over both axes. It prints rules that do the same."""

    def trained(strategy):
        keras.utils.set_random_seed(3)
        with strategy.scope():
            x = keras.Input((4, 64))
            h = keras.layers.MultiHeadAttention(2, 32, name="attention")(x, x)
            h = keras.layers.Dense(64, name="contract")(keras.layers.Dense(128, activation="tanh", name="expand")(h))
            model = keras.Model(x, h, name="net")
            model.compile(keras.optimizers.Adam(1e-3), "mse")
        x = np.random.default_rng(1).normal(size=(12, 4, 64)).astype("float32")
        return model, model.fit(x, x, batch_size=4, epochs=2, shuffle=False, verbose=0).history["loss"]

    def specs_of(model):
        return {v.path: v.value.sharding.spec for v in model.trainable_variables}

    strategy = with_rules("auto")
    with caplog.at_level("INFO", "phalanx"):
        model, losses = trained(strategy)
    specs = specs_of(model)
    assert specs["expand/kernel"] == P("replica", "model")
    assert specs["attention/query/kernel"] == P("replica", "model")
    whole, expected = trained(phalanx.OneDeviceStrategy(DEVICES[0]))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    for v, w in zip(model.get_weights(), whole.get_weights(), strict=True):
        np.testing.assert_allclose(v, w, rtol=1e-4, atol=1e-5)
    rules = strategy.topology.layout.rules()
    assert caplog.text.count(f"as layout={rules} does") == 1
    again = with_rules(rules).topology
    assert {v.path: again.sharding_of(v.path, v.shape).spec for v in model.trainable_variables} == specs


def test_rule_without_a_variable():
    """Is an error at the first step that trains, not before: variables may be made late."""
    strategy = with_rules({"net/fjrst/kernel": (None, "model")})
    model, optimizer = made(strategy, adam)
    strategy.run(lambda x: model(x), args=(batch_of(strategy),))
    with pytest.raises(
        InvalidArgumentError, match=r"(?s)'net/fjrst/kernel'.*nearest path is 'net/first/kernel'.*HINT: layout"
    ):
        strategy.run(step_of(model, optimizer), args=(batch_of(strategy),))


def collectives(text, name):
    """The largest number of elements that a collective of that name has."""
    shapes = re.findall(rf"= \(?([^=]*?)\)? {name}\(", text)
    sizes = [
        np.prod([int(n) for n in s.split(",") if n]) for found in shapes for s in re.findall(r"\w+\[([\d,]*)\]", found)
    ]
    return max(sizes, default=0)


def bytes_of_first_device(variables):
    """What one device holds of them."""
    device = jax.devices()[0]
    return sum(s.data.nbytes for v in variables for s in v.value.addressable_shards if s.device == device)


def wide(strategy, make_optimizer):
    """A model whose kernels are large, and its step as a program."""
    with strategy.scope():
        layers = [keras.layers.Dense(256, activation="relu"), keras.layers.Dense(256), keras.layers.Dense(2)]
        model, optimizer = keras.Sequential([keras.layers.Input((4,)), *layers]), make_optimizer()
    step = step_of(model, optimizer)
    program = phalanx.function(lambda x: strategy.run(step, args=(x,)))
    program(batch_of(strategy))
    return [*model.variables, *optimizer.variables], program


@pytest.mark.parametrize("make_optimizer", [adam, lambda: phalanx.keras.OptaxOptimizer(optax.adam(0.1))])
def test_bytes_and_collectives_of_a_step(make_optimizer):
    """A quarter of the variables is on each replica. Gradients are scattered, variables gathered, and nothing large is summed on all."""
    strategy = phalanx.MirroredStrategy(devices(4), layout=phalanx.fully_sharded())
    parts, program = wide(strategy, make_optimizer)
    whole, _ = wide(phalanx.MirroredStrategy(devices(4), weight_update_sharding=False), adam)
    assert bytes_of_first_device(parts) <= 0.30 * bytes_of_first_device(whole)
    text = program.lower(batch_of(strategy)).compile().as_text()
    assert collectives(text, "reduce-scatter") == 256 * 256 / 4
    assert collectives(text, "all-gather") == 256 * 256
    # The biases, and the small kernels.
    assert collectives(text, "all-reduce") == 4 * 256 + 2 * 256 + 2 + 256 * 2


def test_training_compiles_only_once():
    """What a step leaves is laid out as what the next one takes."""
    strategy, model, optimizer = sharded_net()
    step, batch = step_of(model, optimizer), batch_of(strategy)
    strategy.run(step, args=(batch,))
    compiled = []
    listener = lambda event, *_, **__: compiled.append(event) if "backend_compile" in event else None  # noqa: E731
    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        strategy.run(step, args=(batch,))
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)
    assert not compiled


def test_read_after_the_update():
    """In the step the variable has no new value yet."""
    strategy, model, optimizer = sharded_net()

    def step(x):
        step_of(model, optimizer)(x)
        return model.variables[0].value.sum()

    with pytest.raises(VariableError, match=r"(?s)'net/first/kernel'.*after optimizer.apply in the same step.*HINT"):
        strategy.run(step, args=(batch_of(strategy),))


def test_two_steps_in_one_program():
    """In cross-replica context the new values are there at once."""
    strategy, model, optimizer = sharded_net()

    step = step_of(model, optimizer)

    @phalanx.function
    def three(x):
        for _ in range(3):
            strategy.run(step, args=(x,))
        return model.variables[0].value.sum()

    total = three(batch_of(strategy))
    np.testing.assert_allclose(total, model.variables[0].numpy().sum(), rtol=1e-5)
    assert_like_keras([*model.variables, *optimizer.variables], adam)


def test_run_steps_equals_single_steps():
    strategy, model, optimizer = sharded_net()
    iterator = iter(strategy.experimental_distribute_dataset([X] * 3))
    losses = strategy.run_steps(step_of(model, optimizer), iterator, 3)
    assert strategy.reduce("SUM", losses, axis=None).shape == (3,)
    assert_like_keras([*model.variables, *optimizer.variables], adam)


def test_gradients_that_are_equal_already():
    """Of a merge function, and with `skip_gradients_aggregation`."""
    strategy = sharded()
    for merges in (True, False):
        model, optimizer = made(strategy, adam)

        def step(x, model=model, optimizer=optimizer, merges=merges):
            _, gradients = gradients_of(model, x)
            replica, variables = phalanx.get_replica_context(), model.trainable_variables

            def apply(strategy, gradients):
                total = [strategy.reduce("SUM", g, axis=None) for g in gradients]
                optimizer.apply_gradients(zip(total, variables, strict=True))

            if merges:
                replica.merge_call(apply, args=(gradients,))
            else:
                total = replica.all_reduce("SUM", gradients)
                optimizer.apply_gradients(zip(total, variables, strict=True), skip_gradients_aggregation=True)

        train(strategy, step)
        assert_like_keras([*model.variables, *optimizer.variables], adam)


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_variable_without_a_gradient():
    """It stays as it is; the others are trained."""
    strategy, model, optimizer = sharded_net()
    with strategy.scope():
        other = keras.Variable(np.ones(4, "float32"))

    def step(x):
        variables = [*model.trainable_variables, other]
        with phalanx.GradientTape() as tape:
            loss = phalanx.nn.compute_average_loss((model(x) ** 2).mean(-1))
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    train(strategy, step)
    np.testing.assert_array_equal(other.numpy(), np.ones(4))


def test_stateless_train_step():
    """Keras 3's own kind of step works on whole values, and leaves parts."""

    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.inner = net()

        def call(self, x, training=False):
            return self.inner(x, training=training)

        def train_step(self, state, data):
            trained, others, slots, metrics = state
            x, y = data

            def loss_of(trained):
                y_pred, new = self.stateless_call(trained, others, x, training=True)
                return ((y_pred - y) ** 2).mean(), new

            (loss, new), gradients = jax.value_and_grad(loss_of, has_aux=True)(trained)
            trained, slots = self.optimizer.stateless_apply(slots, gradients, trained)
            return {"loss": loss}, (trained, new, slots, metrics)

    weights = []
    for strategy in (phalanx.OneDeviceStrategy(DEVICES[0]), sharded()):
        keras.utils.set_random_seed(3)
        with strategy.scope():
            model = Net()
            model.compile(adam())
        model.fit(X, Y, batch_size=4, epochs=2, shuffle=False, verbose=0)
        weights.append(model.get_weights())
    for a, b in zip(*weights, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert model.variables[0].value.sharding.spec == P("replica")


def test_values_from_outside():
    """An assigned value is divided; one that is held is not given away."""
    strategy, model, optimizer = sharded_net()
    first = model.variables[0]
    first.assign(first * 1.0)
    held, wanted = first.value, first.numpy()
    train(strategy, step_of(model, optimizer))
    np.testing.assert_array_equal(held, wanted)
    assert_like_keras([*model.variables, *optimizer.variables], adam)
    for whole in strategy.experimental_local_results(first):
        np.testing.assert_array_equal(whole, first.numpy())


def test_parts_in_sync():
    """Parts over replicas have no copies. Over a model axis they are compared between replicas; a device that differs is named."""
    for strategy in (sharded(), with_rules({".*kernel": (None, "model")})):
        model, optimizer = made(strategy, adam)
        strategy.run(step_of(model, optimizer), args=(batch_of(strategy),))
        phalanx.testing.assert_in_sync(model, optimizer)
    kernel = model.variables[0]
    parts = [s.data + 1 if s.device.id == 3 else s.data for s in kernel.value.addressable_shards]
    broken = jax.make_array_from_single_device_arrays(kernel.shape, kernel.value.sharding, parts)
    compat.set_raw_values([kernel], [broken])
    with pytest.raises(DivergenceError, match=r"'net/first/kernel' on rank 0 \(replica 1 of 2\)"):
        phalanx.testing.assert_in_sync(model)


def test_one_replica_of_several_devices():
    """Nothing is summed over it: XLA could not divide such a sum between its devices."""
    layout = phalanx.fully_sharded("model", min_size=1)
    strategy = phalanx.MirroredStrategy(devices(2), model_axis=("model", 2), layout=layout)
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.BatchNormalization(), keras.layers.Dense(8)])
        total = keras.Variable(np.ones(16, "float32"), synchronization="on_read", aggregation="sum", trainable=False)

    def step(x):
        total.assign_add(x.sum(0)[:1] * np.ones(16, "float32"))
        return phalanx.get_replica_context().all_reduce("SUM", model(x, training=True)).sum()

    for batch in strategy.experimental_distribute_dataset(X, batch_size=4):
        strategy.run(step, args=(batch,))
    np.testing.assert_allclose(total.numpy(), np.full(16, 1 + X[:, 0].sum()), rtol=1e-5)
    assert model.layers[0].moving_mean.value.sharding.spec == P("model")
