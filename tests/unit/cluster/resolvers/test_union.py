"""Several resolvers as one."""

import pytest

from phalanx.cluster_resolver import ClusterSpec, SimpleClusterResolver, UnionResolver
from phalanx.errors import ClusterError, ClusterTypeError

SPEC = ClusterSpec({"worker": ["a:1", "b:1"], "ps": ["c:1"]})


def simple(cluster, **options):
    return SimpleClusterResolver(ClusterSpec(cluster), **options)


def test_union_joins_lists():
    """In the order of the resolvers; everything else is the first one's."""
    first = simple(
        {"worker": ["a:1"]}, master="m:1", task_type="worker", task_id=0, rpc_layer="grpc", environment="lab"
    )
    union = UnionResolver(first, simple({"worker": ["b:1"], "ps": ["c:1"]}, num_accelerators={"GPU": 1}))
    assert union.cluster_spec() == SPEC
    assert (union.task_type, union.task_id, union.rpc_layer, union.environment) == ("worker", 0, "grpc", "lab")
    assert (union.master(), union.master("worker", 1), union.num_accelerators()) == ("grpc://m:1", "grpc://b:1", {})


def test_union_keeps_indices():
    """Where one of the resolvers tells them."""
    union = UnionResolver(simple({"worker": ["a:1"]}), simple({"worker": {3: "d:1"}}), simple({"worker": {1: "b:1"}}))
    assert union.cluster_spec() == ClusterSpec({"worker": {0: "a:1", 1: "b:1", 3: "d:1"}})
    assert union.task_type is None


def test_union_may_be_told_the_task():
    """Against what its first resolver says."""
    first = simple({"worker": ["a:1"]}, task_type="worker", task_id=0)
    union = UnionResolver(first, task_type="ps", task_id=1, rpc_layer="grpc")
    assert (union.task_type, union.task_id, union.rpc_layer) == ("ps", 1, "grpc")
    union.rpc_layer = None
    assert union.rpc_layer is None


def test_union_refuses_bad_members():
    with pytest.raises(ClusterError, match="a union needs at least one resolver"):
        UnionResolver()
    with pytest.raises(ClusterTypeError, match="is not a ClusterResolver"):
        UnionResolver(SPEC)
    twice = UnionResolver(simple({"worker": ["a:1"]}), simple({"worker": {0: "b:1", 2: "c:1"}}))
    with pytest.raises(ClusterError, match="index 0 of job 'worker': two resolvers have it: 'a:1' and 'b:1'"):
        twice.cluster_spec()
