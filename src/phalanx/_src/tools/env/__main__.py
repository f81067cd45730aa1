# SPDX-License-Identifier: Apache-2.0
"""Prints the report: `python -m phalanx._src.tools.env`."""

import json
import sys

from phalanx._src.tools.env.report import as_text, describe

if __name__ == "__main__":
    environment = describe()
    print(json.dumps(environment, indent=2) if "--json" in sys.argv[1:] else as_text(environment))
