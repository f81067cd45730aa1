# SPDX-License-Identifier: Apache-2.0
"""Tables on the terminal, of text that may come from elsewhere."""

import sys
from collections.abc import Iterable, Sequence

from phalanx.errors.printable import printable


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], *, title: str = "", has_box: bool = False
) -> None:
    """Prints a table whose cells mean what they say: neither the markup of Rich nor control characters have an effect.

    Args:
      columns: the titles of the columns.
      rows: their cells.
      title: a line above. Empty for none.
      has_box: whether lines separate the cells.
    """
    # The import takes a tenth of a second, and most commands print no table.
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(_cell(title)) if title else None, box=box.HEAVY_HEAD if has_box else None)
    for column in columns:
        table.add_column(Text(_cell(column)))
    for row in rows:
        table.add_row(*(Text(_cell(cell)) for cell in row))
    # Whole names, even if the output is a pipe.
    Console(width=None if sys.stdout.isatty() else 200, soft_wrap=not has_box).print(table)


def _cell(text: str) -> str:
    """Returns text that stays in its cell."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")
