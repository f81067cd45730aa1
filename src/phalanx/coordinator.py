# SPDX-License-Identifier: Apache-2.0
"""Schedules steps that any worker may run."""

from phalanx._src.parameter_server.remote.worker_index import experimental_get_current_worker_index
from phalanx._src.parameter_server.scheduling.cluster import ClusterCoordinator
from phalanx._src.parameter_server.scheduling.progress import Status
from phalanx._src.parameter_server.scheduling.queue import RemoteValue
from phalanx._src.parameter_server.scheduling.values import PerWorkerDataset, PerWorkerValues
from phalanx.errors.names import suggest_names

PerWorkerValue = PerWorkerValues
"""The newer name of `PerWorkerValues`."""

__all__ = [
    "ClusterCoordinator",
    "PerWorkerDataset",
    "PerWorkerValue",
    "PerWorkerValues",
    "RemoteValue",
    "Status",
    "experimental_get_current_worker_index",
]

suggest_names(__name__)
