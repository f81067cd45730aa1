"""`examples/large_lm.py` with a tiny model: trained, and predicted."""

import argparse
import json
import re
import runpy
from pathlib import Path

import pytest

pytestmark = pytest.mark.exhaustive("tests/unit/forecast, tests/contract/test_law1_equals_one_device.py")

TINY = ("--width", 64, "--blocks", 1, "--length", 16)
EXAMPLE = Path(__file__).parents[2] / "examples" / "large_lm.py"
PARAMETERS = 2 * 32_768 * 64 + 16 * 64 + 4 * 64 * 64 + 4 * 64 + 2 * 64 * 256 + 256 + 64 + 6 * 64


@pytest.mark.parametrize("options", [(), ("--remat", "--sharded")])
def test_trains_a_tiny_model(run_example, options):
    """The loss of random words is that of guessing one of 32,768."""
    printed = run_example("large_lm.py", *TINY, "--steps", 2, *options)
    assert f"{PARAMETERS:,} parameters" in printed
    assert float(re.findall(r"loss: ([\d.]+)", printed)[-1]) == pytest.approx(10.4, abs=0.2)


def test_preset_changes_the_blocks():
    """A gate, and one head of keys and values for two of queries."""
    shape = {"width": 256, "blocks": 1, "hidden": 512, "kv_heads": 1, "length": 16, "remat": False}
    model = runpy.run_path(str(EXAMPLE))["build"](argparse.Namespace(**shape))
    attention, dense = 2 * 256 * (256 + 1) + 2 * 128 * (256 + 1), 2 * 512 * (256 + 1) + 256 * (512 + 1)
    assert model.count_params() == 2 * 32_768 * 256 + 16 * 256 + attention + dense + 6 * 256


def test_its_first_step_is_predicted(run_example, tmp_path):
    """Two replicas exchange the gradients of all parameters."""
    path = tmp_path / "estimate.json"
    run_example("large_lm.py", *TINY, launcher=("estimate", "--devices", 2, "--topology", "cpu:1,2", "--output", path))
    one, two = json.loads(path.read_text(encoding="utf-8"))["estimates"]
    assert one["collectives"] == []
    assert sum(c["bytes"] for c in two["collectives"]) >= 2 * PARAMETERS
