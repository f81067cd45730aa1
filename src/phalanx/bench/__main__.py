# SPDX-License-Identifier: Apache-2.0
"""Measures a script, or compares two measurements. `phalanx bench` starts it as a child process."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from phalanx.bench import report
from phalanx.bench.session import Options, Script, default_devices, measure, read
from phalanx.errors import InvalidArgumentError, PhalanxError


def main(given: str) -> int:
    """Measures or compares.

    Args:
      given: the options of the command line, as JSON.

    Returns:
      The exit code.
    """
    options = json.loads(given)
    try:
        if options["compare"]:
            report.print_comparison(*map(read, options["compare"]))
            return 0
        paths = [_checked(path) for path in options["output"]]  # Before the measurement, which takes minutes.
        script = Script(options["target"], tuple(options["arguments"]), is_module=options["is_module"])
        measured = measure(script, _options(options), lambda line: print(f"phalanx bench: {line}", file=sys.stderr))
        report.print_table(measured)
        for path in paths:
            report.save(measured, path)
    except PhalanxError as e:
        print(f"phalanx: {e}", file=sys.stderr)
        return 2
    return 0


def _options(given: dict[str, Any]) -> Options:
    fields = {f.name for f in dataclasses.fields(Options)}
    most = default_devices()
    defaults = {"devices": most, "processes": most}
    return Options(**defaults | {k: v for k, v in given.items() if k in fields and v is not None})


def _checked(path: str) -> Path:
    """Returns a path, if a file can be written there.

    Raises:
      InvalidArgumentError: its ending is unknown, or its folder does not exist.
    """
    found = Path(path)
    if found.suffix not in (".json", *report.PICTURES):
        raise InvalidArgumentError(
            f"--output {path}", "must end with .json, .png, .svg or .pdf.", "--output speed.json"
        )
    if not found.parent.is_dir():
        raise InvalidArgumentError(
            f"--output {path}", f"there is no folder {found.parent}.", f"mkdir -p {found.parent}"
        )
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
