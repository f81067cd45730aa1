# SPDX-License-Identifier: Apache-2.0
"""Fills in the files of `job_files`, which run a script as a cluster job, as `phalanx run --print` writes them."""

import json
import os
import re
import shlex
import textwrap
from collections.abc import Mapping
from pathlib import Path, PurePath

from phalanx._src.launch.plan import Request, thread_pool

# As many as the threads that XLA needs per device. See `thread_pool`.
_CORES_PER_DEVICE = 2
_FOLDER = Path(__file__).with_name("job_files")
_PLACE = re.compile(r"^([ ]*)<([a-z_]+)>\n|<([a-z_]+)>", re.MULTILINE)
# The limit of a Job counts the failures of all its pods together, until the training ends.
_POD_RESTARTS = 100
# Each is shorter than the time from SIGTERM to SIGKILL: KillWait of Slurm (30 s by default), and that of the pods.
_SLURM_GRACE_S, _POD_GRACE_S = 25, 100


def slurm(request: Request, max_restarts: int) -> str:
    """Returns a script for `sbatch` that runs the request with one worker per node.

    Example:
      >>> print(slurm(Request("train.py", workers=2), max_restarts=0).splitlines()[1])
      #SBATCH --job-name=train
    """
    is_elastic = request.least_workers is not None
    values = _values(request, max_restarts)
    command = " ".join(map(_shell_word, _command(request, max_restarts, _SLURM_GRACE_S)))
    step = _filled("slurm_elastic_step.sh" if is_elastic else "slurm_step.sh", {**values, "command": command})
    # By default, Slurm ends the whole job when it loses a node.
    return _filled(
        "slurm.sbatch", {**values, "more_options": "#SBATCH --no-kill\n" if is_elastic else "", "step": step}
    )


def kubernetes(request: Request, max_restarts: int) -> str:
    """Returns a JobSet for `kubectl apply` that runs the request with one worker per pod.

    Example:
      >>> print(kubernetes(Request("train.py", workers=2), max_restarts=0).splitlines()[6])
        name: "train"
    """
    return _on_pods("jobset.yaml", request, max_restarts, job="worker")


def kubeflow(request: Request, max_restarts: int) -> str:
    """Returns a TrainJob of Kubeflow Trainer, with its runtime, for `kubectl apply`, with one worker per pod.

    Example:
      >>> print(kubeflow(Request("train.py", workers=2), max_restarts=0).splitlines()[4])
      kind: TrainingRuntime
    """
    # Kubeflow Trainer looks for a job and a container of this name.
    return _on_pods("train_job.yaml", request, max_restarts, job="node")


def _on_pods(file: str, request: Request, max_restarts: int, *, job: str) -> str:
    is_elastic = request.least_workers is not None
    words = [_pod_word(word) for word in _command(request, max_restarts, _POD_GRACE_S)]
    values = {
        **_values(request, max_restarts),
        "job": job,
        "command": f"[{', '.join(words)}]",
        "pod_restarts": f"{_POD_RESTARTS if is_elastic else 0}",
        "if_preempted": "Ignore" if is_elastic else "FailJob",
        "failures": "If one fails, the others continue." if is_elastic else "If one fails, all start again.",
    }
    return _filled(file, {**values, "pods": _filled("pods.yaml", values)})


def _shell_word(word: str) -> str:
    """Returns a word of a command as bash reads it, without control characters, which a terminal would obey."""
    if word.isprintable():
        return shlex.quote(word)
    escaped = word.replace("\\", r"\\").replace("'", r"\'")
    characters = [c if c.isprintable() else "".join(f"\\x{byte:02x}" for byte in os.fsencode(c)) for c in escaped]
    return f"$'{''.join(characters)}'"


def _pod_word(word: str) -> str:
    """Returns a word of a command as YAML and Kubernetes read it.

    YAML joins no pairs of surrogates, which JSON has for a character beyond 16 bits. Kubernetes replaces $(NAME) by the value of a variable, and
    $$ by $, wherever they are.
    """
    characters = [f"\\U{ord(c):08x}" if ord(c) > 0xFFFF else json.dumps(c)[1:-1] for c in word.replace("$", "$$")]
    return f'"{"".join(characters)}"'


def _filled(file: str, values: Mapping[str, str]) -> str:
    """Returns a file with values in place of the names in angle brackets. A name alone on a line stands for whole lines."""

    def value_of(place: re.Match[str]) -> str:
        indent, lines, word = place.groups()
        return values[word] if word else textwrap.indent(values[lines], indent)

    return _PLACE.sub(value_of, (_FOLDER / file).read_text(encoding="utf-8"))


def _command(request: Request, max_restarts: int, grace_s: int) -> tuple[str, ...]:
    """Returns the command of each node or pod: the script, or the launcher of an elastic group."""
    if request.least_workers is None:
        return request.command("python")
    workers = ("--workers", f"{request.least_workers}:{request.workers}")
    # With a restart, a machine that was cut off from the others joins them again.
    restarts = ("--max-restarts", f"{max(1, max_restarts)}", "--grace-seconds", f"{grace_s}")
    return ("phalanx", "run", "--in-cluster", *workers, *restarts, *request.command("python")[1:])


TEMPLATES = {"slurm": slurm, "kubernetes": kubernetes, "kubeflow": kubeflow}
"""The function that writes the template, per scheduler."""


def _values(request: Request, max_restarts: int) -> dict[str, str]:
    devices = request.devices_per_worker or 1
    cores = _CORES_PER_DEVICE * devices
    return {
        "name": _name(request),
        "workers": f"{request.workers}",
        "devices": f"{devices}",
        "cores": f"{cores}",
        "threads": f"{thread_pool(devices, cores, workers=1)}",
        "restarts": f"{max_restarts}",
    }


def _name(request: Request) -> str:
    """Returns a valid name for a job and a part of host names: letters, digits and dashes."""
    stem = request.target.rpartition(".")[2] if request.is_module else PurePath(request.target).stem
    name = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")
    # A host name has at most 63 characters, with the numbers of job and pod. A service name begins with a letter.
    return f"train-{name}"[:40].rstrip("-") if not name[:1].isalpha() else name[:40].rstrip("-")
