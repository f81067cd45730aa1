"""The templates for schedulers: parsed, and run with what the scheduler would set, beside `phalanx run`."""

import json
import os
import re
import stat
import subprocess
import sys

import pytest

from phalanx._src.cluster.resolvers.environment import resolver_of_environment
from phalanx._src.cluster.spec import Task, tf_config
from phalanx._src.launch.plan import Machine, Machines, Request, plan
from phalanx._src.launch.templates import TEMPLATES, kubeflow, kubernetes, slurm

yaml = pytest.importorskip("yaml", reason="PyYAML reads the templates for Kubernetes")

AWKWARD = ("--name", "a b", "$HOME", "it's", "{x}", '"q"', "$(NPROC)")

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
        assert options(text)["nodes"] == options(text)["ntasks"] == "2"
    elif write is kubernetes:
        found = yaml.safe_load(text)
        assert (found["apiVersion"], found["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
        assert found["spec"]["failurePolicy"] == {"maxRestarts": 3}
    else:
        runtime, job = yaml.safe_load_all(text)
        assert runtime["apiVersion"] == job["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
        group, kind, name = "trainer.kubeflow.org", "TrainingRuntime", runtime["metadata"]["name"]
        assert job["spec"] == {"runtimeRef": {"apiGroup": group, "kind": kind, "name": name}}
        assert (runtime["kind"], job["kind"]) == ("TrainingRuntime", "TrainJob")
        assert runtime["spec"]["template"]["spec"]["failurePolicy"] == {"maxRestarts": 3}


def test_jobset_fails_as_a_group():
    """An indexed job whose failure is one of the whole group, with the command as it was given, and the number of restarts."""
    found = yaml.safe_load(kubernetes(Request("package.train", AWKWARD, is_module=True, workers=2), 0))
    job = found["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert (job["completionMode"], job["completions"], job["parallelism"], job["backoffLimit"]) == ("Indexed", 2, 2, 0)
    assert job["template"]["spec"]["restartPolicy"] == "Never"
    (container,) = job["template"]["spec"]["containers"]
    command = container["command"]
    # Kubernetes makes $( of $$(, and leaves every other dollar sign alone.
    assert [word.replace("$$(", "$(") for word in command] == ["python", "-m", "package.train", *AWKWARD]
    assert "$$(NPROC)" in command
    # An annotation that JobSet gives to each pod.
    (restart,) = [entry for entry in container["env"] if entry["name"] == "PHALANX_RESTART"]
    path = "metadata.annotations['jobset.sigs.k8s.io/restart-attempt']"
    assert restart["valueFrom"] == {"fieldRef": {"fieldPath": path}}


@pytest.mark.parametrize("write", [kubernetes, kubeflow])
def test_elastic_pods_start_again_alone(write):
    """A pod that fails ends neither the others nor the job; each runs a launcher, which finds the cluster of pods."""
    text = write(Request("train.py", ("--lr", "1"), workers=4, least_workers=2), 3)
    _, spec, count = job_of(text)
    assert (count, spec["backoffLimit"], spec["template"]["spec"]["restartPolicy"]) == (4, 100, "OnFailure")
    (container,) = spec["template"]["spec"]["containers"]
    run = ["phalanx", "run", "--in-cluster", "--workers", "2:4", "--max-restarts", "3", "train.py", "--lr", "1"]
    assert container["command"] == run
    resolvers = [resolver_of_environment(environ) for environ in pods(text)]
    machines = [Machines.of(r.cluster_spec(), Task(r.task_type, r.task_id)) for r in resolvers]
    first = f"train-{container['name']}-0-0.train:8470"
    assert machines == [Machines(index, 4, first) for index in range(4)]


def test_elastic_script_keeps_the_other_nodes():
    """Neither a launcher that fails nor a lost node ends the step, which is started once."""
    text = slurm(Request("train.py", workers=4, least_workers=2), 3)
    assert "#SBATCH --no-kill\n" in text
    (srun,) = [line for line in text.splitlines() if line.startswith("srun")]
    assert "--no-kill --kill-on-bad-exit=0 " in srun
    assert srun.endswith(" phalanx run --in-cluster --workers 2:4 --max-restarts 3 train.py")
    assert text.splitlines()[-1] == srun


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


@pytest.mark.slow
@pytest.mark.parametrize(("failures", "restarts", "code"), [(2, 3, 0), (9, 1, 1)])
def test_script_runs_and_restarts_tasks(tmp_path, environment, failures, restarts, code):
    """The script for sbatch starts the tasks with their arguments, and again until they succeed or may not restart."""
    (tmp_path / "tell.py").write_text(TELL.format(failures=failures))
    (tmp_path / "srun").write_text(SRUN.format(python=sys.executable))
    (tmp_path / "srun").chmod(stat.S_IRWXU)
    (tmp_path / "python").symlink_to(sys.executable)
    text = slurm(Request("tell.py", AWKWARD, workers=2), restarts)
    environ = {**environment, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_NTASKS": options(text)["ntasks"]}
    environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(["bash"], input=text, cwd=tmp_path, env=environ, text=True, capture_output=True, timeout=500)
    assert done.returncode == code, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    ranks = [(0, str(restart)) for restart in range(min(failures, restarts + 1))]
    ranks += [] if code else [(rank, str(failures)) for rank in range(2)]
    assert found == [["worker", rank, restart, list(AWKWARD)] for rank, restart in ranks]
