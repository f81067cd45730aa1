"""The smallest whole step."""

import keras
import numpy as np
import pytest

import phalanx
from phalanx.errors import DeviceError


def test_two_replicas_train():
    """A step with a tape lowers the loss."""
    strategy = phalanx.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(1)])
        optimizer = keras.optimizers.Adam(0.1)
    x = np.random.default_rng(0).normal(size=(64, 8)).astype("float32")
    batches = list(strategy.experimental_distribute_dataset((x, x.sum(1)), batch_size=64)) * 20

    def step(batch):
        x, y = batch
        with phalanx.GradientTape() as tape:
            loss = phalanx.nn.compute_average_loss((model(x)[:, 0] - y) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    losses = [float(strategy.reduce("SUM", strategy.run(step, args=(b,)), axis=None)) for b in batches]
    assert losses[-1] < 0.5 * losses[0]


def test_number_of_devices():
    """`MirroredStrategy(2)`: the first two devices."""
    assert repr(phalanx.MirroredStrategy(2)) == "MirroredStrategy(['cpu:0', 'cpu:1'])"


@pytest.mark.parametrize(
    ("devices", "match"),
    [
        (0, "devices=0: this process has cpu:0, .*\nHINT: devices=8"),
        (99, r"devices=99: this process has cpu:0, .*\nHINT: phalanx.set_virtual_cpu_devices\(99\)"),
        ([], r"devices=\[\]: a strategy needs at least one device"),
        ({}, "devices={}: must be a list of devices or a number of devices"),
        (True, "devices=True: must be a list of devices or a number of devices"),
        (
            "cpu:0",
            r"devices='cpu:0': must be a list of devices or a number of devices.\nHINT: devices=\['cpu:0', \.\.\.\], one list",
        ),
    ],
)
def test_bad_devices_are_refused(devices, match):
    """None of them stands for all devices."""
    with pytest.raises(DeviceError, match=match):
        phalanx.MirroredStrategy(devices)
