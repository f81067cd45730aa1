# SPDX-License-Identifier: Apache-2.0
"""`train_and_evaluate`: one program for the processes that train and the one that evaluates."""

import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, final

from typing_extensions import override

from phalanx._src.cluster.processes import training as cluster_training
from phalanx._src.parameter_server.processes.ray import Server
from phalanx.errors import InvalidArgumentError, arguments, shown
from phalanx.estimator.config import TaskType
from phalanx.estimator.estimator import Estimator
from phalanx.estimator.exporters import Exporter
from phalanx.estimator.hooks.saving import CheckpointSaverListener, checked_listeners
from phalanx.estimator.hooks.timer import SecondOrStepTimer
from phalanx.estimator.loop import batches
from phalanx.estimator.loop.graph import GLOBAL_STEP
from phalanx.estimator.loop.session import HookSession, SessionRunHook, checked_hooks, listed

_log = logging.getLogger("phalanx")
# Seconds between two looks at the folder. An evaluation takes longer, and a look costs one listing of a folder.
_POLL_S = 1.0


@final
@dataclass(frozen=True)
class TrainSpec:
    """The training part of `train_and_evaluate`. May be created in any context.

    Args:
      input_fn: see `Estimator.train`.
      max_steps: total number of training steps, over all calls. None for the length of the dataset.
      hooks: code that runs between steps.
      saving_listeners: code that runs before and after each checkpoint, on the chief.

    Raises:
      InvalidArgumentError: an argument has the wrong type or value.

    Source: tf.estimator.TrainSpec.

    Example:
      >>> import phalanx.estimator as estimator
      >>> spec = estimator.TrainSpec(input_fn=lambda: [], max_steps=1000)
    """

    input_fn: Callable[..., Any]
    max_steps: int | None = None
    hooks: Iterable[SessionRunHook] | None = ()
    saving_listeners: Iterable[CheckpointSaverListener] | None = ()

    def __post_init__(self) -> None:
        batches.check_input_fn(self.input_fn)
        batches.require_steps("max_steps", self.max_steps)
        object.__setattr__(self, "hooks", checked_hooks("hooks", self.hooks))
        object.__setattr__(self, "saving_listeners", checked_listeners(self.saving_listeners))


@final
@dataclass(frozen=True)
class EvalSpec:
    """The evaluation part of `train_and_evaluate`. May be created in any context.

    Args:
      input_fn: see `Estimator.evaluate`.
      steps: number of batches per evaluation. None for all.
      name: name of the evaluation, if there are several.
      hooks: code that runs between batches.
      exporters: an exporter, or several.
      start_delay_secs: seconds that a separate evaluator waits before its first evaluation.
      throttle_secs: minimum number of seconds from the start of an evaluation to the start of the next one.

    Raises:
      InvalidArgumentError: an argument has the wrong type or value.

    Source: tf.estimator.EvalSpec.

    Example:
      >>> import phalanx.estimator as estimator
      >>> spec = estimator.EvalSpec(input_fn=lambda: [], throttle_secs=10)
    """

    input_fn: Callable[..., Any]
    steps: int | None = 100
    name: str | None = None
    hooks: Iterable[SessionRunHook] | None = ()
    exporters: Exporter | Sequence[Exporter] | None = ()
    start_delay_secs: float = 120
    throttle_secs: float = 600

    def __post_init__(self) -> None:
        batches.check_input_fn(self.input_fn)
        batches.require_steps("steps", self.steps)
        if self.name is not None and not isinstance(self.name, str):
            raise InvalidArgumentError(f"name={shown(self.name)}", "must be a str or None.", 'name="test"')
        object.__setattr__(self, "hooks", checked_hooks("hooks", self.hooks))
        exporters = listed(self.exporters)
        for exporter in exporters:
            if not isinstance(exporter, Exporter):
                raise InvalidArgumentError(
                    f"exporters={shown(self.exporters)}",
                    f"{shown(exporter)} is not an exporter.",
                    "exporters=[estimator.FinalExporter(name, serving_input_receiver_fn)]",
                )
        # The name is the folder. Two exporters in one folder would delete each other's exports.
        names = [exporter.name for exporter in exporters]
        if len(set(names)) < len(names):
            raise InvalidArgumentError(f"exporters of the names {names}", "their names must differ.", 'name="best"')
        object.__setattr__(self, "exporters", exporters)
        for name in ("start_delay_secs", "throttle_secs"):
            # 0 is allowed here, unlike for other times: evaluate without a delay, and after each checkpoint.
            if getattr(self, name) != 0 and arguments.seconds(name, getattr(self, name)) is None:
                raise InvalidArgumentError(f"{name}=None", "must be a number of seconds.", f"{name}=0")


def train_and_evaluate(
    estimator: Estimator, train_spec: TrainSpec, eval_spec: EvalSpec
) -> tuple[dict[str, Any] | None, list[Any]] | None:
    """Trains and evaluates. Call it outside all scopes, in all processes of a cluster.

    Without a cluster, it evaluates after each checkpoint, at most every `throttle_secs`, and at the end. In a cluster, TF_CONFIG
    decides: the chief and the workers train, parameter servers hold variables, and the evaluator evaluates checkpoints until the
    training has ended.

    Args:
      estimator: the Estimator. All processes have the same `model_dir`.
      train_spec: data and length of the training run.
      eval_spec: data of the evaluation, and exporters.

    Returns:
      Without a cluster, the last metrics and the last results of the exporters. In a cluster, None.

    Raises:
      InvalidArgumentError: an argument has the wrong type.
      InputError, CheckpointMismatchError, NanLossDuringTrainingError: see `Estimator.train`.

    Source: tf.estimator.train_and_evaluate.

    Example:
      >>> import keras, numpy as np, tempfile
      >>> import phalanx.estimator as estimator
      >>> x = np.ones((8, 2), "float32")
      >>> def model_fn(features, labels, mode):
      ...     loss = keras.losses.MeanSquaredError()(labels, keras.layers.Dense(1)(features))
      ...     return estimator.EstimatorSpec(mode, loss=loss, train_op=estimator.minimize(keras.optimizers.SGD(), loss))
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     metrics, exports = estimator.train_and_evaluate(
      ...         estimator.Estimator(model_fn, folder),
      ...         estimator.TrainSpec(lambda: [(x, x[:, :1])] * 20, max_steps=10),
      ...         estimator.EvalSpec(lambda: [(x, x[:, :1])]),
      ...     )
      >>> int(metrics["global_step"])
      10
    """
    arguments.instance("estimator", estimator, Estimator, "estimator.Estimator(model_fn)")
    arguments.instance("train_spec", train_spec, TrainSpec, "estimator.TrainSpec(input_fn, max_steps=1000)")
    arguments.instance("eval_spec", eval_spec, EvalSpec, "estimator.EvalSpec(input_fn)")
    config = estimator.config
    evaluator = Evaluator(estimator, eval_spec, train_spec.max_steps)
    if config.task_type == TaskType.EVALUATOR:
        evaluator.run()
        return None
    # A cluster of one task evaluates itself. tf.estimator would leave that to an evaluator, and train only.
    is_alone = config.num_worker_replicas == 1 and not config.num_ps_replicas
    if not is_alone and config.num_ps_replicas and not config.is_chief:
        # Workers and parameter servers do what the chief asks them to.
        Server(config.cluster_spec, config.task_type, config.task_id).join()
        return None
    local = _EvaluatesSaved(evaluator, eval_spec.throttle_secs)
    estimator.train(
        train_spec.input_fn,
        hooks=train_spec.hooks,
        max_steps=train_spec.max_steps,
        saving_listeners=[*(train_spec.saving_listeners or ()), *([local] if is_alone else [])],
    )
    return (evaluator.metrics, evaluator.exports) if is_alone else None


@final
class Evaluator:
    """Evaluates new checkpoints, and calls the exporters.

    Args:
      estimator: the Estimator.
      spec: data of the evaluation, and exporters.
      max_steps: total number of training steps, over all calls, or None.

    Attributes:
      metrics: metrics of the last evaluation, or None.
      exports: what the exporters returned for that evaluation.
    """

    def __init__(self, estimator: Estimator, spec: EvalSpec, max_steps: int | None) -> None:
        self._estimator, self._spec, self._max_steps = estimator, spec, max_steps
        self._last: str | None = None
        self.metrics: dict[str, Any] | None = None
        self.exports: list[Any] = []

    def evaluate(self, *, is_final: bool = False) -> bool:
        """Evaluates the latest checkpoint, unless it was evaluated before. Returns whether it evaluated one.

        Args:
          is_final: whether this is the last checkpoint.
        """
        path = self._estimator.latest_checkpoint()
        # As in training.py of tf.estimator: no second evaluation of one checkpoint, which would export it twice.
        if path is None or path == self._last:
            return False
        spec = self._spec
        self.metrics = self._estimator.evaluate(
            spec.input_fn, steps=spec.steps, name=spec.name, checkpoint_path=path, hooks=spec.hooks
        )
        is_last = is_final or self._is_last
        self.exports = [
            exporter.export(
                self._estimator,
                os.path.join(self._estimator.model_dir, "export", exporter.name),
                path,
                self.metrics,
                is_last,
            )
            for exporter in spec.exporters  # type: ignore[union-attr]
        ]
        self._last = path
        return True

    @property
    def _is_last(self) -> bool:
        """Whether the training has reached its last step."""
        done = self.metrics is not None and int(self.metrics[GLOBAL_STEP])
        return self._max_steps is not None and done is not False and done >= self._max_steps

    def run(self) -> None:
        """Evaluates each new checkpoint until the training run has ended."""
        # tf.estimator waits before the first evaluation, too: at the beginning there is nothing worth evaluating.
        time.sleep(self._spec.start_delay_secs)
        while not self._is_last:
            # Asked before the folder is read, so that the last checkpoint is not missed.
            has_ended = cluster_training.has_ended()
            started_s = time.monotonic()
            has_evaluated = self.evaluate(is_final=bool(has_ended))
            if has_ended:
                _log.info("The training has ended.")
                return
            # From the start of the evaluation, as in tf.estimator. Without a new checkpoint, it looks again soon.
            wait_s = self._spec.throttle_secs if has_evaluated else 0
            self._wait_until(started_s + max(wait_s, _POLL_S))

    def _wait_until(self, time_s: float) -> None:
        """Waits for a time, or for the end of the training."""
        while time.monotonic() < time_s and not cluster_training.has_ended():
            time.sleep(min(_POLL_S, max(0.0, time_s - time.monotonic())))


@final
class _EvaluatesSaved(CheckpointSaverListener):
    """Evaluates after checkpoints, and once more at the end.

    Args:
      evaluator: evaluates and exports.
      throttle_s: minimum number of seconds between two evaluations.
    """

    def __init__(self, evaluator: Evaluator, throttle_s: float) -> None:
        self._evaluator = evaluator
        self._timer = SecondOrStepTimer(every_secs=throttle_s)
        self._is_first = True

    @override
    def begin(self) -> None:
        """Clears the state of an earlier training run."""
        self._timer.reset()
        self._is_first = True

    @override
    def after_save(self, session: HookSession, global_step_value: int) -> bool | None:
        """Evaluates, but not before the first step."""
        if self._is_first:
            self._is_first = False
        # The checkpoint of step 0 is skipped, as in training.py of tf.estimator: it would only evaluate initial values.
        elif self._timer.should_trigger_for_step(global_step_value):
            self._evaluate(global_step_value)
        return None

    @override
    def end(self, session: HookSession, global_step_value: int) -> None:
        """Evaluates the last checkpoint."""
        # Whatever the throttle says: the caller gets the metrics of the last checkpoint.
        if global_step_value != self._timer.last_triggered_step():
            self._evaluate(global_step_value, is_final=True)

    def _evaluate(self, step: int, *, is_final: bool = False) -> None:
        self._timer.update_last_triggered_step(step)
        self._evaluator.evaluate(is_final=is_final)
