"""Slurm's lists of hosts and counts, and the resolver on recorded job steps."""

import itertools
import os
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx._src.cluster.resolvers.slurm import SlurmClusterResolver, expand_counts, expand_hosts, port_of_step
from phalanx._src.cluster.spec import ClusterSpec
from phalanx.errors import ClusterSourceError

# What `srun --nodes=2 --ntasks=7 env` of Slurm 23.11 sets for its fifth task; names and formats as in "OUTPUT ENVIRONMENT
# VARIABLES" of srun(1), hosts as on a cluster whose nodes have 4 GPUs.
STEP = {
    "SLURM_JOB_ID": "22902023",
    "SLURM_JOB_NODELIST": "gpu[009-010]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_LAUNCH_NODE_IPADDR": "10.19.0.68",
    "SLURM_LOCALID": "0",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "1",
    "SLURM_NODELIST": "gpu[009-010]",
    "SLURM_NPROCS": "7",
    "SLURM_NTASKS": "7",
    "SLURM_PROCID": "4",
    "SLURM_STEPID": "0",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_LAUNCHER_PORT": "37564",
    "SLURM_STEP_NODELIST": "gpu[009-010]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
    "SLURM_TASKS_PER_NODE": "4,3",
    "SLURM_TASK_PID": "25501",
}
# The same of `srun --pty bash` in an interactive allocation, which is a step of one task.
INTERACTIVE = {
    "SLURM_JOB_NODELIST": "sh04-10n05",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "0",
    "SLURM_STEPID": "4294967290",
    "SLURM_STEP_NODELIST": "sh04-10n05",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
}
TASKS = [f"gpu009:{8888 + i}" for i in range(4)] + [f"gpu010:{8888 + i}" for i in range(3)]


def resolver(changes=None, **options):
    environ = {k: v for k, v in {**STEP, **(changes or {})}.items() if v is not None}
    return SlurmClusterResolver(**options, environ=environ)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node1", ["node1"]),
        ("n[1-2,05],m3-[9-11]", ["n1", "n2", "n05", "m3-9", "m3-10", "m3-11"]),
        ("n[008-011]", ["n008", "n009", "n010", "n011"]),
        ("rack[0-1]n[2-3]-ib", ["rack0n2-ib", "rack0n3-ib", "rack1n2-ib", "rack1n3-ib"]),
        ("[3,1]", ["3", "1"]),
        ("a.b.example.com,c", ["a.b.example.com", "c"]),
    ],
)
def test_hosts_expand_in_rank_order(text, hosts):
    assert expand_hosts(text) == hosts


NAMES = st.from_regex(r"[a-z][a-z.-]{0,4}", fullmatch=True)


@st.composite
def host_lists(draw):
    """Returns a host list, and its hosts written out by hand."""
    texts, hosts = [], []
    for _ in range(draw(st.integers(1, 3))):
        pieces = []
        for _ in range(draw(st.integers(0, 2))):
            width = draw(st.sampled_from([1, 2, 4]))
            numbers = draw(st.lists(st.tuples(st.integers(0, 120), st.integers(0, 12)), min_size=1, max_size=3))
            text = ",".join(f"{n:0{width}d}-{n + k:0{width}d}" if k else f"{n:0{width}d}" for n, k in numbers)
            pieces.append(
                (draw(NAMES), f"[{text}]", [str(i).zfill(width) for n, k in numbers for i in range(n, n + k + 1)])
            )
        end = draw(NAMES)
        texts.append("".join(name + text for name, text, _ in pieces) + end)
        choices = [[name + value for value in values] for name, _, values in pieces]
        hosts += ["".join(parts) + end for parts in itertools.product(*choices)]
    return ",".join(texts), hosts


@given(host_lists())
def test_hosts_equal_an_independent_expansion(case):
    """Whatever the ranges, widths and number of brackets."""
    text, hosts = case
    assert expand_hosts(text) == hosts


@given(st.lists(st.tuples(st.integers(1, 99), st.integers(1, 5)), min_size=1, max_size=5))
def test_counts_equal_an_independent_expansion(runs):
    """A run is written with its length, or without where it has length 1."""
    text = ",".join(f"{n}(x{k})" if k > 1 else str(n) for n, k in runs)
    assert expand_counts(text) == [n for n, k in runs for _ in range(k)]


@pytest.mark.parametrize("text", ["", "a,,b", "n[1-2", "n1-2]", "n[1-2]]", "a b", "n[[1]]"])
def test_bad_hosts_show_the_wrong_part(text):
    with pytest.raises(
        ClusterSourceError,
        match=f"host list {re.escape(repr(text))}: .* is not a host name, or has unbalanced brackets",
    ):
        expand_hosts(text)


@pytest.mark.parametrize("part", ["3-1", "x", "1-", "-2", ""])
def test_bad_ranges_are_refused(part):
    with pytest.raises(ClusterSourceError, match=f"'{part}' is neither a number nor a range of ascending numbers"):
        expand_hosts(f"n[{part}]")


@pytest.mark.parametrize("text", ["n[1-999999999999]", "a[1-1000]b[1-1000]", f"n[{'9' * 5000}]"])
def test_hosts_are_counted_before_they_are_named(text):
    """A short list may stand for more hosts than there is memory for."""
    with pytest.raises(ClusterSourceError, match="it stands for more than 65536 hosts|is neither a number"):
        expand_hosts(text)


@pytest.mark.parametrize("text", ["1(x999999)", "999999", "1(x65536),1", "9" * 5000])
def test_tasks_are_counted(text):
    with pytest.raises(ClusterSourceError, match="they are more than 65536|is not a number of tasks"):
        expand_counts(text)


@pytest.mark.parametrize("text", ["", "4(2)", "4x2", "a", "4,"])
def test_bad_counts_show_the_list(text):
    with pytest.raises(
        ClusterSourceError, match=f"tasks per node {re.escape(repr(text))}: .* is not a number of tasks"
    ):
        expand_counts(text)


def test_recorded_step_fills_nodes_in_order():
    """Ranks fill the nodes in the order of the list, and the tasks of a node have ports of their own."""
    slurm = resolver()
    assert slurm.cluster_spec() == ClusterSpec({"worker": TASKS})
    assert (slurm.task_type, slurm.task_id, slurm.get_task_info()) == ("worker", 4, ("worker", 4))
    assert slurm.master() == "grpc://gpu010:8888"
    assert slurm.num_accelerators() == {}


def test_interactive_step_is_one_worker():
    slurm = SlurmClusterResolver(port_base=5000, environ=INTERACTIVE)
    assert slurm.cluster_spec() == ClusterSpec({"worker": ["sh04-10n05:5000"]})


def test_cyclic_distribution_deals_ranks_round_nodes():
    """`srun --distribution=cyclic` deals the ranks round the nodes."""
    slurm = resolver({"SLURM_DISTRIBUTION": "cyclic", "SLURM_NODEID": "0", "SLURM_LOCALID": "2"})
    order = ["009:8888", "010:8888", "009:8889", "010:8889", "009:8890", "010:8890", "009:8891"]
    assert slurm.cluster_spec() == ClusterSpec({"worker": [f"gpu{a}" for a in order]})


def test_jobs_share_the_ranks_by_name():
    """Rank 4 of chief, ps, worker is the third worker of four."""
    slurm = resolver(jobs={"worker": 4, "chief": 1, "ps": 2}, tasks_per_node={"gpu009": 4, "gpu010": 3})
    assert slurm.cluster_spec() == ClusterSpec({"chief": TASKS[:1], "ps": TASKS[1:3], "worker": TASKS[3:]})
    assert slurm.get_task_info() == ("worker", 1)


@pytest.mark.parametrize(
    ("changes", "options", "count"),
    [
        ({"SLURM_GPUS_ON_NODE": "4"}, {}, 1),
        ({"SLURM_GPUS_ON_NODE": "8"}, {}, 2),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, {}, 1),
        ({"SLURM_GPUS_ON_NODE": "2"}, {"gpus_per_node": 8}, 2),
        ({}, {"gpus_per_task": 3}, 3),
    ],
)
def test_gpus_of_a_task(changes, options, count):
    assert resolver(changes, **options).num_accelerators() == {"GPU": count}


@pytest.mark.parametrize(
    ("visible", "own"), [("0,1,2,3,4,5,6,7", "2,3"), ("GPU-a,GPU-b", "GPU-a,GPU-b"), (None, "2,3")]
)
def test_gpus_of_a_task_are_set(monkeypatch, visible, own):
    """The second task of a node takes its second share; one that Slurm has bound sees its own already."""
    changes = {"SLURM_PROCID": "1", "SLURM_NODEID": "0", "SLURM_LOCALID": "1", "CUDA_VISIBLE_DEVICES": visible}
    for name, value in {**STEP, **changes}.items():
        monkeypatch.setenv(name, value or "")
        if value is None:
            monkeypatch.delenv(name)
    slurm = SlurmClusterResolver(gpus_per_node=8)
    slurm.task_type, slurm.num_accelerators()
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == visible
    slurm.cluster_spec()
    slurm.cluster_spec()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == own


def test_gpus_are_left_alone(monkeypatch):
    """If they are not to be set, if nothing tells how many there are, and those of this process for another environment."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    for changes, options in (({"SLURM_GPUS_ON_NODE": "8"}, {"auto_set_gpu": False}), ({}, {})):
        environ = {**STEP, **changes}
        SlurmClusterResolver(**options, environ=environ).cluster_spec()
        assert "CUDA_VISIBLE_DEVICES" not in environ
    resolver({"SLURM_GPUS_ON_NODE": "8"}).cluster_spec()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "5"


@pytest.mark.parametrize(
    "name", ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE"]
)
def test_missing_variable_is_named(name):
    with pytest.raises(
        ClusterSourceError, match=rf"{name}: is not set; srun sets it for each task of a job step\.\nHINT: srun"
    ):
        resolver({name: None}).cluster_spec()


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"SLURM_PROCID": "x"}, {}, "SLURM_PROCID='x': must be a number"),
        ({"SLURM_PROCID": "9" * 5000}, {}, "SLURM_PROCID='9+: must be a number"),
        ({"SLURM_PROCID": "7", "SLURM_LOCALID": "3"}, {}, "SLURM_PROCID=7: the job step has 7 tasks"),
        ({"SLURM_STEP_NUM_TASKS": "8"}, {}, "7 were assigned"),
        (
            {},
            {"jobs": {"worker": 6}},
            r"jobs={'worker': 6}: 6 tasks were requested, but 7 were assigned\.\nHINT: srun --ntasks=6",
        ),
        ({"SLURM_STEP_TASKS_PER_NODE": "4"}, {}, r"tasks per node \[4\]: this is 1 nodes, but .*gpu\[009-010\] has 2"),
        (
            {},
            {"tasks_per_node": {"gpu009": 4}},
            "tasks_per_node={'gpu009': 4}: host 'gpu010' of the job step is missing",
        ),
        ({}, {"tasks_per_node": 2}, "SLURM_PROCID=4: the job step has 4 tasks"),
        ({}, {"tasks_per_node": np.int64(2)}, "SLURM_PROCID=4: the job step has 4 tasks"),
        ({"SLURM_NODEID": "0"}, {}, "SLURM_NODEID=0: rank 4 would have 1 if the tasks were placed as"),
        ({"SLURM_LOCALID": "1"}, {}, "SLURM_LOCALID=1: rank 4 would have 0 if"),
        (
            {"SLURM_DISTRIBUTION": "plane=2"},
            {},
            "SLURM_DISTRIBUTION='plane=2': it does not determine the node of a rank",
        ),
    ],
)
def test_contradictions_show_both_sides(changes, options, message):
    with pytest.raises(ClusterSourceError, match=message):
        resolver(changes, **options).cluster_spec()


def test_too_few_gpus():
    with pytest.raises(ClusterSourceError, match="gpus_per_task=2: 4 tasks on one node need 8 GPUs, but it has 4"):
        resolver({"SLURM_GPUS_ON_NODE": "4"}, gpus_per_task=2).num_accelerators()


def test_ports_of_jobs_on_one_node():
    """Jobs and steps that may run at the same time have ports of their own; the parts of a heterogeneous job have the same."""
    steps = [{"SLURM_JOB_ID": f"{job}", "SLURM_STEP_ID": f"{step}"} for job in range(900, 1100) for step in range(8)]
    assert len({port_of_step(step) for step in steps}) == len(steps)
    assert all(60999 < port_of_step(step) < 65536 - 256 for step in [*steps, STEP, {"SLURM_JOB_ID": "3839"}])
    parts = [{"SLURM_JOB_ID": f"{job}", "SLURM_HET_JOB_ID": "7", "SLURM_STEP_ID": f"{job}"} for job in (7, 8)]
    assert port_of_step(parts[0]) == port_of_step(parts[1])
    # tf.distribute's port, where Slurm does not say more, and in a resolver that the program makes.
    assert port_of_step(INTERACTIVE) == 8888
    assert resolver().cluster_spec().job_tasks("worker") == TASKS
