# SPDX-License-Identifier: Apache-2.0
"""Templates that run a script as a cluster job, as `phalanx run --print` writes them. All functions are pure."""

import json
import re
import shlex
import textwrap
from pathlib import PurePath

from phalanx._src.launch.plan import Request, thread_pool

_CORES_PER_DEVICE = 2

_SLURM = """\
#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={workers}
#SBATCH --ntasks={workers}
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task={cores}
{more}##SBATCH --gpus-per-task={devices}
# With GPUs, remove one # from the line above and delete the next two lines.
export PHALANX_CPU_DEVICES={devices}
export NPROC={threads}
export PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1
# Only processes that know this secret can join the cluster.
export PHALANX_TOKEN=${{PHALANX_TOKEN:-$(python -c "import secrets; print(secrets.token_hex(32))")}}

{step}
"""

_FIXED_STEP = """\
# The workers find each other through variables that srun sets. If one fails, srun ends all of them.
for PHALANX_RESTART in $(seq 0 {restarts}); do
  export PHALANX_RESTART
  srun --label --kill-on-bad-exit=1 --distribution=block {command} && exit 0
  code=$?
done
exit "$code"
"""

_ELASTIC_STEP = """\
# Each node has one launcher, which starts its worker again. They meet on the first node, and go on without a node that is lost.
srun --label --no-kill --kill-on-bad-exit=0 --distribution=block {command}
"""

_JOBSET = """\
# JobSet creates the headless service {name}, through which the workers find each other. {failures}
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: "{name}"
spec:
  failurePolicy:
    maxRestarts: {restarts}
  replicatedJobs:
  - name: worker
    replicas: 1
    template:
      spec:
        completionMode: Indexed
        completions: {workers}
        parallelism: {workers}
{pods}
"""

_TRAIN_JOB = """\
# The JobSet of the TrainJob creates the headless service {name}, through which the workers find each other. {failures}
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainingRuntime
metadata:
  name: "{name}"
spec:
  mlPolicy:
    numNodes: {workers}
  template:
    spec:
      failurePolicy:
        maxRestarts: {restarts}
      replicatedJobs:
      - name: node
        template:
          metadata:
            labels:
              trainer.kubeflow.org/trainjob-ancestor-step: trainer
          spec:
            completionMode: Indexed
{pods}
---
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata:
  name: "{name}"
spec:
  runtimeRef:
    apiGroup: trainer.kubeflow.org
    kind: TrainingRuntime
    name: "{name}"
"""

_PODS = """\
backoffLimit: {pod_restarts}
template:
  spec:
    restartPolicy: {restart_policy}
    containers:
    - name: {job}
      image: registry.example.com/{name}:latest  # Your image, with the script in its working directory.
      command: {command}
      ports:
      - containerPort: 8470
      resources:
        limits:
          cpu: {cores}
          # nvidia.com/gpu: {devices}  # With GPUs, delete PHALANX_CPU_DEVICES and NPROC.
      env:
      - {{name: PHALANX_NUM_PODS, value: "{workers}"}}
      - {{name: JOBSET_NAME, value: "{name}"}}
      - {{name: REPLICATED_JOB_NAME, value: "{job}"}}
      - name: PHALANX_RESTART
        valueFrom:
          fieldRef:
            fieldPath: metadata.annotations['jobset.sigs.k8s.io/restart-attempt']
      # Only processes that know this secret can join the cluster. To make one:
      # kubectl create secret generic {name} --from-literal=token=$(openssl rand -hex 32)
      - name: PHALANX_TOKEN
        valueFrom:
          secretKeyRef: {{name: "{name}", key: token}}
      - {{name: PHALANX_CPU_DEVICES, value: "{devices}"}}
      - {{name: NPROC, value: "{threads}"}}
      - {{name: PYTHONUNBUFFERED, value: "1"}}
      - {{name: PYTHONFAULTHANDLER, value: "1"}}"""

_POD_RESTARTS = 100


def slurm(request: Request, max_restarts: int) -> str:
    """Returns a script for `sbatch` that runs the request with one worker per node.

    Example:
      >>> print(slurm(Request("train.py", workers=2), max_restarts=0).splitlines()[1])
      #SBATCH --job-name=train
    """
    values = _values(request, max_restarts)
    is_elastic = request.least_workers is not None
    step = (_ELASTIC_STEP if is_elastic else _FIXED_STEP).format(
        **values, command=shlex.join(_command(request, max_restarts))
    )
    # By default, Slurm ends the whole job when it loses a node.
    return _SLURM.format(**values, more="#SBATCH --no-kill\n" if is_elastic else "", step=step.rstrip())


def kubernetes(request: Request, max_restarts: int) -> str:
    """Returns a JobSet for `kubectl apply` that runs the request with one worker per pod.

    Example:
      >>> print(kubernetes(Request("train.py", workers=2), max_restarts=0).splitlines()[4])
        name: "train"
    """
    return _on_pods(_JOBSET, request, max_restarts, job="worker", indent=8)


def kubeflow(request: Request, max_restarts: int) -> str:
    """Returns a TrainJob of Kubeflow Trainer, with its runtime, for `kubectl apply`, with one worker per pod.

    Example:
      >>> print(kubeflow(Request("train.py", workers=2), max_restarts=0).splitlines()[2])
      kind: TrainingRuntime
    """
    # Kubeflow Trainer looks for a job and a container of this name.
    return _on_pods(_TRAIN_JOB, request, max_restarts, job="node", indent=12)


def _on_pods(template: str, request: Request, max_restarts: int, *, job: str, indent: int) -> str:
    values = _values(request, max_restarts)
    is_elastic = request.least_workers is not None
    # Kubernetes replaces $(NAME) by the value of a variable.
    words = [word.replace("$(", "$$(") for word in _command(request, max_restarts)]
    pods = _PODS.format(
        **values,
        job=job,
        command=json.dumps(words),
        pod_restarts=_POD_RESTARTS if is_elastic else 0,
        restart_policy="OnFailure" if is_elastic else "Never",
    )
    failures = "The others go on without a pod that fails." if is_elastic else "If one fails, all start again."
    return template.format(**values, failures=failures, pods=textwrap.indent(pods, " " * indent))


def _command(request: Request, max_restarts: int) -> tuple[str, ...]:
    """Returns what each node or pod runs: the script, or the launcher of an elastic group."""
    if request.least_workers is None:
        return request.command("python")
    workers = ("--workers", f"{request.least_workers}:{request.workers}")
    restarts = ("--max-restarts", f"{max_restarts}") if max_restarts else ()
    return ("phalanx", "run", "--in-cluster", *workers, *restarts, *request.command("python")[1:])


TEMPLATES = {"slurm": slurm, "kubernetes": kubernetes, "kubeflow": kubeflow}
"""The function that writes the template, per scheduler."""


def _values(request: Request, max_restarts: int) -> dict[str, str | int]:
    devices = request.devices_per_worker or 1
    cores = _CORES_PER_DEVICE * devices
    return {
        "name": _name(request),
        "workers": request.workers,
        "devices": devices,
        "cores": cores,
        "threads": thread_pool(devices, cores, workers=1),
        "restarts": max_restarts,
    }


def _name(request: Request) -> str:
    """Returns a valid name for a job and a part of host names: letters, digits and dashes."""
    stem = request.target.rpartition(".")[2] if request.is_module else PurePath(request.target).stem
    name = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")
    # A host name has at most 63 characters, with the numbers of job and pod. A service name begins with a letter.
    return f"train-{name}"[:40].rstrip("-") if not name[:1].isalpha() else name[:40].rstrip("-")
