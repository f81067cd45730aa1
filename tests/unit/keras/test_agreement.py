"""What processes of `fit` compare. With real processes: tests/cluster/test_multi_worker.py."""

import keras
import numpy as np
import pytest

import phalanx
from phalanx.errors import DivergenceError
from phalanx.keras import agreement


class Shared(keras.callbacks.Callback):
    """A callback with a state of its own."""

    def __init__(self, state):
        super().__init__()
        self.state = state

    def get_state(self):
        return self.state

    def set_state(self, state):
        self.state = state


def states(*callbacks):
    with phalanx.OneDeviceStrategy("cpu:0").scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
    return agreement._states_of(model, callbacks)


def test_states_hold_what_steers():
    """What Keras sets, what `get_state` returns, and learning rates; not what a user's callback has besides."""

    class Stop(keras.callbacks.EarlyStopping):
        clock = 3.0

    stop = Stop(patience=3, verbose=1)
    stop.clock, stop.best = 4.0, np.float32(0.5)
    found = states(stop, Stop(), keras.callbacks.LambdaCallback(), Shared({"a": np.ones(2), "b": print}), Shared(7))
    assert (found["Stop"]["patience"], found["Stop"]["best"], found["Stop 1"]["patience"]) == (3, 0.5, 0)
    assert {"clock", "verbose", "model", "params"}.isdisjoint(found["Stop"])
    assert found["LambdaCallback"] == {}
    assert found["Shared"].keys() == {"a"}
    assert found["Shared 1"] == {"get_state()": 7}
    assert found["SGD"] == {"learning_rate": 0.1}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (0.1, 0.1 * (1 + 1e-7)),
        (float("nan"), float("nan")),
        ([1, {"a": 0.5}], [1, {"a": 0.5}]),
    ],
)
def test_values_that_may_differ_a_little(first, second):
    """The last bits of numbers, which processors of different kinds may round differently."""
    agreement._require_equal([{"A": {"x": first, "mine": 1}}, {"A": {"x": second}}, {"B": {"x": 3}}], 0)


@pytest.mark.parametrize(
    ("first", "second"),
    [(0.1, -0.1), (1, 2), (0.5, None), ([1, 2], [1]), ({"a": 1}, {"b": 1}), ([0.5], 0.5), ({"a": 0.5}, 1), ("a", "b")],
)
def test_values_that_must_be_equal(first, second):
    """The error has the owner, the name, the values with their ranks, and how many more there are."""
    ranks = [{"A": {"x": value, "y": value}} for value in (first, second, first)]
    with pytest.raises(DivergenceError) as raised:
        agreement._require_equal(ranks, 4)
    assert str(raised.value) == (
        f"fit on 3 workers, epoch 5: A.x is {first!r} on ranks 0, 2, {second!r} on rank 1, so that the workers would train "
        "differently from here on; 2 values differ in total.\nHINT: compute it in all workers from values that all of them have: the "
        "epoch, the logs of fit, or metrics of compile, which see the rows of all"
    )
