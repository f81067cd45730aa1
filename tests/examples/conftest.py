"""How to run an example."""

import os
import sys
from pathlib import Path

import pytest
from tests import forks

EXAMPLES = Path(__file__).parents[2] / "examples"
DEADLINE_S = 300  # On a busy machine; alone, each takes less than a tenth of it.


@pytest.fixture(scope="module")
def run_example(tmp_path_factory):
    """Runs an example in a folder of its own, where asked for by the command `phalanx`, and returns what it prints."""

    def run(name, *arguments, folder=None, launcher=None):
        # The size of this process's thread pool is not that of the example. PYTHONPATH leads to tests/startup.
        environment = {name: value for name, value in os.environ.items() if name not in ("NPROC", "PYTHONPATH")}
        started_by = []
        if launcher is not None:
            environment["JAX_PLATFORMS"] = "cpu"  # Two workers cannot share a GPU.
            started_by = ["-m", "phalanx", *launcher]
        result = forks.run(
            [sys.executable, *map(str, [*started_by, EXAMPLES / name, *arguments])],
            cwd=folder or tmp_path_factory.mktemp("run"),
            # They compute for longer than they compile.
            env={**environment, "JAX_DISABLE_MOST_OPTIMIZATIONS": "0", "PYTHONIOENCODING": "utf-8"},
            capture_output=True,
            encoding="utf-8",
            timeout=DEADLINE_S,
            check=False,
        )
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    return run
