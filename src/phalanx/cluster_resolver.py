# SPDX-License-Identifier: Apache-2.0
"""How a process finds out which cluster it belongs to."""

from phalanx.cluster.resolvers.base import ClusterResolver
from phalanx.cluster.resolvers.gce import GCEClusterResolver
from phalanx.cluster.resolvers.kubernetes import KubernetesClusterResolver, KubernetesExecutableLocation
from phalanx.cluster.resolvers.sagemaker import SageMakerClusterResolver
from phalanx.cluster.resolvers.simple import SimpleClusterResolver
from phalanx.cluster.resolvers.slurm import SlurmClusterResolver
from phalanx.cluster.resolvers.tf_config import TFConfigClusterResolver
from phalanx.cluster.resolvers.tpu import TPUClusterResolver
from phalanx.cluster.resolvers.union import UnionResolver
from phalanx.cluster.spec import ClusterSpec

__all__ = [
    "ClusterResolver",
    "ClusterSpec",
    "GCEClusterResolver",
    "KubernetesClusterResolver",
    "KubernetesExecutableLocation",
    "SageMakerClusterResolver",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "TFConfigClusterResolver",
    "TPUClusterResolver",
    "UnionResolver",
]
