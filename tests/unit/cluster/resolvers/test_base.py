"""What all resolvers share."""

import pytest

from phalanx.cluster_resolver import ClusterResolver, ClusterSpec

SPEC = ClusterSpec({"worker": ["a:1", "b:1"], "ps": ["c:1"]})


class OwnResolver(ClusterResolver):
    """A user's resolver, without a constructor."""

    def cluster_spec(self):
        return SPEC


def test_a_resolver_of_ones_own():
    """It needs its cluster alone, and is told the rest."""
    own = OwnResolver()
    assert (own.task_type, own.task_id, own.rpc_layer, own.environment, own.master()) == (None, None, None, "", "")
    assert own.num_accelerators() == {}
    own.task_type, own.task_id, own.rpc_layer = "worker", 1, "grpc"
    assert own.master() == "grpc://b:1"
    assert own.master(task_id=0) == "grpc://a:1"
    assert own.master("ps", 0, rpc_layer="http") == "http://c:1"
    assert OwnResolver().task_type is None


def test_the_abstract_resolver():
    with pytest.raises(TypeError, match="cluster_spec"):
        ClusterResolver()
