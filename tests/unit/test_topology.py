"""Device names, virtual devices and the mesh."""

import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import phalanx
from phalanx.errors import DeviceError, InvalidArgumentError, StartupError
from phalanx.mesh.devices import device_name, parse_device
from phalanx.mesh.topology import Topology


def run_python(code, **environment):
    """Runs `code` in a process of its own, with a deadline; returns its output."""
    removed = {"XLA_FLAGS", "NPROC", "PHALANX_CPU_DEVICES", "KERAS_BACKEND"}
    env = {k: v for k, v in os.environ.items() if k not in removed} | {"JAX_PLATFORMS": "cpu"} | environment
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=100, check=False
    )
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    "spelling",
    ["cpu:1", "CPU:1", "/cpu:1", "/device:CPU:1", "device:cpu:1", "/job:localhost/replica:0/task:0/device:CPU:1"],
)
def test_spellings_of_a_device(spelling):
    """All that tf.distribute prints or takes."""
    assert device_name(parse_device(spelling)) == "cpu:1"


def test_devices_of_jax_are_taken():
    """As they are."""
    device = jax.local_devices(backend="cpu")[2]
    assert parse_device(device) is device
    assert phalanx.MirroredStrategy([device]).extended.worker_devices == ("cpu:2",)


@pytest.mark.parametrize("spelling", ["cpu", "gpu0", "", "cpu:", "/task:3/cpu:0", "cpu:-1", 0, None])
def test_unreadable_devices(spelling):
    """The message gives names that can be read."""
    with pytest.raises(DeviceError, match='not a device name.\nHINT: a name such as "/gpu:0" or "cpu:1"'):
        parse_device(spelling)


@pytest.mark.parametrize(
    ("spelling", "hint"),
    [
        ("cpu:99", r"phalanx.set_virtual_cpu_devices\(100\)"),
        ("tpu:0", "one of these names"),
        ("dsp:0", "one of these names"),
    ],
)
def test_unknown_devices(spelling, hint):
    """The message lists what there is, and how to get more."""
    with pytest.raises(DeviceError, match=rf"device='{spelling}': this process has .*\nHINT: {hint}"):
        phalanx.MirroredStrategy([spelling])


def test_duplicate_devices():
    """Whatever they are called."""
    with pytest.raises(DeviceError, match=r"cpu:1 is given twice; .*\nHINT: devices=\['cpu:0', 'cpu:1'\]"):
        phalanx.MirroredStrategy(["cpu:1", "cpu:0", "/CPU:1"])


def test_a_string_is_no_list():
    """It would be read letter by letter."""
    with pytest.raises(
        DeviceError, match=r"devices='cpu:0': must be a list of devices, or their number.\nHINT: devices=\['cpu:0'\]"
    ):
        phalanx.MirroredStrategy("cpu:0")


def test_no_device():
    """An empty list is a mistake: in tf.distribute it means all devices."""
    with pytest.raises(DeviceError, match="a strategy needs at least one device"):
        phalanx.MirroredStrategy([])


def test_mesh():
    """One automatic axis over the devices in the order given."""
    topology = Topology.of(["cpu:3", "cpu:1"])
    assert topology.mesh.axis_names == (phalanx.REPLICA_AXIS,)
    assert topology.mesh.axis_types == (AxisType.Auto,)
    assert [d.id for d in topology.mesh.devices] == [3, 1]
    assert topology.per_replica.spec == PartitionSpec("replica")
    assert topology == Topology.of(["cpu:3", "cpu:1"])


def test_too_late_for_more_devices():
    """JAX has started here."""
    with pytest.raises(StartupError, match="JAX has started its devices already"):
        phalanx.set_virtual_cpu_devices(5)


@pytest.mark.parametrize("count", [0, -2])
def test_fewer_than_one_device(count):
    """Refused before JAX is asked."""
    with pytest.raises(InvalidArgumentError, match=f"count={count}: .*a process has at least one CPU device"):
        phalanx.set_virtual_cpu_devices(count)


@pytest.mark.parametrize("value", ["two", "0", "-1", "²"])
def test_environment_variable_that_is_no_number(value):
    """What is no number is refused when the script first asks for a public name."""
    code = (
        "import phalanx\n"
        "try: phalanx.MirroredStrategy\n"
        "except phalanx.errors.InvalidArgumentError as e: print('refused', e)\n"
    )
    found = run_python(code, PHALANX_CPU_DEVICES=value)
    assert f"refused PHALANX_CPU_DEVICES={value!r}: must be a number of devices.\nHINT: PHALANX_CPU_DEVICES=2" in found


def test_too_few_threads(monkeypatch):
    """A pool in which all-reduces deadlock is refused when a strategy is made, with the number to set."""
    with monkeypatch.context() as m:
        m.setenv("NPROC", "15")
        with pytest.raises(StartupError, match=r"has 15 threads; 15 or fewer deadlock .*\n.*NPROC=16"):
            phalanx.MirroredStrategy(["cpu:0", "cpu:1"])
        m.delenv("NPROC")
        m.setattr(os, "sched_getaffinity", lambda _: set(range(4)), raising=False)
        with pytest.raises(StartupError, match="has 4 threads"):
            phalanx.MirroredStrategy(["cpu:0", "cpu:1"])
        phalanx.MirroredStrategy(["cpu:0"])


def test_sixty_four_virtual_replicas():
    """PHALANX_CPU_DEVICES=64 gives 64 replicas, which all-reduce: the canary of the thread pool rule."""
    code = (
        "import phalanx, jax, keras\n"
        "s = phalanx.MirroredStrategy()\n"
        "with s.scope(): v = keras.Variable(0.0, aggregation='sum')\n"
        "s.run(lambda: v.assign_add(phalanx.get_replica_context().replica_id_in_sync_group + 1))\n"
        "print('total', s.num_replicas_in_sync, float(v.value))\n"
    )
    assert "total 64 2080.0" in run_python(code, PHALANX_CPU_DEVICES="64")


def test_import_sets_the_keras_backend():
    """Nothing need be configured; TensorFlow, Ray, Grain and Orbax stay outside."""
    code = (
        "import sys, phalanx, keras\n"
        "heavy = {'tensorflow', 'ray', 'grain', 'orbax', 'torch', 'optax', 'flax'} & set(sys.modules)\n"
        "print('backend', keras.backend.backend(), heavy)\n"
    )
    assert "backend jax set()" in run_python(code)


@pytest.mark.parametrize("order", ["phalanx, jax", "jax, phalanx"])
def test_environment_gives_two_devices(order):
    """The variable is honoured at import, also after JAX, as long as JAX has not started."""
    code = f"import {order}; print([d.id for d in jax.devices()])"
    assert "[0, 1]" in run_python(code, PHALANX_CPU_DEVICES="2")


def test_further_axes():
    """A replica spreads over neighbouring devices, along automatic axes; replicas are counted as before."""
    topology = Topology.of([f"cpu:{i}" for i in range(8)], axes=(("rows", 2), ("columns", 2)))
    assert (topology.num_replicas, topology.devices_per_replica, topology.is_single) == (2, 4, False)
    assert dict(topology.mesh.shape) == {"replica": 2, "rows": 2, "columns": 2}
    assert set(topology.mesh.axis_types) == {AxisType.Auto}
    assert [d.id for d in topology.first_devices] == [0, 4] == [d.id for d in topology.local_devices]
    assert [d.id for d in topology.devices_of(1)] == [4, 5, 6, 7]
    assert topology.local_replicas == range(2)


@pytest.mark.parametrize(
    ("axis", "message"),
    [
        (("model", 3), "4 devices cannot be divided into replicas of 3.\nHINT: a size that divides 4"),
        (("model", 0), "their sizes must be positive integers.\nHINT: model_axis="),
        (("model", True), "their sizes must be positive integers"),
        (("replica", 2), "each needs a name of its own; 'replica' is taken.\nHINT"),
        (("", 2), "their names must be strings"),
        ("model", "model_axis='model': must be a name and a size.\nHINT: model_axis="),
    ],
)
def test_axes_that_are_none(axis, message):
    """The message says what is wrong with them."""
    with pytest.raises(InvalidArgumentError, match=message):
        phalanx.MirroredStrategy([f"cpu:{i}" for i in range(4)], model_axis=axis)


class _Device:
    """What a topology asks of a device, for machines that have other ones than this."""

    def __init__(self, name, process=0):
        platform, number = name.split(":")
        self.platform, self.id, self.process_index = platform, int(number), process


def test_two_platforms():
    """One program runs on one."""
    with pytest.raises(DeviceError, match=r"platforms cpu and tpu, .*\nHINT: devices=\['tpu:0'\]"):
        Topology((_Device("tpu:0"), _Device("cpu:0")))


def test_replica_in_two_processes():
    """Each process feeds replicas of its own."""
    devices = tuple(_Device(f"tpu:{i}", process=i // 3) for i in range(4))
    with pytest.raises(DeviceError, match=r"(?s)replica 1 on .*processes \[0, 1\].*\nHINT: fewer logical devices"):
        Topology(devices, (("model", 2),))


def test_default_strategy_places_nothing():
    """Its topology is a null object: one replica, and values come back as they are."""
    nowhere = phalanx.get_strategy().topology
    value = np.zeros(2)
    assert not nowhere.has_devices
    assert (nowhere.num_replicas, nowhere.num_workers, nowhere.worker_index, list(nowhere.local_replicas)) == (
        1,
        1,
        0,
        [0],
    )
    assert nowhere.put_replicated(value) is value
    assert nowhere.put_variable(value, "path") is value
    assert nowhere.divided_dim("path", (2,)) is None
    assert nowhere.devices == nowhere.first_devices == nowhere.local_devices == ()
