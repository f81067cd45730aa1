# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks [name...] [--quick]`."""

import argparse
import importlib
import sys
import traceback
from collections.abc import Callable

from benchmarks.report import Report
from benchmarks.zoo import ZOO

MODULES = {
    "step": "step",
    "tensorflow": "against_tensorflow",
    "models": "every_model",
    "kernels": "kernels",
    "compile": "compile_time",
    "short_batch": "short_batch",
    "host": "host_time",
    "scale": "scale",
    "memory": "memory",
    "input": "input",
    "run_steps": "run_steps",
    "fit": "fit",
    "fit_input": "fit_input",
    "model_parallel": "model_parallel",
    "update_sharding": "update_sharding",
    "multi_worker": "multi_worker",
    "all_reduce": "all_reduce",
    "parameter_server": "parameter_server",
    "parameter_server_memory": "parameter_server_memory",
    "parameter_server_soak": "parameter_server_soak",
    "checkpoints": "checkpoints",
    "sharded_checkpoints": "checkpoints:run_sharded",
    "summaries": "summaries",
    "soak": "soak",
    "restarts": "restarts",
    "kills": "kills",
    "sharded_kills": "kills:run_sharded",
    "interrupts": "interrupts",
    "endurance": "endurance",
    "elastic": "elastic",
    "sharded_elastic": "elastic:run_sharded",
    "elastic_machines": "elastic_machines",
    "elastic_callbacks": "elastic_callbacks",
    "elastic_data": "elastic_data",
    "elastic_peers": "elastic_peers",
    "elastic_soak": "elastic_soak",
    "slow_link": "slow_link",
    "equal_training": "equal_training",
    "unequal": "unequal",
}
"""The module of each benchmark, and its function unless that is `run`. The module is imported when it runs, because some need optional libraries."""


def function_of(name: str) -> Callable[..., Report]:
    """Returns the function that runs a benchmark."""
    module, _, function = MODULES[name].partition(":")
    run: Callable[..., Report] = getattr(importlib.import_module(f"benchmarks.{module}"), function or "run")
    return run


def main() -> None:
    """Runs the benchmarks that are named, or all."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help=f"some of {', '.join(MODULES)}; none means all")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds")
    parser.add_argument(
        "--rounds",
        type=int,
        help="how many rounds of restarts, elastic and elastic_callbacks (50), elastic_data (36), elastic_peers (3), slow_link, elastic_machines, equal_training and unequal (5), elastic_soak (100), kills (200), sharded_kills (60), sharded_checkpoints (7), sharded_elastic (20) and "
        "parameter_server_soak (30), and interrupts per loop (1000)",
    )
    parser.add_argument("--seed", type=int, default=0, help="the number of their first round (default: %(default)s)")
    parser.add_argument("--gigabytes", type=float, default=4.0, help="of the table of parameter_server_memory (4)")
    parser.add_argument("--case", choices=list(ZOO), help="the only model of models")
    parser.add_argument("--minutes", type=float, help="of endurance (30)")
    options = parser.parse_args()
    unknown = set(options.names) - set(MODULES)
    if unknown:
        parser.error(f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join(MODULES)}")
    rounds = {} if options.rounds is None else {"rounds": options.rounds}
    drawn = {"seed": options.seed} | rounds
    arguments = {
        "models": {"case": options.case},
        "restarts": drawn,
        "kills": drawn,
        "sharded_kills": drawn,
        "sharded_checkpoints": rounds,
        "elastic": drawn,
        "sharded_elastic": drawn,
        "elastic_machines": drawn,
        "elastic_callbacks": drawn,
        "elastic_data": drawn,
        "elastic_peers": drawn,
        "elastic_soak": drawn,
        "slow_link": drawn,
        "equal_training": drawn,
        "unequal": drawn,
        "parameter_server_soak": drawn,
        "parameter_server_memory": {"gigabytes": options.gigabytes},
        "interrupts": {"rounds": options.rounds},
        "endurance": {"minutes": options.minutes},
    }
    failures = []
    for name in options.names or MODULES:
        try:
            report = function_of(name)(quick=options.quick, **arguments.get(name, {}))
        except Exception:
            if options.names:
                raise
            # One of all may need what this machine lacks. The others take hours.
            traceback.print_exc()
            failures.append(name)
        else:
            report.show()
            failures += report.failures
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
