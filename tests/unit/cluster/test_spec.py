"""ClusterSpec, the roles in it, and TF_CONFIG in and out."""

import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx._src.cluster.spec import (
    ClusterSpec,
    Task,
    addresses_of_workers,
    check,
    id_in_cluster,
    is_chief,
    leader,
    parse_tf_config,
    tf_config,
)
from phalanx.errors import ClusterError, ClusterTypeError

DENSE = {"worker": ["w0:1", "w1:1"], "ps": ["p0:1"]}
SPARSE = {"worker": {1: "w1:1", 4: "w4:1"}, "ps": ["p0:1"]}


def test_lists_stay_lists_and_gaps_stay_dicts():
    """What goes in comes out; a dict without gaps is a list."""
    assert ClusterSpec(DENSE).as_dict() == DENSE
    assert ClusterSpec(SPARSE).as_dict() == SPARSE
    assert ClusterSpec({"worker": {1: "b:1", 0: "a:1"}}).as_dict() == {"worker": ["a:1", "b:1"]}
    assert ClusterSpec({"worker": {"2": "c:1"}}).as_dict() == {"worker": {2: "c:1"}}
    assert ClusterSpec(ClusterSpec(SPARSE)) == ClusterSpec(SPARSE)


def test_questions_about_jobs():
    """Jobs are sorted, indices ascend, and a gap is None."""
    spec = ClusterSpec(SPARSE)
    assert spec.jobs == ["ps", "worker"]
    assert (spec.num_tasks("worker"), spec.task_indices("worker")) == (2, [1, 4])
    assert spec.task_address("worker", 4) == "w4:1"
    assert spec.job_tasks("worker") == [None, "w1:1", None, None, "w4:1"]
    assert ClusterSpec({"worker": ()}).job_tasks("worker") == []


def test_equality_truth_and_text():
    """Contents decide, whatever the order."""
    spec = ClusterSpec(DENSE)
    assert spec == ClusterSpec(dict(reversed(DENSE.items())))
    assert hash(spec) == hash(ClusterSpec(dict(reversed(DENSE.items()))))
    assert spec != ClusterSpec(SPARSE)
    assert spec != DENSE
    assert spec
    assert not ClusterSpec({})
    assert repr(spec) == "ClusterSpec({'ps': ['p0:1'], 'worker': ['w0:1', 'w1:1']})"
    assert pickle.loads(pickle.dumps(spec)) == spec


def test_the_given_dict_may_change():
    """A spec keeps its own copy, and gives away copies."""
    cluster = {"worker": ["a:1"]}
    spec = ClusterSpec(cluster)
    cluster["worker"].append("b:1")
    spec.as_dict()["worker"].append("b:1")
    assert spec.num_tasks("worker") == 1


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        (5, r"cluster=5: must be a dict of jobs or a ClusterSpec\.\nHINT: \"cluster\": "),
        ({1: ["a:1"]}, "job 1: the name of a job must be a string"),
        ({"worker": "a:1"}, "\"worker\": 'a:1': must be a list of addresses, or a dict from index to address"),
        ({"worker": 3}, '"worker": 3: must be a list of addresses, or a dict from index to address'),
        ({"worker": ["a:1", 7]}, "address 7 of worker:1: must be a string"),
    ],
)
def test_wrong_types_are_named(cluster, message):
    """They are TypeErrors and say which part it was."""
    with pytest.raises(ClusterTypeError, match=message):
        ClusterSpec(cluster)


@pytest.mark.parametrize("index", [-1, "x", True, 1.5, None])
def test_wrong_index_is_refused(index):
    """An index is a number, 0 or more."""
    with pytest.raises(ClusterError, match=r"of job 'worker': an index must be an integer, 0 or more\."):
        ClusterSpec({"worker": {index: "a:1"}})


@pytest.mark.parametrize("ask", ["num_tasks", "task_indices", "job_tasks"])
def test_unknown_job_lists_the_jobs(ask):
    with pytest.raises(ClusterError, match=r"job 'chief': the cluster has the jobs ps, worker\."):
        getattr(ClusterSpec(DENSE), ask)("chief")
    with pytest.raises(ClusterError, match=r"the cluster has the jobs \(none\)\."):
        getattr(ClusterSpec({}), ask)("chief")


def test_unknown_task_lists_the_indices():
    with pytest.raises(ClusterError, match=r"task 7 of job 'worker': 'worker' has the tasks 1, 4\."):
        ClusterSpec(SPARSE).task_address("worker", 7)


CHIEF = ClusterSpec({"chief": ["c:1"], "worker": ["w0:1", "w1:1"], "ps": ["p:1"], "evaluator": ["e:1"]})
PLAIN = ClusterSpec(DENSE)


@pytest.mark.parametrize(
    ("spec", "task", "chief", "number"),
    [
        (CHIEF, Task("chief", 0), True, 0),
        (CHIEF, Task("worker", 0), False, 1),
        (CHIEF, Task("worker", 1), False, 2),
        (CHIEF, Task("evaluator", 0), True, 0),
        (PLAIN, Task("worker", 0), True, 0),
        (PLAIN, Task("worker", 1), False, 1),
        (PLAIN, Task("evaluator", 0), True, 0),
        (ClusterSpec(SPARSE), Task("worker", 4), False, 1),
    ],
)
def test_roles_put_the_chief_first(spec, task, chief, number):
    """The chief is first, then the workers; an evaluator is alone, listed or not."""
    assert (is_chief(spec, task), id_in_cluster(spec, task)) == (chief, number)


def test_leader_and_addresses():
    """The leader has id 0, and addresses are in the order of ids."""
    assert (leader(CHIEF), leader(PLAIN)) == (Task("chief", 0), Task("worker", 0))
    assert addresses_of_workers(CHIEF) == ["c:1", "w0:1", "w1:1"]
    assert addresses_of_workers(PLAIN) == ["w0:1", "w1:1"]
    assert not is_chief(CHIEF, Task("ps", 0))


def test_parameter_servers_have_neither_number_nor_leader():
    """They do not train."""
    with pytest.raises(ClusterError, match="id of task ps:0: a parameter server does not train"):
        id_in_cluster(CHIEF, Task("ps", 0))
    with pytest.raises(ClusterError, match="there is neither a chief nor a worker"):
        leader(ClusterSpec({"ps": ["p:1"]}))


@pytest.mark.parametrize(
    ("cluster", "task", "message"),
    [
        ({"trainer": ["a:1"]}, None, "job 'trainer': the roles are chief, worker, ps, evaluator"),
        ({"master": ["a:1"]}, None, 'HINT: "chief": '),
        (DENSE, Task("trainer", 0), "job 'trainer': the roles are"),
        ({"chief": ["a:1", "b:1"]}, None, "2 tasks of job 'chief': a cluster has at most one"),
        (DENSE, Task("evaluator", 1), "task evaluator:1: a cluster has at most one evaluator"),
        ({"evaluator": ["a:1"]}, Task("evaluator", 1), "task evaluator:1: the indices of 'evaluator' are 0"),
        ({"evaluator": ["a:1", "b:1"]}, None, "2 tasks of job 'evaluator': a cluster has at most one"),
        (DENSE, Task("chief", 0), "task chief:0: the cluster has the jobs ps, worker"),
        ({}, Task("worker", 0), "task worker:0: the cluster is empty"),
        (DENSE, Task("worker", 9), "task worker:9: the indices of 'worker' are 0, 1"),
        ({"worker": []}, Task("worker", 0), "task worker:0: the job 'worker' has no tasks.\nHINT: \"worker\": \\["),
    ],
)
def test_check_refuses_forbidden_roles(cluster, task, message):
    with pytest.raises(ClusterError, match=message):
        check(ClusterSpec(cluster), task)


def test_tf_config_is_what_tensorflow_documents():
    """The text of the guide, for the second of its workers."""
    text = tf_config(ClusterSpec(DENSE), Task("worker", 1), rpc_layer="grpc")
    assert json.loads(text) == {"cluster": DENSE, "task": {"type": "worker", "index": 1}, "rpc_layer": "grpc"}


def _addresses(count):
    return [f"host{i}:{1000 + i}" for i in range(count)]


@given(
    counts=st.fixed_dictionaries(
        {"worker": st.integers(1, 5)}, optional={"chief": st.just(1), "ps": st.integers(1, 3), "evaluator": st.just(1)}
    ),
    gap=st.integers(0, 3),
    data=st.data(),
)
def test_tf_config_survives_a_round_trip(counts, gap, data):
    """A text that was written is read as what it was written from, gaps included."""
    addresses = iter(_addresses(sum(counts.values())))
    cluster = {job: [next(addresses) for _ in range(count)] for job, count in counts.items()}
    cluster["worker"] = {i + gap: a for i, a in enumerate(cluster["worker"])}
    spec = ClusterSpec(cluster)
    job = data.draw(st.sampled_from(spec.jobs))
    task = Task(job, data.draw(st.sampled_from(spec.task_indices(job))))
    layer = data.draw(st.sampled_from([None, "grpc"]))
    assert parse_tf_config(tf_config(spec, task, rpc_layer=layer)) == (spec, task, layer, None)


CLUSTER = '"cluster": {"worker": ["a:1", "b:1"]}'
TASK = '"task": {"type": "worker", "index": 0}'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"TF_CONFIG: is set but empty. It must be JSON\.\nHINT: TF_CONFIG='{\"cluster\": "),
        (" \n", "is set but empty"),
        ("{'cluster': {}}", "TF_CONFIG: is not JSON: .* at character 1, near \"{'cluster': {}}\""),
        (f"{{{CLUSTER}, {TASK}", "is not JSON"),
        ("[" * 100_000, "cannot be read: maximum recursion"),
        ('{"a": ' + "9" * 5000 + "}", "cannot be read: Exceeds the limit"),
        (f'{{{CLUSTER}, "task": {{"type": "worker", "index": "{"9" * 5000}"}}}}', "an index must be an integer"),
        ('{"cluster": {"worker": ["a:' + "9" * 5000 + '"]}, ' + TASK + "}", "its port '9999.{50,80} is not a number"),
        ("[1]", r"TF_CONFIG=\[1\]: must be a JSON object, not a list"),
        ("3", "must be a JSON object, not a number"),
        ("null", "must be a JSON object, not null"),
        ('{"cluster": ["a:1"]}', r"\"cluster\": \[\"a:1\"\]: must be a JSON object, not a list"),
        ('{"cluster": true}', "must be a JSON object, not true or false"),
        ('{"cluster": {"worker": "a:1"}}', "must be a list of addresses, or a dict from index to address"),
        ('{"cluster": {"worker": ["a:1", 2]}}', "address 2 of worker:1: must be a string"),
        ('{"cluster": {"worker": {"x": "a:1"}}}', "index 'x' of job 'worker': an index must be an integer"),
        ('{"cluster": {"worker": ["a"]}}', "address 'a' of worker:0: must be host:port"),
        ('{"cluster": {"worker": ["grpc://a:1"]}}', "address 'grpc://a:1' of worker:0: must be host:port"),
        ('{"cluster": {"worker": ["::1"]}}', r"must be host:port, or \[host\]:port for an IPv6 address"),
        ('{"cluster": {"worker": [":1"]}}', "address ':1' of worker:0: must be host:port"),
        ('{"cluster": {"worker": ["host1:port"]}}', "its port 'port' is not a number from 1 to 65535"),
        ('{"cluster": {"worker": ["a:65536"]}}', "its port '65536' is not a number from 1 to 65535"),
        ('{"cluster": {"worker": ["a..b:1"]}}', "address 'a..b:1' of worker:0: its host is not a name"),
        (json.dumps({"cluster": {"worker": ["a" * 300 + ":1"]}}), "of worker:0: its host is not a name"),
        (r'{"cluster": {"worker": ["\u202eh:1"]}}', "of worker:0: its host is not a name"),
        ('{"cluster": {"worker": ["a:0"]}}', "its port '0' is not a number from 1 to 65535"),
        (
            '{"cluster": {"worker": ["a:1", "a:1"]}}',
            "address 'a:1' of worker:1: worker:0 has it too, but each process needs its own",
        ),
        ('{"cluster": {"worker": ["a:1"], "ps": ["a:1"]}}', "address 'a:1' of worker:0: ps:0 has it too"),
        ('{"cluster": {"worker": ["a:1"], "worker": ["b:1"]}}', "TF_CONFIG with 'worker' twice"),
        ('{"cluster": {"worker": {"1": "a:1", "01": "b:1"}}}', "index 1 of job 'worker' twice: the second address"),
        (f'{{{CLUSTER}, "task": "worker"}}', '"task": "worker": must be a JSON object, not a string'),
        (f"{{{CLUSTER}}}", "it describes the cluster, but not the task of this process"),
        (f'{{{CLUSTER}, "task": {{"type": "worker"}}}}', "the task has no 'index'"),
        (f'{{{CLUSTER}, "task": {{"index": 0}}}}', "the task has no 'type'"),
        (f'{{{CLUSTER}, "task": {{"type": 3, "index": 0}}}}', '"type": 3: must be a string, not a number'),
        (f'{{{CLUSTER}, "task": {{"type": "worker", "index": "one"}}}}', '"index": "one": an index must be an integer'),
        (
            f'{{{CLUSTER}, "task": {{"type": "worker", "index": -1}}}}',
            '"index": -1: an index must be an integer, 0 or more',
        ),
        (f'{{{CLUSTER}, "task": {{"type": "worker", "index": 2}}}}', "task worker:2: the indices of 'worker' are 0, 1"),
        (f'{{{CLUSTER}, "task": {{"type": "chief", "index": 0}}}}', "task chief:0: the cluster has the jobs worker"),
        (f"{{{TASK}}}", "task worker:0: the cluster is empty"),
        ('{"cluster": {"boss": ["a:1"]}, "task": {"type": "boss", "index": 0}}', "job 'boss': the roles are"),
        ('{"cluster": {"chief": ["a:1", "b:1"]}, "task": {"type": "chief", "index": 0}}', "2 tasks of job 'chief'"),
        (f'{{{CLUSTER}, {TASK}, "rpc_layer": 3}}', '"rpc_layer": 3: must be a string, not a number'),
        (f'{{{CLUSTER}, {TASK}, "session_master": {{}}}}', '"session_master": {}: must be a string, not an object'),
    ],
)
def test_malformed_tf_config(text, message):
    with pytest.raises(ClusterError, match=message):
        parse_tf_config(text)


@pytest.mark.parametrize("text", ["{}", '{"cluster": {}}', '{"cluster": null, "task": {}}', '{"environment": "cloud"}'])
def test_empty_tf_config_has_no_cluster(text):
    assert parse_tf_config(text) == (ClusterSpec({}), None, None, None)


def test_what_else_a_tf_config_says():
    """An index may be text, further keys are skipped, an evaluator needs no address, IPv6 has brackets."""
    text = (
        '{"cluster": {"worker": ["[::1]:12345"]}, "task": {"type": "evaluator", "index": "0"}, "session_master": "m:1"}'
    )
    config = parse_tf_config(text)
    assert config.spec.task_address("worker", 0) == "[::1]:12345"
    assert (config.task, config.session_master) == (Task("evaluator", 0), "m:1")


def test_the_caller_may_replace_the_task():
    """In whole or in part, also where the text has none."""
    assert parse_tf_config(f"{{{CLUSTER}}}", task_type="worker", task_id=1).task == Task("worker", 1)
    assert parse_tf_config(f"{{{CLUSTER}, {TASK}}}", task_id=1).task == Task("worker", 1)


@pytest.mark.parametrize(
    ("spec", "task", "message"),
    [
        ({"worker": ["a"]}, Task("worker", 0), "must be host:port"),
        (DENSE, Task("worker", 2), "the indices of 'worker' are 0, 1"),
        ({"boss": ["a:1"]}, Task("boss", 0), "the roles are"),
    ],
)
def test_tf_config_writes_nothing_that_it_could_not_read(spec, task, message):
    """It fails in the launcher, before any process starts."""
    with pytest.raises(ClusterError, match=message):
        tf_config(ClusterSpec(spec), task)
