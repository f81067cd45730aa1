"""`MultiWorkerMirroredStrategy` in one process."""

import pytest

import phalanx
from phalanx._src.mesh.topology import Topology
from phalanx._src.strategies import multi_worker
from phalanx._src.strategies.base import living_strategies


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan")])
def test_stall_timeout_must_be_positive(seconds):
    with pytest.raises(phalanx.errors.InvalidArgumentError, match=r"must be more than 0 seconds, or None"):
        phalanx.MultiWorkerMirroredStrategy(stall_timeout_s=seconds)


def test_scaled_batches_outside_elastic_groups():
    """They are whole, because no process can be missing."""
    strategy = phalanx.MultiWorkerMirroredStrategy(elastic="scale_batch")
    assert strategy.elastic == phalanx.elastic.ElasticOptions(scale_batch=True)
    assert len(strategy.experimental_distribute_dataset(list(range(8)), batch_size=4)) == 2


@pytest.mark.parametrize("elastic", ["scale-batch", True])
def test_elastic_must_be_options(elastic):
    """Or the one word that stands for some."""
    with pytest.raises(phalanx.errors.InvalidArgumentError, match='elastic=(.|\n)*HINT: elastic="scale_batch", or '):
        phalanx.MultiWorkerMirroredStrategy(elastic=elastic)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"local_updates": 8}, "local_updates=8: must be a LocalSGD or a DiLoCo"),
        ({"replica_weights": "fast"}, 'replica_weights=.fast.: must be "auto", or a list of positive numbers'),
        (
            {
                "local_updates": phalanx.experimental.LocalSGD(8),
                "communication_options": phalanx.experimental.CommunicationOptions(compression="int8"),
            },
            "the replicas send no gradients",
        ),
    ],
    ids=["local updates", "weights", "both"],
)
def test_wrong_choices_are_refused_before_the_processes_meet(given, message):
    """The other worker does not exist, so that whoever waits for it waits long."""
    spec = phalanx.cluster_resolver.ClusterSpec({"worker": ["127.0.0.1:1", "127.0.0.1:2"]})
    resolver = phalanx.cluster_resolver.SimpleClusterResolver(spec, task_type="worker", task_id=0)
    with pytest.raises(phalanx.errors.InvalidArgumentError, match=message):
        phalanx.MultiWorkerMirroredStrategy(resolver, **given)


def test_refused_groups_leave_no_strategy(monkeypatch):
    """`fit` outside a scope looks at all strategies. A process of an elastic group has one of the replicas here."""
    monkeypatch.setattr(multi_worker.membership, "is_elastic", lambda: True)
    monkeypatch.setattr(multi_worker.membership, "sizes", lambda: range(1, 3))
    monkeypatch.setattr(Topology, "local_replicas", property(lambda _: range(1)))
    before = set(living_strategies())
    with pytest.raises(phalanx.errors.InvalidArgumentError, match="replicas_per_group=2 in an elastic group") as error:
        phalanx.MultiWorkerMirroredStrategy(local_updates=phalanx.experimental.LocalSGD(8, replicas_per_group=2))
    assert set(living_strategies()) <= before, error
