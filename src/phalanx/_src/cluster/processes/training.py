# SPDX-License-Identifier: Apache-2.0
"""How an evaluator finds out that the training has ended: a file, whose path `phalanx run` puts into its environment."""

import os
from pathlib import Path

ENDED = "PHALANX_TRAINING_ENDED"
"""The variable that holds the path of the file."""


def has_ended() -> bool | None:
    """Returns whether the training that this evaluator follows has ended. May be called in any context.

    Look for new checkpoints after this call, not before, because the last checkpoint is written before the end.

    Returns:
      None if it is unknown: this process is not an evaluator of `phalanx run`.

    Example:
      >>> print(has_ended())
      None
    """
    path = os.environ.get(ENDED)
    return Path(path).exists() if path else None


def note_end(path: Path, word: str) -> None:
    """Creates the file of which `has_ended` is told, with `word` in it."""
    begun = path.with_suffix(".new")
    begun.write_text(word)
    begun.replace(path)  # Atomic: whoever finds the file can read the word in it.
