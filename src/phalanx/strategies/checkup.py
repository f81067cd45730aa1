# SPDX-License-Identifier: Apache-2.0
"""What `phalanx doctor` runs in each process of a cluster: `python -m phalanx.strategies.checkup`."""

import argparse
import json
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from phalanx.cluster.resolvers.base import ClusterResolver
from phalanx.cluster.resolvers.environment import resolver_of_environment
from phalanx.cluster.resolvers.tf_config import TFConfigClusterResolver
from phalanx.cluster.spec import Task, addresses_of_workers, id_in_cluster
from phalanx.errors import PhalanxError
from phalanx.mesh.bootstrap import print_on_chief
from phalanx.mesh.environment import versions
from phalanx.options import CommunicationOptions
from phalanx.strategies.multi_worker import MultiWorkerMirroredStrategy

_ALLOWED_SKEW_S = 5.0
_VISIBLE_WITHIN_S = 5.0
_MESSAGE_BYTES = 1 << 13


@dataclass(frozen=True)
class Check:
    """What one check has found.

    Args:
      name: what was checked.
      is_passed: whether it is as it should be.
      found: what was found.
      hint: what to do if it failed.

    Example:
      >>> print(Check("clocks", False, "rank 1 is 60 s ahead.", "start chronyd"))
      FAIL clocks: rank 1 is 60 s ahead.
      HINT: start chronyd
    """

    name: str
    is_passed: bool
    found: str
    hint: str = ""

    def __str__(self) -> str:
        line = f"{'PASS' if self.is_passed else 'FAIL'} {self.name}: {self.found}"
        return line if self.is_passed else f"{line}\nHINT: {self.hint}"


def check_port(address: str) -> Check:
    """Returns whether this process can listen at its address."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_server((host.strip("[]"), int(port))).close()
    except OSError as e:
        hint = "end the process that has the port, or write a free port and a name of this machine into the address"
        return Check(
            "port", False, f"rank 0 cannot listen at {address}: {os.strerror(e.errno) if e.errno else e}.", hint
        )
    return Check("port", True, f"rank 0 can listen at {address}.")


def judge_versions(of_ranks: Sequence[Mapping[str, str]]) -> Check:
    """Returns whether all ranks have the same versions."""
    names = sorted({name for versions in of_ranks for name in versions})
    for name in names:
        found = [versions.get(name, "none") for versions in of_ranks]
        if len(set(found)) > 1:
            said = ", ".join(f"rank {rank} has {version}" for rank, version in enumerate(found))
            return Check(
                "versions", False, f"{name} differs: {said}.", f"pip install {name}=={found[0]} on all workers"
            )
    return Check("versions", True, ", ".join(f"{name} {of_ranks[0][name]}" for name in names) + " on all ranks.")


def judge_clocks(times_s: Sequence[float], uncertainty_s: float) -> Check:
    """Returns whether the clocks of the ranks agree, which were read within `uncertainty_s` seconds."""
    skew_s = max(times_s) - min(times_s)
    last = times_s.index(max(times_s))
    if skew_s - uncertainty_s > _ALLOWED_SKEW_S:
        found = f"that of rank {last} is {skew_s:.0f} s ahead of that of rank {times_s.index(min(times_s))}."
        return Check("clocks", False, found, "set the clocks of all machines by NTP, for example with chronyd")
    return Check("clocks", True, f"they differ by {max(0.0, skew_s - uncertainty_s):.1f} s at most.")


def judge_shared(folder: str, seen: Sequence[Sequence[int]]) -> Check:
    """Returns whether each rank has seen the files that all ranks have written to a folder."""
    for rank, own in enumerate(seen):
        if missing := sorted(set(range(len(seen))) - set(own)):
            found = f"rank {rank} does not see in {folder} what rank {missing[0]} has written."
            return Check("shared folder", False, found, "a folder of a file system that all machines have mounted")
    return Check("shared folder", True, f"all ranks see what the others write to {folder}.")


def judge_sum(total: float, replicas: int, seconds: float) -> Check:
    """Returns whether an all-reduce of ones has counted the replicas."""
    if total != replicas:
        hint = "phalanx env --json, for a bug report"
        return Check("all-reduce", False, f"the sum of ones over {replicas} replicas is {total:g}.", hint)
    return Check("all-reduce", True, f"{replicas} replicas, {1000 * seconds:.1f} ms.")


def main(arguments: Sequence[str]) -> int:
    """Runs all checks in this process; the chief prints, and returns 1 if one has failed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--shared")
    parser.add_argument("--timeout-s", type=float, default=30.0)
    args = parser.parse_args(arguments)
    try:
        resolver = resolver_of_environment() or TFConfigClusterResolver()
        if (port := _port_of_chief(resolver)) is not None:
            print(port, flush=True)
            if not port.is_passed:
                return 1
        options = CommunicationOptions(timeout_seconds=args.timeout_s)
        strategy = MultiWorkerMirroredStrategy(resolver, options)
    except PhalanxError as e:
        print(Check("roll call", False, f"{e.asked}: {e.found}", e.hint), flush=True)
        return 1
    workers = strategy.topology.num_workers
    print_on_chief(Check("roll call", True, f"{workers} processes have met."), flush=True)
    checks = [_all_reduce(strategy), *_together(strategy, args.shared)]
    print_on_chief(*checks, sep="\n", flush=True)
    # The chief alone fails: a launcher ends the others when one has failed, perhaps before the chief has printed.
    return int(strategy.topology.worker_index == 0 and not all(check.is_passed for check in checks))


def _port_of_chief(resolver: ClusterResolver) -> Check | None:
    """Returns whether the first process can listen; None in the others."""
    spec = resolver.cluster_spec()
    if not spec or resolver.task_type is None or resolver.task_id is None:
        return None
    rank = id_in_cluster(spec, Task(resolver.task_type, resolver.task_id))
    return None if rank else check_port(addresses_of_workers(spec)[0])


def _all_reduce(strategy: MultiWorkerMirroredStrategy) -> Check:
    ones = strategy.run(lambda: jnp.ones(()))
    strategy.reduce("SUM", ones, axis=None)  # Compiles.
    started_s = time.perf_counter()
    total = float(strategy.reduce("SUM", ones, axis=None))
    return judge_sum(total, strategy.num_replicas_in_sync, time.perf_counter() - started_s)


def _together(strategy: MultiWorkerMirroredStrategy, shared: str | None) -> list[Check]:
    """Compares what all processes know."""
    tell = _teller(strategy)
    of_ranks = tell({"versions": versions(), "token": secrets.token_hex(8)})
    checks = [judge_versions([own["versions"] for own in of_ranks])]
    tell({})  # Compiled by now: all read their clocks within the time that this takes.
    started_s = time.perf_counter()
    times_s = [own["time"] for own in tell({"time": time.time()})]
    checks.append(judge_clocks(times_s, time.perf_counter() - started_s))
    if shared is not None:
        checks.append(_shared_folder(shared, of_ranks[0]["token"], strategy.topology.worker_index, tell))
    return checks


def _shared_folder(folder: str, token: str, rank: int, tell: Callable[[Any], list[Any]]) -> Check:
    path = Path(folder) / f".phalanx-doctor-{token}-{rank}"
    try:
        path.write_text("")
        problem = ""
    except OSError as e:
        problem = f"rank {rank} cannot write to {folder}: {e.strerror}."
    of_ranks = tell(problem)
    if problems := [own for own in of_ranks if own]:
        return Check("shared folder", False, problems[0], "a folder that exists, and that all workers may write to")
    deadline_s = time.monotonic() + _VISIBLE_WITHIN_S
    while True:
        seen = {int(p.name.rpartition("-")[2]) for p in Path(folder).glob(f".phalanx-doctor-{token}-*")}
        # All look as often as the slowest needs: the file system of a network shows new files late.
        if all(tell(len(seen) == len(of_ranks) or time.monotonic() > deadline_s)):
            break
        time.sleep(0.1)
    seen_by_ranks = tell(sorted(seen))
    path.unlink()
    return judge_shared(folder, seen_by_ranks)


def _teller(strategy: MultiWorkerMirroredStrategy) -> Callable[[Any], list[Any]]:
    """Returns a function that all processes call at once with what they know, and that returns what each of them knows."""

    def tell(message: Any) -> list[Any]:
        data = json.dumps(message).encode().ljust(_MESSAGE_BYTES)
        of_ranks = strategy.topology.exchange(np.frombuffer(data, np.uint8))
        return [json.loads(bytes(own)) for own in of_ranks]

    return tell


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
