# SPDX-License-Identifier: Apache-2.0
"""The strategies of an Estimator whose `RunConfig` names none."""

import jax

from phalanx._src.cluster.resolvers.tf_config import TFConfigClusterResolver
from phalanx._src.strategies.base import Strategy
from phalanx._src.strategies.multi_worker import MultiWorkerMirroredStrategy
from phalanx._src.strategies.parameter_server import ParameterServerStrategy
from phalanx._src.strategies.single import OneDeviceStrategy
from phalanx.estimator.config import RunConfig, TaskType


def default_strategy(config: RunConfig) -> Strategy | None:
    """Returns the strategy that the tasks of a cluster suggest, or None for one device.

    Parameter servers suggest asynchronous training, which the chief coordinates. Several workers suggest synchronous training.
    """
    # It would wait for workers that do not know of it.
    if config.task_type == TaskType.EVALUATOR:
        return None
    if config.num_ps_replicas:
        return ParameterServerStrategy(TFConfigClusterResolver()) if config.is_chief else None
    return MultiWorkerMirroredStrategy() if config.num_worker_replicas > 1 else None


def local_strategy() -> OneDeviceStrategy:
    """Returns a strategy for the first device of this process."""
    return OneDeviceStrategy(jax.local_devices()[0])
