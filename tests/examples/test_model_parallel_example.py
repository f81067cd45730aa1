"""`examples/model_parallel.py` with a tiny model, run as a user runs it."""

import re

import pytest

TINY = ("--steps", 6, "--batch", 32, "--width", 64, "--layers", 1)

pytestmark = pytest.mark.exhaustive("tests/contract/test_law1_equals_one_device.py: the transformer on meshes")


@pytest.fixture(scope="module")
def parts(run_example):
    """What it prints of each strategy."""
    printed = run_example("model_parallel.py", *TINY)
    return re.split(r"─+ (?:model|sharded) ─+", printed)[1:]


def test_both_learn_the_same(parts):
    """Six steps on the same batches."""
    losses = [[float(x) for x in re.findall(r"^step +\d+ +loss ([\d.]+)$", part, re.MULTILINE)] for part in parts]
    assert len(losses[0]) == 6
    assert losses[0][-1] < losses[0][0] - 0.3
    assert losses[0] == pytest.approx(losses[1], abs=2e-3)


def test_shows_where_variables_live(parts):
    """Neurons between the devices of a replica; rows between replicas."""
    assert re.search(r"float32\[64, 256\] +\[:, 0:128\] cpu:0 cpu:2", parts[0])
    assert re.search(r"float32\[64, 256\] +\[0:16\] cpu:0\s", parts[1])


def test_shows_the_bytes_of_a_device(parts):
    """In quarters they are fewer than in halves."""
    sizes = [re.search(r"cpu:0 +([\d.]+) (kB|MB)", part).groups() for part in parts]
    kilobytes = [float(number) * {"kB": 1, "MB": 1000}[unit] for number, unit in sizes]
    assert kilobytes[1] < kilobytes[0]
