# SPDX-License-Identifier: Apache-2.0
"""All public names. `import phalanx` loads them lazily, because they need JAX and Keras, and the launcher does not."""

from phalanx import compat  # noqa: F401  (Must be first, because it checks the Keras backend.)
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
from phalanx.mesh.bootstrap import print_on_chief
from phalanx.tracing.tape import GradientTape, value_and_grad
from phalanx.collectives.cross_device import (
    CrossDeviceOps,
    HierarchicalCopyAllReduce,
    NcclAllReduce,
    ReductionToOneDevice,
)
from phalanx.tracing.context import (
    ReplicaContext,
    experimental_set_strategy,
    get_replica_context,
    has_strategy,
    in_cross_replica_context,
)
from phalanx.tracing.control_flow import cond, remat, scan, while_loop
from phalanx.programs.function import function

from phalanx import keras
from phalanx.forecast.estimate import Estimates, estimate
from phalanx.forecast.prediction import Estimate
from phalanx.mesh.layout import fully_sharded
from phalanx.input.distributed import DistributedDataset
from phalanx.input.iterator import DistributedIterator
from phalanx.input.sources.functions import InputContext
from phalanx.strategies.describe import describe, explain_sharding
from phalanx.options import (
    InputOptions,
    InputReplicationMode,
    ReduceOp,
    RunOptions,
    VariableAggregation,
    VariableSynchronization,
)
from phalanx.strategies.base import Strategy
from phalanx.strategies.current import get_strategy
from phalanx.strategies.extended import StrategyExtended
from phalanx.strategies.mirrored import MirroredStrategy
from phalanx.strategies.multi_worker import MultiWorkerMirroredStrategy
from phalanx.servers.ray import Server
from phalanx.strategies.parameter_server import ParameterServerStrategy
from phalanx.strategies.single import OneDeviceStrategy
from phalanx.strategies.tpu import TPUStrategy
from phalanx.tracing.tf_variable import Variable
from phalanx.mesh.layout import REPLICA_AXIS

from phalanx.mesh.devices import set_virtual_cpu_devices
from phalanx.mesh.values import DistributedValues, Mirrored, PerReplica

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
