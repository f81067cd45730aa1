"""The default strategy, and a strategy of one device."""

import keras
import numpy as np
import pytest

import phalanx


@pytest.mark.parametrize(
    "make", [phalanx.get_strategy, lambda: phalanx.OneDeviceStrategy("cpu:0")], ids=["default", "one"]
)
def test_one_replica_returns_values_unchanged(make):
    """`reduce` with axis None, `gather` and `run` give the value; an axis reduces locally."""
    one = make()
    x = np.float32([[1, 2], [3, 4]])
    assert one.reduce("SUM", 7.0, axis=None) == 7.0
    assert one.reduce("SUM", x, axis=0).tolist() == [4, 6]
    assert float(one.reduce("MEAN", x, axis=(0, 1))) == 2.5
    np.testing.assert_array_equal(one.gather(x, axis=0), x)
    assert one.run(lambda x: {"x": x}, args=("text",)) == {"x": "text"}
    assert one.experimental_local_results(5) == (5,)


def test_default_strategy_runs_a_tape():
    """A replica function with a tape works without a strategy too, and its effects happen once."""
    v, log = keras.Variable(3.0), keras.Variable(0.0, trainable=False)

    def step(x):
        log.assign_add(1.0)
        with phalanx.GradientTape() as tape:
            loss = v * v * x
        return tape.gradient(loss, v)

    assert [float(phalanx.get_strategy().run(step, args=(x,))) for x in (1.0, 2.0)] == [6, 12]
    assert log.numpy() == 2
