"""Launchers that start several processes and do not connect them. The docstring of `lone_task` has the others."""

from phalanx._src.cluster.resolvers.launchers import lone_task

JOB = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2"}


def test_process_of_slurm_that_srun_has_not_started():
    """The only one of a job of two tasks. One that starts both itself is not alone."""
    task = lone_task(JOB, command="phalanx run train.py")
    assert task.launch == "The Slurm job has 2 tasks (SLURM_NTASKS), and srun has not started this process"
    assert task.hint == "srun phalanx run train.py"
    assert lone_task(JOB, num_started=2) is None
    assert lone_task({**JOB, "SLURM_JOB_ID": ""}) is None
