# SPDX-License-Identifier: Apache-2.0
"""Measures a script, or compares two measurements. `phalanx bench` starts it as a child process."""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from phalanx._src.cluster.resolvers.environment import resolver_of_environment
from phalanx._src.tools.bench import report
from phalanx._src.tools.bench.session import Options, Script, default_devices, launcher, measure, read
from phalanx.errors import PhalanxError
from phalanx.errors.arguments import json_or_picture


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
        # Before the measurement, which takes minutes.
        paths = [json_or_picture("--output", path, "--output speed.json") for path in options["output"]]
        if options["links"]:
            return _links(options["processes"], options["devices"], paths)
        script = Script(options["target"], tuple(options["arguments"]), is_module=options["is_module"])
        measured = measure(
            script, _options(options), lambda line: print(f"phalanx bench: {line}", file=sys.stderr, flush=True)
        )
        report.print_table(measured)
        for path in paths:
            report.save(measured, path)
    except PhalanxError as e:
        print(f"phalanx: {e}", file=sys.stderr)
        return 2
    return 0


def _links(processes: int | None, devices: int | None, paths: Sequence[Path]) -> int:
    """Measures the links of the cluster that the environment describes; else between processes that are started here."""
    module = ["phalanx._src.tools.bench.links", *map(str, paths)]
    if (resolver := resolver_of_environment(os.environ)) and resolver.cluster_spec():
        command = [sys.executable, "-P", "-m", *module]
    else:
        # --devices alone means one process. Without both options, there are several processes of one device.
        processes = processes or (1 if devices else default_devices())
        devices = devices or (default_devices() if processes == 1 else 1)
        command = [*launcher(processes, devices), "-m", *module]
    return subprocess.run(command, check=False).returncode


def _options(given: dict[str, Any]) -> Options:
    fields = {f.name for f in dataclasses.fields(Options)}
    most = default_devices()
    defaults = {"devices": most, "processes": most}
    return Options(**defaults | {k: v for k, v in given.items() if k in fields and v is not None})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
