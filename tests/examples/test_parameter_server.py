"""`examples/parameter_server.py` with small tables and few steps, run as a user runs it."""

import re

import keras
import numpy as np
import pytest

import phalanx

USERS, ITEMS, WIDTH = 300, 100, 4
SMALL = ("--users", USERS, "--items", ITEMS, "--width", WIDTH, "--batch", 256)


@pytest.mark.exhaustive("tests/guide/test_parameter_server_guide.py")
def test_learns_who_clicks(run_example, tmp_path):
    """The AUC on held-out rows goes up, not above that of the model that the clicks are drawn from."""
    printed = run_example("parameter_server.py", *SMALL, "--epochs", 3, "--steps", 100, folder=tmp_path)
    found = [float(x) for x in re.findall(r"held-out AUC ([\d.]+)", printed)]
    best = float(re.search(r"AUC of the hidden model ([\d.]+)", printed).group(1))
    assert len(found) == 3
    assert found[0] < found[-1] < best
    assert found[-1] > 0.7
    # One line an epoch says how the workers get on.
    lines = re.findall(r"(\d+) steps/s \| workers 2/2 \| queued 0, in flight 0 \| staleness mean", printed)
    assert len(lines) == 3
    assert all(float(rate) > 0 for rate in lines)
    # The weights and the curve are saved; the checkpoint of a training that is done is gone.
    out = tmp_path / "out/parameter_server"
    assert sorted(p.name for p in out.iterdir()) == ["auc.png", "model.weights.h5"]
    assert (out / "auc.png").read_bytes().startswith(b"\x89PNG")
    # Without a strategy the tables are ordinary layers.
    table = phalanx.keras.ShardedEmbedding(USERS, WIDTH, name="users")
    user = keras.Input((), dtype="int32")
    keras.Model(user, table(user)).load_weights(out / "model.weights.h5", skip_mismatch=True)
    assert np.abs(table.embeddings.numpy()).max() > 0.1, "the table is as it was made"


@pytest.mark.exhaustive("tests/guide/test_parameter_server_guide.py")
def test_fit_trains_like_the_loop(run_example):
    """By Keras's fit it is the same training."""
    printed = run_example("parameter_server.py", *SMALL, "--fit", "--epochs", 4, "--steps", 60)
    found = [float(x) for x in re.findall(r"val_auc: ([\d.]+)", printed)]
    # A model that has learned nothing has 0.5, the hidden one 0.84. No order of the four is certain: that of asynchronous steps
    # makes an epoch better or worse by more than the last ones add.
    assert len(found) == 4
    assert min(found) > 0.6
    assert found[-1] > 0.66
