# SPDX-License-Identifier: Apache-2.0
"""`RunConfig`: where and how an Estimator runs."""

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import NoneType
from typing import Any, Self, final

from phalanx._src.cluster.resolvers.tf_config import TFConfigClusterResolver
from phalanx._src.cluster.spec import ClusterSpec
from phalanx._src.strategies.base import Strategy
from phalanx._src.strategies.parameter_server import ParameterServerStrategy
from phalanx.errors import InvalidArgumentError, arguments, shown


@final
class TaskType:
    """The types of tasks in a cluster. May be used in any context.

    Source: tf.estimator.TaskType.

    Example:
      >>> from phalanx.estimator.config import TaskType
      >>> TaskType.EVALUATOR
      'evaluator'
    """

    MASTER = "master"
    PS = "ps"
    WORKER = "worker"
    CHIEF = "chief"
    EVALUATOR = "evaluator"


# RunConfig in run_config.py of tf.estimator: ten minutes, unless the user gives an interval.
_DEFAULT_SECS = 600
_REFUSED = {
    "session_config": ("a JAX program has no session.", "omit session_config"),
    "device_fn": ("the strategy places variables.", "omit device_fn"),
    "protocol": ("Phalanx chooses the protocol.", "omit protocol"),
    "experimental_distribute": ("each strategy has its own option.", "train_distribute=..., eval_distribute=..."),
    "checkpoint_save_graph_def": ("no graph is ever saved.", "omit checkpoint_save_graph_def"),
}


def refuse_options(call: str, options: Any, refused: Mapping[str, tuple[str, str]]) -> None:
    """Refuses options that do not have their defaults."""
    for name, default in ((f.name, f.default) for f in fields(options) if f.name in refused):
        # Only other values than the default are refused, so that a program which spells out the defaults runs.
        value = getattr(options, name)
        if type(value) is not type(default) or value != default:
            raise InvalidArgumentError(f"{call}({name}={shown(value)})", *refused[name])


@dataclass(frozen=True)
class RunConfig:
    """Options of an Estimator. May be created in any context.

    The properties about the cluster come from the environment variable TF_CONFIG.

    Args:
      model_dir: folder for checkpoints and summaries. All processes must see it. None for a temporary folder.
      tf_random_seed: seed of all initializers and random layers that have none.
      save_summary_steps: number of steps between two summaries. None or 0 for none.
      session_config: refused.
      save_checkpoints_steps: number of steps between two checkpoints. None if `save_checkpoints_secs` is given.
      save_checkpoints_secs: seconds between two checkpoints. By default 600, if `save_checkpoints_steps` is not given.
      keep_checkpoint_max: number of checkpoints to keep. None or 0 for all.
      keep_checkpoint_every_n_hours: also keep one checkpoint per this many hours, even if `keep_checkpoint_max` would delete it.
      log_step_count_steps: number of steps between two log lines with loss and steps per second. None or 0 for none.
      train_distribute: strategy of `train`. None for the first device; in a cluster, for the strategy that its tasks suggest.
      device_fn: refused.
      protocol: refused.
      eval_distribute: strategy of `evaluate`, but not parameter servers. None for the first device.
      experimental_distribute: refused.
      experimental_max_worker_delay_secs: accepted and ignored, because the workers start together.
      session_creation_timeout_secs: accepted and ignored, because cluster startup has its own timeout.
      checkpoint_save_graph_def: must be True, the default. No graph is ever saved.

    Raises:
      InvalidArgumentError: an argument has the wrong type or value, or is not supported.

    Source: tf.estimator.RunConfig.

    Example:
      >>> import phalanx.estimator as estimator
      >>> config = estimator.RunConfig(model_dir="model", save_checkpoints_steps=100)
      >>> config.replace(save_checkpoints_steps=200).save_checkpoints_steps
      200
    """

    model_dir: str | os.PathLike[str] | None = None
    tf_random_seed: int | None = None
    save_summary_steps: int | None = 100
    save_checkpoints_steps: int | None = None
    save_checkpoints_secs: float | None = None
    session_config: None = None
    keep_checkpoint_max: int | None = 5
    keep_checkpoint_every_n_hours: float = 10000
    log_step_count_steps: int | None = 100
    train_distribute: Strategy | None = None
    device_fn: None = None
    protocol: None = None
    eval_distribute: Strategy | None = None
    experimental_distribute: None = None
    experimental_max_worker_delay_secs: float | None = None
    session_creation_timeout_secs: float = 7200
    checkpoint_save_graph_def: bool = True

    def __post_init__(self) -> None:
        refuse_options("RunConfig", self, _REFUSED)
        if self.model_dir is not None:
            object.__setattr__(self, "model_dir", arguments.local_path("model_dir", self.model_dir))
            if not self.model_dir:
                raise InvalidArgumentError("model_dir=''", "must be the name of a folder.", 'model_dir="model"')
        # 0 would be "never" for summaries and logs, but a training run without
        # checkpoints cannot be evaluated or continued.
        _check_count("save_checkpoints_steps", self.save_checkpoints_steps, least=1)
        for name in ("save_summary_steps", "log_step_count_steps", "keep_checkpoint_max"):
            _check_count(name, getattr(self, name), least=0)
        _check_count("tf_random_seed", self.tf_random_seed, least=0)
        self._check_intervals()
        for name in ("train_distribute", "eval_distribute"):
            if not isinstance(getattr(self, name), (Strategy, NoneType)):
                raise InvalidArgumentError(
                    f"{name}={shown(getattr(self, name))}", "must be a strategy.", f"{name}=phalanx.MirroredStrategy()"
                )
        # Its servers hold the variables of the training. An evaluation reads a checkpoint instead.
        if isinstance(self.eval_distribute, ParameterServerStrategy):
            raise InvalidArgumentError(
                "eval_distribute=ParameterServerStrategy(...)",
                "its workers run training steps only.",
                "eval_distribute=phalanx.MirroredStrategy(); or omit it",
            )

    def _check_intervals(self) -> None:
        arguments.seconds("keep_checkpoint_every_n_hours", self.keep_checkpoint_every_n_hours)
        if self.save_checkpoints_secs is not None:
            if self.save_checkpoints_steps is not None:
                raise InvalidArgumentError(
                    f"save_checkpoints_steps={self.save_checkpoints_steps} and "
                    f"save_checkpoints_secs={self.save_checkpoints_secs}",
                    "only one of them can decide when to save.",
                    "save_checkpoints_secs=None",
                )
            arguments.seconds("save_checkpoints_secs", self.save_checkpoints_secs)
        elif self.save_checkpoints_steps is None:
            object.__setattr__(self, "save_checkpoints_secs", _DEFAULT_SECS)

    def replace(self, **options: Any) -> Self:
        """Returns a copy with other options.

        Args:
          **options: arguments of `RunConfig`.

        Raises:
          InvalidArgumentError: there is no such option, or its value is invalid.
        """
        known = {f.name for f in dataclasses.fields(self)}
        for name in options:
            if name not in known:
                raise InvalidArgumentError(f"replace({name}=...)", "RunConfig has no such option.", "RunConfig(...)")
        # As in tf.estimator, one of the two replaces the other.
        if options.get("save_checkpoints_steps") is not None:
            options.setdefault("save_checkpoints_secs", None)
        if options.get("save_checkpoints_secs") is not None:
            options.setdefault("save_checkpoints_steps", None)
        return dataclasses.replace(self, **options)

    @property
    def cluster_spec(self) -> ClusterSpec:
        """The tasks that train, without the evaluator. Empty without a cluster, and in the evaluator."""
        if self.task_type == TaskType.EVALUATOR:
            # The evaluator is outside of the cluster in tf.estimator: it does not train, and nobody waits for it.
            return ClusterSpec({})
        # Read at each access: in tests and in notebooks, TF_CONFIG changes after the module was imported.
        return TFConfigClusterResolver().cluster_spec()

    @property
    def task_type(self) -> str:
        """The type of this task: `"worker"` without a cluster."""
        return TFConfigClusterResolver().task_type or TaskType.WORKER

    @property
    def task_id(self) -> int:
        """The index of this task among the tasks of its type."""
        return TFConfigClusterResolver().task_id or 0

    @property
    def is_chief(self) -> bool:
        """Whether this task saves checkpoints and summaries of the training."""
        # "master" is the name of the chief in TF_CONFIG of Cloud ML Engine. tf.estimator knows both.
        if self.task_type in (TaskType.CHIEF, TaskType.MASTER):
            return True
        has_chief = {TaskType.CHIEF, TaskType.MASTER} & set(self.cluster_spec.jobs)
        return self.task_type == TaskType.WORKER and self.task_id == 0 and not has_chief

    @property
    def num_worker_replicas(self) -> int:
        """The number of tasks that train, the chief included. 0 in the evaluator."""
        if self.task_type == TaskType.EVALUATOR:
            return 0
        spec = self.cluster_spec
        jobs = (TaskType.CHIEF, TaskType.MASTER, TaskType.WORKER)
        # At least 1: without a cluster, this process is the worker.
        return sum(spec.num_tasks(job) for job in jobs if job in spec.jobs) or 1

    @property
    def num_ps_replicas(self) -> int:
        """The number of parameter servers."""
        spec = self.cluster_spec
        return spec.num_tasks(TaskType.PS) if TaskType.PS in spec.jobs else 0


def _check_count(name: str, value: object, least: int) -> None:
    if value is not None:
        kind = f"an integer of at least {least}, or None"
        arguments.integer(name, value, least=least, kind=kind, hint=f"{name}=100")
