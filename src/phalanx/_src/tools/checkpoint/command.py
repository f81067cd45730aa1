# SPDX-License-Identifier: Apache-2.0
"""`phalanx checkpoint`, on the command line. It starts the process that reads the files."""

import sys

import click

from phalanx._src.tools import child

_READER = "phalanx._src.tools.checkpoint"


@click.group()
def checkpoint() -> None:
    """Lists, shows, compares and exports checkpoints of `phalanx.train`."""


@checkpoint.command("ls")
@click.argument("folder", default=".")
def list_(folder: str) -> None:
    """Lists the checkpoints in FOLDER, oldest first."""
    sys.exit(child.run(_READER, ["ls", folder]))


@checkpoint.command("show")
@click.argument("path")
def show(path: str) -> None:
    """Shows names, shapes, dtypes and sizes in PATH: a checkpoint, or a folder for the latest in it."""
    sys.exit(child.run(_READER, ["show", path]))


@checkpoint.command("diff")
@click.argument("first")
@click.argument("second")
def diff(first: str, second: str) -> None:
    """Shows how two checkpoints differ. The exit code is 0 if they are equal, and 1 if they differ."""
    sys.exit(child.run(_READER, ["diff", first, second]))


@checkpoint.command("export")
@click.argument("path")
@click.argument("output")
@click.option(
    "--object", "name", default="", metavar="NAME", help="Only what was saved under this name, such as `model`."
)
def export(path: str, output: str, name: str) -> None:
    """Writes the arrays of PATH into OUTPUT, a new file that ends with .npz or .safetensors; or its model, with .keras."""
    sys.exit(child.run(_READER, ["export", path, output, name]))
