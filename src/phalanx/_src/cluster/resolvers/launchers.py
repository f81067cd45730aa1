# SPDX-License-Identifier: Apache-2.0
"""Launchers that start several processes and tell them their rank, but not the addresses of the others."""

from collections.abc import Mapping
from dataclasses import dataclass

from phalanx.errors import arguments

_LAUNCHERS = {
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "MPICH or Intel MPI": ("PMI_RANK", "PMI_SIZE"),
    "torchrun": ("RANK", "WORLD_SIZE"),
}
"""The variables with the rank of a process and with their number, per launcher."""


@dataclass(frozen=True)
class LoneTask:
    """One of several processes, which nothing connects.

    Args:
      launch: who has started how many processes.
      hint: what to write so that they form a cluster.
    """

    launch: str
    hint: str


def lone_task(environ: Mapping[str, str], *, num_started: int = 1, command: str = "python train.py") -> LoneTask | None:
    """Returns the rank of this process in its launcher, if the environment does not describe a cluster but tells of other processes.

    Args:
      environ: the environment.
      num_started: how many tasks of a Slurm job this process is, or starts itself.
      command: what each task should run, for the hint.

    Example:
      >>> print(lone_task({"PMI_RANK": "1", "PMI_SIZE": "2"}).launch)
      MPICH or Intel MPI has started 2 processes (PMI_SIZE), and this is rank 1 (PMI_RANK)
      >>> lone_task({"PMI_RANK": "0", "PMI_SIZE": "1"}) is None
      True
    """
    for name, (rank, size) in _LAUNCHERS.items():
        if environ.get(rank) and _number(environ.get(size)) > 1:
            addresses = '["host0:12345", "host1:12345"]' if environ[size] == "2" else '["host0:12345", ...]'
            task = f'{{"type": "worker", "index": \'${rank}\'}}'
            variable = f'export TF_CONFIG=\'{{"cluster": {{"worker": {addresses}}}, "task": {task}}}\''
            return LoneTask(
                f"{name} has started {environ[size]} processes ({size}), and this is rank {environ[rank]} ({rank})",
                f'./in_cluster.sh {command}, with these lines in in_cluster.sh: {variable}; exec "$@"',
            )
    # Last: what `mpirun` starts in a script of sbatch has these variables too. Callers have found no step of srun.
    if environ.get("SLURM_JOB_ID") and _number(environ.get("SLURM_NTASKS")) > num_started:
        return LoneTask(
            f"The Slurm job has {environ['SLURM_NTASKS']} tasks (SLURM_NTASKS), and srun has not started this process",
            f"srun {command}",
        )
    return None


def _number(text: str | None) -> int:
    return int(text) if text and arguments.is_number(text) else 0
