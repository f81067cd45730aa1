"""The command line: in this process, and as a process of its own."""

import errno
import functools
import importlib.metadata
import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from phalanx._src.launch.plan import free_ports
from phalanx._src.tools import child
from phalanx._src.tools import run as run_tool
from phalanx._src.tools.cli import main
from phalanx._src.tools.doctor import command as doctor

pytestmark = pytest.mark.slow

START = "from phalanx._src.tools.cli import main; main(prog_name='phalanx')"
FOREIGN = ["jax", "jaxlib", "keras", "numpy", "ray", "tensorflow"]


@pytest.fixture
def phalanx(environment, monkeypatch, tmp_path, capfd):
    """Runs the command line in this process, with what it would start as a child of one process, and real workers."""

    def run_here(module, arguments, _=None):
        monkeypatch.setattr(sys, "argv", [module, *arguments])
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # The module may be imported already.
                runpy.run_module(module, run_name="__main__")
        except SystemExit as e:
            return e.code
        return 0

    def run(*arguments, **variables):
        for name in (*os.environ, *environment, *variables):
            monkeypatch.delenv(name, raising=False)
        for name, value in {**environment, **variables}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit) as ended:
            main(arguments, prog_name="phalanx")
        return SimpleNamespace(returncode=ended.value.code, **capfd.readouterr()._asdict())

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(child, "run", run_here)
    for command in (run_tool, doctor):
        monkeypatch.setattr(command, "run_group", functools.partial(command.run_group, word_s=0.0))
    return run


@pytest.fixture
def phalanx_process(environment, tmp_path):
    """Runs the command line in a process of its own."""
    options = {"cwd": tmp_path, "capture_output": True, "text": True, "timeout": 500}
    return lambda *arguments, **variables: subprocess.run(
        [sys.executable, "-c", START, *arguments], env=environment | variables, check=False, **options
    )


def invoke(*arguments, **environment):
    """Runs the command line in this process, where no variable describes a cluster unless given."""
    hidden = ("TF_CONFIG", "SLURM_PROCID", "PHALANX_NUM_PODS", "SM_HOSTS", "TPU_WORKER_HOSTNAMES")
    return CliRunner().invoke(main, arguments, env={**dict.fromkeys(hidden), **environment})


def test_run_passes_arguments_to_script(phalanx_process, launch):
    """The script runs as so many workers, with its own arguments after its name. One that asks finds the end of its input."""
    script = launch.script(
        "print(rank, len(addresses), sys.argv[1:], os.environ['PHALANX_CPU_DEVICES'], repr(sys.stdin.read()))"
    )
    arguments = ["--workers", "2", "--devices-per-worker", "3", script, "--workers", "7", "-m", "--", "--help"]
    done = phalanx_process("run", *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    own = "['--workers', '7', '-m', '--', '--help'] 3 ''"
    assert sorted(done.stdout.splitlines()) == [f"[worker {r}] {r} 2 {own}" for r in range(2)]


def test_run_takes_a_module(phalanx, tmp_path):
    """`-m` runs a module, and what follows its name is the module's."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text("import sys; print(__name__, sys.argv[1:])")
    done = phalanx("run", "-m", "package.train", "-m", "--max-restarts", "2")
    assert (done.returncode, done.out) == (0, "[worker 0] __main__ ['-m', '--max-restarts', '2']\n")


def test_failure_ends_with_code_of_last_attempt(phalanx, launch):
    """The launcher ends with the code of the last attempt; each attempt is reported on the stream of errors."""
    script = launch.script("if rank == 1:\n    sys.exit(4 + restart)\npause()")
    done = phalanx("run", "--workers", "2", "--max-restarts", "1", script)
    assert (done.returncode, done.out) == (5, "")
    assert re.fullmatch(
        r"worker 1 failed first: it exited with code 4.*\nIt printed nothing.\n  worker 0 was ended .*\n"
        r"The group starts again: 1 of 1.\n"
        r"worker 1 failed first: it exited with code 5.*\nIt printed nothing.\n  worker 0 was ended .*\n",
        done.err,
    )


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_end_launcher_and_workers(environment, launch, number, code):
    """Ctrl-C and SIGTERM end the launcher and all workers; those that ignore SIGTERM after the grace period."""
    script = launch.script("signal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('ready')\npause()")
    command = [sys.executable, "-c", START, "run", "--workers", "2", "--grace-seconds", "0.3", script]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as launcher:
        assert {launcher.stdout.readline() for _ in range(2)} == {b"[worker 0] ready\n", b"[worker 1] ready\n"}
        launcher.send_signal(number)
        _, errors = launcher.communicate(timeout=300)
    assert launcher.returncode == code
    assert (
        f"The launcher was ended by {number.name}.\n  worker 0 was ended by the launcher (SIGKILL)" in errors.decode()
    )


def test_env_reports_versions_without_secrets(phalanx_process):
    """Versions, devices and variables, without secrets."""
    done = phalanx_process("env", "--json", PHALANX_CPU_DEVICES="3", RAY_AUTH_TOKEN="s3cret")
    assert (done.returncode, done.stderr) == (0, "")
    assert "s3cret" not in done.stdout
    report = json.loads(done.stdout)
    assert report["versions"]["phalanx"] == importlib.metadata.version("phalanx")
    assert report["devices"] == {f"cpu:{i}": "cpu" for i in range(3)}
    assert report["variables"]["RAY_AUTH_TOKEN"] == "(hidden)"


def test_env_without_devices(phalanx, monkeypatch):
    """If JAX cannot start, the report says why, and the rest is there, as text."""
    monkeypatch.setattr("jax.local_devices", lambda: exec("raise RuntimeError('no nonsense')"))
    done = phalanx("env", PHALANX_CPU_DEVICES="3", RAY_AUTH_TOKEN="s3cret")
    assert (done.returncode, done.err) == (0, "")
    assert re.search(r"^devices\n  none  RuntimeError: no nonsense", done.out, re.M)
    assert "\nvariables\n" in done.out
    assert "s3cret" not in done.out
    assert re.search(rf"^  jax +{importlib.metadata.version('jax')}$", done.out, re.M)
    assert re.search(r"^  PHALANX_CPU_DEVICES +3$", done.out, re.M)


@pytest.mark.parametrize(
    "arguments",
    [("ls", "none"), ("show", "none"), ("diff", "none", "other"), ("export", "none", "out.npz")],
    ids=lambda a: a[0],
)
def test_checkpoint_that_is_not_there(phalanx, arguments):
    """Every command says so, with the exit code of a wrong call. What they print otherwise is tested in unit/train."""
    done = phalanx("checkpoint", *arguments)
    assert done.returncode == 2
    assert re.search(r"^phalanx: .*none[^§]*HINT: ", done.err)


def test_doctor_passes_all_checks(phalanx_process, tmp_path):
    """Two processes of this machine pass all checks, and leave nothing in the shared folder."""
    (tmp_path / "shared").mkdir()
    done = phalanx_process("doctor", "--shared", "shared")
    assert done.returncode == 0, done.stdout + done.stderr
    names = ["port", "handshake", "all-reduce", "versions", "clocks", "shared folder"]
    assert re.findall(r"^\[worker 0\] PASS (.*?):", done.stdout, re.M) == names
    assert not list((tmp_path / "shared").iterdir())


@pytest.mark.parametrize(("code", "own"), [(0, 0), (137, 1)])
def test_doctor_fails_with_its_processes(phalanx, monkeypatch, code, own):
    """The exit code says only whether a check has failed."""
    monkeypatch.setattr(doctor, "run_group", lambda plan, **_: SimpleNamespace(exit_code=code, processes=len(plan(0))))
    assert phalanx("doctor").returncode == own


def config_of(task, *addresses):
    return json.dumps({"cluster": {"worker": addresses}, "task": {"type": task, "index": 0}})


def test_doctor_of_a_cluster_with_a_missing_peer(phalanx):
    """The cluster of the environment is tried, and who does not come is named."""
    first, second = [f"127.0.0.1:{port}" for port in free_ports(2)]
    done = phalanx("doctor", "--timeout-seconds", "0.5", TF_CONFIG=config_of("worker", first, second))
    assert done.returncode == 1
    passed, failed, hint = done.out.splitlines()
    assert passed == f"PASS port: rank 0 can listen at {first}."
    missing = f"after 0.5 s rank 1 ({second}) had not connected to rank 0 ({first})."
    assert failed == f"FAIL handshake: a cluster of 2 processes: {missing}"
    assert hint == "HINT: look at the output of the missing processes, or use a longer --timeout-seconds"


def test_doctor_in_an_elastic_group(phalanx):
    """It would try processes of this machine alone."""
    done = phalanx("doctor", PHALANX_RENDEZVOUS="127.0.0.1:1", PHALANX_MEMBER="0")
    assert done.returncode == 2
    assert "learn their cluster when they train.\nHINT: phalanx doctor without phalanx run, on each" in done.err


def test_doctor_names_a_launcher_without_addresses(phalanx):
    """Instead of trying two processes of its own in each of those that mpirun has started."""
    done = phalanx("doctor", OMPI_COMM_WORLD_RANK="1", OMPI_COMM_WORLD_SIZE="2")
    assert done.returncode == 2
    launch = "Open MPI has started 2 processes (OMPI_COMM_WORLD_SIZE), and this is rank 1 (OMPI_COMM_WORLD_RANK)"
    assert done.err.startswith(f"phalanx: {launch}: it does not know the addresses of the others, so each would train")
    assert "HINT: ./in_cluster.sh python train.py, with these lines in in_cluster.sh: export TF_CONFIG=" in done.err


def test_doctor_finds_a_port_in_use(phalanx):
    """The port of the first worker is taken: said before anybody waits. An evaluator needs no worker and no port."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        addresses = f"127.0.0.1:{other.getsockname()[1]}", "127.0.0.1:1"
        done = phalanx("doctor", TF_CONFIG=config_of("worker", *addresses))
        assert done.returncode == 1
        in_use = f"FAIL port: rank 0 cannot listen at {addresses[0]}: Address already in use.\nHINT: end the"
        assert done.out.startswith(in_use)
        for folder, code, name in ((".", 0, "PASS"), ("nowhere", 1, "FAIL")):
            variables = {"NPROC": "16", "TF_CONFIG": config_of("evaluator", *addresses)}
            done = phalanx("doctor", "--shared", folder, **variables)
            assert done.returncode == code, done
            found = re.findall(r"^(PASS|FAIL) (.*?):", done.out, re.M)
            names = ["handshake", "all-reduce", "versions", "clocks"]
            assert found == [*(("PASS", name) for name in names), (name, "shared folder")]
            assert done.out.startswith("PASS handshake: this is an evaluator, which joins nobody.\n")
    assert "\nFAIL shared folder: rank 0 cannot write to nowhere: No such file or directory.\nHINT: use a" in done.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--workers", "0", "train.py"], "workers=0: there must be at least one worker.\nHINT: --workers 2"),
        (["--devices-per-worker", "0", "train.py"], "devices_per_worker=0: a worker must have at least one device."),
        (["--workers", "two", "train.py"], "--workers two: must be a number, or two numbers."),
        (["--workers", "9" * 5000, "train.py"], "9: must be a number, or two numbers."),
        (["--workers", "2", "--profile", "1:" + "9" * 5000, __file__], "9: must be two numbers of steps"),
        (["--workers", "2:", "train.py"], "--workers 2:: must be a number, or two numbers."),
        (["--workers", "3:2", "train.py"], "workers=3:2: the minimum must be at least 1 and at most the maximum."),
        (["--workers", "0:2", "train.py"], "workers=0:2: the minimum must be at least 1"),
        (
            ["--workers", "2", "--in-cluster", __file__],
            "--in-cluster with --workers 2: only a group whose workers may be lost is started from several machines.",
        ),
        (
            ["--workers", "1:2", "--in-cluster", __file__],
            "--in-cluster: nothing here describes a cluster.\nHINT: srun ",
        ),
        (["--workers", "2", "no.py"], "phalanx: script='no.py': there is no such file in "),
        (["--max-restarts", "-1", "train.py"], "-1 is not in the range x>=0"),
        (["--grace-seconds", "-1", "train.py"], "-1.0 is not in the range x>=0"),
        (["--evaluator-grace-seconds", "-1", "train.py"], "-1.0 is not in the range x>=0"),
        (["--grace-seconds", "nan", "train.py"], "nan is not a number of seconds"),
        (["--evaluator-grace-seconds", "inf", "train.py"], "inf is not a number of seconds"),
        (["--ray", "", "train.py"], "'--ray': it is empty, as if a variable of the shell is not set."),
        (["--print", "mesos", "train.py"], "'mesos' is not one of 'slurm', 'kubernetes', 'kubeflow'"),
        (["--wrokers", "2", "train.py"], "No such option"),
        ([], "Missing argument 'SCRIPT'"),
    ],
)
def test_bad_commands_are_refused_without_stack(arguments, words):
    """What cannot be run is refused without a stack, with what to write instead."""
    done = invoke("run", *arguments)
    assert done.exit_code == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_more_workers_than_ports_are_refused(monkeypatch):
    def held_ports(count):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("phalanx._src.launch.nodes.held_ports", held_ports)
    done = invoke("run", "--workers", "99999", __file__)
    assert (done.exit_code, done.stderr) == (
        2,
        "phalanx: --workers 99999: this machine has no port for each worker: [Errno 24] Too many open files.\nHINT: --workers 2\n",
    )


def test_template_of_a_name_that_is_no_text():
    """Bash gets the bytes of the name."""
    done = invoke("run", "--print", "slurm", os.fsdecode(b"\xff.py"))
    assert done.exit_code == 0
    assert r" $'\xff.py' &" in done.stdout


@pytest.mark.parametrize("name", ["x" * 5000, "\udcff/x", "train.py/x"])
def test_names_of_no_file_are_refused(name):
    done = invoke("run", name)
    assert done.exit_code == 2
    assert "there is no such file in " in done.output


def test_option_after_the_script_is_recognized(launch):
    """The warning has the right line. The script gets the option all the same, which it may know."""
    script = launch.script("import sys\nprint(sys.argv[1:])")
    done = invoke("run", script, "--lr", "1", "--workers", "2", "--report")
    assert done.exit_code == 0
    assert done.stderr.splitlines()[:2] == [
        f"phalanx: --workers 2 --report comes after {script}, so it is passed to the script and not to phalanx run.",
        f"HINT: phalanx run --workers 2 --report {script} --lr 1",
    ]


STEP_OF_SLURM = {
    "SLURM_JOB_ID": "3",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
}
OF_CLUSTERS = {
    "TF_CONFIG": ({"TF_CONFIG": config_of("worker", "a:1", "b:1")}, "4:4"),
    "Slurm": (STEP_OF_SLURM, "4:4"),
    "pods": ({"PHALANX_NUM_PODS": "3", "JOB_COMPLETION_INDEX": "0", "HOSTNAME": "a-0", "PHALANX_SERVICE": "s"}, "6:6"),
}


@pytest.mark.parametrize(("variables", "workers"), OF_CLUSTERS.values(), ids=OF_CLUSTERS)
def test_group_of_one_machine_in_a_cluster_warns(phalanx, launch, variables, workers):
    """Each machine of the cluster would train by itself. The hint is the line that joins them."""
    script = launch.script("print(len(addresses))")
    done = phalanx("run", "--workers", "2", script, "--lr", "1", **variables)
    assert (done.returncode, sorted(done.out.splitlines())) == (0, ["[worker 0] 2", "[worker 1] 2"]), done
    first, hint = done.err.splitlines()
    assert re.fullmatch(
        r"phalanx: The environment describes a cluster with \d workers, but .* trains by itself.", first
    )
    assert hint == f"HINT: phalanx run --in-cluster --workers {workers} {script} --lr 1"


def test_group_of_one_machine_under_mpirun_warns(phalanx, launch):
    """`mpirun` gives it no addresses of the others."""
    script = launch.script("")
    done = phalanx("run", script, PMI_RANK="1", PMI_SIZE="2")
    assert done.returncode == 0
    assert done.err.startswith(
        "phalanx: MPICH or Intel MPI has started 2 processes (PMI_SIZE), and this is rank 1 (PMI"
    )
    assert f"\nHINT: ./in_cluster.sh python {script}, with these lines" in done.err
    done = phalanx("run", "--in-cluster", "--workers", "1:2", script, PMI_RANK="1", PMI_SIZE="2")
    assert done.returncode == 2
    assert ": MPICH or Intel MPI has started 2 processes" in done.err
    assert f"\nHINT: ./in_cluster.sh python {script}" in done.err


@pytest.mark.parametrize(
    ("variables", "workers"),
    [
        ({"TF_CONFIG": config_of("worker", "a:1")}, "1"),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, "1"),
        ({"SLURM_JOB_ID": "3", "SLURM_NTASKS": "2"}, "2"),  # All tasks of the job, started in its script.
    ],
)
def test_group_that_is_whole_does_not_warn(phalanx, launch, variables, workers):
    """All tasks that the environment describes are in it."""
    assert phalanx("run", "--workers", workers, launch.script(""), **variables).err == ""


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        (
            {"PHALANX_START_TIMEOUT_S": "abc"},
            "PHALANX_START_TIMEOUT_S='abc': must be a number of seconds above 0.\nHINT: ",
        ),
        (
            {"PHALANX_STALL_TIMEOUT_S": "nan"},
            "PHALANX_STALL_TIMEOUT_S='nan': must be a number of seconds above 0.\nHINT: ",
        ),
        ({"PHALANX_RESTART": "foo"}, "PHALANX_RESTART='foo': must be the number of earlier starts.\nHINT: unset"),
        (
            {"TF_CONFIG": "foo"},
            "TF_CONFIG: is not JSON: Expecting value at character 0, near 'foo'.\nHINT: TF_CONFIG='",
        ),
    ],
)
def test_variables_that_are_wrong(phalanx, launch, variables, words):
    """Said before anything starts, instead of by each worker, or never."""
    done = phalanx("run", launch.script("print('started')"), **variables)
    assert (done.returncode, done.out) == (2, "")
    assert done.err.startswith(f"phalanx: {words}")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_output_that_cannot_be_written(environment, launch):
    """Workers have run, so it is not 2. Reports that nobody can read change nothing."""
    script = launch.script("print('hello')\nsys.exit(7 if restart < 2 else 0)")
    command = [sys.executable, "-c", START, "run", "--workers", "2", "--max-restarts", "2", script]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command, env=environment, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
        assert (done.returncode, "cannot be written: [Errno 28]" in done.stderr) == (1, True)
        assert (
            subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, stderr=full, check=False).returncode
            == 0
        )


@pytest.mark.parametrize("closed", [0, 1, 2])
def test_launcher_without_a_standard_stream(environment, launch, closed):
    """A shell has closed it: `>&-`."""
    script = launch.script("note(f'done{rank}')")
    command = [sys.executable, "-c", START, "run", "--workers", "2", script]
    closing = ["sh", "-c", f'exec "$@" {closed}>&-', "sh", *command]
    done = subprocess.run(closing, env=environment, capture_output=True, check=False)
    assert done.returncode == 0
    assert all((launch.folder / f"done{rank}").exists() for rank in range(2))


def test_too_few_open_files_are_said(phalanx, launch, monkeypatch):
    def ask(self):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(run_tool.ThisNode, "__enter__", ask)
    done = phalanx("run", launch.script(""))
    assert (done.returncode, done.err) == (
        2,
        "phalanx: Too many open files: this user may not open as many as it needs.\nHINT: ulimit -n 4096\n",
    )


def test_malformed_number_of_devices(phalanx, launch):
    done = phalanx("run", launch.script(""), PHALANX_CPU_DEVICES="x")
    assert (done.returncode, done.out) == (2, "")
    assert re.fullmatch(r"phalanx: .*: the environment sets PHALANX_CPU_DEVICES='x'.\nHINT: .*\n", done.err)


@pytest.mark.parametrize(
    ("scheduler", "start"),
    [("slurm", "#!/bin/bash\n"), ("kubernetes", "# JobSet "), ("kubeflow", "# The JobSet of the TrainJob ")],
)
def test_print_writes_template_without_running(scheduler, start):
    """`--print` writes the template and runs nothing: the script is not even there."""
    done = invoke("run", "--workers", "2", "--max-restarts", "3", "--print", scheduler, "no.py", "--print", "x")
    assert done.exit_code == 0
    assert done.stdout.startswith(start)
    assert "no.py" in done.stdout


def test_template_has_all_characters_of_arguments():
    """As bash reads them, and no terminal."""
    done = invoke("run", "--print", "slurm", "train.py", "\x1b[2Jx")
    assert r"train.py $'\x1b[2Jx' &" in done.stdout


def test_machines_must_have_the_same_number():
    """Three workers cannot be shared by two machines."""
    cluster = {"cluster": {"worker": ["host0:1", "host1:1"]}, "task": {"type": "worker", "index": 0}}
    done = invoke("run", "--workers", "1:3", "--in-cluster", __file__, TF_CONFIG=json.dumps(cluster))
    assert done.exit_code == 2
    assert done.stderr.splitlines() == [
        "phalanx: workers=3 on 2 machines: each machine runs the same number of workers.",
        "HINT: --workers 2:4",
    ]


@pytest.mark.parametrize("scheduler", ["slurm", "kubernetes", "kubeflow"])
def test_template_with_an_evaluator_is_refused(scheduler):
    """The evaluator is a job of its own, which the message writes."""
    done = invoke("run", "--workers", "2", "--evaluator", "--print", scheduler, "train.py", "--lr", "1")
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == (
        f"phalanx: --evaluator with --print {scheduler}: the template starts only the processes that train. "
        "An evaluator needs its own job.\n"
        """HINT: TF_CONFIG='{"task": {"type": "evaluator", "index": 0}}' python train.py --lr 1\n"""
    )


def test_run_with_an_evaluator(phalanx, launch):
    """One more process has the prefix and the task of an evaluator, and a limited time after the workers."""
    script = launch.script(
        "print(job, rank, len(addresses))\nnote(job)\nwait_for('evaluator')\nif job == 'evaluator':\n    pause()"
    )
    done = phalanx("run", "--workers", "2", "--evaluator", "--evaluator-grace-seconds", "0.2", script)
    assert done.returncode == 0
    wanted = ["[evaluator 0] evaluator 0 2", "[worker 0] worker 0 2", "[worker 1] worker 1 2"]
    assert sorted(done.out.splitlines()) == wanted
    assert done.err.splitlines() == [
        "The workers have ended. evaluator 0 has 0.2 s to finish.",
        "evaluator 0 has not finished after 0.2 s.",
        "evaluator 0 was ended by the launcher (SIGTERM).",
    ]


@pytest.mark.parametrize(
    ("cluster", "task", "rows"),
    [
        ({"worker": ["a:1", "b:1"]}, ("worker", 1), ["worker 0 a:1 chief", "worker 1 b:1 this process"]),
        (
            {"worker": ["a:1"], "evaluator": ["e:1"]},
            ("evaluator", 0),
            ["worker 0 a:1 chief", "evaluator 0 e:1 this process"],
        ),
        # Not listed, it has no address.
        ({"worker": ["a:1", "b:1"]}, ("evaluator", 0), ["worker 0 a:1 chief", "evaluator 0  this process"]),
        (
            {"chief": ["a:1"], "worker": ["b:1"], "ps": ["c:1"], "evaluator": ["d:1"]},
            ("chief", 0),
            ["chief 0 a:1 chief, this process", "worker 0 b:1 ", "ps 0 c:1 ", "evaluator 0 d:1 "],
        ),
    ],
)
def test_cluster_lists_tasks_and_chief(cluster, task, rows):
    """All tasks with their addresses, and which is the chief and which this process."""
    task = dict(zip(("type", "index"), task, strict=True))
    done = invoke("cluster", TF_CONFIG=json.dumps({"cluster": cluster, "task": task}))
    assert done.exit_code == 0
    shown = [" ".join(cell.strip() for cell in re.split("[│|]", line)[1:-1]) for line in done.stdout.splitlines()]
    assert set(rows) <= set(shown)
    assert "TFConfigClusterResolver" in done.stdout


def test_cluster_with_two_evaluators():
    """A second evaluator is an error, wherever it is counted."""
    for cluster, index in [({"worker": ["a:1"]}, 1), ({"worker": ["a:1"], "evaluator": ["e:1", "f:1"]}, 0)]:
        task = {"type": "evaluator", "index": index}
        done = invoke("cluster", TF_CONFIG=json.dumps({"cluster": cluster, "task": task}))
        assert done.exit_code == 2
        assert re.search(r"^phalanx: .* a cluster has at most one.*\nHINT: ", done.stderr)


@pytest.mark.parametrize("variables", [{}, {"TF_CONFIG": "{}"}])
def test_missing_cluster_is_explained(variables):
    """Where nothing describes a cluster, that is said, and how to have one."""
    done = invoke("cluster", **variables)
    assert done.exit_code == 0
    assert done.stdout.startswith(
        "Nothing here describes a cluster: this process is alone.\nHINT: phalanx run --workers 2"
    )


def test_cluster_that_is_wrong():
    done = invoke("cluster", TF_CONFIG="{'cluster'")
    assert done.exit_code == 2
    assert re.match(r"phalanx: TF_CONFIG: is not JSON: .*(\n.*)*HINT: ", done.stderr)


def test_help_names_all_commands():
    done = invoke("--help")
    assert done.exit_code == 0
    assert re.search(r"cluster .*\n +doctor .*\n +env .*\n +estimate .*\n +migrate .*\n +run ", done.stdout)


def test_each_command_has_its_file():
    """`phalanx X` is `tools/X.py`, or `tools/X/command.py`."""
    modules = {name: command.callback.__module__ for name, command in main.commands.items()}
    tools = "phalanx._src.tools"
    assert [m for name, m in modules.items() if m not in (f"{tools}.{name}", f"{tools}.{name}.command")] == []


def test_migrate_starts_its_tool(phalanx):
    done = phalanx("migrate", "no.py")
    assert done.returncode == 2
    assert "phalanx migrate no.py: there is no such file or folder." in done.err


def test_migrate_takes_one_way_to_write(phalanx):
    done = phalanx("migrate", "no.py", "--check", "--in-place")
    assert done.returncode == 2
    assert "use one of -o, --in-place, --diff and --check" in done.err


def test_version_is_that_of_package(phalanx):
    done = phalanx("--version")
    assert re.fullmatch(r"phalanx, version \d+\.\d+\.\d+\S*\n", done.out), done.err


def test_launcher_imports_no_jax(environment):
    """The launcher imports neither JAX nor Keras, nor rich before it prints a table."""
    code = f"import sys, phalanx._src.tools.cli; print([m for m in {[*FOREIGN, 'rich']} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=500)
    assert (done.stdout, done.stderr) == ("[]\n", "")
