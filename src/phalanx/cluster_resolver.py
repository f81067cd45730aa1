# SPDX-License-Identifier: Apache-2.0
"""How a process finds out which cluster it belongs to."""

from phalanx._src.cluster.resolvers.base import ClusterResolver
from phalanx._src.cluster.resolvers.gce import GCEClusterResolver
from phalanx._src.cluster.resolvers.kubernetes import KubernetesClusterResolver, KubernetesExecutableLocation
from phalanx._src.cluster.resolvers.sagemaker import SageMakerClusterResolver
from phalanx._src.cluster.resolvers.simple import SimpleClusterResolver
from phalanx._src.cluster.resolvers.slurm import SlurmClusterResolver
from phalanx._src.cluster.resolvers.tf_config import TFConfigClusterResolver
from phalanx._src.cluster.resolvers.tpu import TPUClusterResolver
from phalanx._src.cluster.resolvers.union import UnionResolver
from phalanx._src.cluster.spec import ClusterSpec
from phalanx.errors.names import suggest_names

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

suggest_names(__name__)
