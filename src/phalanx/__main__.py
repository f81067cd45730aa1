# SPDX-License-Identifier: Apache-2.0
"""`python -m phalanx`: the command line, even if the command `phalanx` is not on the path."""

from phalanx._src.tools.cli import main

if __name__ == "__main__":
    main()
