"""`RunConfig`: its options, and the tasks of TF_CONFIG."""

import json

import pytest
from refusals import refusals, refused

import phalanx
import phalanx.estimator as estimator
from phalanx.errors import InvalidArgumentError

OPTIONS = [
    ({"save_checkpoints_steps": 5, "save_checkpoints_secs": 5}, ["save_checkpoints_steps=5 and", "only one"]),
    ({"save_checkpoints_steps": 0}, ["save_checkpoints_steps=0", "at least 1"]),
    ({"save_checkpoints_secs": "a"}, ["save_checkpoints_secs='a'", "more than 0"]),
    ({"keep_checkpoint_max": -1}, ["keep_checkpoint_max=-1", "at least 0"]),
    ({"keep_checkpoint_every_n_hours": 0}, ["keep_checkpoint_every_n_hours=0", "more than 0"]),
    ({"save_summary_steps": 2.5}, ["save_summary_steps=2.5", "an integer"]),
    ({"log_step_count_steps": True}, ["log_step_count_steps=True", "an integer"]),
    ({"tf_random_seed": -1}, ["tf_random_seed=-1", "at least 0"]),
    ({"model_dir": 3}, ["model_dir=3", "must be a path"]),
    ({"model_dir": ""}, ["model_dir=''", "the name of a folder"]),
    ({"train_distribute": 3}, ["train_distribute=3", "must be a strategy"]),
    ({"eval_distribute": "mirrored"}, ["eval_distribute='mirrored'", "must be a strategy"]),
    ({"session_config": 3}, ["session_config=3", "no session"]),
    ({"device_fn": print}, ["device_fn=", "the strategy places variables"]),
    ({"protocol": "grpc"}, ["protocol='grpc'", "Phalanx chooses"]),
    ({"experimental_distribute": 3}, ["experimental_distribute=3", "each strategy has its own option"]),
    ({"checkpoint_save_graph_def": False}, ["checkpoint_save_graph_def=False", "no graph is ever saved"]),
]
test_options_that_are_refused = refusals(
    InvalidArgumentError, *OPTIONS, call=lambda options: estimator.RunConfig(**options)
)
test_replacements_that_are_refused = refusals(
    InvalidArgumentError, *OPTIONS, call=lambda options: estimator.RunConfig().replace(**options)
)


def test_replace_gives_another_config():
    """Steps and seconds between checkpoints replace each other, and an unknown option is an error."""
    config = estimator.RunConfig("model", save_checkpoints_steps=7)
    assert (config.save_checkpoints_steps, config.save_checkpoints_secs) == (7, None)
    other = config.replace(save_checkpoints_secs=9)
    assert (other.save_checkpoints_steps, other.save_checkpoints_secs, other.model_dir) == (None, 9, "model")
    assert other.replace(save_checkpoints_steps=3).save_checkpoints_secs is None
    assert estimator.RunConfig().save_checkpoints_secs == 600
    strategy = phalanx.OneDeviceStrategy("cpu:1")
    assert estimator.RunConfig(train_distribute=strategy).train_distribute is strategy
    assert config == estimator.RunConfig("model", save_checkpoints_steps=7)
    with refused(InvalidArgumentError, ["replace(other=...)", "no such option"]):
        config.replace(other=3)


CLUSTER = {"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["d:1"]}


@pytest.mark.parametrize(
    ("cluster", "task_type", "index", "wanted"),
    [
        (CLUSTER, "chief", 0, (True, 3, 1)),
        (CLUSTER, "worker", 0, (False, 3, 1)),
        (CLUSTER, "ps", 0, (False, 3, 1)),
        (CLUSTER, "evaluator", 0, (False, 0, 0)),
        ({"worker": ["b:1", "c:1"]}, "worker", 0, (True, 2, 0)),
        ({"worker": ["b:1", "c:1"]}, "worker", 1, (False, 2, 0)),
    ],
)
def test_tasks_of_a_cluster(cluster, task_type, index, wanted, monkeypatch):
    """Who is the chief, and how many tasks there are, as `tf.estimator.RunConfig` documents it."""
    with monkeypatch.context() as patch:
        patch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": task_type, "index": index}}))
        config = estimator.RunConfig()
        assert (config.is_chief, config.num_worker_replicas, config.num_ps_replicas) == wanted
        assert (config.task_type, config.task_id) == (task_type, index)
        assert config.task_type == getattr(estimator.TaskType, task_type.upper())
        assert bool(config.cluster_spec.jobs) == (task_type != "evaluator")
