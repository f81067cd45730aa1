"""`examples/keras_mnist_style.py`, run as a user runs it."""

import re

import keras
import numpy as np
import pytest

EPOCHS = 8

pytestmark = pytest.mark.exhaustive("test_digits.py")


@pytest.fixture(scope="module")
def run(run_example, tmp_path_factory):
    """What the example prints with two replicas, and the folder it ran in."""
    folder = tmp_path_factory.mktemp("mnist")
    return run_example("keras_mnist_style.py", "--epochs", EPOCHS, "--batch", 63, folder=folder), folder / "out/digits"


def test_prints_every_epoch(run):
    """Keras's progress bar."""
    assert re.findall(r"Epoch (\d+)/", run[0]) == [str(i + 1) for i in range(EPOCHS)]


def test_learns_the_digits(run):
    """Of images it has never seen more than 95% are recognized, each counted once."""
    accuracy, count = re.search(r"test accuracy ([\d.]+)% of (\d+) images", run[0]).groups()
    assert float(accuracy) > 95
    assert count == "297"


def test_writes_the_model(run):
    """The saved model needs no strategy."""
    model = keras.saving.load_model(run[1] / "digits.keras")
    assert model.predict(np.zeros((3, 8, 8, 1)), verbose=0).shape == (3, 10)


def test_writes_logs_and_a_picture(run):
    """For TensorBoard, and for a reader."""
    assert [p.name for p in sorted((run[1] / "logs").iterdir())] == ["train", "validation"]
    assert (run[1] / "digits.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("strategy", ["one-device", "none"])
def test_other_strategies_train_the_same(run_example, strategy):
    """The flag changes where it trains and nothing else."""
    printed = run_example("keras_mnist_style.py", "--epochs", 2, "--strategy", strategy, "--steps-per-execution", 4)
    assert "test accuracy" in printed
