# SPDX-License-Identifier: Apache-2.0
"""Chooses the resolver that matches the environment of a process."""

import os
from collections.abc import Mapping

from phalanx._src.cluster.resolvers.base import ClusterResolver
from phalanx._src.cluster.resolvers.kubernetes import KubernetesClusterResolver
from phalanx._src.cluster.resolvers.sagemaker import SageMakerClusterResolver
from phalanx._src.cluster.resolvers.slurm import SlurmClusterResolver, port_of_step
from phalanx._src.cluster.resolvers.tf_config import TFConfigClusterResolver
from phalanx._src.cluster.resolvers.tpu import TPUClusterResolver
from phalanx._src.cluster.watch.membership import RENDEZVOUS

_SLURM_STEP = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE")


def resolver_of_environment(environ: Mapping[str, str] | None = None) -> ClusterResolver | None:
    """Returns the resolver that matches the environment, or None if there is no cluster. May be used in any context.

    The first match wins. Explicit settings come before automatic ones, and inner systems before the systems they run in:

    1. TF_CONFIG, and PHALANX_RENDEZVOUS: a process of an elastic group finds its present generation in TF_CONFIG.
    2. A Slurm job step: SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_STEP_NODELIST and SLURM_STEP_TASKS_PER_NODE. The port
       follows SLURM_JOB_ID and SLURM_STEP_ID.
    3. Kubernetes: PHALANX_NUM_PODS.
    4. SageMaker: SM_HOSTS and SM_CURRENT_HOST.
    5. TPU: several hosts in TPU_PROCESS_ADDRESSES or TPU_WORKER_HOSTNAMES. The metadata server is not queried.

    Args:
      environ: environment variables to read; by default those of this process.

    Example:
      >>> type(resolver_of_environment({"SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-1"})).__name__
      'SageMakerClusterResolver'
      >>> resolver_of_environment({}) is None
      True
    """
    variables = os.environ if environ is None else environ
    # Even if it is empty: parsing names that mistake, and the next system in the list would hide it.
    if "TF_CONFIG" in variables or RENDEZVOUS in variables:
        return TFConfigClusterResolver(environ=environ)
    # The script of sbatch has SLURM_PROCID too, but is not a task. Only srun sets the variables of a step.
    if all(variables.get(name) for name in _SLURM_STEP):
        return SlurmClusterResolver(port_base=port_of_step(variables), environ=environ)
    # Not by what Kubernetes sets: the pods of an indexed Job may have nothing to do with each other.
    if "PHALANX_NUM_PODS" in variables:
        return KubernetesClusterResolver(environ=environ)
    if variables.get("SM_HOSTS") and variables.get("SM_CURRENT_HOST"):
        return SageMakerClusterResolver(environ=environ)
    # A slice of one host also has the variable, with the name localhost, and needs no cluster.
    if "," in (variables.get("TPU_PROCESS_ADDRESSES") or variables.get("TPU_WORKER_HOSTNAMES", "")):
        return TPUClusterResolver(environ=environ)
    return None
