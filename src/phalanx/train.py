# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: the names of `tf.train` that save and restore a training run."""

from phalanx._src.checkpoint.checkpoint import Checkpoint, CheckpointOptions
from phalanx._src.checkpoint.manager import CheckpointManager, checkpoints_iterator, latest_checkpoint
from phalanx._src.checkpoint.reader import CheckpointReader, list_variables, load_checkpoint, load_variable
from phalanx._src.checkpoint.status import CheckpointStatus
from phalanx.errors.names import suggest_names

__all__ = [
    "Checkpoint",
    "CheckpointManager",
    "CheckpointOptions",
    "CheckpointReader",
    "CheckpointStatus",
    "checkpoints_iterator",
    "latest_checkpoint",
    "list_variables",
    "load_checkpoint",
    "load_variable",
]

suggest_names(__name__)
