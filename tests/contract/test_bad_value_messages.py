"""What errors say that no other test asks for."""

import jax.numpy as jnp
import keras
import numpy as np
import pytest
from bad_values import deleted

import phalanx

STRATEGY = phalanx.MirroredStrategy(["cpu:0", "cpu:1"])
ONE = phalanx.OneDeviceStrategy("cpu:0")


def iterator():
    """Batches of two rows."""
    return iter(STRATEGY.experimental_distribute_dataset(np.arange(8.0), batch_size=2))


def components(value):
    """Returns a value of which each replica has the same."""
    return STRATEGY.experimental_distribute_values_from_function(lambda context: value)


VERBS = {
    r"container_strategy='x': must be a Strategy.*HINT: strategy.extended": lambda: phalanx.StrategyExtended("x"),
    r"strategy='x': must be a Strategy.*HINT: phalanx.exp": lambda: phalanx.experimental_set_strategy("x"),
    r"strategy='x': must be a Strategy.*HINT: phalanx.get": lambda: phalanx.ReplicaContext("x", 0),
    r"id_in_sync_group=2: must be a number of a replica from 0 to 1": lambda: phalanx.ReplicaContext(STRATEGY, 2),
    r"masks=\[\]: must be a tuple of row masks": lambda: phalanx.ReplicaContext(STRATEGY, 0, []),
    r"fn='x': is not callable.*HINT: strategy.run_steps": lambda: STRATEGY.run_steps("x", iterator(), 2),
    r"steps=2147483648: must be an integer of at least 1": lambda: STRATEGY.run_steps(abs, iterator(), 2**31),
    r"variable='x': must be a variable of Keras.*HINT: strategy.held": lambda: STRATEGY.held("x"),
    r"args\[0\] that is a deleted array": lambda: STRATEGY.run(abs, args=(deleted(),)),
    r"args\[0\]\['x'\] that is a deleted array": lambda: ONE.run(len, args=({"x": deleted()},)),
    r"kwargs\['x'\] that is a deleted array": lambda: STRATEGY.run(lambda x: x, kwargs={"x": deleted()}),
    r"the result of a step that is a deleted array": lambda: (lambda x: STRATEGY.run(lambda: x))(deleted()),
    r"a step that returns PerReplica\(\('a', 'b'\)\)": lambda: STRATEGY.run(lambda: phalanx.PerReplica(("a", "b"))),
    r"value_fn: it returned a Mirrored": lambda: components(phalanx.Mirrored(jnp.ones(2))),
    r"value_fn's result that is a deleted array": lambda: components(deleted()),
    r"value='x': not an array of numbers": lambda: ONE.reduce("SUM", "x", axis=None),
    r"axis=None: must be an integer": lambda: ONE.gather(jnp.ones(2), axis=None),
    r"axis=2: the value has dims 0 to 0": lambda: ONE.gather(jnp.ones(2), axis=2),
}


@pytest.mark.parametrize("message", VERBS)
def test_verbs(message):
    """Of strategies and replica contexts."""
    with pytest.raises(phalanx.errors.PhalanxError, match=f"(?s){message}"):
        VERBS[message]()


def test_deleted_argument_of_a_known_program():
    """A program that has run before names the argument too."""
    step = phalanx.function(lambda x: x * 2)
    step(jnp.ones(3))
    with pytest.raises(phalanx.errors.InputError, match=r"args\[0\] that is a deleted array"):
        step(deleted())


def test_replicate_takes_what_acts_as_an_array():
    """It copies a variable, whose own array belongs to the next step."""
    with STRATEGY.scope():
        variable = keras.Variable([1.0, 2.0], aggregation="mean")
    tree = STRATEGY.replicate({"v": variable, "r": range(2)})
    STRATEGY.run(lambda: variable.assign_add([1.0, 1.0]))
    assert tree.value["v"].tolist() == [1.0, 2.0]
    assert tree.value["r"].tolist() == [0, 1]


def test_components_may_be_arrays_of_text():
    """They are Python objects, as text is."""
    assert components(np.array(["a"])).values[1].tolist() == ["a"]
