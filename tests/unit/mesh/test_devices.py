"""Names of devices, and virtual devices."""

import os

import jax
import pytest

import phalanx
from phalanx.errors import DeviceError, InvalidArgumentError, StartupError
from phalanx.mesh.devices import device_name, parse_device


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
def test_unreadable_devices_are_refused(spelling):
    """The message gives names that can be read."""
    with pytest.raises(DeviceError, match='is not a device name.\nHINT: a name such as "/gpu:0" or "cpu:1"'):
        parse_device(spelling)


@pytest.mark.parametrize(
    ("spelling", "hint"),
    [
        ("cpu:99", r"phalanx.set_virtual_cpu_devices\(100\)"),
        ("tpu:0", "use one of these names"),
        ("dsp:0", "use one of these names"),
    ],
)
def test_unknown_devices_list_what_exists(spelling, hint):
    """The message lists what there is, and how to get more."""
    with pytest.raises(DeviceError, match=rf"device='{spelling}': this process has only .*\nHINT: {hint}"):
        phalanx.MirroredStrategy([spelling])


def test_duplicate_devices_are_refused():
    """Whatever they are called."""
    with pytest.raises(DeviceError, match=r"cpu:1 is listed twice, .*\nHINT: devices=\['cpu:0', 'cpu:1'\]"):
        phalanx.MirroredStrategy(["cpu:1", "cpu:0", "/CPU:1"])


def test_a_string_is_no_list():
    """It would be read letter by letter."""
    with pytest.raises(
        DeviceError,
        match=r"devices='cpu:0': must be a list of devices or a number of devices.\nHINT: devices=\['cpu:0', \.\.\.\], one list",
    ):
        phalanx.MirroredStrategy("cpu:0")


def test_empty_list_of_devices_is_refused():
    """An empty list is a mistake: in tf.distribute it means all devices."""
    with pytest.raises(DeviceError, match="a strategy needs at least one device"):
        phalanx.MirroredStrategy([])


def test_too_late_for_more_devices():
    """JAX has started here. The error of JAX is not shown above the message."""
    with pytest.raises(StartupError, match="JAX has already initialized its devices") as caught:
        phalanx.set_virtual_cpu_devices(5)
    assert caught.value.__suppress_context__
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("count", [0, -2])
def test_fewer_than_one_device(count):
    """Refused before JAX is asked."""
    with pytest.raises(InvalidArgumentError, match=f"count={count}: .*a process has at least one CPU device"):
        phalanx.set_virtual_cpu_devices(count)


@pytest.mark.slow
@pytest.mark.parametrize("value", ["two", "0", "-1", "²"])
def test_environment_variable_that_is_no_number(value, run_python):
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
        with pytest.raises(StartupError, match=r"has 15 threads; with fewer than 16, .* deadlocks.*\n.*NPROC=16"):
            phalanx.MirroredStrategy(["cpu:0", "cpu:1"])
        m.delenv("NPROC")
        m.setattr(os, "sched_getaffinity", lambda _: set(range(4)), raising=False)
        with pytest.raises(StartupError, match="has 4 threads"):
            phalanx.MirroredStrategy(["cpu:0", "cpu:1"])
        phalanx.MirroredStrategy(["cpu:0"])


@pytest.mark.slow
def test_sixty_four_virtual_replicas(run_python):
    """PHALANX_CPU_DEVICES=64 gives 64 replicas, which all-reduce: the canary of the thread pool rule."""
    code = (
        "import phalanx, jax, keras\n"
        "s = phalanx.MirroredStrategy()\n"
        "with s.scope(): v = keras.Variable(0.0, aggregation='sum')\n"
        "s.run(lambda: v.assign_add(phalanx.get_replica_context().replica_id_in_sync_group + 1))\n"
        "print('total', s.num_replicas_in_sync, float(v.value))\n"
    )
    assert "total 64 2080.0" in run_python(code, PHALANX_CPU_DEVICES="64")


@pytest.mark.slow
def test_import_sets_the_keras_backend(run_python):
    """Nothing need be configured; TensorFlow, Ray, Grain and Orbax stay outside."""
    code = (
        "import sys, phalanx, keras\n"
        "heavy = {'tensorflow', 'ray', 'grain', 'orbax', 'torch', 'optax', 'flax'} & set(sys.modules)\n"
        "print('backend', keras.backend.backend(), heavy)\n"
    )
    assert "backend jax set()" in run_python(code)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["phalanx, jax", "jax, phalanx"])
def test_environment_gives_two_devices(order, run_python):
    """The variable is honoured at import, also after JAX, as long as JAX has not started."""
    code = f"import {order}; print([d.id for d in jax.devices()])"
    assert "[0, 1]" in run_python(code, PHALANX_CPU_DEVICES="2")
