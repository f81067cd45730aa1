"""How to run an example."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
DEADLINE_S = 120  # On a busy machine; alone, each takes a tenth of it.


@pytest.fixture(scope="module")
def run_example(tmp_path_factory):
    """Runs an example in a folder of its own and returns what it prints."""

    def run(name, *arguments, folder=None):
        result = subprocess.run(
            [sys.executable, str(EXAMPLES / name), *map(str, arguments)],
            cwd=folder or tmp_path_factory.mktemp("run"),
            env={**os.environ, "PYTHONIOENCODING": "utf-8"},
            capture_output=True,
            encoding="utf-8",
            timeout=DEADLINE_S,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        return result.stdout

    return run
