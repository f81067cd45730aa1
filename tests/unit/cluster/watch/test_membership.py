"""A process outside all elastic groups, and the description of a generation. The rendezvous has the other tests."""

import json

import pytest

from phalanx._src.cluster.watch import membership
from phalanx._src.cluster.watch.meeting import Generation


@pytest.fixture(autouse=True)
def outside(monkeypatch):
    monkeypatch.delenv(membership.RENDEZVOUS, raising=False)
    monkeypatch.delenv(membership.MEMBER, raising=False)
    membership.own.cache_clear()
    yield
    membership.own.cache_clear()


def test_process_outside_a_group():
    assert membership.own() is None
    assert not membership.is_elastic()
    assert not membership.is_late()
    assert not membership.is_first()
    assert membership.may_train()
    assert not membership.outlives_losses()


def test_description_of_a_generation(monkeypatch):
    generation = Generation(3, "127.0.0.1:1", ("127.0.0.1:2", "127.0.0.1:3"), rank=1)
    found = json.loads(generation.tf_config())
    assert found["cluster"] == {"worker": ["127.0.0.1:2", "127.0.0.1:3"]}
    assert found["task"] == {"type": "worker", "index": 1}
    assert generation.size == 2
    monkeypatch.setenv(membership.MOST, "4")
    monkeypatch.setenv(membership.LEAST, "2")
    assert membership.most_workers() == 4
    assert list(membership.sizes()) == [2, 3, 4]
