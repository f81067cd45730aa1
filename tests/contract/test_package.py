"""What a user installs: the wheel has everything, tells its types, and has the command line."""

import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = """\
import numpy as np
import phalanx

strategy = phalanx.MirroredStrategy(["cpu:0"])
reveal_type(strategy)
with strategy.scope() as current:
    reveal_type(current)
reveal_type(phalanx.get_strategy())
dataset = strategy.experimental_distribute_dataset(np.zeros((4, 2)), batch_size=2)
reveal_type(iter(dataset))
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """The interpreter of a new environment with the wheel in it; what Phalanx needs comes from this environment."""
    folder = tmp_path_factory.mktemp("package")
    run = lambda *command: subprocess.run(command, cwd=folder, timeout=300, check=True, capture_output=True)  # noqa: E731
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
    run(*pip, "wheel", "--no-deps", "--wheel-dir", folder, str(ROOT))
    (wheel,) = folder.glob("phalanx-*.whl")
    venv.create(folder / "env")
    new = folder / "env/bin/python"
    run(*pip, "--python", str(new), "install", "--no-deps", str(wheel))
    (packages,) = folder.glob("env/lib/python*/site-packages")
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    return new


def output_of(python, *arguments):
    """Returns what a Python process prints, without what PYTHONPATH names."""
    found = subprocess.run(
        [python, "-I", *arguments], cwd=python.parent, timeout=300, check=False, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


def test_wheel_imports_in_a_new_environment(python):
    """What is imported is the wheel, not these sources."""
    where = output_of(python, "-c", "import phalanx; phalanx.MirroredStrategy; print(phalanx.__file__)")
    assert str(python.parents[1]) in where


def test_wheel_has_the_command_line(python):
    """`python -m phalanx` is the command `phalanx`."""
    assert "phalanx" in output_of(python, "-m", "phalanx", "--version")
    assert "doctor" in output_of(python, "-m", "phalanx", "--help")


@pytest.mark.exhaustive("make check, which checks types of the whole package")
def test_type_checker_sees_the_strategy(python, tmp_path):
    """mypy knows the types of a user's script, for the package has the marker `py.typed`."""
    (tmp_path / "script.py").write_text(SCRIPT)
    command = ["-m", "mypy", "--python-executable", str(python), "--cache-dir", str(tmp_path / "cache"), "script.py"]
    found = subprocess.run(
        [sys.executable, *command], cwd=tmp_path, timeout=300, check=False, capture_output=True, text=True
    )
    revealed = [
        line.partition('Revealed type is "')[2].rstrip('"') for line in found.stdout.splitlines() if "Revealed" in line
    ]
    assert revealed == [
        "phalanx._src.strategies.mirrored.MirroredStrategy",
        "phalanx._src.strategies.mirrored.MirroredStrategy",
        "phalanx._src.strategies.base.Strategy",
        "phalanx._src.input.iterator.DistributedIterator",
    ], found.stdout


def test_design_names_the_rooms():
    """All of them, in the order in which they import each other."""
    text = (ROOT / "DESIGN.md").read_text(encoding="utf-8")
    table = re.findall(
        r"^\| `(\w+)` \|", text[text.index("| room |") : text.index("## State of the process")], re.MULTILINE
    )
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    (layers,) = [c["layers"] for c in contracts if c.get("containers") == ["phalanx._src"]]
    rooms = {path.parent.name for path in (ROOT / "src/phalanx/_src").glob("*/__init__.py")}
    assert table == [layer for layer in layers if layer in rooms]
    assert set(table) == rooms


def test_tour_leads_to_files():
    """Every file that the tour of CONTRIBUTING.md names exists: in the engine, or below the project's folder."""
    tour = (ROOT / "CONTRIBUTING.md").read_text().split("## A tour in ten questions")[1].split("\n## ")[0]
    files = re.findall(r"`([a-z_/]+\.py)`", tour)
    assert len(files) > 10
    assert [f for f in files if not any((ROOT / room / f).exists() for room in ("src/phalanx/_src", "."))] == []
