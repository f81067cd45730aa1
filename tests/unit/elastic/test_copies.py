"""Copies of variables: which values they have, what is copied again, and what cannot be copied."""

import keras
import numpy as np
import pytest

import phalanx
from phalanx._src.elastic import copies
from phalanx._src.elastic.copies import Copier, fingerprint, kinds_here, present


@pytest.fixture
def strategy():
    return phalanx.MirroredStrategy(["cpu:0", "cpu:1"])


def test_copy_has_all_values(strategy):
    """Of the moment of the copy, whatever a step makes of the arrays afterwards."""
    with strategy.scope():
        v = keras.Variable([1.0, 2.0], aggregation="sum")
        metric = keras.metrics.Mean()

    def step():
        v.assign_add([1.0, 1.0])
        metric.update_state(v.value)

    strategy.run(step)
    found = Copier().copy(7, [0, 0], {"at": 1}, strategy.topology)
    strategy.run(step)
    assert (found.step, found.stage, found.position) == (7, [0, 0], {"at": 1})
    np.testing.assert_array_equal(found.values.get(v).value, [3.0, 4.0])
    assert float(found.values.get(metric.count).value) == 4.0
    np.testing.assert_array_equal(v.value, [5.0, 6.0])


def test_unchanged_array_is_not_copied_again(strategy):
    """A frozen variable costs nothing in later copies, and a changed one is copied."""
    with strategy.scope():
        frozen, v = keras.Variable([1.0], trainable=False), keras.Variable([1.0], aggregation="sum")
    copier = Copier()

    def step():
        v.assign_add(frozen)

    strategy.run(step)
    first = copier.copy(0, [0, 0], {}, strategy.topology)
    strategy.run(step)
    second = copier.copy(1, [0, 0], {}, strategy.topology)
    assert first.values.get(frozen) is second.values.get(frozen)
    assert first.values.get(v) is not second.values.get(v)
    assert float(second.values.get(v).value[0]) == 5.0


def test_new_variables_are_missed(strategy):
    """Until the next copy."""
    copier = Copier()
    copier.copy(0, [0, 0], {}, strategy.topology)
    assert not copier.has_missed
    v = keras.Variable(1.0)
    assert copier.has_missed
    assert copier.copy(0, [0, 0], {}, strategy.topology).values.get(v) is not None
    assert not copier.has_missed


def test_consumed_array_cannot_be_copied(strategy):
    """Unless an old value will do, or zeros."""
    with strategy.scope():
        v = keras.Variable([2.0])
    copier = Copier()
    before = copier.copy(0, [0, 0], {}, strategy.topology)
    v.value.delete()
    try:
        assert copier.copy(1, [0, 0], {}, strategy.topology) is None
        lenient = copier.copy(1, [0, 1], {}, strategy.topology, is_lenient=True)
        np.testing.assert_array_equal(lenient.values.get(v).value, [2.0])
        fresh = Copier().copy(1, [0, 1], {}, strategy.topology, is_lenient=True)
        np.testing.assert_array_equal(fresh.values.get(v).value, [0.0])
        before.values.discard(v)
        assert present([before]).get(v) is None
    finally:
        v.assign([0.0])


def test_accumulated_gradients_cannot_be_copied(strategy):
    """Each process knows its own only. Once they are applied, they are zero."""
    with strategy.scope():
        w = keras.Variable([1.0])
        optimizer = keras.optimizers.SGD(0.5, gradient_accumulation_steps=2)

    def step():
        optimizer.apply_gradients([(w.value * 0.0 + 1.0, w)])

    copier = Copier()
    strategy.run(step)
    assert copier.copy(1, [0, 0], {}, strategy.topology) is None
    strategy.run(step)
    found = copier.copy(2, [0, 0], {}, strategy.topology)
    assert float(found.values.get(w).value[0]) != 1.0


def test_others_have_their_present_values():
    copier = Copier()
    strategy = phalanx.OneDeviceStrategy("cpu:0")
    found = copier.copy(0, [0, 0], {}, strategy.topology)
    v = keras.Variable([4.0])
    values = present([found])
    assert values.get(v).value.tolist() == [4.0]
    assert found.values.get(v) is None
    assert found.completed(values).values.get(v).value.tolist() == [4.0]
    assert copies._variables.get(v)


def test_fingerprint_does_not_depend_on_the_order():
    """Two variables with one path differ by their number; another shape makes another text."""
    v, same, other = keras.Variable([4.0], name="v"), keras.Variable([5.0], name="v"), keras.Variable(1.0, name="w")
    kinds = [kind for variable, kind in kinds_here() if any(variable is x for x in (v, same, other))]
    assert kinds[1].number == kinds[0].number + 1
    assert fingerprint(kinds) == fingerprint(kinds[::-1])
    assert fingerprint(kinds) != fingerprint([*kinds[:2], kinds[2]._replace(shape=(1,))])


def test_accumulated_gradients_that_were_read_can_be_copied(strategy):
    """Every process has the whole sum then, as of an optimizer whose training is over. It belongs to the first process."""
    with strategy.scope():
        w, optimizer = keras.Variable([1.0]), keras.optimizers.SGD(0.1, gradient_accumulation_steps=3)
    strategy.run(lambda: optimizer.apply_gradients([(keras.ops.ones(1), w)]))
    assert Copier().copy(0, [0, 0], {}, strategy.topology) is None
    (accumulator,) = [v for v in optimizer.variables if v.synchronization == "on_demand"]
    assert float(accumulator.value[0]) == 2.0
    accumulator.assign([2.0])
    found = Copier().copy(0, [0, 0], {}, strategy.topology)
    accumulator.assign([0.0])
    copies.put_shares(found, strategy.topology)
    assert float(accumulator.value[0]) == 2.0
