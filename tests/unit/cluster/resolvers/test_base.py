"""What all resolvers share."""

import pytest

from phalanx._src.cluster.resolvers.base import start_timeout_s
from phalanx.cluster_resolver import ClusterResolver, ClusterSpec
from phalanx.errors import InvalidArgumentError

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


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan", "inf"])
def test_time_is_finite_and_above_0(text):
    assert start_timeout_s({"PHALANX_START_TIMEOUT_S": "60"}) == 60.0
    message = (
        rf"PHALANX_START_TIMEOUT_S='{text}': must be a number of seconds above 0.\nHINT: PHALANX_START_TIMEOUT_S=60"
    )
    with pytest.raises(InvalidArgumentError, match=message):
        start_timeout_s({"PHALANX_START_TIMEOUT_S": text})
