# SPDX-License-Identifier: Apache-2.0
"""All public names. `import phalanx` loads them lazily, because they need JAX and Keras, and the launcher does not."""

from phalanx._src import compat as _compat  # noqa: F401  (Must be first, because it checks the Keras backend.)
from phalanx import cluster_resolver
from phalanx import coordinator
from phalanx import data
from phalanx import elastic
from phalanx import errors
from phalanx import estimator
from phalanx import experimental
from phalanx import feature_column
from phalanx import lax
from phalanx import nn
from phalanx import summary
from phalanx import tpu
from phalanx import train
from phalanx._src.runtime.bootstrap import print_on_chief
from phalanx._src.tracing.tape import GradientTape, value_and_grad
from phalanx._src.collectives.cross_device import (
    CrossDeviceOps,
    HierarchicalCopyAllReduce,
    NcclAllReduce,
    ReductionToOneDevice,
)
from phalanx._src.tracing.context import (
    ReplicaContext,
    experimental_set_strategy,
    get_replica_context,
    has_strategy,
    in_cross_replica_context,
)
from phalanx._src.tracing.control_flow import cond, remat, scan, while_loop
from phalanx._src.programs.function import function

from phalanx import keras
from phalanx._src.tools.estimate.api import Estimates, estimate
from phalanx._src.tools.estimate.prediction import Estimate
from phalanx._src.mesh.layout import fully_sharded
from phalanx._src.input.distributed import DistributedDataset
from phalanx._src.input.iterator import DistributedIterator
from phalanx._src.input.sources.functions import InputContext
from phalanx._src.tools.describe import describe, explain_sharding
from phalanx._src.options import (
    InputOptions,
    InputReplicationMode,
    ReduceOp,
    RunOptions,
    VariableAggregation,
    VariableSynchronization,
)
from phalanx._src.strategies.base import Strategy
from phalanx._src.strategies.current import get_strategy
from phalanx._src.strategies.extended import StrategyExtended
from phalanx._src.strategies.mirrored import MirroredStrategy
from phalanx._src.strategies.multi_worker import MultiWorkerMirroredStrategy
from phalanx._src.parameter_server.processes.ray import Server
from phalanx._src.strategies.parameter_server import ParameterServerStrategy
from phalanx._src.strategies.single import OneDeviceStrategy
from phalanx._src.strategies.tpu import TPUStrategy
from phalanx._src.compat.tf_variable import Variable
from phalanx._src.mesh.layout import REPLICA_AXIS

from phalanx._src.mesh.devices import set_virtual_cpu_devices
from phalanx._src.mesh.values import DistributedValues, Mirrored, PerReplica

__all__ = [
    "REPLICA_AXIS",
    "CrossDeviceOps",
    "DistributedDataset",
    "DistributedIterator",
    "DistributedValues",
    "Estimate",
    "Estimates",
    "GradientTape",
    "HierarchicalCopyAllReduce",
    "InputContext",
    "InputOptions",
    "InputReplicationMode",
    "Mirrored",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "NcclAllReduce",
    "OneDeviceStrategy",
    "ParameterServerStrategy",
    "PerReplica",
    "ReduceOp",
    "ReductionToOneDevice",
    "ReplicaContext",
    "RunOptions",
    "Server",
    "Strategy",
    "StrategyExtended",
    "TPUStrategy",
    "Variable",
    "VariableAggregation",
    "VariableSynchronization",
    "cluster_resolver",
    "cond",
    "coordinator",
    "data",
    "describe",
    "elastic",
    "errors",
    "estimate",
    "estimator",
    "experimental",
    "experimental_set_strategy",
    "explain_sharding",
    "feature_column",
    "fully_sharded",
    "function",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "keras",
    "lax",
    "nn",
    "print_on_chief",
    "remat",
    "scan",
    "set_virtual_cpu_devices",
    "summary",
    "tpu",
    "train",
    "value_and_grad",
    "while_loop",
]
