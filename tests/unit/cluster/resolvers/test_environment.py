"""Which resolver fits the environment."""

import pytest

from phalanx._src.cluster.resolvers.environment import resolver_of_environment
from phalanx._src.cluster.spec import Task, tf_config
from phalanx.cluster_resolver import (
    ClusterSpec,
    KubernetesClusterResolver,
    SageMakerClusterResolver,
    SlurmClusterResolver,
    TFConfigClusterResolver,
    TPUClusterResolver,
)

SPEC = ClusterSpec({"worker": ["a:1", "b:1"], "ps": ["c:1"]})
# From "SageMaker Training Toolkit", ENVIRONMENT_VARIABLES.md.
SAGEMAKER = {"SM_CURRENT_HOST": "algo-2", "SM_HOSTS": '["algo-2","algo-1"]', "SM_NUM_GPUS": "1", "SM_NUM_CPUS": "4"}
STEP = {
    "SLURM_PROCID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
}
PODS = {"PHALANX_NUM_PODS": "2", "PHALANX_SERVICE": "s", "HOSTNAME": "web-1"}
SLICE = {"TPU_WORKER_HOSTNAMES": "t0,t1", "TPU_WORKER_ID": "0"}
CONFIG = {"TF_CONFIG": tf_config(SPEC, Task("worker", 0))}


@pytest.mark.parametrize(
    ("environ", "kind"),
    [
        ({**SLICE, **SAGEMAKER, **PODS, **STEP, **CONFIG}, TFConfigClusterResolver),
        ({**SLICE, **SAGEMAKER, **PODS, **STEP}, SlurmClusterResolver),
        ({**SLICE, **SAGEMAKER, **PODS}, KubernetesClusterResolver),
        ({**SLICE, **SAGEMAKER}, SageMakerClusterResolver),
        (SLICE, TPUClusterResolver),
        ({"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}, type(None)),
        # The script of `sbatch` itself, outside of a step, has a rank but is no task.
        ({"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_JOB_NODELIST": "n[1-2]"}, type(None)),
        # A Job whose pods have nothing to do with each other.
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1", "HOSTNAME": "sweep-1"}, type(None)),
        ({}, type(None)),
    ],
)
def test_order_of_environments(environ, kind):
    """What a person wrote goes before what a machine set, and no cluster is guessed."""
    resolver = resolver_of_environment(environ)
    assert type(resolver) is kind
    assert resolver is None or len(resolver.cluster_spec().task_indices("worker")) == 2


def test_environment_of_this_process(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", CONFIG["TF_CONFIG"])
    assert resolver_of_environment().cluster_spec() == SPEC


def test_port_of_a_slurm_step():
    """It follows the job, so that two jobs can have their first task on one node."""
    first, second = ({**STEP, "SLURM_JOB_ID": f"{job}", "SLURM_STEP_ID": "0"} for job in (1, 2))
    addresses = [resolver_of_environment(step).cluster_spec().job_tasks("worker")[0] for step in (first, second)]
    assert addresses == ["n1:61441", "n1:61442"]
