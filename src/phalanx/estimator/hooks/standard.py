# SPDX-License-Identifier: Apache-2.0
"""The hooks of a training run."""

from collections.abc import Sequence

from phalanx.estimator.config import RunConfig
from phalanx.estimator.hooks.basic import LoggingTensorHook, NanTensorHook, StepCounterHook
from phalanx.estimator.hooks.saving import CheckpointSaverHook, CheckpointSaverListener, SummarySaverHook
from phalanx.estimator.loop.graph import GLOBAL_STEP, Graph
from phalanx.estimator.loop.saver import Saver
from phalanx.estimator.loop.session import SessionRunHook
from phalanx.summary import SummaryWriter


def train_hooks(
    config: RunConfig,
    graph: Graph,
    writer: SummaryWriter | None,
    listeners: Sequence[CheckpointSaverListener],
    user_hooks: Sequence[SessionRunHook],
) -> list[SessionRunHook]:
    """Returns all hooks of a training run: the standard hooks, the user's hooks and the model function's hooks.

    As in TensorFlow, the Estimator saves a step before any other hook runs, so that an error in a hook loses no step.

    Args:
      config: options of the Estimator.
      graph: the graph of the training run.
      writer: writes summaries. None for no summaries.
      listeners: code that runs before and after each checkpoint.
      user_hooks: the hooks that the user passes.
    """
    spec, folder = graph.spec, str(config.model_dir)
    # The order is that of estimator.py in tf.estimator: the user's hooks,
    # the check for NaN, the log, the model's hooks.
    hooks: list[SessionRunHook] = [NanTensorHook("loss")]
    if every := config.log_step_count_steps:
        hooks.append(LoggingTensorHook({"loss": "loss", "step": GLOBAL_STEP}, every_n_iter=every))
        hooks.append(StepCounterHook(every, summary_writer=writer))
    hooks.extend(spec.training_hooks or ())
    # training_chief_hooks write files. With several processes, one of them does it.
    if config.is_chief:
        hooks.extend(spec.training_chief_hooks or ())
    if config.save_summary_steps:
        hooks.append(SummarySaverHook(config.save_summary_steps, summary_writer=writer, summary_op={"loss": "loss"}))
    hooks = [*user_hooks, *hooks]
    # A user's hook that saves checkpoints replaces the hook of the Estimator.
    if any(isinstance(hook, CheckpointSaverHook) for hook in hooks):
        return hooks
    saver = Saver(graph, folder, config.keep_checkpoint_max, config.keep_checkpoint_every_n_hours)
    every_s, every = config.save_checkpoints_secs, config.save_checkpoints_steps
    # Step 0 is saved, too: an evaluator can start at once, and a crash in the first interval keeps the initial values.
    return [CheckpointSaverHook(folder, every_s, every, saver, listeners=listeners), *hooks]
