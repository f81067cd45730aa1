"""What a program hears about what was not restored."""

import keras
import numpy as np
from keras import layers

from phalanx.train import Checkpoint


def test_differences_are_told_once(tmp_path, caplog):
    """What the file has and the program lacks, and the reverse; not if the program asks or expects it."""
    path = Checkpoint(model=np.ones(2), epoch=3).save(tmp_path / "a")
    checkpoint = Checkpoint(net=np.zeros(2))
    status = checkpoint.restore(path)
    assert not caplog.records
    del status
    (record,) = caplog.records
    assert "it contains what the program lacks: epoch" in record.message
    assert "model; the program has what it does not contain: net" in record.message
    assert (
        "HINT: restore(path).expect_partial(), if you have changed the model or the optimizer; else the names"
        in record.message
    )
    checkpoint.read(path).expect_partial()
    Checkpoint(model=np.zeros(2), epoch=0).read(path)
    Checkpoint(model=np.zeros(2)).read(path).assert_existing_objects_matched()
    assert len(caplog.records) == 1


def test_variables_that_are_made_later_are_no_difference(tmp_path, caplog):
    """Of layers and optimizers that are not built."""

    def make(is_built):
        layer, optimizer = layers.Dense(2), keras.optimizers.Adam()
        if is_built:
            layer.build((None, 2))
            optimizer.build(layer.trainable_variables)
        return Checkpoint(layer=layer, optimizer=optimizer)

    make(False).read(make(True).write(tmp_path / "a"))
    assert not caplog.records
