# SPDX-License-Identifier: Apache-2.0
"""Templates that run a script as a cluster job, as `phalanx run --print` writes them. All functions are pure."""

import json
import re
import shlex
from pathlib import PurePath

from phalanx.launch.plan import Request, thread_pool

_CORES_PER_DEVICE = 2

_SLURM = """\
#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={workers}
#SBATCH --ntasks={workers}
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task={cores}
##SBATCH --gpus-per-task={devices}
# With GPUs, remove one # from the line above and delete the next two lines.
export PHALANX_CPU_DEVICES={devices}
export NPROC={threads}
export PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1
# Only processes that know this secret can join the cluster.
export PHALANX_TOKEN=${{PHALANX_TOKEN:-$(python -c "import secrets; print(secrets.token_hex(32))")}}

# The workers find each other through variables that srun sets. If one fails, srun ends all of them.
for PHALANX_RESTART in $(seq 0 {restarts}); do
  export PHALANX_RESTART
  srun --label --kill-on-bad-exit=1 --distribution=block {command} && exit 0
  code=$?
done
exit "$code"
"""

_KUBERNETES = """\
# JobSet creates the headless service {name}, through which the workers find each other. If one fails, it restarts all.
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
        backoffLimit: 0
        template:
          spec:
            restartPolicy: Never
            containers:
            - name: worker
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
              - {{name: JOBSET_NAME, value: {name}}}
              - {{name: REPLICATED_JOB_NAME, value: worker}}
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
              - {{name: PYTHONFAULTHANDLER, value: "1"}}
"""


def slurm(request: Request, max_restarts: int) -> str:
    """Returns a script for `sbatch` that runs the request with one worker per node.

    Example:
      >>> print(slurm(Request("train.py", workers=2), max_restarts=0).splitlines()[1])
      #SBATCH --job-name=train
    """
    return _SLURM.format(**_values(request, max_restarts), command=shlex.join(request.command("python")))


def kubernetes(request: Request, max_restarts: int) -> str:
    """Returns a JobSet for `kubectl apply` that runs the request with one worker per pod.

    Example:
      >>> print(kubernetes(Request("train.py", workers=2), max_restarts=0).splitlines()[4])
        name: "train"
    """
    # Kubernetes replaces $(NAME) by the value of a variable.
    words = [word.replace("$(", "$$(") for word in request.command("python")]
    return _KUBERNETES.format(**_values(request, max_restarts), command=json.dumps(words))


TEMPLATES = {"slurm": slurm, "kubernetes": kubernetes}
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
