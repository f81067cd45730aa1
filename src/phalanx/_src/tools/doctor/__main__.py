# SPDX-License-Identifier: Apache-2.0
"""The checks that `phalanx doctor` runs in each process of a cluster: `python -m phalanx._src.tools.doctor`."""

import argparse
import json
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from phalanx._src.cluster.resolvers.base import ClusterResolver
from phalanx._src.cluster.resolvers.environment import resolver_of_environment
from phalanx._src.cluster.resolvers.tf_config import TFConfigClusterResolver
from phalanx._src.cluster.spec import Task, addresses_of_workers, id_in_cluster
from phalanx._src.options import CommunicationOptions
from phalanx._src.runtime.bootstrap import print_on_chief
from phalanx._src.strategies.multi_worker import MultiWorkerMirroredStrategy
from phalanx._src.tools.doctor.network import Check, check_network, judge_addresses, own_address
from phalanx._src.tools.env.report import versions
from phalanx.errors import PhalanxError, arguments

_ALLOWED_SKEW_S = 5.0
_VISIBLE_WITHIN_S = 5.0
# All processes must exchange arrays of one shape, so every message has this size.
_MESSAGE_BYTES = 1 << 13


def judge_versions(of_ranks: Sequence[Mapping[str, str]]) -> Check:
    """Checks that all ranks have the same package versions.

    Args:
      of_ranks: one dict per rank, from package name to version.
    """
    names = sorted({name for versions in of_ranks for name in versions})
    for name in names:
        rank_versions = [versions.get(name, "none") for versions in of_ranks]
        if len(set(rank_versions)) > 1:
            said = ", ".join(f"rank {rank} has {version}" for rank, version in enumerate(rank_versions))
            return Check(
                "versions", False, f"{name} differs: {said}.", f"pip install {name}=={rank_versions[0]} on all workers"
            )
    return Check("versions", True, ", ".join(f"{name} {of_ranks[0][name]}" for name in names) + " on all ranks.")


def judge_clocks(times_s: Sequence[float], uncertainty_s: float) -> Check:
    """Checks that the clocks of all ranks agree.

    Args:
      times_s: one clock reading per rank, in seconds.
      uncertainty_s: how far apart in time the readings may have been taken, in seconds.
    """
    skew_s = max(times_s) - min(times_s)
    last = times_s.index(max(times_s))
    if skew_s - uncertainty_s > _ALLOWED_SKEW_S:
        first = times_s.index(min(times_s))
        problem = f"the clock of rank {last} is {skew_s:.0f} s ahead of the clock of rank {first}."
        return Check("clocks", False, problem, "synchronize the clocks of all machines with NTP, for example chronyd")
    return Check("clocks", True, f"they differ by at most {max(0.0, skew_s - uncertainty_s):.1f} s.")


def judge_shared(folder: str, seen: Sequence[Sequence[int]]) -> Check:
    """Checks that each rank saw the files that all ranks wrote to a folder.

    Args:
      folder: path of the folder.
      seen: one list per rank, with the ranks whose files it saw.
    """
    for rank, visible_ranks in enumerate(seen):
        if missing := sorted(set(range(len(seen))) - set(visible_ranks)):
            problem = f"rank {rank} does not see the file that rank {missing[0]} wrote to {folder}."
            return Check("shared folder", False, problem, "use a folder on a file system that all machines mount")
    return Check("shared folder", True, f"all ranks see the files that the others write to {folder}.")


def judge_sum(total: float, replicas: int, seconds: float) -> Check:
    """Checks that an all-reduce of ones equals the number of replicas.

    Args:
      total: result of the all-reduce.
      replicas: number of replicas.
      seconds: duration of the all-reduce, in seconds.
    """
    if total != replicas:
        hint = "report a bug, with the output of phalanx env --json"
        return Check("all-reduce", False, f"the sum of ones over {replicas} replicas is {total:g}.", hint)
    return Check("all-reduce", True, f"{replicas} replicas, {1000 * seconds:.1f} ms.")


def judge_failure(error: Exception) -> Check:
    """Returns the check of processes that have met, but could not exchange data."""
    hint = "let the machines reach each other at all TCP ports, in the firewall and in the network policy"
    return Check("all-reduce", False, str(error).partition("\n")[0], hint)


def main(arguments: Sequence[str]) -> int:
    """Runs all checks in this process. The chief prints the results and returns 1 if a check failed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--shared")
    parser.add_argument("--timeout-s", type=float, default=30.0)
    args = parser.parse_args(arguments)
    try:
        resolver = resolver_of_environment() or TFConfigClusterResolver()
        if not _is_network_right(resolver):
            return 1
        options = CommunicationOptions(timeout_seconds=args.timeout_s)
        strategy = MultiWorkerMirroredStrategy(resolver, options)
    except PhalanxError as e:
        # Every process prints: without a handshake, there may be no chief.
        hint = e.hint and e.hint.replace("CommunicationOptions(timeout_seconds=...)", "--timeout-seconds")
        print(Check("handshake", False, f"{e.asked}: {e.found}", hint), flush=True)
        return 1
    workers = strategy.topology.num_workers
    met = (
        "this is an evaluator, which joins nobody."
        if _is_evaluator(resolver)
        else f"{workers} processes have connected."
    )
    print_on_chief(Check("handshake", True, met), flush=True)
    addresses = addresses_of_workers(resolver.cluster_spec()) if workers > 1 else []
    try:
        checks = [_all_reduce(strategy), *_together(strategy, addresses, args.shared)]
    except (PhalanxError, jax.errors.JaxRuntimeError) as e:
        print(judge_failure(e), flush=True)
        return 1
    if rank := strategy.topology.worker_index:
        print(f"rank {rank} has taken part in all checks. Rank 0 prints their results.", flush=True)
    print_on_chief(*checks, sep="\n", flush=True)
    # Only the chief fails: the launcher ends all processes after a failure, perhaps before the chief has printed.
    return int(strategy.topology.worker_index == 0 and not all(check.is_passed for check in checks))


def _is_network_right(resolver: ClusterResolver) -> bool:
    """Whether this process passes the checks before it meets the others. The first process prints all, the others those that failed."""
    spec = resolver.cluster_spec()
    if not spec or resolver.task_type is None or resolver.task_id is None or _is_evaluator(resolver):
        return True
    rank = id_in_cluster(spec, Task(resolver.task_type, resolver.task_id))
    checks = check_network(addresses_of_workers(spec), rank)
    for check in checks:
        if rank == 0 or not check.is_passed:
            print(check, flush=True)
    return all(check.is_passed for check in checks)


def _is_evaluator(resolver: ClusterResolver) -> bool:
    return resolver.task_type == "evaluator"


def _all_reduce(strategy: MultiWorkerMirroredStrategy) -> Check:
    ones = strategy.run(lambda: jnp.ones(()))
    strategy.reduce("SUM", ones, axis=None)  # Compiles, so that the next call measures only the all-reduce.
    started_s = time.perf_counter()
    total = float(strategy.reduce("SUM", ones, axis=None))
    return judge_sum(total, strategy.num_replicas_in_sync, time.perf_counter() - started_s)


def _together(strategy: MultiWorkerMirroredStrategy, addresses: Sequence[str], shared: str | None) -> list[Check]:
    """Runs the checks that compare the states of all processes."""
    tell = _teller(strategy)
    of_ranks = tell({"versions": versions(), "token": secrets.token_hex(8), "address": own_address(addresses)})
    checks = [judge_versions([own["versions"] for own in of_ranks])]
    if (network := judge_addresses(addresses, [own["address"] for own in of_ranks])) is not None:
        checks.insert(0, network)
    # This call, compiled by now, aligns the processes, so that all read their clocks at nearly the same time.
    tell({})
    started_s = time.perf_counter()
    times_s = [own["time"] for own in tell({"time": time.time()})]
    checks.append(judge_clocks(times_s, time.perf_counter() - started_s))
    if shared is not None:
        # All look for files with the token of rank 0, which no earlier run has left there.
        checks.append(_shared_folder(shared, of_ranks[0]["token"], strategy.topology.worker_index, tell))
    return checks


def _shared_folder(folder: str, token: str, rank: int, tell: Callable[[Any], list[Any]]) -> Check:
    path = Path(folder) / f".phalanx-doctor-{token}-{rank}"
    try:
        # Opens with O_EXCL, which does not follow a link that another user has put there.
        path.touch(exist_ok=False)
        problem = ""
    except OSError as e:
        problem = f"rank {rank} cannot write to {folder}: {e.strerror}."
    of_ranks = tell(problem)
    if problems := [own for own in of_ranks if own]:
        if not problem:
            path.unlink()
        return Check("shared folder", False, problems[0], "use a folder that exists and that all workers may write to")
    deadline_s = time.monotonic() + _VISIBLE_WITHIN_S
    while True:
        ends = [p.name.rpartition("-")[2] for p in Path(folder).glob(f".phalanx-doctor-{token}-*")]
        seen = set(map(int, filter(arguments.is_number, ends)))  # Others may write there too.
        # Every rank looks until the slowest has seen all files, because network file systems show new files late.
        if all(tell(len(seen) == len(of_ranks) or time.monotonic() > deadline_s)):
            break
        time.sleep(0.1)
    seen_by_ranks = tell(sorted(seen))
    path.unlink()
    return judge_shared(folder, seen_by_ranks)


def _teller(strategy: MultiWorkerMirroredStrategy) -> Callable[[Any], list[Any]]:
    """Returns a function that exchanges one JSON message per process. All processes must call it together."""

    def tell(message: object) -> list[Any]:
        data = json.dumps(message).encode().ljust(_MESSAGE_BYTES)
        of_ranks = strategy.topology.exchange(np.frombuffer(data, np.uint8))
        return [json.loads(bytes(own)) for own in of_ranks]

    return tell


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
