# SPDX-License-Identifier: Apache-2.0
"""Lines for the user of a script that need no action: on which devices it trains, and where it resumes."""

import logging
import sys

from phalanx._src.runtime.bootstrap import is_this_chief

_log = logging.getLogger("phalanx")


def note(text: str) -> None:
    """Tells the user of a script something. Only the chief of a cluster does.

    A program that configures logging receives a record of the logger "phalanx" with level INFO. Otherwise the text is a line on
    stderr, because Python drops such records.

    Args:
      text: one line.
    """
    if not is_this_chief():
        return
    if _log.hasHandlers() or _log.level > logging.INFO:
        _log.info(text)
    else:
        print(f"Phalanx: {text}", file=sys.stderr, flush=True)
