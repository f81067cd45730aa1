"""Variables that are frozen and unfrozen after the optimizer was built."""

import functools

import keras
import numpy as np
import pytest
from twins import BATCH, FIT, X, Y, alone, compiled, crossentropy, mlp, replicas, same, same_state, twins, under

import phalanx
from phalanx._src import compat
from phalanx.errors import VariableError

pytestmark = pytest.mark.slow


@pytest.fixture
def strategy():
    return replicas(2)


class OwnStep(keras.Sequential):
    """A custom step that works on variables."""

    def train_step(self, data):
        x, y = data
        with phalanx.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        trained = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, trained), trained, strict=True))
        return {}


class StatelessStep(keras.Sequential):
    """A custom step as Keras has it on JAX, which hands the state on."""

    def train_step(self, state, data):
        return super().train_step(state, data)


def model_of(kind):
    return lambda: kind([keras.layers.Input((5,)), keras.layers.Dense(6, "tanh"), keras.layers.Dense(3)])


TRAINABLE = (False, True, False, True)


@functools.cache
def weights_by_keras():
    """The weights after each of four trainings by Keras, in which the first layer is frozen and unfrozen."""
    make, found = lambda: keras.optimizers.SGD(0.5), []
    model = alone(compiled(model_of(keras.Sequential), optimizer=make))
    for trainable in TRAINABLE:
        model.layers[0].trainable = trainable
        model.compile(make(), crossentropy())
        model.fit(X, Y, **FIT)
        found.append(model.get_weights())
    return found


@pytest.mark.cover(["kind", "compiles"], {(keras.Sequential, True), (OwnStep, False), (StatelessStep, True)})
@pytest.mark.parametrize(
    ("kind", "compiles"), [(keras.Sequential, False), (keras.Sequential, True), (OwnStep, False), (StatelessStep, True)]
)
def test_layers_are_frozen_and_unfrozen(strategy, kind, compiles):
    """A layer trains whenever it is trainable, whether the model is compiled again or not. Keras's model is, with a new optimizer."""
    ours = under(strategy, compiled(model_of(kind), optimizer=lambda: keras.optimizers.SGD(0.5)))
    for trainable, expected in zip(TRAINABLE, weights_by_keras(), strict=True):
        ours.layers[0].trainable = trainable
        if compiles:
            with strategy.scope():
                ours.compile(ours.optimizer, crossentropy())
        ours.fit(X, Y, **FIT)
        same(ours.get_weights(), expected)


@pytest.mark.cover(["accumulates"], {True})
@pytest.mark.parametrize("accumulates", [False, True])
def test_slots_keep_their_values(strategy, accumulates):
    """A slot of a frozen variable waits, and that of a new one begins, as in an optimizer that was built for all variables."""
    make = lambda: keras.optimizers.Adam(0.05, gradient_accumulation_steps=7 if accumulates else None)  # noqa: E731
    models = [under(strategy, compiled(optimizer=make)) for _ in range(2)]
    models[1].optimizer.build(models[1].trainable_variables)
    for trainable in (False, True, False, True):
        for model in models:
            model.layers[0].trainable = trainable
            model.fit(X, Y, **FIT)
    same_state(*models)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: keras.optimizers.Nadam(0.05), id="a variable of the whole optimizer"),
        pytest.param(lambda: keras.optimizers.Adafactor(0.05), id="slots of other shapes"),
        pytest.param(lambda: keras.optimizers.ScheduleFreeAdamW(0.05), id="slots that begin with the weights"),
        pytest.param(lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.05)), id="scaled losses"),
    ],
)
def test_slots_have_the_order_of_files(strategy, make):
    """A file that is written after a layer was unfrozen can be read into an optimizer that was built for all variables."""
    model = under(strategy, compiled(optimizer=make))
    model.layers[0].trainable = False
    model.fit(X, Y, **FIT)
    kept = [(v, v.numpy()) for v in model.optimizer.variables]
    model.layers[0].trainable = True
    compat.train_unfrozen(model)
    for variable, value in kept:
        assert any(variable is v for v in model.optimizer.variables)
        np.testing.assert_array_equal(variable, value)
    assert len({id(v) for v in model.optimizer.variables}) == len(model.optimizer.variables)
    whole = under(strategy, compiled(optimizer=make)).optimizer
    whole.build(model.trainable_variables)
    names = [[v.name for v in o.variables if not v.name.startswith("variable")] for o in (model.optimizer, whole)]
    assert names[0] == names[1]
    model.fit(X, Y, **FIT)


def test_moving_averages_of_frozen_layers(strategy):
    """The weights that are trainable at the end of `fit` become their moving averages, and no others."""
    make = lambda: keras.optimizers.SGD(0.5, use_ema=True, ema_momentum=0.5)  # noqa: E731
    ours, theirs = twins(strategy, compiled(optimizer=make))
    for model in (ours, theirs):
        model.fit(X, Y, **FIT)
    frozen = ours.layers[0].get_weights()
    ours.layers[0].trainable = False
    ours.fit(X, Y, **FIT)
    same(ours.layers[0].get_weights(), frozen)
    averages = [v for v in ours.optimizer.variables if "average" in v.path][-2:]
    same(ours.layers[1].get_weights(), [v.numpy() for v in averages])


def test_step_that_trains_a_part(strategy):
    """An optimizer that a custom step uses for some variables gets no slots for the others."""

    class Part(OwnStep):
        def train_step(self, data):
            x, y = data
            trained = self.layers[1].trainable_variables
            with phalanx.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            self.optimizer.apply_gradients(zip(tape.gradient(loss, trained), trained, strict=True))
            return {}

    model = under(strategy, compiled(model_of(Part)))
    model.optimizer.build(model.layers[1].trainable_variables)
    count = len(model.optimizer.variables)
    model.fit(X, Y, **FIT, epochs=2)
    model.fit(X, Y, **FIT)
    assert len(model.optimizer.variables) == count


def test_variable_without_slots_is_named(strategy):
    """A custom loop that unfreezes a layer learns which variable the optimizer does not know."""
    model = under(strategy, mlp)
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(model.layers[1].trainable_variables)

    def step(x):
        gradients = [v * 0 + x.mean() for v in model.trainable_variables]
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    with pytest.raises(
        VariableError, match=r"kernel' \(5, 6\) float32: the optimizer was built for 2 other variables"
    ) as e:
        strategy.run(step, args=(X[:BATCH],))
    assert "HINT: optimizer.build(model.variables)" in str(e.value)
