"""The cluster in TF_CONFIG."""

import json

import numpy as np
import pytest

from phalanx._src.cluster.spec import Task, tf_config
from phalanx.cluster_resolver import ClusterSpec, TFConfigClusterResolver
from phalanx.errors import ClusterError

SPEC = ClusterSpec({"worker": ["a:1", "b:1"], "ps": ["c:1"]})


def test_tf_config_is_read_at_every_access():
    environ = {"TF_CONFIG": tf_config(SPEC, Task("worker", 1), rpc_layer="grpc")}
    resolver = TFConfigClusterResolver(environ=environ)
    assert (resolver.task_type, resolver.task_id, resolver.master()) == ("worker", 1, "grpc://b:1")
    assert (resolver.cluster_spec(), resolver.rpc_layer, resolver.environment) == (SPEC, "grpc", None)
    environ["TF_CONFIG"] = tf_config(SPEC, Task("ps", 0))
    assert (resolver.task_type, resolver.task_id, resolver.master()) == ("ps", 0, "c:1")


def test_tf_config_of_this_process(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", tf_config(SPEC, Task("worker", 0)))
    assert TFConfigClusterResolver().master() == "a:1"


def test_tf_config_that_is_not_set():
    resolver = TFConfigClusterResolver(environ={})
    assert not resolver.cluster_spec()
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer, resolver.master()) == (None, None, None, "")


def test_tf_config_against_arguments():
    """What the program says goes before what the environment says, from the constructor or later."""
    environ = {"TF_CONFIG": tf_config(SPEC, Task("worker", 1), rpc_layer="grpc")}
    resolver = TFConfigClusterResolver("ps", 0, "http", "lab", environ=environ)
    assert (resolver.task_type, resolver.task_id, resolver.environment) == ("ps", 0, "lab")
    assert (resolver.master(), resolver.master("worker", 1, "ftp")) == ("http://c:1", "ftp://b:1")
    resolver.task_type, resolver.task_id, resolver.rpc_layer = "worker", 0, "tcp"
    assert resolver.master() == "tcp://a:1"
    with pytest.raises(ClusterError, match="worker:0"):
        TFConfigClusterResolver("worker", np.int64(0), environ={}).cluster_spec()


@pytest.mark.parametrize(
    ("more", "cluster", "master"),
    [
        ({"session_master": "m:1"}, {"worker": ["a:1", "b:1"]}, "m:1"),
        ({"session_master": "m:1", "rpc_layer": "grpc"}, {"worker": ["a:1"]}, "m:1"),
        ({}, {"worker": ["a:1"]}, ""),
        ({}, {"worker": ["a:1"], "ps": ["b:1"]}, "a:1"),
        # One known address of several is the master still. An evaluator alone has no address.
        ({"task": {"type": "worker", "index": 1}}, {"worker": {"1": "b:1"}}, "b:1"),
        ({"task": {"type": "evaluator", "index": 0}}, {}, ""),
    ],
)
def test_master_of_tf_config(more, cluster, master):
    """`session_master` goes first, as it is, and one task alone needs none."""
    config = {"cluster": cluster, "task": {"type": "worker", "index": 0}, **more}
    assert TFConfigClusterResolver(environ={"TF_CONFIG": json.dumps(config)}).master() == master


@pytest.mark.parametrize(("evaluators", "master"), [([], ""), (["e:1"], "e:1")])
def test_evaluator_of_a_cluster(evaluators, master):
    """It knows its task and the addresses of the others; its own may be missing."""
    cluster = {"worker": ["a:1", "b:1"], **({"evaluator": evaluators} if evaluators else {})}
    text = json.dumps({"cluster": cluster, "task": {"type": "evaluator", "index": 0}})
    resolver = TFConfigClusterResolver(environ={"TF_CONFIG": text})
    assert (resolver.task_type, resolver.task_id, resolver.master()) == ("evaluator", 0, master)
    assert resolver.master("worker", 1) == "b:1"
    assert resolver.cluster_spec().as_dict() == cluster


@pytest.mark.parametrize("ask", ["cluster_spec", "master"])
def test_malformed_tf_config(ask):
    with pytest.raises(ClusterError, match="TF_CONFIG: is not JSON"):
        getattr(TFConfigClusterResolver(environ={"TF_CONFIG": "{"}), ask)()


def test_master_of_a_task_that_is_not_there():
    environ = {"TF_CONFIG": tf_config(SPEC, Task("worker", 0))}
    with pytest.raises(ClusterError, match="task 7 of job 'worker': 'worker' has the tasks 0, 1"):
        TFConfigClusterResolver(environ=environ).master("worker", 7)
