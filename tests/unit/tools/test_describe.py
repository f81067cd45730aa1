"""What `describe` prints."""

import io

import keras
import numpy as np
import pytest
from rich.console import Console

import phalanx
from phalanx.errors import InvalidArgumentError


def printed(strategy, *objects):
    """The lines, without the spaces between their columns."""
    console = Console(file=io.StringIO(), width=200)
    phalanx.describe(strategy, *objects, console=console)
    return [" ".join(line.split()) for line in console.file.getvalue().splitlines() if line.strip()]


def strategy_of(**options):
    return phalanx.MirroredStrategy([f"cpu:{i}" for i in range(4)], **options)


def test_mesh_has_a_row_per_replica():
    """A row a replica, a column for each of its devices."""
    lines = printed(strategy_of(model_axis=("model", 2)))
    assert lines[0] == "2 replicas x model of 2"
    assert lines[1] == "replica model 0 model 1"
    assert lines[3:] == ["0 cpu:0 cpu:1", "1 cpu:2 cpu:3"]


def test_model_with_its_optimizer():
    """Every variable has a row; the bytes are those of the parts."""
    strategy = strategy_of(model_axis=("model", 2), layout={".*kernel": (None, "model")})
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(8, name="d")], name="net")
        model.compile(keras.optimizers.Adam(name="adam"), "mse")
        model.optimizer.build(model.trainable_variables)
    lines = printed(strategy, model)
    at = lines.index("net/d/kernel float32[4, 8] [:, 0:4] cpu:0 cpu:2")
    assert lines[at + 1] == "[:, 4:8] cpu:1 cpu:3"
    assert "net/d/bias float32[8]" in lines
    assert "adam/net_d_kernel_momentum float32[4, 8] [:, 0:4] cpu:0 cpu:2" in lines
    # Half of three kernels, three biases, two scalars of the loss and two of the optimizer.
    assert lines[-4:] == [f"cpu:{i} {4 * (3 * 16 + 3 * 8 + 2 + 2)} bytes" for i in range(4)]


def test_variables_that_live_elsewhere():
    """Where they are, they are."""
    strategy = phalanx.experimental.CentralStorageStrategy(["cpu:1", "cpu:2"], "cpu:0")
    with strategy.scope():
        v = keras.Variable(np.zeros((3, 1000), "float32"), name="v")
    lines = printed(strategy, [v])
    assert "v float32[3, 1000] whole cpu:0" in lines
    assert lines[-1] == "cpu:0 12 kB"


def test_objects_without_variables_are_refused():
    """A typed error. The default strategy places nothing."""
    assert printed(phalanx.get_strategy())[0] == "1 replica, on JAX's default device"
    with pytest.raises(InvalidArgumentError, match=r"describe\(5\): .* is not a variable.*\nHINT: describe\(model\)"):
        phalanx.describe(strategy_of(), 5)
