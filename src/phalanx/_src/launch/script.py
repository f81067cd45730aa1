# SPDX-License-Identifier: Apache-2.0
"""Runs a user's script in this process, as Python itself would. Uses the standard library only."""

import os
import runpy
import sys
from collections.abc import Sequence


def run_as_main(kind: str, target: str, arguments: Sequence[str]) -> None:
    """Runs a script or a module under the name `__main__`.

    Args:
      kind: "module" or "script".
      target: the name of a module, or the path of a script.
      arguments: its arguments.
    """
    sys.argv = [target, *arguments]
    # What calls this was started without its own folder. A module imports from the current folder, a script from its own.
    sys.path.insert(0, os.getcwd() if kind == "module" else os.path.dirname(os.path.abspath(target)))
    if kind == "module":
        # As `python -m` does, it replaces the name in `sys.argv` by the path.
        runpy.run_module(target, run_name="__main__", alter_sys=True)
        return
    runpy.run_path(target, run_name="__main__")
