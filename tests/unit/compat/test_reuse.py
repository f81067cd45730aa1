"""Variables that are found by name, for functions that create their layers at each call."""

import copy
import pickle
import random
import threading

import keras
import numpy as np
import pytest

from phalanx._src import compat
from phalanx._src.compat import reuse
from phalanx.errors import VariableError


def test_second_call_gets_the_variables_of_the_first():
    """Layers without names, and variables without names, are the same ones in each block."""
    store, found = compat.VariableStore(seed=0), []
    for _ in range(2):
        with store.reusing():
            layers = [keras.layers.Dense(2), keras.layers.Dense(2)]
            layers[1](layers[0](np.ones((1, 3), "float32")))
            found.append([v for layer in layers for v in layer.variables] + [keras.Variable(1.0), keras.Variable(2.0)])
    assert all(a is b for a, b in zip(*found, strict=True))
    names = [f"{layer}/{name}" for layer in ("dense", "dense_1") for name in ("kernel", "bias")]
    assert list(store.variables) == [*names, "variable", "variable_1"]
    assert float(found[1][-1].value) == 2


def test_known_variable_keeps_its_value():
    """Creating it again does not initialize it. If the shape is another one, the error names the variable and both shapes."""
    store = compat.VariableStore(seed=0)
    for wanted in (1, 5):
        with store.reusing():
            variable = keras.Variable([1.0, 1.0], name="weight")
        assert variable.numpy().tolist() == [wanted] * 2
        variable.assign([5.0, 5.0])
    match = r"the variable 'weight' of shape .*has the shape \(2,\)"
    for shape in ((3,), 3, (2, 1)):
        with store.reusing(), pytest.raises(VariableError, match=match):
            keras.Variable("zeros", shape=shape, name="weight")


def test_name_that_is_used_twice():
    store, pairs = compat.VariableStore(seed=0), []
    for _ in range(2):
        with store.reusing(), keras.name_scope("part"):
            pairs.append([keras.Variable(0.0, name="a"), keras.Variable(0.0, name="a")])
    assert pairs[0][0] is pairs[1][0] is not pairs[0][1]
    assert pairs[0][1] is pairs[1][1]
    assert set(store.variables) == {"part/a", "part/a_1"}


def test_seeds_of_a_block():
    """Each block draws the same seeds, and Python's generator goes on after it as if it had not been."""
    store, drawn = compat.VariableStore(seed=1), []
    random.seed(7)
    before = random.random()
    random.seed(7)
    for _ in range(2):
        with store.reusing():
            drawn.append(random.random())
    assert drawn[0] == drawn[1] != before
    assert random.random() == before
    with compat.VariableStore(seed=2).reusing():
        assert random.random() != drawn[0]
    with compat.VariableStore().reusing():
        assert random.random() != drawn[0]


def test_names_outside_go_on():
    """A block counts its own names. Variables outside, copies and pickles are new."""
    outside = keras.Variable(1.0)
    store = compat.VariableStore(seed=0)
    with store.reusing():
        inside = keras.Variable(1.0)
        assert reuse.store() is store
        nested = compat.VariableStore(seed=0)
        with nested.reusing():
            other = keras.Variable(1.0)
        assert keras.Variable(3.0) is store.variables["variable_1"]
    assert reuse.store() is None
    assert inside.name == other.name == "variable"
    assert len({id(v) for v in (outside, inside, other, keras.Variable(1.0))}) == 4
    assert copy.copy(outside) is not outside
    assert float(pickle.loads(pickle.dumps(np.asarray(inside.value)))) == 1


def test_other_threads_do_not_reuse():
    """The block of a thread is its own. A block that fails leaves no trace."""
    store, found = compat.VariableStore(seed=0), []
    with store.reusing():
        thread = threading.Thread(target=lambda: found.append(keras.Variable(1.0, name="weight")))
        thread.start()
        thread.join()
        mine = keras.Variable(2.0, name="weight")
    assert found[0] is not mine
    assert store.variables == {"weight": mine}
    with pytest.raises(KeyError), store.reusing():
        raise KeyError
    assert reuse.store() is None
    assert keras.Variable(1.0) not in store.variables.values()
