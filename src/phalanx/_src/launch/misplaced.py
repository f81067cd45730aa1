# SPDX-License-Identifier: Apache-2.0
"""Recognizes options of a command that stand after the script, where they are arguments of the script."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from phalanx._src.cluster.untrusted import read_data


def misplaced(target: str, arguments: Sequence[str], options: Mapping[str, bool]) -> tuple[list[str], list[str]]:
    """Divides the arguments of a script.

    Args:
      target: the script. An option that its text has in quotes is its own.
      arguments: what stands after it.
      options: the options of the command, and whether they take a value.

    Returns:
      The options of the command, with their values, and the other arguments.

    Example:
      >>> misplaced("train.py", ["--lr", "0.1", "--workers", "2"], {"--workers": True})
      (['--workers', '2'], ['--lr', '0.1'])
    """
    text = _text(target)
    moved: list[str] = []
    remaining: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        name, has_value, _ = argument.partition("=")
        if name not in options or f'"{name}"' in text or f"'{name}'" in text:
            remaining.append(argument)
            continue
        moved.append(argument)
        if options[name] and not has_value:
            moved += [value for value in [next(rest, None)] if value is not None]
    return moved, remaining


def warning_of(command: str, target: Sequence[str], moved: Sequence[str], remaining: Sequence[str]) -> str:
    """Returns the warning that shows the right line.

    Args:
      command: for example "phalanx run".
      target: the script, perhaps after `-m`.
      moved: options of the command that stand after the script.
      remaining: arguments of the script.
    """
    # A script whose name looks like an option.
    end = ["--"] if target[0].startswith("-") and target[0] != "-m" else []
    return (
        f"phalanx: {shlex.join(moved)} comes after {target[-1]}, so it is passed to the script and not to {command}.\n"
        f"HINT: {command} {shlex.join([*moved, *end, *target, *remaining])}"
    )


def _text(target: str) -> str:
    try:
        return read_data(Path(target)).decode(errors="replace")
    except (OSError, ValueError):  # The name of a module, or a pipe, from which only Python may read.
        return ""
