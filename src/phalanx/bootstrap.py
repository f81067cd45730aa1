# SPDX-License-Identifier: Apache-2.0
"""The start of a process that is one of several: the only caller of `jax.distributed`."""

import atexit
import functools
import math
import os
import signal
import sys
import traceback
from types import TracebackType

import jax

from phalanx import watch
from phalanx.cluster.resolvers.base import ClusterResolver
from phalanx.cluster.spec import Task, addresses_of_workers, id_in_cluster
from phalanx.errors import ClusterError, InvalidArgumentError, StartupError
from phalanx.rollcall import call_roll

START_TIMEOUT_S = 300.0
"""How long a process waits for the others, unless the caller or PHALANX_START_TIMEOUT_S says otherwise."""
_A_DAY_S = 24 * 60 * 60


def start(resolver: ClusterResolver, timeout_s: float | None = None, stall_timeout_s: float | None = None) -> None:
    """Connects this process with the others of its cluster; does nothing where there are none, or where it is done.

    Args:
      resolver: what describes the cluster and this process's task in it.
      timeout_s: how long to wait for the others.
      stall_timeout_s: how long the processes may stand still, later, while one of them waits.

    Raises:
      ClusterError: the cluster has no task for this process.
      InvalidArgumentError: a time that is none, in the environment.
      StartupError: others are missing, or JAX has used its devices already.
    """
    spec = resolver.cluster_spec()
    if not spec:
        return
    task = _own_task(resolver)
    addresses = addresses_of_workers(spec)
    rank = id_in_cluster(spec, task)
    if jax.distributed.is_initialized():
        _require_same(len(addresses), rank)
        return
    if len(addresses) == 1:
        return
    timeout_s = timeout_s or _seconds_of("PHALANX_START_TIMEOUT_S", START_TIMEOUT_S)
    stall_timeout_s = stall_timeout_s or _seconds_of("PHALANX_STALL_TIMEOUT_S", watch.STALL_TIMEOUT_S)
    lines = call_roll(addresses, rank, about=f"{spec.as_dict()}", timeout_s=timeout_s)
    own = watch.start(addresses, rank, lines, stall_timeout_s)
    _initialize(addresses, rank, timeout_s)
    sys.excepthook = functools.partial(_end_at_once, own)
    # After JAX has registered its own, so that it runs before: JAX waits for the others there.
    atexit.register(own.leave)


def _seconds_of(variable: str, default: float) -> float:
    text = os.environ.get(variable) or str(default)
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not seconds > 0:
        raise InvalidArgumentError(f"{variable}={text!r}", "must be a number of seconds above 0.", f"{variable}=60")
    return seconds


def _own_task(resolver: ClusterResolver) -> Task:
    if resolver.task_type is None or resolver.task_id is None:
        raise ClusterError(
            f"a cluster of {resolver.cluster_spec().as_dict()}",
            "nothing says which of its tasks this process is.",
            '"task": {"type": "worker", "index": 0} in TF_CONFIG, or task_type and task_id of the resolver',
        )
    return Task(resolver.task_type, resolver.task_id)


def _require_same(processes: int, rank: int) -> None:
    if (jax.process_count(), jax.process_index()) != (processes, rank):
        raise StartupError(
            f"rank {rank} of {processes} processes",
            f"this process is rank {jax.process_index()} of {jax.process_count()} already, and stays it.",
            "one cluster for each process",
        )


def _initialize(addresses: list[str], rank: int, timeout_s: float) -> None:
    host = addresses[0].rpartition(":")[0]
    # Not for other machines to see where all processes are on this one.
    bind = addresses[0] if rank == 0 and host in ("127.0.0.1", "localhost") else None
    # Two programs that do not need each other would run at once, and gloo would take the one's messages for the other's.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    try:
        jax.distributed.initialize(
            addresses[0],
            len(addresses),
            rank,
            cluster_detection_method="deactivate",
            initialization_timeout=max(1, int(timeout_s)),
            # One that has come to its end waits for the others there; the watch knows whether they come.
            shutdown_timeout_seconds=_A_DAY_S,
            coordinator_bind_address=bind,
        )
    except RuntimeError as e:
        raise StartupError(
            f"rank {rank} of {len(addresses)} processes",
            f"JAX cannot join them any more: {e}",
            "make the strategy at the top of the script, before the first array",
        ) from e


def _end_at_once(
    own: watch.Watch, kind: type[BaseException], error: BaseException, where: TracebackType | None
) -> None:
    """Ends this process without waiting for the others, which wait for it in the middle of a step."""
    traceback.print_exception(kind, error, where)
    own.fail(f"has ended by {kind.__name__}: {error}".partition("\n")[0])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(128 + signal.SIGINT if issubclass(kind, KeyboardInterrupt) else 1)
