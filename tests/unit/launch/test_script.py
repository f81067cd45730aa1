"""A user's script runs as Python itself would run it."""

import sys

import pytest

from phalanx._src.launch.script import run_as_main

SCRIPT = """
import sys
from helper import NAME
assert __name__ == "__main__"
sys.said = [NAME, *sys.argv]
"""


@pytest.mark.parametrize("kind", ["module", "script"])
def test_script_finds_its_arguments_and_modules(monkeypatch, tmp_path, kind):
    """A script imports from its own folder, a module from the current one."""
    folders = {"script": tmp_path / "scripts", "module": tmp_path / "current"}
    for name, folder in folders.items():
        folder.mkdir()
        (folder / "helper.py").write_text(f"NAME = {name!r}")
        (folder / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(folders["module"])
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.setattr(sys, "said", [], raising=False)
    monkeypatch.delitem(sys.modules, "helper", raising=False)
    target = "train" if kind == "module" else str(folders["script"] / "train.py")
    run_as_main(kind, target, ["--epochs", "3"])
    assert sys.said == [kind, str(folders[kind] / "train.py"), "--epochs", "3"]
    monkeypatch.delitem(sys.modules, "helper")
