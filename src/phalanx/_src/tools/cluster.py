# SPDX-License-Identifier: Apache-2.0
"""`phalanx cluster`: shows the cluster that the environment describes."""

import os

import click

from phalanx._src.cluster.resolvers.base import ClusterResolver
from phalanx._src.cluster.resolvers.environment import resolver_of_environment
from phalanx._src.cluster.spec import ClusterSpec, Task, is_unlisted, leader
from phalanx._src.launch.tables import print_table
from phalanx._src.tools.command_line import errors_without_stack

_NO_CLUSTER = """Nothing here describes a cluster: this process is alone.
HINT: phalanx run --workers 2 train.py    starts one on this machine
HINT: phalanx run --workers 2 --print slurm train.py    writes a script for sbatch (or: --print kubernetes)
HINT: TF_CONFIG='{"cluster": {"worker": ["host0:12345", "host1:12345"]}, "task": {"type": "worker", "index": 0}}'"""


@click.command()
def cluster() -> None:
    """Shows the cluster that the environment of this process describes."""
    with errors_without_stack():
        resolver = resolver_of_environment(os.environ)
        spec = resolver.cluster_spec() if resolver else None
        if resolver is None or not spec:
            click.echo(_NO_CLUSTER)
            return
        _show(resolver, spec)


def _show(resolver: ClusterResolver, spec: ClusterSpec) -> None:
    this_task, chief = (resolver.task_type, resolver.task_id), leader(spec)
    rows = []
    for task in [Task(job, i) for job in spec.jobs for i in spec.task_indices(job)]:
        notes = [("chief", task == chief), ("this process", (task.type, task.index) == this_task)]
        said = ", ".join(note for note, is_so in notes if is_so)
        rows.append((task.type, str(task.index), spec.task_address(task.type, task.index), said))
    # The jobs above lack an evaluator without an address, which is this process.
    if resolver.task_type == "evaluator" and is_unlisted(spec, Task("evaluator", 0)):
        rows.append(("evaluator", str(resolver.task_id), "", "this process"))
    title = f"As {type(resolver).__name__} sees it"
    print_table(("job", "task", "address", ""), rows, title=title, has_box=True)
