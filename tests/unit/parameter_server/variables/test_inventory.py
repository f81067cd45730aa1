"""Which variables servers hold, as a script finds them that starts again."""

import keras
import numpy as np
import pytest

from phalanx._src.parameter_server.remote.plans import Inventory, Label, ServerPart, VariableId
from phalanx._src.parameter_server.variables.inventory import id_of, labels_of, stored_in

KERNEL = VariableId("dense/kernel", 0, (5, 2), "float32")
COUNT = VariableId("sgd/iteration", 0, (), "int32")


def test_copies_on_several_servers():
    """They are one part, which the first of them is asked for."""
    stored = stored_in(
        [Inventory({}, {}), Inventory({}, {7: Label(COUNT, 0, None)}), Inventory({}, {7: Label(COUNT, 0, None)})]
    )
    assert stored == {COUNT: (((ServerPart(1, 7, 0, None),)), {7: (1, 2)})}


def test_shards_in_the_order_of_their_rows():
    """The second server may have the first rows."""
    (stored,) = stored_in([Inventory({}, {1: Label(KERNEL, 3, 5)}), Inventory({}, {2: Label(KERNEL, 0, 3)})]).values()
    assert stored.placement == (ServerPart(1, 2, 0, 3), ServerPart(0, 1, 3, 5))
    assert stored.holders == {1: (0,), 2: (1,)}


@pytest.mark.parametrize(
    "rows", [[(0, 3)], [(3, 5)], [(0, 2), (3, 5)], [(0, 3), (0, 3), (3, 5)], [(0, None), (0, None)]]
)
def test_variables_that_are_not_complete(rows):
    """Their move to the servers was cut off, so they have no value."""
    labels = {key: Label(KERNEL, *of_key) for key, of_key in enumerate(rows)}
    assert stored_in([Inventory({}, labels)]) == {}


def test_variables_with_one_path():
    """They differ in their number, and in shape and dtype."""
    first, second = (keras.Variable(np.zeros((2, 3), "float32"), name="mine_alone") for _ in range(2))
    assert id_of(first) == VariableId("mine_alone", 0, (2, 3), "float32")
    assert id_of(second) == VariableId("mine_alone", 1, (2, 3), "float32")


def test_metrics_have_no_label():
    """They begin again."""
    part = ServerPart(0, 3, 0, None)
    (variable,) = keras.metrics.Sum().variables
    assert labels_of(variable, part) == {}
    assert list(labels_of(keras.Variable(0.0), part)) == [3]
