"""A step with gradient tapes is the step that one writes by hand with `jax.grad`: the same bits, the same flops."""

from collections import namedtuple

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from keras import layers

import phalanx
from phalanx._src.kernels import optimization

pytestmark = pytest.mark.slow

BATCH = 8
bce = keras.losses.BinaryCrossentropy(from_logits=True)


# A step of a user, and the same step by hand: `hand(values, *args)` returns a result and new values.
Case = namedtuple("Case", ["step", "hand", "variables", "args"])


def normal(*shape):
    return np.random.default_rng(3).normal(size=shape).astype("float32")


def adam(model):
    optimizer = keras.optimizers.Adam(0.01)
    optimizer.build(model.trainable_variables)
    return optimizer


def sequential(shape, *parts):
    return keras.Sequential([layers.Input(shape if isinstance(shape, tuple) else (shape,)), *parts])


def state_of(**parts):
    state = {}
    for name, part in parts.items():
        if isinstance(part, keras.Model):
            state |= {name: part.trainable_variables, f"{name}_rest": part.non_trainable_variables}
        else:
            state[name] = part.variables
    return state


def supervised(model, x, y):
    """One tape, one loss, one optimizer."""
    optimizer = adam(model)

    def step(x, y):
        with phalanx.GradientTape() as tape:
            loss = ((model(x, training=True) - y) ** 2).mean()
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    def hand(values, x, y):
        def loss_of(trained):
            out, rest = model.stateless_call(trained, values["model_rest"], x, training=True)
            return ((out - y) ** 2).mean(), rest

        (loss, rest), grads = jax.value_and_grad(loss_of, has_aux=True)(values["model"])
        trained, state = optimizer.stateless_apply(values["optimizer"], grads, values["model"])
        return loss, {"model": trained, "model_rest": rest, "optimizer": state}

    return Case(step, hand, state_of(model=model, optimizer=optimizer), (x, y))


def mlp():
    """Layers that write: BatchNormalization its statistics, Dropout its seed."""
    parts = [layers.Dense(8), layers.BatchNormalization(), layers.ReLU(), layers.Dropout(0.5, seed=3), layers.Dense(3)]
    return supervised(sequential(6, *parts), normal(BATCH, 6), normal(BATCH, 3))


def lstm():
    """A scan inside the tape."""
    model = sequential((5, 4), layers.LSTM(6), layers.Dense(3))
    return supervised(model, normal(BATCH, 5, 4), normal(BATCH, 3))


def generator_and_discriminator():
    generator = [
        layers.Dense(2 * 2 * 4, use_bias=False),
        layers.BatchNormalization(),
        layers.LeakyReLU(),
        layers.Reshape((2, 2, 4)),
        layers.Conv2DTranspose(1, 3, strides=2, padding="same", use_bias=False, activation="tanh"),
    ]
    discriminator = [
        layers.Conv2D(4, 3, strides=2, padding="same"),
        layers.LeakyReLU(),
        layers.Dropout(0.3, seed=5),
        layers.Flatten(),
        layers.Dense(1),
    ]
    return sequential(5, *generator), sequential((4, 4, 1), *discriminator)


def dcgan():
    """The step of the TF tutorial: two tapes open at once."""
    gen, disc = generator_and_discriminator()
    gen_opt, disc_opt = adam(gen), adam(disc)

    def losses(real, fake):
        return bce(jnp.ones_like(fake), fake), bce(jnp.ones_like(real), real) + bce(jnp.zeros_like(fake), fake)

    def step(noise, images):
        with phalanx.GradientTape() as gen_tape, phalanx.GradientTape() as disc_tape:
            generated = gen(noise, training=True)
            real, fake = disc(images, training=True), disc(generated, training=True)
            gen_loss, disc_loss = losses(real, fake)
        gen_grads = gen_tape.gradient(gen_loss, gen.trainable_variables)
        disc_grads = disc_tape.gradient(disc_loss, disc.trainable_variables)
        gen_opt.apply_gradients(zip(gen_grads, gen.trainable_variables, strict=True))
        disc_opt.apply_gradients(zip(disc_grads, disc.trainable_variables, strict=True))
        return gen_loss, disc_loss

    def hand(v, noise, images):
        def both(g, d):
            generated, g_rest = gen.stateless_call(g, v["gen_rest"], noise, training=True)
            real, d_rest = disc.stateless_call(d, v["disc_rest"], images, training=True)
            fake, d_rest = disc.stateless_call(d, d_rest, generated, training=True)
            gen_loss, disc_loss = losses(real, fake)
            return gen_loss, disc_loss, (g_rest, d_rest)

        g, d = v["gen"], v["disc"]
        (g_loss, (g_rest, d_rest)), g_grads = jax.value_and_grad(lambda g: both(g, d)[::2], has_aux=True)(g)
        d_loss, d_grads = jax.value_and_grad(lambda d: both(g, d)[1])(d)
        g, g_opt = gen_opt.stateless_apply(v["gen_opt"], g_grads, g)
        d, d_opt = disc_opt.stateless_apply(v["disc_opt"], d_grads, d)
        new = {"gen": g, "gen_rest": g_rest, "disc": d, "disc_rest": d_rest, "gen_opt": g_opt, "disc_opt": d_opt}
        return (g_loss, d_loss), new

    variables = state_of(gen=gen, disc=disc, gen_opt=gen_opt, disc_opt=disc_opt)
    return Case(step, hand, variables, (normal(BATCH, 5), normal(BATCH, 4, 4, 1)))


def wgan_gp():
    """A gradient penalty: a tape inside a tape, and the gradient to a watched tensor."""
    gen, disc = generator_and_discriminator()
    optimizer = adam(disc)

    def penalty(grads):
        return 10.0 * ((jnp.sqrt((grads**2).sum((1, 2, 3)) + 1e-8) - 1.0) ** 2).mean()

    def step(noise, images, mix):
        fake = gen(noise, training=False)
        with phalanx.GradientTape() as tape:
            between = mix * images + (1 - mix) * fake
            with phalanx.GradientTape() as inner:
                inner.watch(between)
                score = disc(between, training=True)
            grads = inner.gradient(score, between)
            loss = disc(fake, training=True).mean() - disc(images, training=True).mean() + penalty(grads)
        optimizer.apply(tape.gradient(loss, disc.trainable_variables), disc.trainable_variables)
        return loss

    def hand(v, noise, images, mix):
        fake, _ = gen.stateless_call(v["gen"], v["gen_rest"], noise, training=False)

        def loss_of(d):
            def score_of(x):
                score, rest = disc.stateless_call(d, v["disc_rest"], x, training=True)
                return score.sum(), rest

            grads, rest = jax.grad(score_of, has_aux=True)(mix * images + (1 - mix) * fake)
            on_fake, rest = disc.stateless_call(d, rest, fake, training=True)
            on_real, rest = disc.stateless_call(d, rest, images, training=True)
            return on_fake.mean() - on_real.mean() + penalty(grads), rest

        (loss, rest), grads = jax.value_and_grad(loss_of, has_aux=True)(v["disc"])
        d, state = optimizer.stateless_apply(v["optimizer"], grads, v["disc"])
        return loss, v | {"disc": d, "disc_rest": rest, "optimizer": state}

    args = normal(BATCH, 5), normal(BATCH, 4, 4, 1), normal(BATCH, 1, 1, 1)
    return Case(step, hand, state_of(gen=gen, disc=disc, optimizer=optimizer), args)


def persistent():
    """One tape asked twice, for two losses over one network."""
    model = sequential(6, layers.Dense(8, activation="tanh"), layers.Dense(3))
    optimizer = adam(model)

    def step(x):
        with phalanx.GradientTape(persistent=True) as tape:
            out = model(x)
            first, second = (out**2).mean(), jnp.abs(out).sum()
        trained = model.trainable_variables
        one, two = tape.gradient(first, trained), tape.gradient(second, trained)
        optimizer.apply([a + 0.1 * b for a, b in zip(one, two, strict=True)], trained)
        return first, second

    def hand(v, x):
        out_of = lambda t: model.stateless_call(t, v["model_rest"], x)[0]  # noqa: E731
        first, one = jax.value_and_grad(lambda t: (out_of(t) ** 2).mean())(v["model"])
        second, two = jax.value_and_grad(lambda t: jnp.abs(out_of(t)).sum())(v["model"])
        grads = [a + 0.1 * b for a, b in zip(one, two, strict=True)]
        trained, state = optimizer.stateless_apply(v["optimizer"], grads, v["model"])
        return (first, second), v | {"model": trained, "optimizer": state}

    return Case(step, hand, state_of(model=model, optimizer=optimizer), (normal(BATCH, 6),))


def six_in_a_row():
    """Six updates in one step, a tape each."""
    model = sequential(6, layers.Dense(4, activation="tanh"), layers.Dense(1))
    optimizer = adam(model)

    def step(x):
        losses = []
        for i in range(6):
            with phalanx.GradientTape() as tape:
                loss = ((model(x[i]) - i) ** 2).mean()
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
            losses.append(loss)
        return losses

    def hand(v, x):
        trained, state, losses = v["model"], v["optimizer"], []
        for i in range(6):
            out_of = lambda t: model.stateless_call(t, v["model_rest"], x[i])[0]  # noqa: E731
            loss, grads = jax.value_and_grad(lambda t: ((out_of(t) - i) ** 2).mean())(trained)
            trained, state = optimizer.stateless_apply(state, grads, trained)
            losses.append(loss)
        return losses, v | {"model": trained, "optimizer": state}

    return Case(step, hand, state_of(model=model, optimizer=optimizer), (normal(6, BATCH, 6),))


def rematerialized():
    """A checkpoint inside the tape."""
    variables = [keras.Variable(normal(6, 6)), keras.Variable(normal(6, 3))]
    block = lambda x, a, b: jnp.tanh(x @ a) @ b  # noqa: E731

    def step(x):
        with phalanx.GradientTape() as tape:
            loss = (jax.checkpoint(block)(x, *(v.value for v in variables)) ** 2).mean()
        return tape.gradient(loss, variables)

    def hand(v, x):
        return jax.grad(lambda w: (jax.checkpoint(block)(x, *w) ** 2).mean())(v["w"]), v

    return Case(step, hand, {"w": variables}, (normal(BATCH, 6),))


def assert_same_steps(case, step, hand_args=None, sharding=None):
    """Runs both steps side by side and compares all bits, then compares the cost of the two programs."""
    hand_args = case.args if hand_args is None else hand_args
    values = jax.device_put(jax.tree.map(lambda v: np.array(v.value), case.variables), sharding)
    options = optimization.compiler_options(jax.local_devices())
    by_hand = jax.jit(case.hand).lower(values, *hand_args).compile(options)
    for i in range(3):
        result, values = by_hand(values, *hand_args)
        found = jax.tree_util.tree_leaves_with_path((step(*case.args), jax.tree.map(lambda v: v.value, case.variables)))
        for (path, got), wanted in zip(found, jax.tree.leaves((result, values)), strict=True):
            got, wanted = np.asarray(got), np.asarray(wanted)
            assert got.shape == wanted.shape
            assert got.tobytes() == wanted.tobytes(), f"step {i}, {path}: they differ by {np.abs(got - wanted).max()}"
    flops = step.lower(*case.args).compile().cost_analysis()["flops"]
    assert 0 < flops <= 1.001 * by_hand.cost_analysis()["flops"]


def on_one_device():
    """`Strategy.run` with one replica adds nothing to the program."""
    case, strategy = persistent(), phalanx.OneDeviceStrategy("cpu:0")
    return case._replace(step=lambda *args: strategy.run(case.step, args=args))


@pytest.mark.cover(["make"], {dcgan, persistent, on_one_device})
@pytest.mark.parametrize("make", [mlp, lstm, dcgan, wgan_gp, persistent, on_one_device, six_in_a_row, rematerialized])
def test_equals_hand_written_code(make):
    """A compiled step has the bits and at most the flops of the one by hand, and Python runs its body once."""
    case, calls = make(), []
    step = phalanx.function(lambda *args: (calls.append(1), case.step(*args))[1])
    assert_same_steps(case, step)
    assert len(calls) == 1 + 1, "once for the steps, and once for step.lower"


def test_two_replicas_equal_hand_written_shard_map(strategy):
    """A step on two replicas has the bits and the flops of a hand-written `shard_map` with one psum per gradient."""
    topology, spec = strategy.topology, jax.sharding.PartitionSpec
    with strategy.scope():
        model = sequential(6, layers.Dense(8, activation="tanh"), layers.Dense(3))
        optimizer = adam(model)

    def replica_step(x, y):
        with phalanx.GradientTape() as tape:
            loss = ((model(x) - y) ** 2).mean() / 2
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    def replica_by_hand(v, x, y):
        loss_of = lambda t: ((model.stateless_call(t, [], x[0])[0] - y[0]) ** 2).mean() / 2  # noqa: E731
        loss, grads = jax.value_and_grad(loss_of)(v["model"])
        trained, state = optimizer.stateless_apply(v["optimizer"], jax.lax.psum(grads, "replica"), v["model"])
        return loss[None], v | {"model": trained, "optimizer": state}

    sides = {"in_specs": (spec(), spec("replica"), spec("replica")), "out_specs": (spec("replica"), spec())}
    hand = jax.shard_map(replica_by_hand, mesh=topology.mesh, check_vma=False, **sides)
    split = jax.device_put((normal(2, BATCH, 6), normal(2, BATCH, 3)), topology.per_replica)
    args = tuple(map(phalanx.PerReplica, split))
    case = Case(replica_step, hand, state_of(model=model, optimizer=optimizer), args)
    step = phalanx.function(lambda *args: strategy.run(replica_step, args=args))
    assert_same_steps(case, step, split, topology.replicated)
