# SPDX-License-Identifier: Apache-2.0
"""Keras's `fit`, `evaluate` and `predict` on the replicas of a strategy, with callbacks and layers that go with them.

Importing the package makes models that are created in the scope of a strategy train on its replicas.
"""

from phalanx.errors.names import suggest_names
from phalanx.keras import bridge as bridge
from phalanx.keras.backup import BackupAndRestore
from phalanx.keras.callbacks import SyncCheck
from phalanx.keras.data import DatasetCreator
from phalanx.keras.embedding import ShardedEmbedding
from phalanx.keras.kernels import set_cpu_kernels
from phalanx.keras.logits import set_logits_recovery
from phalanx.keras.model_checkpoint import ModelCheckpoint
from phalanx.keras.optax_optimizer import OptaxOptimizer
from phalanx.keras.sidecar import SidecarEvaluator
from phalanx.keras.tensorboard import TensorBoard
from phalanx.keras.tracking import Tracking

__all__ = [
    "BackupAndRestore",
    "DatasetCreator",
    "ModelCheckpoint",
    "OptaxOptimizer",
    "ShardedEmbedding",
    "SidecarEvaluator",
    "SyncCheck",
    "TensorBoard",
    "Tracking",
    "set_cpu_kernels",
    "set_logits_recovery",
]

suggest_names(__name__)
