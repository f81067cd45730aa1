"""Numbers of thousands of digits, which Python neither reads nor prints, are refused with a message as short as others."""

import keras
import numpy as np
import pytest

import phalanx
from phalanx._src.cluster.resolvers.environment import resolver_of_environment
from phalanx.cluster_resolver import ClusterSpec, SlurmClusterResolver
from phalanx.errors import PhalanxError

DIGITS, NUMBER = "9" * 5000, 10**5000


def saved(folder, value):
    checkpoint = phalanx.train.Checkpoint(a=value)
    checkpoint.write(folder / "a")
    checkpoint.sync()


def number_of_checkpoint(folder, number):
    phalanx.train.CheckpointManager(phalanx.train.Checkpoint(a=1), folder, max_to_keep=1).save(number)


CALLS = {
    "devices": lambda _: phalanx.MirroredStrategy(NUMBER),
    "name of a device": lambda _: phalanx.OneDeviceStrategy(f"cpu:{DIGITS}"),
    "text for devices": lambda _: phalanx.MirroredStrategy(DIGITS),
    "virtual devices": lambda _: phalanx.set_virtual_cpu_devices(NUMBER),
    "too many virtual devices": lambda _: phalanx.set_virtual_cpu_devices(2**31),
    "argument": lambda _: phalanx.OneDeviceStrategy("cpu:0").run(lambda x: x, args=(NUMBER,)),
    "checkpoint": lambda folder: saved(folder, {"a": [NUMBER]}),
    "number of a checkpoint": lambda folder: number_of_checkpoint(folder, NUMBER),
    "large number of a checkpoint": lambda folder: number_of_checkpoint(folder, 10**18),
    "profile_batch": lambda folder: phalanx.keras.TensorBoard(folder, profile_batch=DIGITS),
    "profile_batch of two": lambda folder: phalanx.keras.TensorBoard(folder, profile_batch=f"1,{DIGITS}"),
    "slices": lambda _: phalanx.estimate(lambda: None, [f"{DIGITS}*v5e:4x4"]),
    "topology": lambda _: phalanx.estimate(lambda: None, [f"v5e:4x{DIGITS}"]),
    "task": lambda _: ClusterSpec({"worker": {NUMBER: "a:1"}}),
    "hosts": lambda _: SlurmClusterResolver(environ={**SLURM, "SLURM_JOB_NODELIST": f"a[1-{DIGITS}]"}).cluster_spec(),
    "brackets": lambda _: SlurmClusterResolver(
        environ={**SLURM, "SLURM_JOB_NODELIST": "a" + "[1]" * 3000}
    ).cluster_spec(),
    "batch_size": lambda _: phalanx.MirroredStrategy(1).experimental_distribute_dataset(np.ones(4), batch_size=NUMBER),
}
SLURM = {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"}


POD = {"JOB_COMPLETION_INDEX": "0", "HOSTNAME": "a-0", "PHALANX_SERVICE": "a"}
JOBSET = {"JOBSET_NAME": "a", "REPLICATED_JOB_NAME": "b", "JOB_INDEX": "0", "JOB_COMPLETION_INDEX": "0"}
ENVIRONMENTS = {
    "task": {
        "TF_CONFIG": '{"cluster": {"worker": {"0": "a:1", "99999999": "b:1"}}, "task": {"type": "worker", "index": 0}}'
    },
    "tasks": {**SLURM, "SLURM_STEP_NODELIST": "a", "SLURM_STEP_NUM_TASKS": "9" * 18},
    "pods": {**POD, "PHALANX_NUM_PODS": "9" * 18},
    "jobs": {**JOBSET, "PHALANX_NUM_PODS": "999999", "REPLICATED_JOB_REPLICAS": "999999"},
}


@pytest.mark.parametrize("environ", ENVIRONMENTS.values(), ids=ENVIRONMENTS)
def test_clusters_that_would_fill_the_memory_are_refused(environ):
    with pytest.raises(PhalanxError, match=r"(?s)(at most 1048576|more than 1048576|0 or more).*HINT: "):
        resolver_of_environment(environ).cluster_spec().job_tasks("worker")


def test_hosts_of_too_many_chips_have_none():
    environ = {"TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "0", "TPU_CHIPS_PER_HOST_BOUNDS": f"{'9' * 18},1,1"}
    assert resolver_of_environment(environ).num_accelerators() == {}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_long_numbers_are_refused(call, tmp_path):
    with pytest.raises(PhalanxError, match="(?s).*HINT: ") as e:
        call(tmp_path)
    assert len(str(e.value)) < 500


def test_numbers_of_eighteen_digits_are_saved(tmp_path):
    """As are those of thousands that Python reads."""
    number = 10**4000
    saved(tmp_path, {"a": [number, -number, 10**17]})
    checkpoint = phalanx.train.Checkpoint(a={"a": [0, 0, 0]}, v=keras.Variable(1.0))
    checkpoint.read(tmp_path / "a")
    assert checkpoint.a == {"a": [number, -number, 10**17]}
