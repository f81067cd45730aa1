"""Which ports a cluster opens, from its description alone."""

import pytest

from phalanx._src.cluster.connections.openings import openings
from phalanx._src.cluster.spec import ClusterSpec

HERE = ClusterSpec({"worker": ["127.0.0.1:5001", "localhost:5002"]})
FAR = ClusterSpec({"worker": ["host0:5001", "host1:5001"]})
SERVERS = {"chief": ["127.0.0.1:1"], "worker": ["127.0.0.1:2"], "ps": ["127.0.0.1:3"]}


@pytest.mark.parametrize("is_elastic", [False, True])
def test_one_machine_has_no_port_for_others(is_elastic):
    """All ports are on the loopback interface, and JAX's service has none."""
    found = openings(HERE, is_elastic=is_elastic)
    assert [each.listener for each in found if each.port == "none"] == ["JAX's coordination service"]
    assert {each.where for each in found if each.port != "none"} == {"127.0.0.1"}
    assert any("rendezvous" in each.listener for each in found) == is_elastic


def test_several_machines_name_who_gets_in():
    """What has no proof says so."""
    found = {each.listener: each for each in openings(FAR)}
    assert "prove" in found["the handshake of the workers"].admitted
    assert found["JAX's coordination service"].port == "5001 of worker 0"
    assert "everyone" in found["JAX's coordination service"].admitted
    assert "host0" in found["the handshake of the workers"].where


@pytest.mark.parametrize("host", ["127.0.0.1", "host0"])
def test_parameter_servers_have_a_door_and_ray(host):
    door, ray = openings(ClusterSpec({**SERVERS, "chief": [f"{host}:1"]}))
    assert door.port == "1 of the chief"
    assert ray.where.startswith("127.0.0.1" if host == "127.0.0.1" else "all")


@pytest.mark.parametrize("spec", [ClusterSpec({}), ClusterSpec({"worker": ["host0:1"]})])
def test_a_process_alone_opens_nothing(spec):
    assert openings(spec) == []
