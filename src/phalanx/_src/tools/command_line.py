# SPDX-License-Identifier: Apache-2.0
"""What several commands share: options, errors without a stack, and the environment of the processes that they start."""

import errno
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

import click
from typing_extensions import override

from phalanx._src.cluster.connections.secret import TOKEN, new_token
from phalanx._src.launch.misplaced import misplaced, warning_of
from phalanx._src.launch.plan import Request
from phalanx._src.launch.relay import OutputError
from phalanx.errors import PhalanxError

IS_MODULE = click.option(
    "-m", "is_module", is_flag=True, help="Treat SCRIPT as the name of a module, like `python -m`."
)
ARGUMENTS = click.argument("arguments", metavar="[ARGS]...", nargs=-1, type=click.UNPROCESSED)
OUTPUT = click.option(
    "--output", multiple=True, help="Also write this file: .json, or .png, .svg, .pdf. May be repeated."
)


@final
class Seconds(click.FloatRange):
    """A number of seconds. A range alone accepts NaN, which no comparison refuses, and infinity, which no clock waits for."""

    @override
    def convert(self, value: float, param: click.Parameter | None, ctx: click.Context | None) -> float:
        seconds: float = super().convert(value, param, ctx)
        if not math.isfinite(seconds):
            self.fail(f"{seconds} is not a number of seconds.", param, ctx)
        return seconds


@final
class Text(click.ParamType):
    """A text that is not empty. Shells replace a variable that is not set by nothing, and the command would run as without the option."""

    name = "text"

    @override
    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if not value:
            self.fail("it is empty, as if a variable of the shell is not set.", param, ctx)
        return value


class _Refused(click.ClickException):
    """Shows a Phalanx error without a stack trace."""

    exit_code = 2  # As for the usage errors of click.

    @override
    def show(self, file: object = None) -> None:
        click.echo(f"phalanx: {self.message}", err=True)


@final
class _Failed(_Refused):
    """The same, after processes have run."""

    exit_code = 1


@contextmanager
def errors_without_stack() -> Iterator[None]:
    """Ends the command with the message of a Phalanx error, and exit code 2; with 1 if processes have run."""
    try:
        yield
    except PhalanxError as e:
        raise (_Failed if isinstance(e, OutputError) else _Refused)(str(e)) from e
    except OSError as e:
        if e.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        raise _Refused(f"{e.strerror}: this user may not open as many as it needs.\nHINT: ulimit -n 4096") from e


def warn_of_misplaced(request: Request) -> None:
    """Warns if an option of the present command stands after the script. One that also stands before it was understood."""
    context = click.get_current_context()
    explicit = click.core.ParameterSource.COMMANDLINE
    takes_value = {
        name: not option.is_flag
        for option in context.command.params
        if isinstance(option, click.Option) and context.get_parameter_source(f"{option.name}") is not explicit
        for name in option.opts
        if name.startswith("--")
    }
    # click stops at SCRIPT, as `python` does, and passes everything behind it on.
    moved, remaining = misplaced(request.target, request.arguments, takes_value)
    if moved:
        script = [*(["-m"] if request.is_module else []), request.target]
        click.echo(warning_of(f"phalanx {context.command.name}", script, moved, remaining), err=True)


def environment_of_processes() -> dict[str, str]:
    """Returns the environment of the processes to start, with a secret that only they know, unless the user has set one."""
    return {**os.environ, TOKEN: os.environ.get(TOKEN) or new_token()}
