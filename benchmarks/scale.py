# SPDX-License-Identifier: Apache-2.0
"""Measures the work of rank 0 in a cluster of up to 4,096 processes. The code is the real one; the other processes are simulated.

The roll call and the watch run over real sockets, with rank 0 in one process and all other ranks as threads of another. The
scheduler of parameter servers is real, and its workers take the time of a step without computing. The slowest of n workers is
drawn from a distribution.
"""

import functools
import time

import numpy as np

from benchmarks import scale_cluster
from benchmarks.parent import Child
from benchmarks.report import Report

_RANKS = (8, 64, 512, 4096)
_SPREAD = 0.05
_STEP_S = 0.5
_COLUMNS = (
    "processes",
    "meet s",
    "rank 0 CPU s",
    "kB each",
    "agree s",
    "watch % core",
    "msgs/s",
    "death known s",
    "steps/s",
    "CPU us/step",
    "fetch ms",
    "busy %",
    "plan ms",
    "waiting %",
)


def run(*, quick: bool = False) -> Report:
    """Measures rank 0 at several sizes of a cluster.

    Args:
      quick: only the two smallest sizes, and fewer steps.

    Returns:
      The report.
    """
    report = Report("scale", "Rank 0 of a cluster, whose other processes are simulated: no ratio", _COLUMNS)
    report.measure(lambda n=n: _add(report, n, quick=quick) for n in _RANKS[: 2 if quick else None])
    return report


def plan_s(num_ranks: int) -> float:
    """In a child: the time in which the chief plans what each worker reads of an array, and says it."""
    import phalanx
    from phalanx._src.input.shard import InputWorker
    from phalanx._src.input.sharding import plan
    from phalanx._src.input.sources.adapt import source_of

    rows = np.zeros((64 * num_ranks, 1), "float32")
    began_s = time.perf_counter()
    worker = InputWorker(0, num_ranks)
    plan(
        rows, functools.partial(source_of, batch_size=64 * num_ranks), phalanx.data.AutoShardPolicy.AUTO, worker
    ).announce(worker)
    return time.perf_counter() - began_s


def _add(report: Report, num_ranks: int, *, quick: bool) -> None:
    met = scale_cluster.roll_call(num_ranks)
    if met.chief["error"] or met.members["errors"]:
        raise RuntimeError(f"roll call: {met.chief['error'] or met.members['first_error']}")
    watched = scale_cluster.watched(num_ranks, quiet_s=3.0 if quick else 10.0)
    with Child(1) as child:
        queue = child.call(
            "benchmarks.scale_queue:measure",
            600.0,
            workers=num_ranks,
            closures=1_000 if quick else 20_000,
            rounds=3 if quick else 10,
            fetches=100,
            step_s=_STEP_S,
        )
        planned_s = child.call("benchmarks.scale:plan_s", 60.0, num_ranks=num_ranks)
    waiting = _waiting(num_ranks)
    chief, members = watched.chief, watched.members
    report.add(
        [
            f"{num_ranks:,}",
            max(met.chief["ended_s"], met.members["ended_s"]) - met.members["began_s"],
            met.chief["cpu_s"],
            f"{met.chief['bytes'] / num_ranks / 1e3:.0f}",
            max(chief["agreed_s"], members["agreed_s"]) - members["asked_s"],
            f"{chief['cpu_share']:.1%}",
            f"{chief['messages_in_per_s'] + chief['messages_out_per_s']:,.0f}",
            members["known_s"] - members["cut_s"],
            f"{queue['closures_per_s']:,.0f}",
            f"{1e6 * queue['cpu_s_each']:.0f}",
            1e3 * queue["fetch_s"],
            f"{queue['busy_share']:.1%}",
            1e3 * planned_s,
            f"{waiting:.1%}",
        ],
        ranks=num_ranks,
        roll_call={"chief": met.chief, "members": met.members},
        watch={"chief": chief, "members": members},
        queue=queue,
        plan_s=planned_s,
        waiting=waiting,
    )


def _waiting(num_ranks: int) -> float:
    """Returns the share of a step in which a worker waits for the slowest, if their steps vary by 5% (standard deviation)."""
    times = np.random.default_rng(0).normal(1.0, _SPREAD, (1_000, num_ranks))
    return 1.0 - float(times.mean() / times.max(axis=1).mean())
