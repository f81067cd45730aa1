# SPDX-License-Identifier: Apache-2.0
"""Describes the commands of `phalanx` in Markdown, from the definitions that `phalanx --help` reads."""

import inspect
import re
from collections.abc import Iterator

import click

from phalanx._src.tools.cli import main

_CODE_OR_OPTION = re.compile(r"`[^`]*`|(?<![\w-])--?[a-z][\w-]*")


def commands_in_markdown() -> str:
    """Returns a section per command: its usage, what it does, and a table of its options."""
    return "\n".join(_sections(main, click.Context(main, info_name="phalanx"), "##"))


def _sections(
    group: click.Group, context: click.Context, heading: str
) -> Iterator[str]:
    for name in group.list_commands(context):
        command = group.commands[name]
        inner = click.Context(command, context, info_name=name)
        yield f"{heading} {inner.command_path}\n"
        yield f"```shell\n{command.get_usage(inner).removeprefix('Usage: ')}\n```\n"
        yield from _paragraphs(inspect.cleandoc(command.help or ""))
        yield from _options(command, inner)
        if isinstance(command, click.Group):
            yield from _sections(command, inner, heading + "#")


def _paragraphs(text: str) -> Iterator[str]:
    for paragraph in text.split("\n\n"):
        # Click marks a paragraph that it does not wrap by a backspace.
        verbatim = paragraph.removeprefix("\b\n")
        if verbatim != paragraph:
            yield f"```text\n{verbatim}\n```\n"
        else:
            yield _prose(paragraph) + "\n"


def _options(command: click.Command, context: click.Context) -> Iterator[str]:
    records = [
        p.get_help_record(context)
        for p in command.params
        if isinstance(p, click.Option)
    ]
    if records:
        yield "| option | meaning |\n|---|---|"
        for option, meaning in filter(None, records):
            yield f"| `{_cell(option).replace(' RANGE', '')}` | {_cell(_prose(meaning))} |"
        yield ""


def _prose(text: str) -> str:
    """Marks options as code. Otherwise, their two hyphens become a dash."""
    return _CODE_OR_OPTION.sub(lambda match: f"`{match[0].strip('`')}`", text)


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", r"\|")
