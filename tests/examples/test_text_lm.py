"""`examples/text_lm.py` with a tiny model, run as a user runs it."""

import re
import sysconfig
from pathlib import Path

import pytest

TINY = ("--steps", 8, "--batch", 32, "--width", 32, "--layers", 1)
WINDOW = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the example saves."""
    return tmp_path_factory.mktemp("text_lm")


@pytest.fixture(scope="module")
def mirrored(run_example, folder):
    """What the example prints with three replicas, which cannot share a batch of 32 windows without padding."""
    return run_example("text_lm.py", *TINY, "--devices", 3, folder=folder)


def losses(output):
    """Returns the losses of the steps."""
    return [float(x) for x in re.findall(r"^step +\d+ +loss ([\d.]+)$", output, re.MULTILINE)]


def held_back(output):
    """Returns the loss on the held-back files and the number of windows in them."""
    loss, windows = re.search(r"held-back loss: ([\d.]+) nats.* all (\d+) windows", output).groups()
    return float(loss), int(windows)


def test_loss_falls(mirrored):
    """An untrained model knows nothing of bytes (5.5 nats); eight steps teach it which are frequent."""
    assert len(losses(mirrored)) == 8
    assert losses(mirrored)[0] > 5
    assert losses(mirrored)[-1] < losses(mirrored)[0] - 0.5


def test_evaluates_every_window_once(mirrored):
    """All windows of the held-back files are counted, and no padding."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[::20]
    assert held_back(mirrored)[1] == sum(max(0, file.stat().st_size - 1) // WINDOW for file in files)


def test_reads_by_file(mirrored):
    """The windows come from files, which several workers would divide between them."""
    assert re.search(r"worker 0 of 1 reads (\d+) of \1 files \(FILE\)", mirrored)


def test_saves_the_curve_and_the_sample(mirrored, folder):
    """The loss curve is a PNG, and the sample continues the prompt."""
    assert (folder / "out" / "loss.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert (folder / "out" / "sample.txt").read_text(encoding="utf-8").startswith("def ")


def test_one_device_learns_the_same(mirrored, run_example):
    """Three replicas with padded batches end where one device ends."""
    one_device = run_example("text_lm.py", *TINY, "--strategy", "one-device")
    assert losses(one_device) == pytest.approx(losses(mirrored), abs=2e-3)
    assert held_back(one_device) == pytest.approx(held_back(mirrored), abs=2e-3)
