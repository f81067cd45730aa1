"""A cluster that a program describes."""

import pytest

from phalanx.cluster_resolver import ClusterSpec, SimpleClusterResolver
from phalanx.errors import ClusterTypeError

SPEC = ClusterSpec({"worker": ["a:1", "b:1"], "ps": ["c:1"]})


def test_simple_resolver_returns_its_arguments():
    simple = SimpleClusterResolver(
        SPEC, "m:1", task_type="ps", task_id=0, environment="lab", num_accelerators={"GPU": 2}, rpc_layer="grpc"
    )
    assert simple.cluster_spec() == SPEC
    assert (simple.task_type, simple.task_id, simple.environment, simple.rpc_layer) == ("ps", 0, "lab", "grpc")
    assert simple.num_accelerators() == {"GPU": 2}
    assert (simple.master(), simple.master("worker", 1, "http")) == ("grpc://m:1", "http://b:1")
    simple.task_id = 7
    assert simple.task_id == 7
    assert SimpleClusterResolver(SPEC, rpc_layer="grpc").master() == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (({"worker": ["a:1"]},), "cluster_spec={'worker': .*: must be a ClusterSpec"),
        ((SPEC, 3), "master=3: must be a string"),
    ],
)
def test_simple_resolver_refuses_other_types(arguments, message):
    with pytest.raises(ClusterTypeError, match=message):
        SimpleClusterResolver(*arguments)
