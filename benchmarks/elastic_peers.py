# SPDX-License-Identifier: Apache-2.0
"""A process of three is killed while they train: the seconds until the group finishes the next step, with three libraries.

All train the same MLP on the same batches on the CPU. In each round every library starts its training once, and loses some random
processes, rank 0 included, one after the other. The seconds go from SIGKILL to a finished step of all processes that take part in it: with
Phalanx these are the two that are left, and with the other libraries three new ones. The group is complete again before the next loss.

Each training writes down its steps. After a restart from a checkpoint, the first step may be one that was done before. Phalanx repeats such
steps before the script sees the next one, so its seconds contain them.
"""

import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from benchmarks import peers
from benchmarks.elastic import Job, Recovery, Training
from benchmarks.parent import ROOT
from benchmarks.report import Report

WORKERS = 3
SAVE_EVERY = 5
"""Steps between two checkpoints of the libraries that restart from one."""
KILLS = 3
"""Processes lost per start."""

_EPOCHS = 1_000_000
_LOOPBACK = {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
_TORCHRUN = {
    "--nnodes": "1",
    "--nproc-per-node": str(WORKERS),
    "--max-restarts": "1000",
    "--rdzv-backend": "c10d",
    "--rdzv-endpoint": "127.0.0.1:0",
    "--local-addr": "127.0.0.1",
    "--monitor-interval": "0.01",
    "--shutdown-timeout": "1",
}
# Without it a restarted group can read the addresses of the former group from the store that torchrun shares, and hang.
_NEW_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
_RAY = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.1",
    "TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S": "1",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_ENABLE_STATE_ACTOR_RECONCILIATION": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}


@dataclass(frozen=True)
class _Library:
    """A library that is measured.

    Args:
      name: what the report calls it.
      settings: what was set in its favour.
      start: starts its training.
      members: number of processes that make the next step.
      recoveries: what has been measured.
    """

    name: str
    settings: str
    start: Callable[[], Training]
    members: int
    recoveries: list[Recovery] = field(default_factory=list)


def _torchrun() -> Training:
    python = str(peers.interpreter("torch", peers.TORCH))
    options = [word for option in _TORCHRUN.items() for word in option]
    script = ["-m", "benchmarks.elastic_torch", str(SAVE_EVERY)]
    return Training([python, "-m", "torch.distributed.run", *options, *script], WORKERS, _LOOPBACK | _NEW_STORE)


def _ray_train() -> Training:
    python = str(peers.interpreter("ray_train", peers.RAY_TRAIN))
    command = [python, "-m", "benchmarks.elastic_ray", str(WORKERS), str(SAVE_EVERY)]
    return Training(command, WORKERS, _LOOPBACK | _RAY)


def _libraries() -> list[_Library]:
    workers, restart = f"{WORKERS - 1}:{WORKERS}", f"a checkpoint every {SAVE_EVERY} steps"
    torchrun = "c10d rendezvous, a new store per restart, monitor interval 0.01 s, shutdown timeout 1 s"
    ray_train = "health check every 0.1 s, shutdown timeout 1 s, no preemption watcher, no reconciliation, no metrics"
    return [
        _Library(
            f"phalanx run --workers {workers}, loop", "defaults", partial(Job, "loop", workers, _EPOCHS), WORKERS - 1
        ),
        _Library(
            f"phalanx run --workers {workers}, fit", "defaults", partial(Job, "fit", workers, _EPOCHS), WORKERS - 1
        ),
        _Library("torchrun, DDP", f"{restart}, {torchrun}", _torchrun, WORKERS),
        _Library("Ray Train, TorchTrainer", f"{restart}, {ray_train}", _ray_train, WORKERS),
    ]


def _play(library: _Library, kills: int, rng: random.Random) -> None:
    """Starts the training of a library, loses processes and ends it."""
    with library.start() as training:
        for _ in range(kills):
            members = sorted(training.wait_until_complete())
            time.sleep(rng.uniform(0.5, 1.0))
            library.recoveries.append(training.kill(rng.choice(members), library.members))


def _row(library: _Library, reference: float) -> list[object]:
    seconds = [recovery.seconds for recovery in library.recoveries]
    median, repeated = statistics.median(seconds), statistics.median(r.repeated for r in library.recoveries)
    rounds = " ".join(f"{s:.2f}" for s in seconds)
    return [library.name, median, max(seconds), median / reference, repeated, rounds, library.settings]


def run(*, quick: bool, rounds: int = 3, seed: int = 0) -> Report:
    """Loses processes of each library in turn, and compares the medians with the first one's."""
    report = Report(
        "elastic_peers",
        f"One process of {WORKERS} is killed at a time: seconds to the next step of the group (ratio: median / median of the first row)",
        ("library", "median s", "worst s", "ratio", "steps seen twice", "all rounds", "settings"),
    )
    rng, libraries = random.Random(seed), _libraries()

    def play(library: _Library) -> None:
        _play(library, 1 if quick else KILLS, rng)
        print(f"{library.name}: {library.recoveries[-KILLS:]}", file=sys.stderr, flush=True)

    report.measure(partial(play, library) for _ in range(1 if quick else rounds) for library in libraries)
    if not libraries[0].recoveries:
        return report
    reference = statistics.median(recovery.seconds for recovery in libraries[0].recoveries)
    for library in libraries:
        if library.recoveries:
            report.add(_row(library, reference), library=library.name, recoveries=library.recoveries)
    return report
