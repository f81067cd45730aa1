# SPDX-License-Identifier: Apache-2.0
"""Starts this process as a member of a cluster, moves it from group to group if the cluster is elastic, and ends it."""

import atexit
import functools
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import version
from types import FrameType, TracebackType
from typing import Any, final

import jax

from phalanx._src.cluster.connections.filters import admitting
from phalanx._src.cluster.connections.hosts import bypass_proxies
from phalanx._src.cluster.connections.ports import raise_limit_of_descriptors
from phalanx._src.cluster.connections.rollcall import Roll, call_roll
from phalanx._src.cluster.connections.secret import secret_of
from phalanx._src.cluster.resolvers.base import ClusterResolver, stall_limit_s, start_timeout_s
from phalanx._src.cluster.resolvers.environment import resolver_of_environment
from phalanx._src.cluster.resolvers.launchers import lone_task
from phalanx._src.cluster.resolvers.slurm import SlurmClusterResolver, step_of
from phalanx._src.cluster.spec import ClusterSpec, Task, addresses_of_workers, host_and_port, id_in_cluster, is_chief
from phalanx._src.cluster.watch import membership, verdict, watch
from phalanx._src.cluster.watch.meeting import Generation
from phalanx._src.runtime import coordination
from phalanx._src.runtime.streams import filtered
from phalanx._src.typed_jax import set_config
from phalanx.errors import ClusterError, StartupError, listed, warn_of_slip
from phalanx.typing import PyTree

_A_DAY_S = 24 * 60 * 60
_CONFIRM_S = 10.0
_MEETING_S = 3.0
"""Time in seconds that the processes of a new generation wait for each other. All of them were there when it was formed."""


def start(resolver: ClusterResolver, timeout_s: float | None = None, stall_timeout_s: float | None = None) -> None:
    """Connects this process with the other processes of its cluster.

    Does nothing if there are no others, or if they are connected already. An evaluator does not join: it reads what the
    others save.

    Args:
      resolver: describes the cluster, and the task of this process.
      timeout_s: time in seconds to wait for the other processes.
      stall_timeout_s: time in seconds without progress after which the watchdog reports a stall, while a process waits.

    Raises:
      ClusterError: the cluster has no task for this process.
      InvalidArgumentError: an environment variable holds an invalid time.
      StartupError: a process is missing, or JAX has already used its devices.
    """
    # In a process without a cluster too: a wrong time is found before the script runs in one.
    timeout_s, stall_timeout_s = timeout_s or start_timeout_s(os.environ), stall_timeout_s or stall_limit_s(os.environ)
    member = membership.own()
    if member is not None:
        # Before this process compiles anything, which one that joins a running training does alone.
        coordination.keep_all_reduces_apart()
        # A process that joins a running training stays alone until its training begins.
        if not member.is_late and member.generation is None:
            first = member.meet(call=0, progress=[-1])
            assert first is not None
            enter(first, stall_timeout_s)
        return
    spec = resolver.cluster_spec()
    if not spec:
        return
    task = _own_task(resolver)
    addresses = addresses_of_workers(spec)
    rank = id_in_cluster(spec, task)
    if task.type == "evaluator":
        return
    if jax.distributed.is_initialized():
        _require_same(len(addresses), rank)
        return
    if len(addresses) == 1:
        return
    secret = secret_of(addresses)
    raise_limit_of_descriptors()
    with call_roll(
        addresses, rank, about=_about(resolver, spec), versions=_versions(), secret=secret, timeout_s=timeout_s
    ) as roll:
        watchdog = watch.start(addresses, rank, roll.lines, stall_timeout_s, service=roll.bind)
        _initialize(roll, rank, timeout_s)
        _end_with_group()
        _exchange_first(watchdog, roll, coordination.find_devices())


def enter(generation: Generation, stall_timeout_s: float | None = None) -> None:
    """Makes this process a member of a generation of an elastic group. JAX must not have used its devices since `leave`.

    Args:
      generation: the generation, which the rendezvous has formed.
      stall_timeout_s: see `start`.

    Raises:
      StartupError: a process of the generation did not connect.
    """
    member, rank, addresses = membership.own(), generation.rank, generation.addresses
    assert member is not None
    about = f"generation {generation.number} of {len(addresses)} processes"
    raise_limit_of_descriptors()
    with call_roll(
        addresses, rank, about=about, versions=_versions(), secret=secret_of(addresses), timeout_s=_MEETING_S
    ) as roll:
        lines = roll.lines
    watchdog = watch.start(addresses, rank, lines, stall_timeout_s or stall_limit_s(os.environ), _outlive)
    member.changed = watchdog.change_point.request
    _set_up_jax()
    try:
        # A generation of one has no connections, and needs none.
        if lines:
            coordination.listen_at(roll.host, roll.machines)
        # JAX waits minutes for a process that has left the generation on the way here. The watchdog notices it, and ends the wait.
        with watchdog.operations.waiting():
            ports = coordination.connect(generation.service, rank, len(addresses), _MEETING_S)
            _exchange_first(watchdog, roll, ports)
    except RuntimeError as e:
        hint = "look at the output of the other processes"
        raise StartupError(about, f"JAX cannot connect them: {e}", hint) from e
    _end_with_group()


def _outlive(still: Sequence[int], why: str) -> None:
    """Gets this process out of a step that others cannot end, and requests the end of stalled processes."""
    member = membership.own()
    if member is not None and still:
        member.accuse(still, why)
    coordination.break_off()


def leave() -> None:
    """Leaves the group, whose other processes may have died. All devices, programs and JAX arrays are gone then."""
    watch.end()
    coordination.disconnect()
    coordination.drop_devices()


@functools.cache
def _end_with_group() -> None:
    """Makes sure that the other processes learn of the end of this one, however it ends."""
    sys.excepthook = functools.partial(_end_at_once, sys.excepthook)
    # Registered after the exit function of JAX, so that it runs first: JAX waits there for the other processes.
    atexit.register(_Termination().leave)


def without_lines_of_gloo() -> AbstractContextManager[None]:
    """Removes the lines that gloo prints for each connection from the standard output of the block.

    gloo has no option to be silent. See https://github.com/jax-ml/jax/issues/32673.
    """
    return filtered(sys.stdout, 1, lambda line: not line.startswith(b"[Gloo] "))


def print_on_chief(*args: PyTree, **kwargs: PyTree) -> None:
    """Prints like `print`, but only in the chief of the cluster, which is worker 0 if no task has the type "chief".

    May be called in any context, even before the strategy is created. A process without a cluster prints.

    Args:
      args: the values to print.
      kwargs: the keyword arguments of `print`.

    Example:
      >>> import phalanx
      >>> phalanx.print_on_chief("loss:", 0.25)
      loss: 0.25
    """
    if is_this_chief():
        print(*args, **kwargs)


def is_this_chief() -> bool:
    """Returns whether this process writes the files of its cluster: the chief, an evaluator, or a process without a cluster."""
    if watchdog := watch.own():
        return watchdog.rank == 0
    if membership.is_elastic():
        return membership.is_first()
    resolver = resolver_of_environment()
    task = _task_of(resolver)
    return resolver is None or task is None or is_chief(resolver.cluster_spec(), task)


def warn_if_alone(strategy: str) -> None:
    """Warns if this process is one of several but creates a strategy for its own devices only.

    Args:
      strategy: class name of the strategy.
    """
    resolver = resolver_of_environment()
    task = _task_of(resolver)
    if resolver is None and (lone := lone_task(os.environ)):
        warn_of_slip(
            f"{lone.launch}, but it does not know the addresses of the others, so each trains alone.", lone.hint
        )
    if watch.own() or resolver is None or task is None or task.type not in ("chief", "worker"):
        return
    spec = resolver.cluster_spec()
    workers = addresses_of_workers(spec)
    if len(workers) > 1 and "ps" not in spec.jobs:
        warn_of_slip(
            f"This process is worker {id_in_cluster(spec, task)} of a cluster with {len(workers)} workers, but "
            f"{strategy} uses only the devices of this process, so each worker trains alone.",
            "phalanx.MultiWorkerMirroredStrategy()",
        )


def _task_of(resolver: ClusterResolver | None) -> Task | None:
    if resolver is None or not resolver.cluster_spec() or resolver.task_type is None or resolver.task_id is None:
        return None
    return Task(resolver.task_type, resolver.task_id)


def _about(resolver: ClusterResolver, spec: ClusterSpec) -> str:
    """Returns the view of the cluster that all its processes must have. Two jobs may have the same addresses and the same secret."""
    if not isinstance(resolver, SlurmClusterResolver):
        return f"{spec.as_dict()}"
    return f"{spec.as_dict()} in step {'.'.join(step_of(os.environ))} of Slurm"


def _versions() -> dict[str, str]:
    return {
        "Phalanx": version("phalanx"),
        "JAX": jax.__version__,
        "Python": f"{sys.version_info.major}.{sys.version_info.minor}",
    }


def _own_task(resolver: ClusterResolver) -> Task:
    if resolver.task_type is None or resolver.task_id is None:
        raise ClusterError(
            f"a cluster of {resolver.cluster_spec().as_dict()}",
            "neither TF_CONFIG nor the resolver says which task this process is.",
            'set "task": {"type": "worker", "index": 0} in TF_CONFIG, or task_type and task_id of the resolver',
        )
    return Task(resolver.task_type, resolver.task_id)


def _require_same(processes: int, rank: int) -> None:
    if (jax.process_count(), jax.process_index()) != (processes, rank):
        raise StartupError(
            f"rank {rank} of {processes} processes",
            f"this process is already rank {jax.process_index()} of {jax.process_count()}, which cannot change.",
            "use the same cluster for all strategies of a process",
        )


def _initialize(roll: Roll, rank: int, timeout_s: float) -> None:
    coordination.keep_all_reduces_apart()
    _set_up_jax()
    bypass_proxies([roll.service])
    try:
        coordination.listen_at(roll.host, roll.machines)
        with _for_machines_of(roll, rank):
            jax.distributed.initialize(
                roll.service,
                len(roll.addresses),
                rank,
                cluster_detection_method="deactivate",
                initialization_timeout=max(1, int(timeout_s)),
                # A process that has finished waits for the others at shutdown. The watchdog detects processes that never come.
                shutdown_timeout_seconds=_A_DAY_S,
                coordinator_bind_address=roll.bind,
            )
    except RuntimeError as e:
        raise StartupError(
            f"rank {rank} of {len(roll.addresses)} processes",
            f"JAX can no longer join the cluster: {e}",
            "create the strategy at the top of the script, before the first array, model or optimizer "
            "(DiLoCo takes a function: outer_optimizer=lambda: keras.optimizers.SGD(0.7))",
        ) from e


def _for_machines_of(roll: Roll, rank: int) -> AbstractContextManager[None]:
    """Admits only the machines of the cluster at JAX's service, which rank 0 starts in the block."""
    if rank or not roll.machines:
        return nullcontext()
    return admitting(host_and_port(roll.bind)[1], roll.machines)


def _exchange_first(watchdog: watch.Watch, roll: Roll, ports: set[int]) -> None:
    """Connects all processes for the exchange of arrays, and makes sure that no stranger has come before one of them.

    Args:
      watchdog: the watchdog of this process.
      roll: the processes.
      ports: the ports at which gloo listens. None if arrays are exchanged in other ways.

    Raises:
      StartupError: a stranger has taken the place of a process.
    """
    if not ports or not watchdog.has_others:
        return
    watchdog.pairs.open(roll.host, ports)
    try:
        with watchdog.operations.waiting(), without_lines_of_gloo():
            # Each process does the same, whether it has seen strangers or not: arrays travel once all have looked.
            coordination.exchange_twice(lambda: watchdog.pairs.confirm(_CONFIRM_S))
    except RuntimeError as e:
        if not (strangers := watchdog.pairs.strangers):
            raise
        raise StartupError(
            f"the exchange of arrays of {watchdog.place}",
            f"strangers had connected to its port before the other processes, from {listed(strangers)}.",
            "start again; keep other users away from these machines, or the ports of the workers from other machines",
        ) from e


def _set_up_jax() -> None:
    """Sets the JAX options that several processes need."""
    # With asynchronous dispatch, two independent programs run at the same time and gloo confuses their messages.
    set_config("jax_cpu_enable_async_dispatch", False)
    # This service replaces the SIGTERM handler: no Python handler would run, and the process would not end.
    set_config("jax_enable_preemption_service", False)
    # It warns of proxies, which `bypass_proxies` keeps out.
    set_config("jax_check_proxy_envs", False)


def ends_by(handler: object) -> bool:
    """Whether a handler of SIGTERM ends this process: the one that Python begins with, or the one that `start` has installed."""
    return handler is signal.SIG_DFL or isinstance(getattr(handler, "__self__", None), _Termination)


def _end_at_once(
    show: Callable[..., Any], kind: type[BaseException], error: BaseException, where: TracebackType | None
) -> None:
    """Exits immediately after an uncaught error. Other processes may wait for this one in the middle of a step."""
    show(kind, error, where)
    if watchdog := watch.own():
        watchdog.fail(f"failed with {kind.__name__}: {error}".partition("\n")[0].removesuffix("."))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(128 + signal.SIGINT if issubclass(kind, KeyboardInterrupt) else 1)


@final
class _Termination:
    """Ends this process after SIGTERM, so that its `finally` blocks run and no other process waits for it.

    A SIGTERM handler of the user stays installed. Without one, SIGTERM raises SystemExit(143) in the main thread.
    """

    def __init__(self) -> None:
        self._is_ours = False
        self._news = -1
        if threading.current_thread() is not threading.main_thread():
            return
        self._news, wakeup = os.pipe()
        for fd in (self._news, wakeup):
            os.set_blocking(fd, False)
        # Python writes the number of each handled signal to this pipe, including signals with a handler of the user.
        if (previous_fd := signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)) != -1:
            signal.set_wakeup_fd(previous_fd)
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._raise)

    def leave(self) -> None:
        """Reports to the watchdog that this process ends. Must be called at exit."""
        watchdog = watch.own()
        if not self._is_ours:
            if watchdog:
                watchdog.leave(is_told=self._has_come())
            if watchdog and (member := membership.own()):
                member.finish()
            if membership.is_elastic():
                coordination.disconnect()
            return
        if watchdog:
            watchdog.fail(verdict.SIGTERM)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(128 + signal.SIGTERM)

    def _raise(self, number: int, _: FrameType | None) -> None:
        # Raises only once, and not after the loss of a peer: a second SystemExit would interrupt `finally` blocks.
        watchdog = watch.own()
        if not self._is_ours and (watchdog is None or watchdog.loss() is None):
            self._is_ours = True
            raise SystemExit(128 + number)

    def _has_come(self) -> bool:
        try:
            return self._news != -1 and signal.SIGTERM in os.read(self._news, 1 << 16)
        except BlockingIOError:
            return False
