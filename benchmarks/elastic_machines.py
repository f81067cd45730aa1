# SPDX-License-Identifier: Apache-2.0
"""The first of three machines is lost: how soon the others finish the next step, and whether the result is right.

The machines are network namespaces, so this needs root on Linux (`phalanx.testing.VirtualNetwork`). Each round is a new training. Its
first machine is the one whose launcher decides who is in the group.
"""

import json
import random
import secrets
import shlex
import statistics
import subprocess
import sys
import time

from benchmarks.elastic import SHARDS, WIDTHS, Job, largest_difference
from benchmarks.report import Report
from phalanx.testing import VirtualNetwork

_EPOCHS = 8
_PAUSE_S = 0.02
_END_S = 600
_EVENTS = {
    "worker": "its worker is killed",
    "machine": "all its processes are killed",
    "silent": "it is switched off: nothing closes its connections",
}


class Machines(Job):
    """A training on three machines.

    Args:
      network: the machines.
      is_sharded: see `Job`.
    """

    def __init__(self, network: VirtualNetwork, *, is_sharded: bool) -> None:
        self._network, self._token = network, secrets.token_hex(16)
        super().__init__(
            "loop", "1:3", _EPOCHS, is_sharded=is_sharded, pause_s=_PAUSE_S, widths=WIDTHS, options=["--in-cluster"]
        )

    def command(self, launcher: list[str]) -> list[str]:
        """Returns a command that runs a launcher on each machine, and waits for all."""
        workers = [f"{address}:12345" for address in self._network.addresses]
        lines = []
        for index in range(len(workers)):
            cluster = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}}
            environment = ["env", f"TF_CONFIG={json.dumps(cluster)}", f"PHALANX_TOKEN={self._token}"]
            lines.append(f'{shlex.join(self._network.command(index, [*environment, *launcher]))} "$@" &')
        return ["sh", "-c", "\n".join([*lines, "wait"]), "machines"]

    def processes_of_the_first(self) -> set[int]:
        """Returns the processes of the first machine."""
        (*_, name) = self._network.command(0, [])
        return set(map(int, subprocess.check_output(["ip", "netns", "pids", name], text=True).split()))


def run(*, quick: bool, rounds: int = 5, seed: int = 0) -> Report:
    """Loses the first machine in three ways, with whole variables and with sharded ones."""
    columns = ("training", "the first machine", "rounds", "median s", "worst s", "difference of the weights")
    report = Report("elastic_machines", "The first of three machines is lost: seconds to the next step", columns)
    rng = random.Random(seed)
    with Job("loop", "1", _EPOCHS, widths=WIDTHS) as alone:
        alone.wait(_END_S)
        expected = alone.result()
    played: dict[tuple[bool, str], list[tuple[float, float]]] = {}
    for _ in range(1 if quick else rounds):
        for event in _EVENTS:
            for is_sharded in SHARDS:
                with VirtualNetwork(machines=3) as network, Machines(network, is_sharded=is_sharded) as job:
                    found = job.wait_until_complete()
                    time.sleep(rng.uniform(0.0, 0.5))
                    lost = job.processes_of_the_first()
                    if event == "silent":
                        network.pull_cable(0)
                    taken_s = job.lose(lost & set(found) if event == "worker" else lost, "kill")
                    job.hurry()
                    job.wait(_END_S)
                    difference = largest_difference(job.result(), expected)
                played.setdefault((is_sharded, event), []).append((taken_s, difference))
                print(f"{SHARDS[is_sharded]}, {event}: {taken_s:.2f} s, {difference:.1e}", file=sys.stderr, flush=True)
    for (is_sharded, event), each in played.items():
        seconds, differences = zip(*each, strict=True)
        row = [SHARDS[is_sharded], _EVENTS[event], len(each), statistics.median(seconds), max(seconds)]
        report.add([*row, f"{max(differences):.1e}"], how=f"{row[0]}, {event}", seconds=seconds)
    return report
