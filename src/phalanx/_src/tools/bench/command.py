# SPDX-License-Identifier: Apache-2.0
"""`phalanx bench`, on the command line. It starts the process that measures."""

import json
import sys
from collections.abc import Sequence

import click

from phalanx._src.launch.plan import Request
from phalanx._src.tools import child
from phalanx._src.tools.command_line import (
    ARGUMENTS,
    IS_MODULE,
    OUTPUT,
    Seconds,
    errors_without_stack,
    warn_of_misplaced,
)
from phalanx.errors import InvalidArgumentError


# Options behind SCRIPT are those of the script.
@click.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "--devices",
    type=click.IntRange(1),
    help="The most devices of one process.  [default: all GPUs or cores, at most 8]",
)
@click.option(
    "--processes", type=click.IntRange(1), help="The most processes, of one device each.  [default: as --devices]"
)
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True, help="How often to run each, in turn.")
@click.option(
    "--steps",
    type=click.IntRange(1),
    default=30,
    show_default=True,
    help="Training steps (or calls of several) to measure per run.",
)
@click.option(
    "--timeout-seconds",
    "timeout_s",
    type=Seconds(1),
    default=600.0,
    show_default=True,
    help="How long a run may take.",
)
@OUTPUT
@click.option(
    "--links",
    is_flag=True,
    help="Measure the links between processes, or those of a cluster, instead of running SCRIPT.",
)
@click.option("--compare", nargs=2, metavar="A.json B.json", help="Compare two measurements instead of running SCRIPT.")
@IS_MODULE
@click.argument("target", metavar="[SCRIPT]", required=False)
@ARGUMENTS
def bench(target: str | None, arguments: Sequence[str], **options: object) -> None:
    """Measures how fast SCRIPT trains on 1, 2, ... devices and processes of this machine, and where the time of a step goes.

    Each run ends SCRIPT after some training steps. `{devices}` and `{processes}` in ARGS stand for the numbers of a run.
    """
    with errors_without_stack():
        if target is None and not (options["compare"] or options["links"]):
            raise InvalidArgumentError("phalanx bench", "there is no script to run.", "phalanx bench train.py")
        if options["compare"] and (target or options["output"] or options["links"]):
            raise InvalidArgumentError(
                "phalanx bench --compare with a script, --links or --output",
                "it measures nothing and prints a table.",
                "phalanx bench --compare before.json after.json",
            )
        if options["links"] and target:
            raise InvalidArgumentError(
                f"phalanx bench --links {target}", "it runs no script.", "phalanx bench --links --processes 2"
            )
        if target is not None:
            request = Request(target, tuple(arguments), is_module=bool(options["is_module"]))
            request.check_script()
            warn_of_misplaced(request)
    settings = {"target": target, "arguments": list(arguments), **options}
    sys.exit(child.run("phalanx._src.tools.bench", [json.dumps(settings)]))
