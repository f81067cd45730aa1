"""OptaxOptimizer: what it refuses, learning rates, files, and gradients that are None."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest
from twins import BATCH, FIT, X, Y, compiled, under

import phalanx
from phalanx._src import compat
from phalanx._src.runtime.settings import settings
from phalanx.errors import InvalidArgumentError, VariableError
from phalanx.keras import OptaxOptimizer

pytestmark = pytest.mark.slow

INJECTED = optax.inject_hyperparams(optax.sgd)
NO_RATE = r"(?s)learning_rate of an OptaxOptimizer: {}.*HINT: "


def variables(*shapes):
    return [keras.Variable(np.ones(shape, "float32")) for shape in shapes or [(2,), (3, 2)]]


def built(transformation, trained=None):
    optimizer = OptaxOptimizer(transformation)
    optimizer.build(variables() if trained is None else trained)
    return optimizer


def with_optax(transformation, **given):
    return compiled(optimizer=lambda: OptaxOptimizer(transformation), **given)


class Growing:
    """A transformation whose state gets another structure."""

    init = staticmethod(lambda params: ())
    update = staticmethod(lambda updates, state, params: (updates, (state, 1)))


class Drawing:
    """A transformation whose state is a random key."""

    init = staticmethod(lambda params: jax.random.key(0))
    update = staticmethod(lambda updates, state, params: (updates, state))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"transformation": optax.adam}, r"transformation=<function adam.*must have the functions init and update"),
        ({"transformation": "adam"}, r"transformation='adam'\).*HINT: transformation=optax.adamw"),
        ({"transformation": optax.sgd(0.1), "clipnorm": 1.0}, r"\(clipnorm=1.0\).*HINT: .*optax.clip_by_global_norm"),
        ({"transformation": optax.sgd(0.1), "learning_rate": 0.1}, r"\(learning_rate=0.1\): it has no options"),
        (
            {"transformation": optax.sgd(0.1), "jit_compile": True},
            r"\(jit_compile=True\).*HINT: optax.chain.*optax.MultiSteps",
        ),
        ({"transformation": optax.sgd(0.1), "name": "a/b"}, r"name='a/b': must be a text without '/'.*HINT: name="),
    ],
)
def test_arguments_that_are_refused(arguments, message):
    with pytest.raises(InvalidArgumentError, match=f"(?s){message}"):
        OptaxOptimizer(**arguments)


@pytest.mark.parametrize(
    ("transformation", "message"),
    [
        (optax.lbfgs(), r"for 2 variables: the transformation fails: .*missing 3 required keyword-only arguments"),
        (
            optax.noisy_sgd(0.1, key=0),
            r"the transformation fails: Invalid dtype: key<fry>.*HINT: a transformation with",
        ),
        (Growing(), r"its update returns other structures than it gets.*HINT: "),
        (optax.masked(optax.sgd(0.1), {"a": True}), r"the transformation fails: .*HINT: "),
    ],
)
def test_transformations_that_fail(transformation, message):
    with pytest.raises(InvalidArgumentError, match=f"(?s){message}"):
        built(transformation)


@pytest.mark.parametrize("tree", [[], {"a": np.ones(2)}, [1.0], variables((2,)) * 2, {1: 2, "a": 3}])
def test_trees_that_are_not_variables(tree):
    optimizer = OptaxOptimizer(optax.sgd(0.1))
    message = r"(?s)variables=.*must be a pytree of variables, with each of them once.*HINT: variables = jax.tree.map"
    with pytest.raises(InvalidArgumentError, match=message):
        optimizer.apply([jnp.ones(2)], tree)


def test_gradients_of_another_structure(strategy):
    with strategy.scope():
        a, b = variables((2,), (3,))
        optimizer = OptaxOptimizer(optax.sgd(0.1))
    ones, params = {"a": jnp.ones(2), "b": jnp.ones(3)}, {"a": a, "b": b}
    with pytest.raises(InvalidArgumentError, match="before the first apply.*\nHINT: optimizer.apply"):
        strategy.run(lambda: optimizer.apply(ones))
    for wrong in (
        {"a": ones["a"]},
        {**ones, "c": ones["a"]},
        {"a": ones, "b": ones},
        {**ones, "a": 1.0},
        [*ones.values()],
    ):
        with pytest.raises(
            InvalidArgumentError, match=r"(?s)gradients=.*must have .* at \['a'\], \['b'\]\..*HINT: loss"
        ):
            optimizer.apply(wrong, params)
    with pytest.raises(InvalidArgumentError, match=r"(?s)OptaxOptimizer with no gradients for any variable.*HINT: "):
        optimizer.apply({"a": None, "b": None}, params)
    strategy.run(lambda: optimizer.apply(ones, params))
    strategy.run(lambda: optimizer.apply(ones))
    strategy.run(lambda: optimizer.apply([ones["b"], ones["a"]], [b, a]))
    strategy.run(lambda: optimizer.apply_gradients(zip((ones["b"], ones["a"]), (b, a), strict=True)))
    optimizer.apply(ones.values(), iter([a, b]))
    optimizer.apply(list(ones.values()))
    np.testing.assert_allclose(a.numpy(), 1 - (4 * 2 + 2) * 0.1 * np.ones(2), atol=1e-6)


def test_other_variables_than_the_first(strategy):
    """Neither more nor fewer, also if a layer is unfrozen; and `build` works once."""
    a, b = variables((2,), (3,))
    optimizer = built(optax.sgd(0.1), [a, b])
    message = (
        r"(?s)OptaxOptimizer for 1 variables: the optimizer was built for 2.*difference is {}.*HINT: pass the same"
    )
    with pytest.raises(VariableError, match=message.format(b.path)):
        optimizer.apply([jnp.ones(2)], [a])
    with pytest.raises(VariableError, match=r"for 2 variables: the optimizer was built for 2"):
        optimizer.build([a, b])
    model = under(strategy, with_optax(optax.sgd(0.1)))
    model.layers[0].trainable = False
    model.fit(X[:BATCH], Y[:BATCH], **FIT)
    model.layers[0].trainable = True
    with pytest.raises(VariableError, match=r"(?s)for 4 variables: the optimizer was built for 2.*optax.masked"):
        model.fit(X[:BATCH], Y[:BATCH], **FIT)


def test_tables_are_refused():
    with pytest.raises(VariableError, match=r"(?s)OptaxOptimizer with a ShardedEmbedding.*HINT: keras.optimizers.Adam"):
        built(optax.sgd(0.1), [compat.make_table(lambda: keras.Variable(initializer="zeros", shape=(4, 2)))])


def test_tape_of_a_pytree(strategy):
    """Its gradients have the structure of the variables."""
    with strategy.scope():
        params = {"a": variables((2,))[0], "b": [variables((2,))[0]]}
        optimizer = OptaxOptimizer(optax.sgd(0.5))

    @phalanx.function
    def step():
        with phalanx.GradientTape() as tape:
            loss = keras.ops.sum(params["a"] * params["b"][0] ** 2) / 2
        optimizer.apply(tape.gradient(loss, params), params)

    strategy.run(step)
    np.testing.assert_allclose([params["a"].numpy(), params["b"][0].numpy()], [[0.5, 0.5], [0.0, 0.0]])


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_variable_without_a_gradient_keeps_its_value(strategy):
    """Even if weights decay. The clipping by the global norm counts its gradient as zeros."""
    with strategy.scope():
        params = {"a": variables((2,))[0], "b": variables((3,))[0]}
        optimizer = OptaxOptimizer(optax.chain(optax.clip_by_global_norm(2.0**0.5), optax.adamw(0.1, weight_decay=0.5)))
    strategy.run(lambda: optimizer.apply({"a": jnp.ones(2), "b": None}, params))
    np.testing.assert_array_equal(params["b"].numpy(), np.ones(3))
    np.testing.assert_allclose(params["a"].numpy(), (1 - 0.1 * 1.5) * np.ones(2), rtol=1e-5)


def test_learning_rate_of_a_schedule_callback(strategy):
    """With `optax.inject_hyperparams`, callbacks read and set it. The steps of both epochs use what was set."""
    model = under(strategy, with_optax(INJECTED(learning_rate=0.5)))
    other = under(strategy, with_optax(optax.sgd(lambda count: jnp.where(count < 2, 0.1, 0.2))))
    scheduler = keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.1 * (epoch + 1))
    history = model.fit(X[: 2 * BATCH], Y[: 2 * BATCH], epochs=2, callbacks=[scheduler], **FIT).history
    other.fit(X[: 2 * BATCH], Y[: 2 * BATCH], epochs=2, **FIT)
    np.testing.assert_allclose(history["learning_rate"], [0.1, 0.2], rtol=1e-6)
    for a, b in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_learning_rates_that_nobody_can_know(strategy, tmp_path):
    """Callbacks that change it are refused; those that only report it leave it out."""
    with pytest.raises(InvalidArgumentError, match=NO_RATE.format("the optimizer is not built")):
        print(OptaxOptimizer(INJECTED(learning_rate=0.5)).learning_rate)
    several = optax.chain(INJECTED(learning_rate=0.5), INJECTED(learning_rate=0.1))
    for transformation in (optax.sgd(0.1), several):
        with pytest.raises(InvalidArgumentError, match=NO_RATE.format("the transformation does not show one")):
            print(built(transformation).learning_rate)
    scheduled = built(INJECTED(learning_rate=optax.linear_schedule(0.5, 0.0, 10)))
    assert float(scheduled.learning_rate.numpy()) == 0.5
    with pytest.raises(InvalidArgumentError, match=NO_RATE.format("a schedule computes it")):
        scheduled.learning_rate = 0.1
    model = under(strategy, with_optax(optax.sgd(0.1)))
    for callback in (keras.callbacks.LearningRateScheduler(lambda _: 0.1), keras.callbacks.ReduceLROnPlateau("loss")):
        with pytest.raises(InvalidArgumentError, match=NO_RATE.format("the transformation does not show")):
            model.fit(X[:BATCH], Y[:BATCH], callbacks=[callback], **FIT)
    writer = phalanx.summary.create_tracker_writer(phalanx.summary.trackers.CSVTracker(tmp_path / "scalars.csv"))
    model.fit(X[:BATCH], Y[:BATCH], callbacks=[phalanx.keras.Tracking(writer)], **FIT)
    writer.close()
    assert "loss" in (tmp_path / "scalars.csv").read_text()


@keras.saving.register_keras_serializable()
class Momentum(OptaxOptimizer):
    """A transformation in a class that a file can name."""

    def __init__(self, name=None):
        super().__init__(optax.sgd(0.1, momentum=0.9), name)


def test_keras_file_of_a_subclass(strategy, tmp_path):
    """It continues with the state. The file of an OptaxOptimizer itself holds no functions."""
    model = under(strategy, compiled(optimizer=Momentum))
    model.fit(X[:BATCH], Y[:BATCH], **FIT)
    model.save(tmp_path / "model.keras")
    other = under(strategy, lambda: keras.models.load_model(tmp_path / "model.keras"))
    losses = [m.fit(X[:BATCH], Y[:BATCH], epochs=2, **FIT).history["loss"] for m in (model, other)]
    np.testing.assert_allclose(*losses, rtol=1e-5)
    model.compile(OptaxOptimizer(optax.sgd(0.1)), "mse")
    model.save(tmp_path / "model.keras")
    with pytest.raises(
        InvalidArgumentError, match=r"(?s)load a .keras file: a file cannot contain.*HINT: .*compile=Fal"
    ):
        keras.models.load_model(tmp_path / "model.keras")
    keras.models.load_model(tmp_path / "model.keras", compile=False)


def test_keras_file_of_a_pytree(strategy, tmp_path):
    """It is refused: the order of the state in the file would be another one than that of the list."""
    model = under(strategy, with_optax(optax.sgd(0.1)))
    model.optimizer.build({v.path: v for v in model.trainable_variables})
    with pytest.raises(
        InvalidArgumentError, match=r"(?s)model.save with an OptaxOptimizer for the pytree .*HINT: optim"
    ):
        model.save(tmp_path / "model.keras")


def test_scaled_losses_and_constraints(strategy):
    """What Keras does around the update of an optimizer, it does around this one."""
    with strategy.scope():
        variable = keras.Variable(np.ones(3, "float32"))
        variable.constraint = keras.constraints.NonNeg()
        optimizer = keras.optimizers.LossScaleOptimizer(OptaxOptimizer(optax.sgd(0.5)), initial_scale=4.0)
    for gradient in ([4.0, 8.0, -4.0], [np.inf, 0.0, 0.0]):  # Each replica has it: twice that, over 4.
        strategy.run(lambda: optimizer.apply([jnp.asarray(gradient)], [variable]))  # noqa: B023
    np.testing.assert_allclose(variable.numpy(), [0.0, 0.0, 2.0])
    assert float(optimizer.dynamic_scale.numpy()) == 2.0


def test_first_state_is_made_of_the_variables():
    """In a step too, where the variables have no values yet. Arrays that begin equal are different arrays."""
    strategy = phalanx.MirroredStrategy(["cpu:0", "cpu:1"], layout=phalanx.fully_sharded(min_size=1))
    made = []

    def step():
        if not made:
            made.append(keras.Variable(np.arange(4.0, dtype="float32")))
            made.append(OptaxOptimizer(optax.contrib.schedule_free_sgd(0.1)))
        made[1].apply([jnp.zeros(4)], [made[0]])

    with strategy.scope():
        strategy.run(step)
    z = next(v for v in made[1].variables if v.shape == (4,))
    np.testing.assert_array_equal(z.numpy(), np.arange(4.0))
    assert z.value.addressable_shards[0].data.shape == (2,)
    assert jax.tree.leaves(made[0].value)[0] is not z.value


def test_large_variables_without_arrays_have_a_state_without_arrays(monkeypatch):
    """As in a forecast, and in a worker that joins a group. The small arrays are made."""
    with settings.changed(hollow_bytes=1024):
        optimizer = built(optax.adam(0.1), variables((2,), (256,)))
    monkeypatch.setattr(keras.Variable, "value", None)  # It would make an array of zeros.
    count, *slots = optimizer.variables[1:]
    assert compat.raw_value(count) == 0
    assert [(v.shape, compat.is_hollow(v)) for v in slots] == [((2,), False), ((256,), True)] * 2
