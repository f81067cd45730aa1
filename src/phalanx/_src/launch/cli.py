# SPDX-License-Identifier: Apache-2.0
"""The command line: `phalanx run`, `cluster`, `doctor`, `env`, `estimate`, `bench`, `migrate` and `checkpoint`."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

import click
from typing_extensions import override

from phalanx._src.cluster.connections.hosts import LOOPBACK
from phalanx._src.cluster.connections.openings import openings
from phalanx._src.cluster.connections.secret import TOKEN, new_token
from phalanx._src.cluster.resolvers.base import ClusterResolver
from phalanx._src.cluster.resolvers.environment import resolver_of_environment
from phalanx._src.cluster.resolvers.launchers import lone_task
from phalanx._src.cluster.spec import ClusterSpec, Task, is_unlisted, leader
from phalanx._src.cluster.watch.pace import REPORT
from phalanx._src.cluster.watch.profiles import PROFILE, Span, clear, merge
from phalanx._src.launch.evaluator import Patience
from phalanx._src.launch.misplaced import misplaced, warning_of
from phalanx._src.launch.nodes import AbstractNodes, ThisNode
from phalanx._src.launch.plan import ALONE, JOB, Machines, Request, free_ports
from phalanx._src.launch.ray_nodes import RayNodes
from phalanx._src.launch.supervise import run_group
from phalanx._src.launch.tables import print_table
from phalanx._src.launch.templates import TEMPLATES
from phalanx.errors import ClusterSourceError, InvalidArgumentError, PhalanxError

_NO_CLUSTER = """Nothing here describes a cluster: this process is alone.
HINT: phalanx run --workers 2 train.py    starts one on this machine
HINT: phalanx run --workers 2 --print slurm train.py    writes a script for sbatch (or: --print kubernetes)
HINT: TF_CONFIG='{"cluster": {"worker": ["host0:12345", "host1:12345"]}, "task": {"type": "worker", "index": 0}}'"""


_CHECKPOINTS = "phalanx._src.tools.checkpoint"


@final
class _Refused(click.ClickException):
    """Shows a Phalanx error without a stack trace."""

    exit_code = 2

    @override
    def show(self, file: object = None) -> None:
        click.echo(f"phalanx: {self.message}", err=True)


@contextmanager
def _errors_told() -> Iterator[None]:
    try:
        yield
    except PhalanxError as e:
        raise _Refused(str(e)) from e


_IS_MODULE = click.option(
    "-m", "is_module", is_flag=True, help="Treat SCRIPT as the name of a module, like `python -m`."
)
_ARGUMENTS = click.argument("arguments", metavar="[ARGS]...", nargs=-1, type=click.UNPROCESSED)
_OUTPUT = click.option(
    "--output", multiple=True, help="Also write this file: .json, or .png, .svg, .pdf. May be repeated."
)


@click.group()
@click.version_option(package_name="phalanx")
def main() -> None:
    """Phalanx: distributed training with Keras 3 on JAX."""


@main.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "--workers",
    default="1",
    show_default=True,
    metavar="N|MIN:MAX",
    help="Number of processes. With MIN:MAX, the others go on when one dies, as long as there are MIN, and another is started.",
)
@click.option(
    "--in-cluster",
    is_flag=True,
    help="Run this command on each machine of the cluster that the environment describes. --workers MIN:MAX counts those of all.",
)
@click.option(
    "--ray",
    metavar="ADDRESS",
    help="Place the workers on the nodes of this Ray cluster (host:port, or auto), with a share of their cores and GPUs.",
)
@click.option("--devices-per-worker", type=int, help="Devices per process.  [default: 1; its share of the GPUs]")
@click.option("--evaluator", is_flag=True, help="Start one more process, which evaluates what the workers save.")
@click.option(
    "--max-restarts", type=click.IntRange(0), default=0, show_default=True, help="How often to restart after a failure."
)
@click.option(
    "--grace-seconds", type=click.FloatRange(0), default=5.0, show_default=True, help="Time from SIGTERM to SIGKILL."
)
@click.option(
    "--evaluator-grace-seconds",
    type=click.FloatRange(0),
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
@click.option("--profile-folder", default="profile", show_default=True, metavar="DIR", help="Folder for the profiles.")
@_IS_MODULE
@click.option(
    "--print", "template", type=click.Choice(list(TEMPLATES)), help="Print a template instead of starting anything."
)
@click.argument("target", metavar="SCRIPT")
@_ARGUMENTS
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
    """Runs SCRIPT in every worker of a cluster, here or on the nodes of Ray, and stops all workers as soon as one fails.

    Each worker gets TF_CONFIG, its devices and its share of the cores.

    With --evaluator, one more process runs SCRIPT as task 0 of the job `evaluator`, with one device. If it fails, it
    starts again alone, up to 10 times. If it has failed for good and all workers succeed, the exit code is its own.

    \b
    Exit codes:
      0      all workers have finished
      2      nothing was started: the command or the cluster is wrong
      42     the workers have saved before a preemption: start them again
      75     no progress: a worker stood still, or ended while others waited
      76     too few workers are left, or the first machine is gone
      128+N  the worker that failed first was killed by signal N, or
             `phalanx run` was: 130 Ctrl-C, 137 out of memory, 143 SIGTERM
      other  that of the worker that failed first: 1 for an exception
    """
    with _errors_told():
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
            click.echo(TEMPLATES[template](request, max_restarts), nl=False)
            return
        if ray and in_cluster:
            raise InvalidArgumentError(
                f"--ray {ray} with --in-cluster",
                "one launcher starts all workers on Ray's nodes.",
                "leave out --in-cluster",
            )
        request.check_script()
        _warn_of_misplaced(request)
        environment = dict(os.environ) if in_cluster else _environment()
        if report:
            environment[REPORT] = "1"
        span = profile and Span.parse(profile, Path(profile_folder).absolute())
        if span:
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
                say=lambda text: click.echo(text, err=True),
            )
        if span:
            trace_path = merge(span.folder)
            said = (
                f"written to {trace_path}; open it at https://ui.perfetto.dev"
                if trace_path
                else _NO_PROFILE.format(span.first)
            )
            click.echo(f"profile: {said}", err=True)
    sys.exit(outcome.exit_code)


_NO_PROFILE = "none, because no worker has made {} training steps under a strategy"


@main.command()
def cluster() -> None:
    """Shows the cluster that the environment of this process describes."""
    with _errors_told():
        resolver = resolver_of_environment(os.environ)
        spec = resolver.cluster_spec() if resolver else None
        if resolver is None or not spec:
            click.echo(_NO_CLUSTER)
            return
        _show(resolver, spec)


@main.command()
@click.option("--shared", metavar="DIR", help="A folder that all workers must see, such as the checkpoint folder.")
@click.option("--timeout-seconds", default=30.0, show_default=True, help="How long to wait for the other processes.")
@click.option("--ports", is_flag=True, help="Only show which ports would be opened, where, and who gets in.")
def doctor(*, shared: str | None, timeout_seconds: float, ports: bool) -> None:
    """Starts the cluster that the environment describes and checks it. Prints PASS, or FAIL and a HINT, per check.

    Run it in all processes of the cluster at the same time, for example with srun. Without a cluster description, it tries
    two processes on this machine. It checks names, proxies, the port, the roll call, an all-reduce, addresses, versions,
    clocks and a shared folder. The exit code is 0 if all checks pass. With --ports, it starts
    nothing.
    """
    arguments = ["--timeout-s", str(timeout_seconds), *(["--shared", shared] if shared else [])]
    with _errors_told():
        resolver = resolver_of_environment(os.environ)
        spec = resolver.cluster_spec() if resolver else ClusterSpec({})
        if ports:
            _show_ports(spec)
            return
        if spec:
            code = _child("phalanx._src.tools.doctor", arguments)
        elif lone := lone_task(os.environ):
            raise ClusterSourceError(
                lone.launch, "nothing tells it the addresses of the others, so each would train alone.", lone.hint
            )
        else:
            click.echo("Nothing here describes a cluster: trying two processes on this machine.")
            request = Request("phalanx._src.tools.doctor", tuple(arguments), is_module=True, workers=2)
            # The checks print their own lines.
            with ThisNode(request, _environment()) as node:
                code = run_group(node.plan, say=lambda _: None).exit_code
    sys.exit(1 if code else 0)


@main.command()
@click.option("--json", "is_json", is_flag=True, help="Print JSON.")
def env(is_json: bool) -> None:
    """Shows versions, system, devices and variables, for a bug report. Hides the values of secrets."""
    sys.exit(_child("phalanx._src.tools.env", ["--json"] if is_json else []))


@main.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "--topology",
    "topologies",
    multiple=True,
    required=True,
    help="For example v5e:16x16, 2*v5e:16x16, v5p:1,16,4096, h100:8, h100:512x8 or cpu:2. May be repeated.",
)
@click.option(
    "--devices",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Number of CPU devices that SCRIPT sees: those of one replica, or the most of any cpu:N.",
)
@_OUTPUT
@_IS_MODULE
@click.argument("target", metavar="SCRIPT")
@_ARGUMENTS
def estimate(  # noqa: PLR0917
    topologies: Sequence[str],
    devices: int,
    output: Sequence[str],
    is_module: bool,
    target: str,
    arguments: Sequence[str],
) -> None:
    """Predicts a step of SCRIPT on hardware that is not here.

    Runs SCRIPT on CPUs until its first training step, which the real compiler then compiles for each topology. Nothing runs
    there. A replica gets as many rows as a replica of SCRIPT has with --devices. The exit code is 0 if the step fits everywhere, and 3 if
    it does not.
    """
    with _errors_told():
        Request(target, tuple(arguments), is_module=is_module).check_script()
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "PHALANX_CPU_DEVICES": str(devices),
        # The compilers must neither look for hardware nor measure on it.
        "CUDA_VISIBLE_DEVICES": "-1",
        "TPU_SKIP_MDS_QUERY": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0".strip(),
    }
    kind = "module" if is_module else "script"
    sys.exit(
        _child(
            "phalanx._src.tools.estimate",
            [" ".join(topologies), "\n".join(output), kind, target, *arguments],
            environment,
        )
    )


@main.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "--devices",
    type=click.IntRange(1),
    help="The most devices of one process.  [default: all GPUs or cores, at most 8]",
)
@click.option(
    "--processes", type=click.IntRange(1), help="The most processes, of one device each.  [default: as --devices]"
)
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True, help="How often to run each, in turn.")
@click.option(
    "--steps",
    type=click.IntRange(1),
    default=30,
    show_default=True,
    help="Training steps (or calls of several) to measure per run.",
)
@click.option(
    "--timeout-seconds",
    "timeout_s",
    type=click.FloatRange(1),
    default=600.0,
    show_default=True,
    help="How long a run may take.",
)
@_OUTPUT
@click.option(
    "--links",
    is_flag=True,
    help="Measure the links between processes, or those of a cluster, instead of running SCRIPT.",
)
@click.option("--compare", nargs=2, metavar="A.json B.json", help="Compare two measurements instead of running SCRIPT.")
@_IS_MODULE
@click.argument("target", metavar="[SCRIPT]", required=False)
@_ARGUMENTS
def bench(target: str | None, arguments: Sequence[str], **options: object) -> None:
    """Measures how fast SCRIPT trains on 1, 2, ... devices and processes of this machine, and where the time of a step goes.

    Each run ends SCRIPT after some training steps. `{devices}` and `{processes}` in ARGS stand for the numbers of a run.
    """
    with _errors_told():
        if target is None and not (options["compare"] or options["links"]):
            raise InvalidArgumentError("phalanx bench", "there is no script to run.", "phalanx bench train.py")
        if options["compare"] and (target or options["output"] or options["links"]):
            raise InvalidArgumentError(
                "phalanx bench --compare with a script, --links or --output",
                "it measures nothing and prints a table.",
                "phalanx bench --compare before.json after.json",
            )
        if options["links"] and target:
            raise InvalidArgumentError(
                f"phalanx bench --links {target}", "it runs no script.", "phalanx bench --links --processes 2"
            )
        if target is not None:
            request = Request(target, tuple(arguments), is_module=bool(options["is_module"]))
            request.check_script()
            _warn_of_misplaced(request)
    settings = {"target": target, "arguments": list(arguments), **options}
    sys.exit(_child("phalanx._src.tools.bench", [json.dumps(settings)]))


@main.command()
@click.option("-o", "--output", metavar="PATH", help="Write the new program, or the folder of new programs, here.")
@click.option("--in-place", is_flag=True, help="Change the files.")
@click.option("--diff", is_flag=True, help="Print a diff, and write nothing.  [default]")
@click.option("--check", is_flag=True, help="Print the report only.")
@click.argument("path")
def migrate(**options: object) -> None:
    """Rewrites PATH, a program of tf.distribute, as a program of Phalanx: a file, a notebook, or a folder of them.

    The exit code is 0 if everything was migrated, 1 if lines need a look, and 2 if a file cannot be read.
    """
    if sum(bool(options[name]) for name in ("output", "in_place", "diff", "check")) > 1:
        raise click.UsageError("use one of -o, --in-place, --diff and --check")
    sys.exit(_child("phalanx._src.tools.migrate", [json.dumps(options)]))


@main.group()
def checkpoint() -> None:
    """Lists, shows, compares and exports checkpoints of `phalanx.train`."""


@checkpoint.command("ls")
@click.argument("folder", default=".")
def list_(folder: str) -> None:
    """Lists the checkpoints in FOLDER, oldest first."""
    sys.exit(_child(_CHECKPOINTS, ["ls", folder]))


@checkpoint.command("show")
@click.argument("path")
def show(path: str) -> None:
    """Shows names, shapes, dtypes and sizes in PATH: a checkpoint, or a folder for the latest in it."""
    sys.exit(_child(_CHECKPOINTS, ["show", path]))


@checkpoint.command("diff")
@click.argument("first")
@click.argument("second")
def diff(first: str, second: str) -> None:
    """Shows how two checkpoints differ. The exit code is 0 if they are equal, and 1 if they differ."""
    sys.exit(_child(_CHECKPOINTS, ["diff", first, second]))


@checkpoint.command("export")
@click.argument("path")
@click.argument("output")
@click.option(
    "--object", "name", default="", metavar="NAME", help="Only what was saved under this name, such as `model`."
)
def export(path: str, output: str, name: str) -> None:
    """Writes the arrays of PATH into OUTPUT, a new file that ends with .npz or .safetensors; or its model, with .keras."""
    sys.exit(_child(_CHECKPOINTS, ["export", path, output, name]))


def _numbers_of(workers: str) -> tuple[int | None, int]:
    """Returns the minimum, or None, and the maximum of --workers."""
    first, colon, last = workers.partition(":")
    if not (first.isdecimal() and (last.isdecimal() or not colon)):
        raise InvalidArgumentError(f"--workers {workers}", "must be a number, or two numbers.", "--workers 2:4")
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
        raise InvalidArgumentError(
            "--in-cluster", "nothing here describes a cluster.", "srun phalanx run --in-cluster ..."
        )
    return Machines.of(spec, Task(resolver.task_type, resolver.task_id))


def _warn_of_misplaced(request: Request) -> None:
    """Warns if an option of the present command stands after the script. One that also stands before it was understood."""
    context = click.get_current_context()
    explicit = click.core.ParameterSource.COMMANDLINE
    takes_value = {
        name: not option.is_flag
        for option in context.command.params
        if isinstance(option, click.Option) and context.get_parameter_source(f"{option.name}") is not explicit
        for name in option.opts
        if name.startswith("--")
    }
    moved, remaining = misplaced(request.target, request.arguments, takes_value)
    if moved:
        script = [*(["-m"] if request.is_module else []), request.target]
        click.echo(warning_of(f"phalanx {context.command.name}", script, moved, remaining), err=True)


def _require_no_evaluator(request: Request, template: str) -> None:
    if request.evaluator:
        raise InvalidArgumentError(
            f"--evaluator with --print {template}",
            "the template starts only the processes that train. An evaluator is a job of its own.",
            f"""TF_CONFIG='{{"task": {{"type": "evaluator", "index": 0}}}}' {shlex.join(request.command("python"))}""",
        )


def _require_no_report(template: str, *, report: bool) -> None:
    if report:
        raise InvalidArgumentError(
            f"--report with --print {template}",
            "the template starts the workers without a launcher that passes it on.",
            f"{REPORT}=1 in the environment of the workers",
        )


def _environment() -> dict[str, str]:
    """Returns the environment of the processes to start, with a secret that only they know, unless the user has set one."""
    return {**os.environ, TOKEN: os.environ.get(TOKEN) or new_token()}


def _child(module: str, arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> int:
    """Runs a module in a child process, because the launcher does not import JAX. Returns its exit code.

    It imports nothing from the current folder, which may be another user's.
    """
    return subprocess.run([sys.executable, "-P", "-m", module, *arguments], check=False, env=environment).returncode


def _show_ports(spec: ClusterSpec) -> None:
    title = "The cluster that the environment describes"
    if not spec:
        title = "Nothing here describes a cluster. Under phalanx run --workers 2, for example"
        spec = ClusterSpec({JOB: [f"{LOOPBACK}:{port}" for port in free_ports(2)]})
    print_table(("port", "what listens", "where", "who gets in"), openings(spec), title=title, has_box=True)


def _show(resolver: ClusterResolver, spec: ClusterSpec) -> None:
    this_task, chief = (resolver.task_type, resolver.task_id), leader(spec)
    rows = []
    for task in [Task(job, i) for job in spec.jobs for i in spec.task_indices(job)]:
        notes = [("chief", task == chief), ("this process", (task.type, task.index) == this_task)]
        said = ", ".join(note for note, is_so in notes if is_so)
        rows.append((task.type, str(task.index), spec.task_address(task.type, task.index), said))
    if resolver.task_type == "evaluator" and is_unlisted(spec, Task("evaluator", 0)):
        rows.append(("evaluator", str(resolver.task_id), "", "this process"))
    title = f"As {type(resolver).__name__} sees it"
    print_table(("job", "task", "address", ""), rows, title=title, has_box=True)
