"""From a request to processes: arithmetic and variables, without starting anything."""

import json
import os
import socket
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx._src.launch.plan import Machine, Request, free_ports, plan, thread_pool
from phalanx.errors import InvalidArgumentError

PORTS = [4001, 4002, 4003, 4004]


def environments(environment=None, *, workers=2, devices=None, cores=8, gpus=(), restart=0):
    request = Request("train.py", workers=workers, devices_per_worker=devices)
    return [
        process.environment
        for process in plan(request, Machine(cores, gpus), environment or {}, PORTS[:workers], restart=restart)
    ]


def test_ranks_and_tasks():
    processes = plan(Request("train.py", workers=3), Machine(8), {}, PORTS[:3])
    addresses = ["127.0.0.1:4001", "127.0.0.1:4002", "127.0.0.1:4003"]
    for rank, process in enumerate(processes):
        assert process.name == f"worker {rank}"
        assert json.loads(process.environment["TF_CONFIG"]) == {
            "cluster": {"worker": addresses},
            "task": {"type": "worker", "index": rank},
        }


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (Request("train.py"), ["train.py"]),
        (Request("train.py", ("--workers", "9", "--", "-m")), ["train.py", "--workers", "9", "--", "-m"]),
        (Request("package.train", ("a b",), is_module=True), ["-m", "package.train", "a b"]),
    ],
)
def test_command_keeps_arguments_of_script(request_, words):
    """The script gets its own arguments as they are, in this Python."""
    (process,) = plan(request_, Machine(8), {}, PORTS[:1])
    assert list(process.argv) == [sys.executable, *words]


@pytest.mark.parametrize(
    ("devices", "cores", "workers", "threads"),
    [(1, 8, 1, 8), (1, 8, 2, 4), (1, 8, 3, 2), (1, 2, 4, 1), (2, 8, 2, 4), (2, 1, 4, 4), (3, 64, 1, 6), (8, 2, 1, 16)],
)
def test_thread_pool_is_twice_the_devices(devices, cores, workers, threads):
    """Twice the devices where there are several, else a share of the cores, one at least."""
    assert thread_pool(devices, cores, workers) == threads
    if workers <= len(PORTS):
        found = environments(workers=workers, devices=devices, cores=cores)
        assert [(e["PHALANX_CPU_DEVICES"], e["NPROC"]) for e in found] == [(str(devices), str(threads))] * workers


def test_environment_of_user_wins():
    """What the user has set stays, and everything else is handed on."""
    own = {"NPROC": "3", "PYTHONUNBUFFERED": "", "PYTHONFAULTHANDLER": "0", "PHALANX_CPU_DEVICES": "2", "HOME": "/x"}
    assert environments(own)[1].items() >= own.items()
    assert environments({"PHALANX_CPU_DEVICES": "3"})[0]["NPROC"] == "6"
    assert environments({"PHALANX_CPU_DEVICES": "3"}, devices=3)[0]["NPROC"] == "6"
    # But not the cluster to which the launcher itself belongs.
    (environment,) = environments({"TF_CONFIG": "{}", "PHALANX_RESTART": "7"}, workers=1, restart=2)
    assert "127.0.0.1:4001" in environment["TF_CONFIG"]
    assert environment["PHALANX_RESTART"] == "9"  # A scheduler has started the launcher again 7 times.


@pytest.mark.parametrize(
    ("gpus", "workers", "devices", "shares"),
    [
        ("0123", 2, None, ["0,1", "2,3"]),
        ("0123", 2, 1, ["0", "1"]),
        ("75", 2, 1, ["7", "5"]),
        ("0123", 3, None, ["0", "1", "2"]),
        ("0123", 1, None, ["0,1,2,3"]),
    ],
)
def test_shares_of_gpus(gpus, workers, devices, shares):
    """Each worker sees its own GPUs, and no CPU devices are made."""
    found = environments({"CUDA_VISIBLE_DEVICES": ",".join(gpus)}, workers=workers, devices=devices, gpus=tuple(gpus))
    assert [e["CUDA_VISIBLE_DEVICES"] for e in found] == shares
    assert not {"NPROC", "PHALANX_CPU_DEVICES"} & set(found[0])


def evaluator_of(environment=None, **options):
    """The environment of the planned evaluator, and those of two workers."""
    machine = Machine(options.pop("cores", 9), options.pop("gpus", ()))
    request = Request("train.py", ("--lr", "1"), workers=2, evaluator=True, **options)
    *workers, evaluator = plan(request, machine, environment or {}, PORTS[:2], restart=3)
    assert (evaluator.name, evaluator.argv) == ("evaluator 0", workers[0].argv)
    return evaluator.environment, [worker.environment for worker in workers]


def test_evaluator_sees_the_workers_and_is_none():
    """The evaluator runs the same command; its task is outside the cluster of the workers, which do not know of it."""
    evaluator, workers = evaluator_of()
    cluster = {"worker": ["127.0.0.1:4001", "127.0.0.1:4002"]}
    assert json.loads(evaluator["TF_CONFIG"]) == {"cluster": cluster, "task": {"type": "evaluator", "index": 0}}
    assert [json.loads(worker["TF_CONFIG"])["cluster"] for worker in workers] == [cluster] * 2
    assert evaluator["PYTHONUNBUFFERED"] == "1"
    assert evaluator["PHALANX_RESTART"] == "3"


def test_evaluator_has_one_device_and_its_share_of_the_cores():
    """Three processes share nine cores; with two devices per worker, the evaluator still has one."""
    evaluator, workers = evaluator_of()
    assert [(e["PHALANX_CPU_DEVICES"], e["NPROC"]) for e in (evaluator, *workers)] == [("1", "3")] * 3
    for options in ({"devices_per_worker": 2}, {"environment": {"PHALANX_CPU_DEVICES": "2"}}):
        evaluator, workers = evaluator_of(**options)
        assert (evaluator["PHALANX_CPU_DEVICES"], evaluator["NPROC"]) == ("1", "3")
        assert [worker["PHALANX_CPU_DEVICES"] for worker in workers] == ["2", "2"]
    assert evaluator_of({"NPROC": "7", "HOME": "/x"})[0].items() >= {"NPROC": "7", "HOME": "/x"}.items()


@pytest.mark.parametrize(
    ("gpus", "each", "own"), [("01", None, None), ("0123", 2, None), ("012", None, "2"), ("0123", 1, "2")]
)
def test_evaluator_takes_a_gpu_that_is_left(gpus, each, own):
    """One GPU that no worker has, or none at all."""
    evaluator, workers = evaluator_of({"JAX_PLATFORMS": "cuda"}, gpus=tuple(gpus), devices_per_worker=each)
    found = (evaluator["CUDA_VISIBLE_DEVICES"], evaluator["JAX_PLATFORMS"], evaluator.get("PHALANX_CPU_DEVICES"))
    assert found == ((own, "cuda", None) if own else ("", "cpu", "1"))
    assert all(worker["JAX_PLATFORMS"] == "cuda" and worker["CUDA_VISIBLE_DEVICES"] for worker in workers)


@pytest.mark.parametrize(
    ("environment", "gpus"),
    [
        ({"CUDA_VISIBLE_DEVICES": "2, 3"}, ("2", "3")),
        ({"CUDA_VISIBLE_DEVICES": "GPU-a1,GPU-b2"}, ("GPU-a1", "GPU-b2")),
        ({"CUDA_VISIBLE_DEVICES": "2", "JAX_PLATFORMS": ""}, ("2",)),
        ({"CUDA_VISIBLE_DEVICES": "2", "JAX_PLATFORMS": "gpu"}, ("2",)),
        ({"CUDA_VISIBLE_DEVICES": "2", "JAX_PLATFORMS": "cuda,cpu"}, ("2",)),
        ({"CUDA_VISIBLE_DEVICES": "2", "JAX_PLATFORMS": "cpu"}, ()),
        ({"CUDA_VISIBLE_DEVICES": ""}, ()),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, ()),
    ],
)
def test_visible_gpus_come_from_environment(environment, gpus):
    """The GPUs of this machine are those that the environment shows to JAX."""
    assert Machine.this(environment).gpus == gpus


def test_this_machine_has_usable_cores():
    machine = Machine.this({})
    assert 1 <= machine.cores <= os.cpu_count()
    assert all(os.path.exists(f"/dev/nvidia{gpu}") for gpu in machine.gpus)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"workers": 0}, r"workers=0: there must be at least one worker.\nHINT: --workers 2"),
        ({"workers": 99_999_999}, r"workers=99999999: there must be at most 1048576 workers.\nHINT: --workers 2"),
        ({"workers": -1}, r"workers=-1: there must be at least one worker.\nHINT: --workers 2"),
        ({"devices_per_worker": 0}, r"devices_per_worker=0: a worker must have at least one device.\nHINT: "),
    ],
)
def test_zero_workers_and_devices_are_refused(wrong, message):
    with pytest.raises(InvalidArgumentError, match=message):
        Request("train.py", **wrong)


def test_numbers_of_thousands_of_digits():
    """Python takes them for an error of its own."""
    with pytest.raises(InvalidArgumentError, match="PHALANX_RESTART='999.*: must be the number of earlier starts"):
        environments({"PHALANX_RESTART": "9" * 5000})
    with pytest.raises(InvalidArgumentError, match="the environment sets PHALANX_CPU_DEVICES='999"):
        environments({"PHALANX_CPU_DEVICES": "9" * 5000})


@pytest.mark.parametrize(("value", "devices"), [("4", 2), ("many", None), ("0", None), ("-1", None)])
def test_devices_that_contradict(value, devices):
    """The command line and the environment cannot ask for different numbers, nor the environment for none."""
    found = rf"devices_per_worker={devices}: the environment sets PHALANX_CPU_DEVICES='{value}'.\nHINT: unset"
    with pytest.raises(InvalidArgumentError, match=found):
        environments({"PHALANX_CPU_DEVICES": value}, devices=devices)


@pytest.mark.parametrize(("workers", "devices", "each"), [(3, None, 1), (2, 2, 2)])
def test_too_few_gpus(workers, devices, each):
    """Workers do not share a GPU unasked."""
    found = rf"workers={workers}, {each} GPU\(s\) each: this machine has 2: 0, 1.\nHINT: JAX_PLATFORMS=cpu phalanx run"
    with pytest.raises(InvalidArgumentError, match=found):
        environments(workers=workers, devices=devices, gpus=("0", "1"))


def test_script_that_is_not_there(tmp_path, monkeypatch):
    """A script that does not exist is named once, with the folder in which it was looked for."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidArgumentError, match=rf"script='train.py': there is no such file in {tmp_path}.\nHINT: "):
        Request("train.py").check_script()


def test_folder_needs_a_program(tmp_path, monkeypatch):
    """A folder with __main__.py is one for Python."""
    monkeypatch.chdir(tmp_path)
    Path("src").mkdir()
    with pytest.raises(
        InvalidArgumentError, match="'src': it is a folder without __main__.py.\nHINT: phalanx run src/tr"
    ):
        Request("src").check_script()
    Path("src", "__main__.py").touch()
    Request("src").check_script()


def test_module_that_is_not_there(tmp_path, monkeypatch):
    """A module may be installed or lie in the present folder, and is not imported to find out."""
    monkeypatch.chdir(tmp_path)
    for name in ("train", "train.loop", ".train", ""):
        with pytest.raises(
            InvalidArgumentError, match=rf"-m {name}: Python finds no module '.*' here or in {tmp_path}"
        ):
            Request(name, is_module=True).check_script()
    Path("train.py").write_text("raise AssertionError")
    for name in ("train", "json.tool"):
        Request(name, is_module=True).check_script()


def test_script_that_workers_cannot_read(tmp_path, monkeypatch):
    """A pipe has one reader, and workers have another input."""
    os.mkfifo(tmp_path / "pipe")
    for name in (f"{tmp_path}/pipe", "/dev/stdin", "/dev/fd/0"):
        with pytest.raises(
            InvalidArgumentError, match="it is not a file, from which each worker can.*\nHINT: cat > train"
        ):
            Request(name).check_script()


def test_folder_that_is_gone(tmp_path, monkeypatch):
    """Python would fail in each worker."""
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    with pytest.raises(InvalidArgumentError, match="the current folder: it cannot be used: No such file .*\nHINT: cd"):
        Request("json.tool", is_module=True).check_script()
    monkeypatch.chdir("/")


def test_member_of_an_elastic_group_may_start_a_group():
    """The workers of its group do not belong to the elastic one."""
    (environment,) = environments({"PHALANX_RENDEZVOUS": "a:1", "PHALANX_MEMBER": "1", "HOME": "/x"}, workers=1)
    assert {"PHALANX_RENDEZVOUS", "PHALANX_MEMBER"} & set(environment) == set()
    assert environment["HOME"] == "/x"


@pytest.fixture
def ordinary_user():
    """Root may read every file, so root's access is checked as that of another user."""
    if os.geteuid() != 0:
        yield
        return
    os.setreuid(65534, -1)
    yield
    os.setreuid(0, -1)


def test_script_that_may_not_be_read(tmp_path, ordinary_user):
    script = tmp_path / "train.py"
    script.touch(0o000)
    with pytest.raises(InvalidArgumentError, match=r"train.py': this user may not read it.\nHINT: chmod u\+r"):
        Request(str(script)).check_script()


@given(st.integers(1, 20))
def test_free_ports_differ_and_are_free(count):
    ports = free_ports(count)
    assert len(set(ports)) == count
    for port in ports:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", port))
