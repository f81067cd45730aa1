"""The strategies of an Estimator whose `RunConfig` names none."""

import json

import phalanx.estimator as estimator
from phalanx._src.strategies.single import OneDeviceStrategy
from phalanx.estimator.strategies import default_strategy, local_strategy


def test_one_device_without_a_cluster():
    """There is no other strategy, and that of this process has one replica."""
    assert default_strategy(estimator.RunConfig()) is None
    assert isinstance(local_strategy(), OneDeviceStrategy)
    assert local_strategy().num_replicas_in_sync == 1


def test_tasks_that_do_not_train_have_no_strategy(monkeypatch):
    """Neither the evaluator, nor a worker of a chief with parameter servers."""
    cluster = {"chief": ["a:1"], "worker": ["b:1"], "ps": ["c:1"]}
    for task_type in ("evaluator", "worker", "ps"):
        config = {"cluster": cluster, "task": {"type": task_type, "index": 0}}
        with monkeypatch.context() as patch:
            patch.setenv("TF_CONFIG", json.dumps(config))
            assert default_strategy(estimator.RunConfig()) is None
