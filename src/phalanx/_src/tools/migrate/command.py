# SPDX-License-Identifier: Apache-2.0
"""`phalanx migrate`, on the command line. It starts the process that reads and rewrites programs."""

import json
import sys

import click

from phalanx._src.tools import child
from phalanx._src.tools.command_line import Text


@click.command()
@click.option(
    "-o", "--output", type=Text(), metavar="PATH", help="Write the new program, or the folder of new programs, here."
)
@click.option("--in-place", is_flag=True, help="Change the files.")
@click.option("--diff", is_flag=True, help="Print a diff, and write nothing.  [default]")
@click.option("--check", is_flag=True, help="Print the report only.")
@click.argument("path")
def migrate(**options: object) -> None:
    """Rewrites PATH, a program of tf.distribute, as a Phalanx program: a file, a notebook, or a folder of them.

    The exit code is 0 if everything was migrated, 1 if lines need a look, and 2 if a file cannot be read.
    """
    if sum(bool(options[name]) for name in ("output", "in_place", "diff", "check")) > 1:
        raise click.UsageError("use one of -o, --in-place, --diff and --check")
    sys.exit(child.run("phalanx._src.tools.migrate", [json.dumps(options)]))
