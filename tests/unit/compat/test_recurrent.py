"""Stateful recurrent layers: each replica has the states of its own rows, and carries them on.

Keras on JAX carries no states from one compiled batch to the next. So the reference is its eager layer, or one device.
"""

import functools

import keras
import numpy as np
import pytest
from keras import layers

import phalanx
from phalanx.errors import InputError

ROWS = 4
X = np.random.default_rng(0).normal(size=(3 * ROWS, 3, 2)).astype("float32")
Y = X[:, 0, :1] - X[:, 1, 1:]
BATCHES = [slice(i, i + ROWS) for i in range(0, len(X), ROWS)]


def one_device():
    return phalanx.OneDeviceStrategy("cpu:0")


def model_of(layer, shape=(3, 2), **compiled):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input(shape, batch_size=ROWS), layer(), layers.Flatten(), layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse", **compiled)
    return model


def lstm():
    return layers.LSTM(2, stateful=True)


LAYERS = {
    "lstm": lstm,
    "simple": lambda: layers.SimpleRNN(2, stateful=True),
    "stacked cells": lambda: layers.RNN([layers.GRUCell(2), layers.LSTMCell(3)], stateful=True),
    "both directions": lambda: layers.Bidirectional(layers.GRU(2, stateful=True)),
    "convolution": lambda: layers.ConvLSTM1D(2, 2, stateful=True),
    "all beside each other": lambda: Beside(),
}


class Beside(layers.Layer):
    """The layers of all kinds on the same rows: one training shows what each of them does."""

    def __init__(self):
        super().__init__()
        self.parts = [make() for kind, make in LAYERS.items() if kind != "all beside each other"]

    @property
    def states(self):
        return [part.states for part in self.parts]

    def build(self, shape):
        for part in self.parts:
            part.build((*shape, 1) if isinstance(part, layers.ConvLSTM1D) else shape)

    def call(self, x):
        found = [part(x[..., None] if isinstance(part, layers.ConvLSTM1D) else x) for part in self.parts]
        return keras.ops.concatenate([y[:, 0] if y.ndim == 3 else y for y in found], axis=-1)


def states_of(model):
    return [v.numpy() for v in keras.tree.flatten(model.layers[0].states)]


def same(ours, theirs):
    for a, b in zip(keras.tree.flatten(ours), keras.tree.flatten(theirs), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-6)


@pytest.mark.cover(["kind"], {"all beside each other"})
@pytest.mark.parametrize("kind", LAYERS)
def test_states_are_carried_on(strategy, kind):
    """Predictions of consecutive batches are those of the eager layer, and training goes on as on one device."""
    x = X.reshape(*X.shape, 1) if kind == "convolution" else X
    shape = x.shape[1:]
    with strategy.scope():
        ours = model_of(LAYERS[kind], shape)
    eager = model_of(LAYERS[kind], shape)
    for rows in BATCHES:
        same(ours.predict_on_batch(x[rows]), eager(x[rows]))
    same(states_of(ours), states_of(eager))
    with one_device().scope():
        alone = model_of(LAYERS[kind], shape)
    for model in (ours, alone):
        for state in keras.tree.flatten(model.layers[0].states):
            state.assign(np.zeros(state.shape))
    fitted = [model.fit(x, Y, batch_size=ROWS, epochs=2, shuffle=False, verbose=0).history for model in (ours, alone)]
    same(*fitted)
    same([ours.get_weights(), states_of(ours)], [alone.get_weights(), states_of(alone)])


STRATEGIES = {
    "mirrored": lambda: phalanx.MirroredStrategy(["cpu:0", "cpu:1"]),
    "central storage": lambda: phalanx.experimental.CentralStorageStrategy(["cpu:1", "cpu:2"], "cpu:0"),
    "fully sharded": lambda: phalanx.MirroredStrategy(["cpu:0", "cpu:1"], layout=phalanx.fully_sharded(min_size=1)),
}


def results_of_all_methods(strategy):
    with strategy.scope():
        model = model_of(lstm, steps_per_execution=2)
    options = {"batch_size": ROWS, "verbose": 0}
    history = model.fit(X, Y, shuffle=False, **options, validation_data=(X, Y), validation_batch_size=ROWS).history
    found = [history, states_of(model), model.evaluate(X, Y, **options), states_of(model)]
    model.layers[0].reset_state()
    assert not np.any(states_of(model))
    return [*found, model.predict(X, **options), states_of(model)]


@functools.cache
def those_of_one_device():
    return results_of_all_methods(one_device())


@pytest.mark.cover(["kind"], {"fully sharded"})
@pytest.mark.parametrize("kind", STRATEGIES)
def test_states_in_all_methods(kind):
    """Several steps in one program, the validation, `evaluate` and `predict` carry states on; `reset_state` sets them to zero."""
    same(results_of_all_methods(STRATEGIES[kind]()), those_of_one_device())


@pytest.mark.parametrize("compiles", [False, True])
def test_states_in_a_custom_loop(strategy, compiles):
    """A layer that the first step builds has states for the global batch. A merge function sees the rows of all replicas."""
    results = []
    for one in (strategy, one_device()):
        keras.utils.set_random_seed(1)
        with one.scope():
            layer = lstm()

        def step(x, layer=layer):
            outputs = layer(x)
            merge = lambda _: layer.states[0].value * 1  # noqa: E731
            return outputs, phalanx.Mirrored(phalanx.get_replica_context().merge_call(merge))

        def whole_step(x, one=one, step=step):
            outputs, states = one.run(step, args=(x,))
            return one.gather(outputs, axis=0), states.value

        run = phalanx.function(whole_step) if compiles else whole_step
        found = [run(x) for x in one.experimental_distribute_dataset(X, batch_size=ROWS)]
        results.append([found, [v.numpy() for v in layer.states]])
    same(*results)
    assert results[0][1][0].shape == (ROWS, 2)


@pytest.mark.parametrize("method", ["fit", "predict"])
def test_a_short_batch_is_refused(strategy, method):
    """As Keras refuses it. The batches before it count."""
    with strategy.scope():
        model = model_of(lstm)
    arguments = (X[:7],) if method == "predict" else (X[:7], Y[:7])
    with pytest.raises(
        InputError,
        match=r"built for 4 rows, on a batch of which a replica has 1 rows: each replica has the states of 2",
    ) as e:
        getattr(model, method)(*arguments, batch_size=ROWS, verbose=0)
    assert "HINT: batches that all have 4 rows; experimental_distribute_dataset(..., drop_remainder=True)" in str(
        e.value
    )


def test_other_numbers_of_rows_are_refused(strategy):
    """A step gets other rows than the states have, or three rows for two replicas."""
    with strategy.scope():
        layer = lstm()
        layer.build((ROWS, 3, 2))
        odd = lstm()
        odd.build((3, 3, 2))
    whole = strategy.experimental_distribute_values_from_function
    with pytest.raises(
        InputError,
        match=r"built for 4 rows, on a batch of which a replica has 3 rows: each replica has the states of 2",
    ):
        strategy.run(layer, args=(whole(lambda _: X[:3]),))
    with pytest.raises(InputError, match="built for 3 rows: 2 replicas cannot have equal numbers of these rows"):
        strategy.run(odd, args=(whole(lambda _: X[:2]),))


def test_model_of_a_fixed_batch(strategy):
    """A model without states takes other batches than the one that its input names, as in Keras."""
    results = []
    for scope in (strategy.scope(), one_device().scope()):
        with scope:
            model = model_of(lambda: layers.Dense(3, activation="tanh"))
        history = model.fit(X[:11], Y[:11], batch_size=ROWS, epochs=2, shuffle=False, verbose=0).history
        scores = model.evaluate(X[:11], Y[:11], batch_size=ROWS, verbose=0)
        results.append([history, scores, model.predict(X[:11], batch_size=ROWS, verbose=0), model.get_weights()])
    same(*results)
