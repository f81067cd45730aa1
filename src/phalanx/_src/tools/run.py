# SPDX-License-Identifier: Apache-2.0
"""`phalanx run`: starts the workers of a script, and stops all of them as soon as one fails."""

import io
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import click

from phalanx._src.cluster.resolvers.base import stall_limit_s, start_timeout_s
from phalanx._src.cluster.resolvers.environment import resolver_of_environment
from phalanx._src.cluster.resolvers.launchers import lone_task
from phalanx._src.cluster.spec import Task, addresses_of_workers
from phalanx._src.cluster.watch.pace import REPORT
from phalanx._src.cluster.watch.profiles import PROFILE, Span, clear, merge
from phalanx._src.launch.evaluator import Patience
from phalanx._src.launch.nodes import AbstractNodes, ThisNode
from phalanx._src.launch.output import open_standard_streams
from phalanx._src.launch.plan import ALONE, Machines, Request
from phalanx._src.launch.ray_nodes import RayNodes
from phalanx._src.launch.supervise import run_group
from phalanx._src.launch.templates import TEMPLATES
from phalanx._src.tools.command_line import (
    ARGUMENTS,
    IS_MODULE,
    Seconds,
    Text,
    environment_of_processes,
    errors_without_stack,
    warn_of_misplaced,
)
from phalanx.errors import InvalidArgumentError, arguments

_NO_PROFILE = "none, because no worker has run {} training steps under a strategy"


# Options behind SCRIPT are those of the script.
@click.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "--workers",
    default="1",
    show_default=True,
    metavar="N|MIN:MAX",
    help="Number of processes. With MIN:MAX, the others continue when one dies, as long as MIN are left, and a replacement starts.",
)
@click.option(
    "--in-cluster",
    is_flag=True,
    help="Run this command on each machine of the cluster that the environment describes. --workers MIN:MAX counts the workers of all machines.",
)
@click.option(
    "--ray",
    type=Text(),
    metavar="ADDRESS",
    help="Place the workers on the nodes of this Ray cluster (host:port, or auto), with a share of their cores and GPUs.",
)
@click.option("--devices-per-worker", type=int, help="Devices per process.  [default: 1; its share of the GPUs]")
@click.option("--evaluator", is_flag=True, help="Start one more process, which evaluates what the workers save.")
@click.option(
    "--max-restarts", type=click.IntRange(0), default=0, show_default=True, help="How often to restart after a failure."
)
@click.option("--grace-seconds", type=Seconds(0), default=5.0, show_default=True, help="Time from SIGTERM to SIGKILL.")
@click.option(
    "--evaluator-grace-seconds",
    type=Seconds(0),
    default=600.0,
    show_default=True,
    help="Time that the evaluator has to finish after the workers.",
)
@click.option(
    "--report",
    is_flag=True,
    help="At the end, show the step times of each worker, and how often the others waited for it.",
)
@click.option(
    "--profile",
    metavar="FIRST:LAST",
    help="Profile these training steps in all workers, and write one time line for Perfetto.",
)
@click.option(
    "--profile-folder",
    type=Text(),
    default="profile",
    show_default=True,
    metavar="DIR",
    help="Folder for the profiles.",
)
@IS_MODULE
@click.option(
    "--print", "template", type=click.Choice(list(TEMPLATES)), help="Print a template instead of starting anything."
)
@click.argument("target", metavar="SCRIPT")
@ARGUMENTS
def run(
    *,
    max_restarts: int,
    grace_seconds: float,
    evaluator_grace_seconds: float,
    template: str | None,
    workers: str,
    in_cluster: bool,
    ray: str | None,
    report: bool,
    profile: str | None,
    profile_folder: str,
    **options: Any,
) -> None:
    """Runs SCRIPT in every worker of a cluster, on this machine or on the nodes of Ray.

    Each worker gets TF_CONFIG, its devices and its share of the cores. If one fails, all stop; with --workers MIN:MAX, the others continue.

    With --evaluator, one more process runs SCRIPT as task 0 of the job `evaluator`, with one device. If it fails, it
    starts again alone, up to 10 times. If it has failed for good and all workers succeed, the exit code is its own.

    \b
    Exit codes:
      0      all workers have finished
      2      nothing was started: the command or the cluster is wrong
      42     the workers have saved before a preemption: start them again
      75     no progress: a worker was stuck, or ended while others waited
      76     too few workers or machines are left
      128+N  the worker that failed first was killed by signal N, or
             `phalanx run` was: 130 Ctrl-C, 137 out of memory, 143 SIGTERM
      other  that of the worker that failed first: 1 for an exception,
             or if the output of the workers cannot be written
    """
    open_standard_streams()
    with errors_without_stack():
        least, most = _numbers_of(workers)
        request = Request(workers=most, least_workers=least, **options)
        if template:
            _require_no_evaluator(request, template)
            _require_no_report(template, report=report)
            if profile:
                raise InvalidArgumentError(
                    f"--profile with --print {template}",
                    "the template starts the workers without a launcher that joins their profiles.",
                    f"{PROFILE}=100:110:FOLDER in the environment of the workers",
                )
            # Slurm and Kubernetes read UTF-8, whatever the terminal is set to.
            click.echo(TEMPLATES[template](request, max_restarts).encode(), nl=False)
            return
        if ray and in_cluster:
            raise InvalidArgumentError(
                f"--ray {ray} with --in-cluster", "one launcher starts all workers on Ray's nodes.", "omit --in-cluster"
            )
        # Before anything starts: otherwise each worker would fail by itself, and be started again.
        request.check_script()
        for limit_s in (start_timeout_s, stall_limit_s):
            limit_s(os.environ)
        warn_of_misplaced(request)
        if not (in_cluster or ray):
            _warn_of_cluster(request)
        # On several machines all launchers need the same secret, which only the user can give them.
        environment = dict(os.environ) if in_cluster else environment_of_processes()
        if report:
            environment[REPORT] = "1"
        # Absolute, because a node of Ray may lack the current folder, and then runs its workers in another one.
        span = profile and Span.parse(profile, Path(profile_folder).absolute())
        if span:
            # Files of an earlier run would become part of the time line.
            clear(span.folder)
            environment[PROFILE] = str(span)
        machines = _machines(request) if in_cluster else ALONE
        nodes: AbstractNodes = RayNodes(ray, request, environment) if ray else ThisNode(request, environment, machines)
        with nodes:
            outcome = run_group(
                nodes.plan,
                max_restarts=max_restarts,
                least_workers=least,
                machines=nodes.machines,
                start=nodes.start,
                grace_s=grace_seconds,
                patience=Patience(evaluator_grace_seconds),
                say=_say,
            )
        if span:
            # All workers have ended, so that their files are complete.
            trace_path = merge(span.folder)
            said = (
                f"written to {trace_path}; open it at https://ui.perfetto.dev"
                if trace_path
                else _NO_PROFILE.format(span.first)
            )
            click.echo(f"profile: {said}", err=True)
    sys.exit(outcome.exit_code)


def _say(text: str) -> None:
    """Writes a line to stderr, because stdout has what the workers print. They train on if nobody reads it any more."""
    try:
        click.echo(text, err=True)
    except OSError:
        # Python flushes stderr at its end, and would change the exit code.
        sys.stderr = io.StringIO()


def _numbers_of(workers: str) -> tuple[int | None, int]:
    """Returns the minimum, or None, and the maximum of --workers."""
    first, colon, last = workers.partition(":")
    if not (arguments.is_number(first) and (arguments.is_number(last) or not colon)):
        raise InvalidArgumentError(f"--workers {workers:.80}", "must be a number, or two numbers.", "--workers 2:4")
    return (int(first), int(last)) if colon else (None, int(first))


def _machines(request: Request) -> Machines:
    """Returns the machines of the cluster that the environment describes."""
    if request.least_workers is None:
        raise InvalidArgumentError(
            f"--in-cluster with --workers {request.workers}",
            "only a group whose workers may be lost is started from several machines. A fixed one needs no launcher there.",
            f"--workers {request.workers}:{request.workers}, or start the script itself on each machine",
        )
    resolver = resolver_of_environment(os.environ)
    spec = resolver.cluster_spec() if resolver else None
    if resolver is None or not spec or resolver.task_type is None or resolver.task_id is None:
        lone = lone_task(os.environ, command=shlex.join(request.command("python")))
        raise InvalidArgumentError(
            "--in-cluster",
            f"{lone.launch}, but nothing here has the addresses of the others."
            if lone
            else "nothing here describes a cluster.",
            lone.hint if lone else "srun phalanx run --in-cluster ...",
        )
    return Machines.of(spec, Task(resolver.task_type, resolver.task_id))


def _warn_of_cluster(request: Request) -> None:
    """Warns if the environment describes processes on other machines, which a group of this machine does not join."""
    resolver = resolver_of_environment(os.environ)
    spec = resolver.cluster_spec() if resolver else None
    count = len(addresses_of_workers(spec)) if spec else 1
    command = [*(["-m"] if request.is_module else []), request.target, *request.arguments]
    if count > 1:
        least = f"{request.least_workers or request.workers * count}:{request.workers * count}"
        what = f"The environment describes a cluster with {count} workers"
        hint = shlex.join(["phalanx", "run", "--in-cluster", "--workers", least, *command])
    elif resolver is None and (
        lone := lone_task(os.environ, num_started=request.workers, command=shlex.join(request.command("python")))
    ):
        what, hint = lone.launch, lone.hint
    else:
        return
    click.echo(
        f"phalanx: {what}, but this command starts a group on this machine alone, which trains by itself.\nHINT: {hint}",
        err=True,
    )


def _require_no_evaluator(request: Request, template: str) -> None:
    if request.evaluator:
        raise InvalidArgumentError(
            f"--evaluator with --print {template}",
            "the template starts only the processes that train. An evaluator needs its own job.",
            f"""TF_CONFIG='{{"task": {{"type": "evaluator", "index": 0}}}}' {shlex.join(request.command("python"))}""",
        )


def _require_no_report(template: str, *, report: bool) -> None:
    if report:
        raise InvalidArgumentError(
            f"--report with --print {template}",
            "the template starts the workers without a launcher that passes it on.",
            f"{REPORT}=1 in the environment of the workers",
        )
