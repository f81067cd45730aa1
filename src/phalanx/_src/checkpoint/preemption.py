# SPDX-License-Identifier: Apache-2.0
"""Saves before this process, or another one of the cluster, is taken away: `PreemptionCheckpointHandler` and what it uses."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, final

from typing_extensions import override

from phalanx._src.checkpoint.checkpoint import Checkpoint, of_chief, require_between_steps
from phalanx._src.checkpoint.manager import CheckpointManager
from phalanx._src.cluster.processes.notices import Notices
from phalanx._src.cluster.resolvers import gce
from phalanx._src.cluster.resolvers.base import ClusterResolver
from phalanx._src.cluster.watch import watch
from phalanx._src.cluster.watch.sync_point import SyncPoint
from phalanx._src.input.iterator import not_yet_used
from phalanx._src.runtime.observers import Observer, observers
from phalanx.errors import InvalidArgumentError, arguments, shown
from phalanx.typing import PyTree

T = TypeVar("T")

_EXIT_CODE, _EXIT_CODE_GCE = 42, 143  # As in tf.distribute.
# The reason is all that other processes get with a request, so it says which save is the last.
_GRACE_ENDS = "has trained to the end of its grace period"
# tf.distribute ends 6 mean steps early too. The processes agree on a later step, and the last save may take longer.
_STEPS_BEFORE_END, _SAVES_BEFORE_END = 6, 2
_POLL_S = 0.1


@final
class _Cluster:
    """The processes that act together: those of the watchdog, or this one alone."""

    def __init__(self) -> None:
        self._alone = SyncPoint()

    @property
    def _watch(self) -> watch.Watch | None:
        # An elastic group gets another watch when it changes.
        return watch.own()

    @property
    def point(self) -> SyncPoint:
        """The point between two steps on which these processes agree."""
        return self._alone if self._watch is None else self._watch.sync_point

    @property
    def is_chief(self) -> bool:
        """Whether this process reports for all."""
        return self._watch is None or self._watch.rank == 0

    def tell(self, notice: str) -> None:
        """Asks all processes to act, because of a notice to this one."""
        self.point.request(f"{'this process' if self._watch is None else self._watch.place} {notice}")

    def wait_for_others(self) -> None:
        """Waits, on the chief, until the programs of the others have ended."""
        while self._watch is not None and self.is_chief and not self._watch.others_have_left:
            time.sleep(_POLL_S)


@final
@dataclass(frozen=True)
class TerminationConfig:
    """Options of a `PreemptionCheckpointHandler`: the notices that it listens to, and what it does then. May be created in any context.

    Args:
      termination_watcher_fn: function without arguments that returns True if this process will be ended. A thread calls it once
        per second, until it returns True. SIGTERM is handled in any case. None for SIGTERM only, and on a `GCEClusterResolver` for the
        notices of the metadata server of GCE.
      exit_fn: function without arguments that ends the program after the last save. None for `sys.exit(42)`, and on GCE for
        `sys.exit(143)`. `phalanx run --max-restarts 3` starts the program again after both.
      grace_period: time in seconds between the notice and the end of the machine. All processes save at once, continue training, and
        save again and exit shortly before that time is over. None or 0 to exit after the first save.
      save_fn: function that saves, with the arguments of `save_checkpoint_if_preempted`. None for `CheckpointManager.save`.

    Raises:
      InvalidArgumentError: an argument has the wrong type.

    Source: tf.distribute.experimental.TerminationConfig.

    Example:
      >>> import phalanx
      >>> phalanx.experimental.TerminationConfig(grace_period=60).grace_period
      60
    """

    termination_watcher_fn: Callable[[], object] | None = None
    exit_fn: Callable[[], object] | None = None
    grace_period: float | None = None
    save_fn: Callable[..., object] | None = None

    def __post_init__(self) -> None:
        for name in ("termination_watcher_fn", "exit_fn", "save_fn"):
            if getattr(self, name) is not None:
                arguments.function(name, getattr(self, name), f"TerminationConfig({name}=function)")
        if not arguments.is_integer(self.grace_period, least=0):
            arguments.seconds("grace_period", self.grace_period)


class _PassingBeforeSteps(Observer):
    """Passes a point between two steps before each step.

    Args:
      pass_point: function of the arguments of the step.
    """

    def __init__(self, pass_point: Callable[[PyTree], None]) -> None:
        self._pass_point = pass_point

    @override
    def before_step(self, arguments: PyTree) -> None:
        self._pass_point(arguments)


@final
class PreemptionCheckpointHandler:
    """Saves a checkpoint after the same step in all processes when one of them will be ended. Created in all processes.

    Creating it restores the latest checkpoint. From then on it handles SIGTERM, which no longer ends the process, and
    `termination_watcher_fn`, in any process. All processes then save between the same two steps and exit, so that their launcher or scheduler
    starts them again. There are three ways to mark the beginning of a step: `run`, `save_checkpoint_if_preempted` and
    `watch_preemption_scope`. Until a process receives a notice, none of them communicates or waits.

    Create it in the main thread, outside replica functions.

    Args:
      cluster_resolver: `strategy.cluster_resolver`, or None. With a `GCEClusterResolver` it also watches for the notices of GCE.
      checkpoint_or_checkpoint_manager: a `Checkpoint`, or a `CheckpointManager`, which saves into its own folder.
      checkpoint_dir: folder for a `Checkpoint`, in which it keeps one. All processes can read it. None with a `CheckpointManager`.
      termination_config: what to listen to and to do. None for the defaults.

    Raises:
      CheckpointError, CheckpointMismatchError: the latest checkpoint cannot be restored.
      ClusterSourceError: it is a `GCEClusterResolver`, and the metadata server does not answer.
      ContextError: created in another thread, or in a replica function.
      InvalidArgumentError: an argument has the wrong type, or there is no folder.

    Source: tf.distribute.experimental.PreemptionCheckpointHandler.

    Example:
      >>> import keras, os, phalanx, signal, tempfile
      >>> step = keras.Variable(0)
      >>> config = phalanx.experimental.TerminationConfig(exit_fn=lambda: print("saved after step", int(step)))
      >>> checkpoint = phalanx.train.Checkpoint(step=step)
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     handler = phalanx.experimental.PreemptionCheckpointHandler(None, checkpoint, folder, config)
      ...     os.kill(os.getpid(), signal.SIGTERM)
      ...     while not phalanx.train.latest_checkpoint(folder):
      ...         _ = handler.run(step.assign_add, 1)
      ...     handler.close()
      saved after step ...
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None,
        checkpoint_or_checkpoint_manager: Checkpoint | CheckpointManager,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        termination_config: TerminationConfig | None = None,
    ) -> None:
        call = "PreemptionCheckpointHandler(...)"
        require_between_steps(call)
        if cluster_resolver is not None:
            arguments.instance(
                "cluster_resolver",
                cluster_resolver,
                ClusterResolver,  # type: ignore[type-abstract]
                "PreemptionCheckpointHandler(strategy.cluster_resolver, checkpoint, folder)",
            )
        if termination_config is not None:
            arguments.instance(
                "termination_config", termination_config, TerminationConfig, "TerminationConfig(grace_period=60)"
            )
        self._manager = _manager_of(checkpoint_or_checkpoint_manager, checkpoint_dir)
        self._config = termination_config or TerminationConfig()
        is_on_gce = isinstance(cluster_resolver, gce.GCEClusterResolver)
        self._exit_code = _EXIT_CODE_GCE if is_on_gce else _EXIT_CODE
        self._cluster = _Cluster()
        self._received_s: float | None = None
        self._began_s: float | None = None
        self._points = 0
        self._is_extended = False
        self._is_saving = False
        self._timer: threading.Timer | None = None
        # Before the restore, during which SIGTERM would otherwise end the process.
        self._notices = Notices(call, self._note, self._question(is_on_gce=is_on_gce))
        try:
            self._manager.restore_or_initialize()
        except BaseException:
            self.close()
            raise

    def run(self, distributed_train_function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Saves if a process will be ended, and calls a function of one step. Call it outside replica functions, in all processes.

        If the arguments contain the batch that a saved iterator returned last, the iterator is saved as if it had not
        returned it, so that no batch is skipped.

        Args:
          distributed_train_function: the function, which calls `strategy.run`.
          *args: its arguments.
          **kwargs: its keyword arguments.

        Returns:
          What the function returns.

        Raises:
          CheckpointError: the checkpoint cannot be saved.
          ContextError: called in a replica function.
          InvalidArgumentError: the function cannot be called.
          SystemExit: the checkpoint is saved, and this process must end.
        """
        arguments.function("distributed_train_function", distributed_train_function, "handler.run(train_step, batch)")
        self._pass((args, kwargs))
        return distributed_train_function(*args, **kwargs)

    def save_checkpoint_if_preempted(self, *args: Any, **kwargs: Any) -> None:
        """Saves if a process will be ended. Call it between two steps, outside replica functions, in all processes.

        Args:
          *args: arguments of `CheckpointManager.save`, or of `save_fn`.
          **kwargs: their keyword arguments.

        Raises:
          CheckpointError: the checkpoint cannot be saved.
          ContextError: called in a replica function.
          SystemExit: the checkpoint is saved, and this process must end.
        """
        self._pass((), *args, **kwargs)

    @contextmanager
    def watch_preemption_scope(self) -> Iterator[None]:
        """Returns a context in which each call of `strategy.run`, or of a `phalanx.function`, saves before it begins if a process will be ended.

        Enter it outside replica functions, in all processes. See `run`.
        """
        with observers.including(_PassingBeforeSteps(self._pass)):
            yield

    def close(self) -> None:
        """Stops listening, so that SIGTERM ends this process as before. `run` then only calls its function. May be called in the main thread."""
        self._notices.close()
        if self._timer is not None:
            self._timer.cancel()

    def _question(self, *, is_on_gce: bool) -> Callable[[], str | None] | None:
        """Returns the function that the thread asks once per second."""
        ask = self._config.termination_watcher_fn
        if ask is not None:
            return lambda: "was notified by termination_watcher_fn that it will be terminated" if ask() else None
        if not is_on_gce:
            return None
        gce.termination_notice()  # Raises if this is no machine of GCE.
        return gce.later_notice

    def _note(self, notice: str) -> None:
        # Before `tell`: the main thread may reach the agreed point at once, and sets the timer only if this time is known.
        self._received_s = self._received_s or time.monotonic()
        self._cluster.tell(notice)

    def _pass(self, unused: PyTree, *args: Any, **kwargs: Any) -> None:
        """Passes a point between two steps, and saves there if the processes have agreed on it.

        Args:
          unused: values of which the last batch of an iterator may be a part, if no step has used that batch yet.
          args: arguments of the function that saves.
          kwargs: keyword arguments of the function that saves.
        """
        if self._is_saving:
            return  # `save_fn` runs steps.
        self._began_s = self._began_s or time.monotonic()
        self._points += 1
        reason = self._cluster.point.is_reached()
        if reason is None:
            return
        require_between_steps("PreemptionCheckpointHandler")
        is_last = not self._config.grace_period or reason.endswith(_GRACE_ENDS)
        if self._is_extended and not is_last:
            return  # A second process was told to end.
        began_s = time.monotonic()
        with not_yet_used(unused):
            self._save(*args, **kwargs)
        if self._cluster.is_chief:
            what = "exit" if is_last else "train on"
            text = f"Phalanx: all processes have saved after the same step, because {reason}. They {what}."
            print(text, file=sys.stderr, flush=True)
        if is_last:
            self._is_extended = False  # `exit_fn` may return, and a later notice then begins with a first save.
            (self._config.exit_fn or self._exit)()
            return
        self._is_extended = True
        # Only a process with a notice knows when its grace period began. It asks all for the last save.
        if self._received_s is not None:
            self._go_on(time.monotonic() - began_s)

    def _save(self, *args: Any, **kwargs: Any) -> None:
        self._is_saving = True
        try:
            if self._config.save_fn is not None:
                self._config.save_fn(*args, **kwargs)
            else:
                self._manager.save(*args, **{"check_interval": False, **kwargs})
            self._manager.sync()
            of_chief("")  # The file of the chief is on the disk.
        finally:
            self._is_saving = False

    def _go_on(self, save_s: float) -> None:
        """Asks for the last save shortly before the grace period ends. This process was told to end.

        Args:
          save_s: how long the first save took, in seconds.
        """
        assert self._began_s is not None
        assert self._config.grace_period is not None
        assert self._received_s is not None
        now_s = time.monotonic()
        step_s = (now_s - self._began_s) / self._points
        end_s = self._received_s + self._config.grace_period
        left_s = end_s - now_s - _SAVES_BEFORE_END * save_s - _STEPS_BEFORE_END * step_s
        self._timer = threading.Timer(max(0.0, left_s), self._cluster.tell, [_GRACE_ENDS])
        self._timer.daemon = True  # A program whose steps end before must not wait for it.
        self._timer.start()

    def _exit(self) -> None:
        # Slurm sends SIGTERM again as soon as the first process of a step has exited.
        self._notices.close(is_ending=True)
        sys.exit(self._exit_code)


def _manager_of(target: Checkpoint | CheckpointManager, directory: str | os.PathLike[str] | None) -> CheckpointManager:
    """Returns the manager that the handler uses.

    Raises:
      InvalidArgumentError: an argument has the wrong type, or both arguments or neither name a folder.
    """
    hint = "PreemptionCheckpointHandler(strategy.cluster_resolver, checkpoint, folder)"
    if isinstance(target, CheckpointManager):
        folder = None if directory is None else os.path.abspath(arguments.path("checkpoint_dir", directory))
        if folder not in (None, os.path.abspath(target.directory)):
            raise InvalidArgumentError(
                f"checkpoint_dir={shown(directory)} with a CheckpointManager of {target.directory!r}",
                "a manager saves into its own folder.",
                "PreemptionCheckpointHandler(strategy.cluster_resolver, manager)",
            )
        return target
    arguments.instance("checkpoint_or_checkpoint_manager", target, Checkpoint, hint)
    if directory is None:
        raise InvalidArgumentError("checkpoint_dir=None with a Checkpoint", "there is no folder to save into.", hint)
    return CheckpointManager(target, arguments.path("checkpoint_dir", directory), max_to_keep=1)


@final
class PreemptionWatcher:
    """Listens for a notice that a process of the cluster will be ended, and keeps the message. Created in the main thread, outside all scopes.

    SIGTERM then no longer ends this process. It needs no `PreemptionCheckpointHandler`, which saves too.

    Raises:
      ContextError: created in another thread.

    Source: tf.distribute.experimental.PreemptionWatcher.

    Example:
      >>> import phalanx
      >>> watcher = phalanx.experimental.PreemptionWatcher()
      >>> watcher.preemption_message is None
      True
      >>> watcher.close()
    """

    def __init__(self) -> None:
        self._cluster = _Cluster()
        self._notices = Notices("PreemptionWatcher()", self._cluster.tell)

    @property
    def preemption_message(self) -> str | None:
        """The process that will be ended, and how it knows. None if none will. May be called in any context."""
        return self._cluster.point.first_reason

    def block_until_worker_exit(self) -> None:
        """Waits, on the chief, until the programs of all other processes have ended. Returns at once on the others."""
        self._cluster.wait_for_others()

    def close(self) -> None:
        """Stops listening, so that SIGTERM ends this process as before. May be called in the main thread."""
        self._notices.close()
