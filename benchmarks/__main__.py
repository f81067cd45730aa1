# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks [name...] [--quick]`."""

import argparse

from benchmarks import against_tensorflow, compile_time, fit, host_time, memory, run_steps, soak, step
from benchmarks import input as reading

BENCHMARKS = {
    "step": step.run,
    "tensorflow": against_tensorflow.run,
    "compile": compile_time.run,
    "host": host_time.run,
    "memory": memory.run,
    "input": reading.run,
    "run_steps": run_steps.run,
    "fit": fit.run,
    "soak": soak.run,
}


def main() -> None:
    """Runs the benchmarks that are named, or all."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help=f"some of {', '.join(BENCHMARKS)}; none means all")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds: to see that it works")
    options = parser.parse_args()
    unknown = set(options.names) - set(BENCHMARKS)
    if unknown:
        parser.error(f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join(BENCHMARKS)}")
    for name in options.names or BENCHMARKS:
        BENCHMARKS[name](quick=options.quick).show()


if __name__ == "__main__":
    main()
