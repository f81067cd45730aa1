# SPDX-License-Identifier: Apache-2.0
"""`phalanx doctor`, on the command line. It starts the processes that run the checks."""

import os
import sys

import click

from phalanx._src.cluster.connections.hosts import LOOPBACK
from phalanx._src.cluster.connections.openings import openings
from phalanx._src.cluster.resolvers.environment import resolver_of_environment
from phalanx._src.cluster.resolvers.launchers import lone_task
from phalanx._src.cluster.spec import ClusterSpec
from phalanx._src.cluster.watch import membership
from phalanx._src.launch.nodes import ThisNode
from phalanx._src.launch.plan import JOB, Request, free_ports
from phalanx._src.launch.supervise import run_group
from phalanx._src.launch.tables import print_table
from phalanx._src.tools import child
from phalanx._src.tools.command_line import Seconds, Text, environment_of_processes, errors_without_stack
from phalanx.errors import ClusterSourceError

_CHECKS = "phalanx._src.tools.doctor"


@click.command()
@click.option(
    "--shared", type=Text(), metavar="DIR", help="A folder that all workers must see, such as the checkpoint folder."
)
@click.option(
    "--timeout-seconds",
    type=Seconds(0, min_open=True),
    default=30.0,
    show_default=True,
    help="How long to wait for the other processes.",
)
@click.option("--ports", is_flag=True, help="Only show which ports would be opened, where, and who gets in.")
def doctor(*, shared: str | None, timeout_seconds: float, ports: bool) -> None:
    """Starts the cluster that the environment describes and checks it. Prints PASS, or FAIL and a HINT, per check.

    Run it in all processes of the cluster at the same time, for example with srun. Without a cluster description, it tries
    two processes on this machine. It checks names, proxies, the port, the handshake, an all-reduce, addresses, versions,
    clocks and a shared folder. The exit code is 0 if all checks pass. With --ports, it starts
    nothing.
    """
    arguments = ["--timeout-s", str(timeout_seconds), *(["--shared", shared] if shared else [])]
    with errors_without_stack():
        if membership.is_elastic():
            raise ClusterSourceError(
                "phalanx doctor in a worker of phalanx run --workers MIN:MAX",
                "the workers of an elastic group learn their cluster when they train.",
                "phalanx doctor without phalanx run, on each machine",
            )
        resolver = resolver_of_environment(os.environ)
        spec = resolver.cluster_spec() if resolver else ClusterSpec({})
        if ports:
            _show_ports(spec)
            return
        if spec:
            code = child.run(_CHECKS, arguments)
        elif lone := lone_task(os.environ):
            raise ClusterSourceError(
                lone.launch, "it does not know the addresses of the others, so each would train alone.", lone.hint
            )
        else:
            click.echo("Nothing here describes a cluster: trying two processes on this machine.")
            request = Request(_CHECKS, tuple(arguments), is_module=True, workers=2)
            # The checks print their own lines.
            with ThisNode(request, environment_of_processes()) as node:
                code = run_group(node.plan, say=lambda _: None).exit_code
    # The codes of `run_group` tell how a training run has ended, and mean nothing here.
    sys.exit(1 if code else 0)


def _show_ports(spec: ClusterSpec) -> None:
    title = "The cluster that the environment describes"
    if not spec:
        title = "Nothing here describes a cluster. Under phalanx run --workers 2, for example"
        spec = ClusterSpec({JOB: [f"{LOOPBACK}:{port}" for port in free_ports(2)]})
    print_table(("port", "what listens", "where", "who gets in"), openings(spec), title=title, has_box=True)
