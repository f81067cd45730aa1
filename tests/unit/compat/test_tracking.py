"""The parts of Keras's objects, and who hears of new variables."""

import pickle

import keras
import numpy as np
import pytest
from keras import layers

from phalanx._src import compat


def test_attributes_of_users_are_parts():
    """Those of Keras itself are not, but models have layers, an optimizer and metrics."""

    class Block(layers.Layer):
        def __init__(self):
            super().__init__()
            self.steps = [layers.Dense(2), {"last": layers.Dense(3)}]
            self.seen = keras.metrics.Mean()
            self.size, self.names = 3, ["a", "b"]

    block = Block()
    parts = dict(compat.parts_of(block))
    assert parts.keys() == {"steps", "seen", "names", "sublayers"}
    assert parts["steps"][0] is block.steps[0]
    model = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
    parts = dict(compat.parts_of(model))
    assert (parts["layers"], parts["optimizer"]) == (model.layers, None)
    model.compile("adam", "mse")
    parts = dict(compat.parts_of(model))
    assert parts["optimizer"] is model.optimizer
    assert parts["metrics"] == model.metrics


def test_generated_names_do_not_change():
    """Although Keras's own attributes are found on objects that are made for it."""
    before = keras.Sequential().name, layers.Layer().name, keras.optimizers.SGD().name
    compat.tracking._hidden.cache_clear()
    list(compat.parts_of(keras.Sequential()))
    list(compat.parts_of(layers.Layer()))
    after = keras.Sequential().name, layers.Layer().name, keras.optimizers.SGD().name
    numbers = [[int(name.rpartition("_")[2]) if "_" in name else 0 for name in names] for names in (before, after)]
    assert [b - a for a, b in zip(*numbers, strict=True)] == [2, 2, 1]


def test_chosen_names_look_like_generated_ones():
    """`Operation.__init__` is told them, whatever the arguments of the layer are. Pickles of them are plain texts."""

    class Block(layers.Layer):
        def __init__(self, number):
            super().__init__(name=f"block_{number}")

    chosen = Block(2), layers.Dense(1, name="dense_3", kernel_initializer=keras.initializers.Zeros())
    assert [compat.chosen_name(layer) for layer in chosen] == ["block_2", "dense_3"]
    assert [compat.given_name(layer) for layer in chosen] == [None, None]
    for other in (layers.Dense(1), layers.Dense(1, name="mine"), keras.Sequential(), keras.metrics.Mean()):
        assert compat.chosen_name(other) is None
    assert type(pickle.loads(pickle.dumps(chosen[0].name))) is str


def test_own_variables_are_those_of_one_object():
    """In the order of their creation."""
    dense = layers.Dense(2)
    dense.build((None, 3))
    assert compat.own_variables(dense) == [dense.kernel, dense.bias]
    assert compat.own_variables(keras.Sequential([keras.Input((3,)), dense])) == []
    mean, seed, optimizer = keras.metrics.Mean(), keras.random.SeedGenerator(1), keras.optimizers.Adam()
    assert compat.own_variables(mean) == mean.variables
    assert compat.own_variables(seed) == [seed.state]
    optimizer.build(dense.variables)
    assert compat.own_variables(optimizer) == optimizer.variables
    assert compat.own_variables(keras.losses.MeanSquaredError()) == []


def test_growth_is_told_after_a_build(monkeypatch):
    """`Layer._post_build` of Keras, and `build` of each class of optimizers: when the slots are there."""
    told = []
    monkeypatch.setattr(compat.engine_hooks, "grown", [told.append])
    dense, optimizer = layers.Dense(2), keras.optimizers.SGD(0.1, momentum=0.9)
    told.clear()
    dense(np.ones((1, 3)))
    assert told == [dense]
    optimizer.build(dense.trainable_variables)
    assert set(map(id, told)) == {id(dense), id(optimizer)}
    assert told[-1] is optimizer

    class Own(keras.optimizers.SGD):
        """A class of a user, which makes its slots after those of its base."""

        def build(self, variables):
            super().build(variables)
            told.clear()

    own = Own(0.1)
    own.build(dense.trainable_variables)
    assert told == [own]


@pytest.mark.parametrize("value", [5.0, np.array(5.0)])
def test_first_value_replaces_the_initializer(value):
    """Of a variable that has no value yet; others are assigned, but not inside a scope."""
    with keras.StatelessScope():
        variable = keras.Variable("zeros", shape=())
        assert compat.set_first_value(variable, value)
    assert float(variable) == 5
    assert compat.set_first_value(variable, value + 1)
    assert float(variable) == 6
    with keras.StatelessScope():
        assert not compat.set_first_value(variable, 0.0)
    assert float(variable) == 6
