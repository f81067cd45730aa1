"""Files of the format before. The file in `data` was written by the version before names; its program is below."""

from pathlib import Path

import keras
import numpy as np
import pytest
from keras import layers

import phalanx
from phalanx.errors import CheckpointMismatchError
from phalanx.train import Checkpoint

FILE = Path(__file__).parent / "data" / "format-1"
X = np.random.default_rng(0).normal(size=(8, 3)).astype("float32")
LOSSES = [0.8134634494781494, 0.7345146536827087, 0.6709643006324768]
"""Those of the next three epochs of the program that has written the file."""


def compiled(names=("first", None, "last"), optimizer=None, frozen=False):
    inner = [layers.Dense(3, name=name, trainable=not (frozen and name == "first")) for name in names]
    model = keras.Sequential([keras.Input((3,)), *inner])
    model.compile(optimizer or keras.optimizers.Adam(0.01), "mse")
    model.optimizer.build(model.trainable_variables)
    return model


def test_training_goes_on_from_an_old_file():
    """Model, optimizer, position, generator, numbers and arrays."""
    layers.Dense(1)  # The numbers of Keras differ.
    strategy = phalanx.OneDeviceStrategy("cpu:0")
    data, rng = iter(strategy.experimental_distribute_dataset(np.arange(12.0), batch_size=3)), np.random.default_rng(9)
    pair = {1: np.zeros(2, int), "b": np.zeros(2, "bfloat16")}
    model = compiled()
    checkpoint = Checkpoint(model=model, data=data, rng=rng, epoch=0, pair=pair)
    checkpoint.read(FILE).assert_existing_objects_matched()
    history = model.fit(X, X[:, ::-1], epochs=3, batch_size=4, verbose=0, shuffle=False)
    np.testing.assert_allclose(history.history["loss"], LOSSES, rtol=1e-5)
    assert next(data).tolist() == [3, 4, 5]
    assert (checkpoint.epoch, pair[1].tolist(), rng.normal()) == (2, [0, 1], -1.324358995628145)


def test_slots_of_an_old_file_follow_their_variables():
    """The first layer is frozen since then."""
    whole, part = compiled(), compiled(frozen=True)
    for model in (whole, part):
        Checkpoint(model=model).read(FILE).expect_partial()
    for slot, other in zip(part.optimizer._momentums, whole.optimizer._momentums[2:], strict=True):
        assert np.any(slot.numpy())
        np.testing.assert_array_equal(slot.numpy(), other.numpy())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"names": ("last", None, "first")}, "model/layers/0 is the layer 'last', and one of"),
        ({"names": ("first", None, "other")}, "model/layers/2 is the layer 'other', and one of"),
        (
            {"optimizer": keras.optimizers.RMSprop(0.1)},
            "model/optimizer is the optimizer 'rm_sprop.*', and 'adam' in the",
        ),
    ],
    ids=["reordered", "renamed", "optimizer"],
)
def test_old_file_of_other_objects_is_refused(change, message):
    """Positions tell nothing then. Nothing has changed."""
    model = compiled(**change)
    before = [v.numpy() for v in model.variables]
    with pytest.raises(CheckpointMismatchError, match=message):
        Checkpoint(model=model).read(FILE)
    for variable, value in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)
