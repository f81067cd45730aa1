# SPDX-License-Identifier: Apache-2.0
"""The table of TensorFlow's names, which is the file `names.tsv`.

A line has four columns, which tabs separate: a name, its target, its arguments and a note.

The name begins with `tf.`, or with a dot for a method of any object. The target is one of these:

- a dotted name, such as `keras.ops.mean`. Only the name and the arguments change
- an expression with `{argument}` or `{argument=default}`, such as `keras.ops.take({params}, {indices}, axis={axis=0})`
- an expression that stands for the name itself, such as `"float32"`
- `keep`: the name needs TensorFlow and stays
- `drop`: a statement that only calls it is removed
- `none`: it has no counterpart, and the note says what to write

The arguments are those of TensorFlow in their order. A name may have several lines with different arguments: the first that fits a
call counts. One argument is written like this:

- `x`: has the same name in the target. `input_tensor:x`: has another name. `name:`: is dropped. `conjugate:!`: cannot be passed
- `transpose_b=True`: is dropped, and has this value if it is passed
- `x+`: must be passed. `*inputs`: takes all positional arguments that follow
- `/`: the arguments before it have the same positions in the target. All others are passed by keyword
- `...`: all other arguments are passed on as they are
"""

import functools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import final

_ITEM = re.compile(r"(\*?\w+)(?:=([^:+]+))?(?::(!|\w*))?(\+)?")
_NAME = re.compile(r"[A-Za-z_][\w.]*")
_KINDS = ("keep", "drop", "none")


@final
@dataclass(frozen=True)
class Argument:
    """An argument of TensorFlow.

    Attributes:
      name: its name. A star before it takes all positional arguments that follow.
      target: its name in the target. Empty if it is dropped.
      value: the only value that it may have. None allows every value.
      is_required: whether a call must pass it.
      is_refused: whether a call must not pass it.
    """

    name: str
    target: str
    value: str | None = None
    is_required: bool = False
    is_refused: bool = False

    @staticmethod
    def parse(text: str) -> "Argument":
        """Returns the argument that an item of the third column describes."""
        match = _ITEM.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} does not describe an argument")
        name, value, target, plus = match.groups()
        default = "" if value is not None else name.lstrip("*")
        return Argument(
            name, default if target is None else target.replace("!", ""), value, plus is not None, target == "!"
        )


@final
@dataclass(frozen=True)
class Row:
    """A line of the table.

    Attributes:
      name: the name in TensorFlow, for example `tf.reduce_mean`.
      target: what stands for it.
      arguments: the arguments, in TensorFlow's order.
      leading: how many of them have the same position in the target.
      is_open: whether other arguments are passed on as they are.
      note: what a reader should know, or what to write instead.
    """

    name: str
    target: str
    arguments: tuple[Argument, ...]
    leading: int
    is_open: bool
    note: str

    @staticmethod
    def parse(line: str) -> "Row":
        """Returns the row that a line describes."""
        name, target, arguments, note = line.split("\t")
        items = arguments.split()
        plain = [Argument.parse(item) for item in items if item not in {"/", "..."}]
        leading = items.index("/") if "/" in items else 0
        # An empty column passes all arguments on, like `...`.
        return Row(name, target, tuple(plain), leading, "..." in items or not items, note)

    @property
    def kind(self) -> str:
        """One of `keep`, `drop`, `none`, `name`, `template` and `expression`."""
        if self.target in _KINDS:
            return self.target
        if "{" in self.target:
            return "template"
        is_name = _NAME.fullmatch(self.target) and self.target not in {"None", "True", "False"}
        return "name" if is_name else "expression"


@final
class NameTable:
    """All rows, by name."""

    def __init__(self, rows: list[Row]) -> None:
        self._rows: dict[str, list[Row]] = {}
        for row in rows:
            self._rows.setdefault(row.name, []).append(row)

    def rows(self, name: str) -> list[Row]:
        """Returns the rows of a name. Empty if the table does not have it."""
        return self._rows.get(name, [])

    def find(self, name: str) -> tuple[list[Row], str]:
        """Returns the rows of the longest known beginning of a name, and the rest of the name.

        A rest is allowed after a class, whose attributes are the same, and after a name that stays as it is.
        """
        head, rest = name, ""
        while head:
            rows = self.rows(head)
            if rows and (not rest or rows[0].kind == "keep" or _is_class(head)):
                return rows, rest
            if rows:
                return [], ""
            head, dot, last = head.rpartition(".")
            rest = f"{dot}{last}{rest}"
        return [], ""


def _is_class(name: str) -> bool:
    return name.rpartition(".")[2][:1].isupper()


@functools.cache
def the_table() -> NameTable:
    """Returns the table that is part of Phalanx."""
    lines = (Path(__file__).parent / "names.tsv").read_text(encoding="utf-8").splitlines()
    return NameTable([Row.parse(line) for line in lines if not line.startswith("#")])
