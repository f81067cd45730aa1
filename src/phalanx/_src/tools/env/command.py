# SPDX-License-Identifier: Apache-2.0
"""`phalanx env`, on the command line. It starts the process that asks JAX for its devices."""

import sys

import click

from phalanx._src.tools import child


@click.command()
@click.option("--json", "is_json", is_flag=True, help="Print JSON.")
def env(is_json: bool) -> None:
    """Shows versions, system, devices and variables, for a bug report. Hides the values of secrets."""
    sys.exit(child.run("phalanx._src.tools.env", ["--json"] if is_json else []))
