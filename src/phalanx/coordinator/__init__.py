# SPDX-License-Identifier: Apache-2.0
"""Schedules steps that any worker may run."""

from phalanx.coordinator.cluster import ClusterCoordinator
from phalanx.coordinator.progress import Status
from phalanx.coordinator.queue import RemoteValue
from phalanx.coordinator.values import PerWorkerDataset, PerWorkerValues
from phalanx.servers.remote.worker_index import experimental_get_current_worker_index

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
