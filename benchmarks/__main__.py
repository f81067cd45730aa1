# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks [name...] [--quick]`."""

import argparse
import functools

from benchmarks import (
    against_tensorflow,
    all_reduce,
    checkpoints,
    compile_time,
    endurance,
    every_model,
    fit,
    host_time,
    interrupts,
    kernels,
    kills,
    memory,
    model_parallel,
    multi_worker,
    parameter_server,
    parameter_server_memory,
    parameter_server_soak,
    restarts,
    run_steps,
    soak,
    step,
    summaries,
)
from benchmarks import input as reading

BENCHMARKS = {
    "step": step.run,
    "tensorflow": against_tensorflow.run,
    "models": every_model.run,
    "kernels": kernels.run,
    "compile": compile_time.run,
    "host": host_time.run,
    "memory": memory.run,
    "input": reading.run,
    "run_steps": run_steps.run,
    "fit": fit.run,
    "model_parallel": model_parallel.run,
    "multi_worker": multi_worker.run,
    "all_reduce": all_reduce.run,
    "parameter_server": parameter_server.run,
    "parameter_server_memory": parameter_server_memory.run,
    "parameter_server_soak": parameter_server_soak.run,
    "checkpoints": checkpoints.run,
    "summaries": summaries.run,
    "soak": soak.run,
    "restarts": restarts.run,
    "kills": kills.run,
    "interrupts": interrupts.run,
    "endurance": endurance.run,
}


def main() -> None:
    """Runs the benchmarks that are named, or all."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help=f"some of {', '.join(BENCHMARKS)}; none means all")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds: to see that it works")
    parser.add_argument(
        "--rounds",
        type=int,
        help="how many rounds of restarts (50) and parameter_server_soak (30), and interrupts per loop (1000)",
    )
    parser.add_argument("--seed", type=int, default=0, help="the number of their first round (default: %(default)s)")
    parser.add_argument("--gigabytes", type=float, default=4.0, help="of the table of parameter_server_memory (4)")
    parser.add_argument("--minutes", type=float, help="of endurance (30)")
    options = parser.parse_args()
    unknown = set(options.names) - set(BENCHMARKS)
    if unknown:
        parser.error(f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join(BENCHMARKS)}")
    drawn = {"seed": options.seed} | ({} if options.rounds is None else {"rounds": options.rounds})
    sized = functools.partial(parameter_server_memory.run, gigabytes=options.gigabytes)
    benchmarks = BENCHMARKS | {
        "restarts": functools.partial(restarts.run, **drawn),
        "parameter_server_soak": functools.partial(parameter_server_soak.run, **drawn),
        "parameter_server_memory": sized,
        "interrupts": functools.partial(interrupts.run, rounds=options.rounds),
        "endurance": functools.partial(endurance.run, minutes=options.minutes),
    }
    for name in options.names or benchmarks:
        benchmarks[name](quick=options.quick).show()


if __name__ == "__main__":
    main()
