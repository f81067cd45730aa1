# SPDX-License-Identifier: Apache-2.0
"""A child process that calls the functions it is told to, one JSON line a call. It needs the standard library only."""

import importlib
import json
import os
import sys


def main() -> None:
    """Answers calls until standard input ends."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # What libraries print goes to the log, not among the replies.
    for line in sys.stdin:
        request = json.loads(line)
        module, function = request["function"].split(":")
        result = getattr(importlib.import_module(module), function)(**request["kwargs"])
        replies.write(json.dumps(result) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
