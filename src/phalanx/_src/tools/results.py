# SPDX-License-Identifier: Apache-2.0
"""Writes the results of a command."""

from pathlib import Path
from typing import TYPE_CHECKING

from phalanx._src.cluster.untrusted import new_file
from phalanx.errors import InvalidArgumentError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def save(path: Path, results: "str | Figure") -> None:
    """Writes JSON or a picture.

    Raises:
      InvalidArgumentError: the file cannot be written.
    """
    try:
        with new_file(path) as opened:
            if isinstance(results, str):
                opened.write(results.encode())
            else:
                # The format is passed, because Matplotlib sees an open file and no name with an ending.
                results.savefig(opened, format=path.suffix[1:])
    except OSError as e:
        hint = "the path of a new file in a folder that this user may write to"
        raise InvalidArgumentError(f"the file {path}", f"it cannot be written: {e}.", hint) from e
