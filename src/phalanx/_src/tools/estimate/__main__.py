# SPDX-License-Identifier: Apache-2.0
"""Runs a script until its first training step and predicts that step. `phalanx estimate` starts it as a child process."""

import sys

from phalanx._src.launch.script import run_as_main
from phalanx._src.tools.estimate.api import SAVE, estimate
from phalanx.errors import PhalanxError
from phalanx.errors.arguments import json_or_picture

_DOES_NOT_FIT = 3
"""The exit code if a step does not fit. An exception in the script gives 1, and an error in the command 2."""


def main(topologies: str, output: str, kind: str, target: str, *arguments: str) -> int:
    """Predicts the first step of a script.

    Args:
      topologies: names of topologies, separated by spaces.
      output: names of files to write, separated by line feeds.
      kind: "module" or "script".
      target: the name of a module, or the path of a script.
      *arguments: the arguments of the script.

    Returns:
      The exit code.
    """
    try:
        # Checked first, because the compilers take minutes.
        paths = [json_or_picture("path", path, SAVE) for path in output.splitlines()]
        estimates = estimate(lambda: run_as_main(kind, target, arguments), topologies.split())
        print()  # The script may have left an unfinished line, such as a progress bar.
        estimates.print()
        for path in paths:
            estimates.save(path)
    except PhalanxError as e:
        print(f"phalanx: {e}", file=sys.stderr)
        return 2
    return 0 if all(one.fits for one in estimates) else _DOES_NOT_FIT


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
