"""The hosts of a SageMaker job."""

import pytest

from phalanx.cluster_resolver import ClusterSpec, SageMakerClusterResolver
from phalanx.errors import ClusterSourceError, ClusterTypeError


def test_sagemaker_arguments_replace_the_environment():
    resolver = SageMakerClusterResolver(2224, "chief", 3, "grpc", "sagemaker", environ=SAGEMAKER)
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == ("chief", 3, "grpc")
    assert resolver.environment == "sagemaker"
    assert resolver.master("worker", 0).startswith("grpc://")
    with pytest.raises(ClusterTypeError, match="port=0: must be a number from 1 to 65535"):
        SageMakerClusterResolver(0)


# From "SageMaker Training Toolkit", ENVIRONMENT_VARIABLES.md.
SAGEMAKER = {"SM_CURRENT_HOST": "algo-2", "SM_HOSTS": '["algo-2","algo-1"]', "SM_NUM_GPUS": "1", "SM_NUM_CPUS": "4"}


def test_sagemaker_sorts_hosts_as_workers():
    resolver = SageMakerClusterResolver(environ=SAGEMAKER)
    assert resolver.cluster_spec() == ClusterSpec({"worker": ["algo-1:2223", "algo-2:2223"]})
    assert (resolver.task_type, resolver.task_id, resolver.master()) == ("worker", 1, "algo-2:2223")
    assert resolver.num_accelerators() == {"GPU": 1}
    assert SageMakerClusterResolver(environ={**SAGEMAKER, "SM_NUM_GPUS": "0"}).num_accelerators() == {}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"SM_HOSTS": ""}, "SM_HOSTS: is not set; SageMaker sets it for each container of a training job"),
        ({"SM_CURRENT_HOST": ""}, "SM_CURRENT_HOST: is not set"),
        ({"SM_HOSTS": "algo-1"}, "SM_HOSTS='algo-1': must be a JSON list of host names"),
        ({"SM_HOSTS": "[" * 100_000}, "must be a JSON list of host names"),
        ({"SM_HOSTS": "[1]"}, r"SM_HOSTS='\[1\]': must be a JSON list of host names"),
        ({"SM_CURRENT_HOST": "algo-9"}, "SM_CURRENT_HOST='algo-9': is not one of SM_HOSTS="),
    ],
)
@pytest.mark.parametrize("ask", [lambda r: r.cluster_spec(), lambda r: r.task_id])
def test_sagemaker_refuses_bad_environments(changes, message, ask):
    with pytest.raises(ClusterSourceError, match=message):
        ask(SageMakerClusterResolver(environ={**SAGEMAKER, **changes}))
