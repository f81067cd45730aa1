# SPDX-License-Identifier: Apache-2.0
"""Lines for the user of a script that need no action: on which devices it trains, and where it resumes."""

import logging
import sys

from phalanx._src.runtime.bootstrap import is_this_chief

_log = logging.getLogger("phalanx")


def note(text: str) -> None:
    """Tells the user of a script something. Only the chief of a cluster does.

    A program that configures logging for level INFO receives a record of the logger "phalanx". One that sets a higher level of this
    logger hears nothing. Otherwise the text is a line on stderr, because Python drops such records. Libraries add handlers to the root
    logger (Grain's absl does) without a level at which they show anything.

    Args:
      text: one line.
    """
    if not is_this_chief():
        return
    if _log.level > logging.INFO or (_log.hasHandlers() and _log.isEnabledFor(logging.INFO)):
        _log.info(text)
    else:
        print(f"Phalanx: {text}", file=sys.stderr, flush=True)
