"""The templates for schedulers: parsed, and run with what the scheduler would set, beside `phalanx run`."""

import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx._src.cluster.resolvers.environment import resolver_of_environment
from phalanx._src.cluster.spec import Task, tf_config
from phalanx._src.launch.plan import Machine, Machines, Request, plan
from phalanx._src.launch.templates import TEMPLATES, kubeflow, kubernetes, slurm

yaml = pytest.importorskip("yaml", reason="PyYAML reads the templates for Kubernetes")
jsonschema = pytest.importorskip("jsonschema", reason="it compares them with the fields that Kubernetes knows")

AWKWARD = (
    "--name",
    "a b",
    "$HOME",
    "it's",
    "\x1b[31m \\ 'é\r\n\u202e",
    "{x}",
    '"q"',
    "$(NPROC)",
    "$$(NPROC)",
    "$$",
    "a$",
    "\\ud83d",
    "\u2028",
    "\U0001f600",
)

# Does what the real one does: as many tasks, numbered; none is left when one fails; it fails with that code.
SRUN = """\
#!{python}
import os, subprocess, sys
words = sys.argv[1:]
while words[0].startswith("--"):
    words.pop(0)
tasks = int(os.environ["SLURM_NTASKS"])
step = {{"SLURM_STEP_NUM_TASKS": str(tasks), "SLURM_STEP_NODELIST": f"node[1-{{tasks}}]"}}
step["SLURM_STEP_TASKS_PER_NODE"] = f"1(x{{tasks}})"
for rank in range(tasks):
    own = {{"SLURM_PROCID": str(rank), "SLURM_NODEID": str(rank), "SLURM_LOCALID": "0"}}
    code = subprocess.run(words, env={{**os.environ, **step, **own}}).returncode
    if code:
        sys.exit(code)
"""

TELL = """\
import json, os, sys
from phalanx._src.cluster.resolvers.environment import resolver_of_environment
resolver = resolver_of_environment()
print(json.dumps([resolver.task_type, resolver.task_id, os.environ["PHALANX_RESTART"], sys.argv[1:]]))
sys.exit(int(os.environ["PHALANX_RESTART"]) < {failures})
"""


def without_addresses(text):
    """What TF_CONFIG says of jobs and tasks."""
    config = json.loads(text)
    return {job: len(addresses) for job, addresses in config["cluster"].items()}, config["task"]


def launched(request):
    ports = range(4001, 4001 + request.workers)
    return [process.environment for process in plan(request, Machine(cores=8), {}, ports)]


def resolved(environ):
    resolver = resolver_of_environment(environ)
    return tf_config(resolver.cluster_spec(), Task(resolver.task_type, resolver.task_id))


def options(script):
    return dict(re.findall(r"^#SBATCH --([a-z-]+)=(.*)$", script, re.MULTILINE))


def steps(script):
    """What srun sets for each task of a step of this script, on nodes of Slurm 23."""
    asked = options(script)
    count, each = int(asked["ntasks"]), asked["ntasks-per-node"]
    nodes = int(asked["nodes"])
    for rank in range(count):
        yield {
            "SLURM_PROCID": str(rank),
            "SLURM_STEP_NUM_TASKS": str(count),
            "SLURM_STEP_NODELIST": f"node[01-{nodes:02d}]" if nodes > 1 else "node01",
            "SLURM_STEP_TASKS_PER_NODE": f"{each}(x{nodes})" if nodes > 1 else each,
            "SLURM_NODEID": str(rank),
            "SLURM_LOCALID": "0",
        }


def job_of(text):
    """The name of the job of pods in a JobSet or a TrainingRuntime, its spec, and the number of pods."""
    found = next(yaml.safe_load_all(text))["spec"]
    (job,) = found.get("template", {"spec": found})["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    return job["name"], spec, spec.get("completions") or found["mlPolicy"]["numNodes"]


def expanded(word):
    """Expands a word of a command from left to right as Kubernetes does, where NPROC is 7."""
    return re.sub(r"\$\$|\$\(NPROC\)", lambda found: "$" if found[0] == "$$" else "7", word)


def pods(text):
    """What Kubernetes sets in each pod."""
    name, spec, count = job_of(text)
    (container,) = spec["template"]["spec"]["containers"]
    own = {entry["name"]: entry["value"] for entry in container["env"] if "value" in entry}
    for index in range(count):
        yield {**own, "JOB_COMPLETION_INDEX": str(index), "HOSTNAME": f"x-{name}-0-{index}"}


@pytest.mark.parametrize("workers", [1, 2, 3, 12])
@pytest.mark.parametrize(("write", "environments"), [(slurm, steps), (kubernetes, pods), (kubeflow, pods)])
def test_agrees_with_the_launcher(write, environments, workers):
    """The resolvers see the jobs, tasks and ranks that `phalanx run` sets."""
    request = Request("train.py", workers=workers)
    found = [without_addresses(resolved(environ)) for environ in environments(write(request, 0))]
    assert found == [without_addresses(environment["TF_CONFIG"]) for environment in launched(request)]


@pytest.mark.parametrize("devices", [None, 1, 2, 4])
def test_devices_and_threads(devices):
    """Devices are those that were asked for; the threads are enough for them."""
    request = Request("train.py", workers=2, devices_per_worker=devices)
    wanted = {"PHALANX_CPU_DEVICES": str(devices or 1), "NPROC": str(2 * (devices or 1))}
    for environ in pods(kubernetes(request, 0)):
        assert environ.items() >= wanted.items()
    exported = dict(re.findall(r"^export ([A-Z_]+)=(\d+)$", slurm(request, 0), re.MULTILINE))
    assert exported.items() >= wanted.items()


@pytest.mark.slow
@pytest.mark.parametrize("write", TEMPLATES.values())
def test_templates_parse_with_any_arguments(write):
    """Bash reads the script, and YAML the JobSet, whatever the arguments are."""
    text = write(Request("train.py", AWKWARD, workers=2), 3)
    if write is slurm:
        subprocess.run(["bash", "-n"], input=text, text=True, check=True, timeout=300)
        assert text.splitlines()[0] == "#!/bin/bash"
        assert text.replace("\n", "").isprintable()
        assert options(text)["nodes"] == options(text)["ntasks"] == "2"
    elif write is kubernetes:
        found = yaml.safe_load(text)
        assert (found["apiVersion"], found["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
        assert found["spec"]["failurePolicy"]["maxRestarts"] == 3
    else:
        runtime, job = yaml.safe_load_all(text)
        assert runtime["apiVersion"] == job["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
        group, kind, name = "trainer.kubeflow.org", "TrainingRuntime", runtime["metadata"]["name"]
        assert job["spec"] == {"runtimeRef": {"apiGroup": group, "kind": kind, "name": name}}
        assert (runtime["kind"], job["kind"]) == ("TrainingRuntime", "TrainJob")
        assert runtime["spec"]["template"]["spec"]["failurePolicy"]["maxRestarts"] == 3


def test_jobset_fails_as_a_group():
    """An indexed job whose failure is one of the whole group, with the command as it was given, and the number of restarts."""
    found = yaml.safe_load(kubernetes(Request("package.train", AWKWARD, is_module=True, workers=2), 0))
    job = found["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert (job["completionMode"], job["completions"], job["parallelism"], job["backoffLimit"]) == ("Indexed", 2, 2, 0)
    assert job["template"]["spec"]["restartPolicy"] == "Never"
    (container,) = job["template"]["spec"]["containers"]
    command = container["command"]
    assert [expanded(word) for word in command] == ["python", "-m", "package.train", *AWKWARD]
    # An annotation that JobSet gives to each pod.
    (restart,) = [entry for entry in container["env"] if entry["name"] == "PHALANX_RESTART"]
    path = "metadata.annotations['jobset.sigs.k8s.io/restart-attempt']"
    assert restart["valueFrom"] == {"fieldRef": {"fieldPath": path}}


@pytest.mark.parametrize("target", ["train.py", "true.py", "null.py", "2024.py", "x" * 80 + ".py"])
@pytest.mark.parametrize("least", [None, 2])
@pytest.mark.parametrize("write", [kubernetes, kubeflow])
def test_manifests_have_only_known_fields(write, least, target):
    """Fields, types and values are those that the API servers accept, whatever the script is called."""
    schema = yaml.safe_load((Path(__file__).parent / "kubernetes.schema.yaml").read_text())
    validator = jsonschema.Draft202012Validator(schema)
    for manifest in yaml.safe_load_all(write(Request(target, AWKWARD, workers=4, least_workers=least), 3)):
        validator.validate(manifest)
        manifest["spec"]["typo"] = 1
        assert not validator.is_valid(manifest)


@pytest.mark.parametrize("write", [kubernetes, kubeflow])
def test_pods_are_restricted_and_keep_checkpoints(write):
    """A namespace with the Pod Security Standard `restricted` lets them in. They name a volume, and memory that they need."""
    _, job, _ = job_of(write(Request("train.py", workers=2), 3))
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    assert (
        pod["securityContext"].items() >= {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}.items()
    )
    assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert [volume["name"] for volume in pod["volumes"]] == [mount["name"] for mount in container["volumeMounts"]]
    assert container["resources"]["requests"].keys() == {"cpu", "memory"}
    assert container["resources"]["limits"] == {"memory": container["resources"]["requests"]["memory"]}


def test_image_is_that_of_the_pods():
    """Its user has the number that the pods want, and no shell stands between SIGTERM and the launcher."""
    _, job, _ = job_of(kubernetes(Request("train.py", workers=2), 3))
    image = (Path(__file__).parents[3] / "Dockerfile").read_text()
    user = str(job["template"]["spec"]["securityContext"]["runAsUser"])
    assert f"--uid {user} phalanx\n" in image
    assert re.findall("^USER (.*)$", image, re.M)[-1] == user
    assert re.findall("^ENTRYPOINT (.*)$", image, re.M) == ['["phalanx"]']


@pytest.mark.parametrize("write", [kubernetes, kubeflow])
@pytest.mark.parametrize(("least", "action"), [(None, "FailJob"), (2, "Ignore")])
def test_preemptions_are_no_failures(write, least, action):
    """A drained node, and the exit codes after SIGTERM, use up neither the restarts of the group nor those of the pods."""
    text = write(Request("train.py", workers=4, least_workers=least), 3)
    _, job, _ = job_of(text)
    disrupted = {"action": action, "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    ended = {"action": action, "onExitCodes": {"operator": "In", "values": [42, 143]}}
    assert job["podFailurePolicy"]["rules"] == [disrupted, ended]
    spec = next(yaml.safe_load_all(text))["spec"]
    (rule,) = spec.get("template", {"spec": spec})["spec"]["failurePolicy"]["rules"]
    assert rule["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    assert rule["onJobFailureReasons"] == ["PodFailurePolicy"]


@pytest.mark.parametrize("write", [kubernetes, kubeflow])
def test_elastic_pods_start_again_alone(write):
    """A pod that fails ends neither the others nor the job; each runs a launcher, which finds the cluster of pods."""
    text = write(Request("train.py", ("--lr", "1"), workers=4, least_workers=2), 3)
    _, spec, count = job_of(text)
    assert (count, spec["backoffLimit"], spec["template"]["spec"]["restartPolicy"]) == (4, 100, "Never")
    (container,) = spec["template"]["spec"]["containers"]
    restarts = ["--max-restarts", "3", "--grace-seconds", "100"]
    assert container["command"] == [
        "phalanx",
        "run",
        "--in-cluster",
        "--workers",
        "2:4",
        *restarts,
        "train.py",
        "--lr",
        "1",
    ]
    assert spec["template"]["spec"]["terminationGracePeriodSeconds"] > 100
    resolvers = [resolver_of_environment(environ) for environ in pods(text)]
    machines = [Machines.of(r.cluster_spec(), Task(r.task_type, r.task_id)) for r in resolvers]
    addresses = tuple(f"train-{container['name']}-0-{index}.train:8470" for index in range(4))
    assert machines == [Machines(index, addresses) for index in range(4)]


def test_elastic_script_keeps_the_other_nodes():
    """Neither a launcher that fails nor a lost node ends the step, which is started once."""
    text = slurm(Request("train.py", workers=4, least_workers=2), 0)
    assert "#SBATCH --no-kill\n" in text
    (srun,) = [line for line in text.splitlines() if line.startswith("srun")]
    assert "--no-kill --kill-on-bad-exit=0 " in srun
    # One restart at least: a machine that was cut off joins the others again.
    assert srun.endswith(" phalanx run --in-cluster --workers 2:4 --max-restarts 1 --grace-seconds 25 train.py &")


@pytest.mark.parametrize("write", TEMPLATES.values())
@pytest.mark.parametrize(
    ("target", "is_module", "name"),
    [
        ("train.py", False, "train"),
        ("/a/b/Fine_Tune.v2.py", False, "fine-tune-v2"),
        ("package.sub.train_lm", True, "train-lm"),
        ("true.py", False, "true"),
        ("2024.py", False, "train-2024"),
        ("__main__.py", False, "main"),
        ("你好.py", False, "train"),
        ("x" * 80 + ".py", False, "x" * 40),
    ],
)
def test_name_of_job_follows_script(write, target, is_module, name):
    """The job is named after the script, as hosts may be named."""
    text = write(Request(target, is_module=is_module), 0)
    found = options(text)["job-name"] if write is slurm else next(yaml.safe_load_all(text))["metadata"]["name"]
    assert found == name
    if write is not slurm:  # In YAML, `true` without quotes is not a text.
        variables = re.findall(r"- ({name: [A-Z_]+, value: .*})", text)
        assert {"name": "JOBSET_NAME", "value": name} in map(yaml.safe_load, variables)
    assert re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", found)


@pytest.fixture
def submitted(tmp_path, environment):
    """Runs a script for sbatch where `srun` runs the tasks, and `scontrol` writes its arguments to a file."""

    def submitted(request, restarts, source, **variables):
        (tmp_path / request.target).write_text(source)
        commands = {"srun": SRUN.format(python=sys.executable), "scontrol": '#!/bin/sh\necho "$@" >> requeued\n'}
        commands["phalanx"] = f"#!/bin/sh\nexec {sys.executable} {request.target}\n"
        for name, text in commands.items():
            (tmp_path / name).write_text(text)
            (tmp_path / name).chmod(stat.S_IRWXU)
        (tmp_path / "python").symlink_to(sys.executable)
        text = slurm(request, restarts)
        environ = {**environment, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_NTASKS": options(text)["ntasks"]}
        environ |= {"PYTHONPATH": os.pathsep.join(sys.path), "SLURM_JOB_ID": "7", **variables}
        done = subprocess.run(
            ["bash"], input=text, cwd=tmp_path, env=environ, text=True, capture_output=True, timeout=500
        )
        requeued = tmp_path / "requeued"
        return done, requeued.read_text().splitlines() if requeued.exists() else []

    return submitted


@pytest.mark.slow
@pytest.mark.parametrize(("failures", "restarts", "code"), [(2, 3, 0), (9, 1, 1)])
def test_script_runs_and_restarts_tasks(submitted, failures, restarts, code):
    """The script for sbatch starts the tasks with their arguments, and again until they succeed or may not restart."""
    request = Request("tell.py", AWKWARD, workers=2)
    done, requeued = submitted(request, restarts, TELL.format(failures=failures))
    assert (done.returncode, requeued) == (code, []), done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    ranks = [(0, str(restart)) for restart in range(min(failures, restarts + 1))]
    ranks += [] if code else [(rank, str(failures)) for rank in range(2)]
    assert found == [["worker", rank, restart, list(AWKWARD)] for rank, restart in ranks]


USR1 = """
import os, signal
from pathlib import Path
srun = Path(f"/proc/{os.getppid()}/stat").read_text()
os.kill(int(srun.rpartition(")")[2].split()[1]), signal.SIGUSR1)
while not os.path.exists("requeued"):
    pass
print("restart", os.environ["PHALANX_RESTART"])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "least", "runs", "code", "is_requeued"),
    [
        (USR1, None, 2, 0, True),
        ("raise SystemExit(42)", None, 2, 42, True),
        ("raise SystemExit(42)", None, 20, 42, False),
        ("raise SystemExit(76)", 1, 2, 76, True),
        ("raise SystemExit(3)", 1, 2, 3, False),
    ],
    ids=["time is nearly over", "saved", "too often", "machines gone", "failure"],
)
def test_script_requeues_its_job(submitted, source, least, runs, code, is_requeued):
    """Before the time limit, after a save, and when machines are gone, the job waits in the queue again; at most 20 times."""
    request = Request("train.py", workers=1, least_workers=least)
    done, requeued = submitted(request, 3, source, SLURM_RESTART_COUNT=str(runs))
    assert (done.returncode, requeued) == (code, ["requeue 7"] if is_requeued else []), done.stderr
    assert source != USR1 or done.stdout == "restart 2\n"
