# SPDX-License-Identifier: Apache-2.0
"""The hooks of a training."""

from collections.abc import Sequence

from phalanx.estimator.config import RunConfig
from phalanx.estimator.graph import GLOBAL_STEP, Graph
from phalanx.estimator.hooks.basic import LoggingTensorHook, NanTensorHook, StepCounterHook
from phalanx.estimator.hooks.saving import CheckpointSaverHook, CheckpointSaverListener, SummarySaverHook
from phalanx.estimator.saver import Saver
from phalanx.estimator.session import SessionRunHook
from phalanx.summary import SummaryWriter


def train_hooks(
    config: RunConfig,
    graph: Graph,
    writer: SummaryWriter | None,
    listeners: Sequence[CheckpointSaverListener],
    given: Sequence[SessionRunHook],
) -> list[SessionRunHook]:
    """Returns all hooks of a training: those of every training, of the user and of the model function.

    As in TensorFlow, the Estimator saves a step before another hook sees it, so that an error of a hook loses no step.

    Args:
      config: options of the Estimator.
      graph: the graph of the training.
      writer: writes summaries. None for none.
      listeners: code that runs around each checkpoint.
      given: the hooks of the user.
    """
    spec, folder = graph.spec, str(config.model_dir)
    hooks: list[SessionRunHook] = [NanTensorHook("loss")]
    if every := config.log_step_count_steps:
        hooks.append(LoggingTensorHook({"loss": "loss", "step": GLOBAL_STEP}, every_n_iter=every))
        hooks.append(StepCounterHook(every, summary_writer=writer))
    hooks.extend(spec.training_hooks or ())
    if config.is_chief:
        hooks.extend(spec.training_chief_hooks or ())
    if config.save_summary_steps:
        hooks.append(SummarySaverHook(config.save_summary_steps, summary_writer=writer, summary_op={"loss": "loss"}))
    hooks = [*given, *hooks]
    # A hook of the user that saves replaces that of the Estimator.
    if any(isinstance(hook, CheckpointSaverHook) for hook in hooks):
        return hooks
    saver = Saver(graph, folder, config.keep_checkpoint_max, config.keep_checkpoint_every_n_hours)
    every_s, every = config.save_checkpoints_secs, config.save_checkpoints_steps
    return [CheckpointSaverHook(folder, every_s, every, saver, listeners=listeners), *hooks]
