# SPDX-License-Identifier: Apache-2.0
"""The process in which a tool runs that needs JAX: the command line itself imports none."""

import subprocess
import sys
from collections.abc import Mapping, Sequence


def run(module: str, arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> int:
    """Runs a module in a child process. Returns its exit code.

    It imports nothing from the current folder, which may be another user's.
    """
    return subprocess.run([sys.executable, "-P", "-m", module, *arguments], check=False, env=environment).returncode
