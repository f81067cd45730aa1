"""`examples/digits.py`, run as a user runs it."""

import re

import pytest

EPOCHS = 10
TEST_IMAGES = 297  # Odd, so two replicas cannot share them without padding.


@pytest.fixture(scope="module")
def mirrored(run_example):
    """What the example prints with two replicas."""
    return run_example("digits.py", "--epochs", EPOCHS)


def epochs(output):
    """Returns the lines about epochs."""
    return [line for line in output.splitlines() if line.startswith("epoch")]


def test_prints_every_epoch(mirrored):
    """There is one line for each pass over the data."""
    assert len(epochs(mirrored)) == EPOCHS


def test_learns_the_digits(mirrored):
    """The loss falls, and of images it has never seen more than 95% are recognized."""
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", mirrored)]
    accuracy = [float(x) for x in re.findall(r"accuracy ([\d.]+)%", mirrored)]
    assert losses[-1] < 0.2 * losses[0]
    assert accuracy[-1] > 95


def test_counts_every_image_once(mirrored):
    """The padding of the last, short batch is not among the tested images."""
    assert set(re.findall(r"of (\d+) images", mirrored)) == {str(TEST_IMAGES)}


@pytest.mark.exhaustive("tests/contract/test_law1_equals_one_device.py")
def test_one_device_prints_the_same(mirrored, run_example):
    """Two replicas learn what one device learns, to the last digit shown."""
    one_device = run_example("digits.py", "--epochs", EPOCHS, "--strategy", "one-device")
    assert [without_time(x) for x in epochs(one_device)] == [without_time(x) for x in epochs(mirrored)]


def without_time(line):
    """Returns a line without the seconds at its end."""
    return line[: line.rindex("   ")]
