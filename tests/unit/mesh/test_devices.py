"""Names of devices, and virtual devices."""

import importlib.machinery
import os
import sys
import types

import jax
import pytest

import phalanx
from phalanx._src.mesh.devices import device_name, parse_device
from phalanx.errors import DeviceError, InvalidArgumentError, StartupError


@pytest.mark.parametrize(
    "spelling",
    ["cpu:1", "CPU:1", "/cpu:1", "/device:CPU:1", "device:cpu:1", "/job:localhost/replica:0/task:0/device:CPU:1"],
)
def test_spellings_of_a_device(spelling):
    """All that tf.distribute prints or accepts."""
    assert device_name(parse_device(spelling)) == "cpu:1"


def test_devices_of_jax_are_taken():
    device = jax.local_devices(backend="cpu")[2]
    assert parse_device(device) is device
    assert phalanx.MirroredStrategy([device]).extended.worker_devices == ("cpu:2",)


@pytest.mark.parametrize("spelling", ["cpu", "gpu0", "", "cpu:", "/task:3/cpu:0", "cpu:-1", 0, None])
def test_unreadable_devices_are_refused(spelling):
    with pytest.raises(DeviceError, match='is not a device name.\nHINT: a name such as "/gpu:0" or "cpu:1"'):
        parse_device(spelling)


@pytest.mark.parametrize(
    ("spelling", "hint"),
    [
        ("cpu:99", r"phalanx.set_virtual_cpu_devices\(100\)"),
        ("gpu:0", r'pip install "jax\[cuda12\]==[\d.]+", or "jax\[cuda13\]==[\d.]+" for a driver with CUDA 13'),
        ("tpu:0", r'pip install "jax\[tpu\]==[\d.]+"'),
        ("dsp:0", "use one of these names"),
    ],
)
def test_unknown_devices_list_what_exists(spelling, hint):
    """The message says how to get more."""
    with pytest.raises(DeviceError, match=rf"device='{spelling}': this process has only .*\nHINT: {hint}"):
        phalanx.MirroredStrategy([spelling])


@pytest.mark.parametrize(
    ("platforms", "hint"),
    [("cpu", "unset JAX_PLATFORMS, which is 'cpu'"), ("", "nvidia-smi"), ("gpu,cpu", "nvidia-smi")],
)
def test_installed_plugin_that_finds_no_device(monkeypatch, platforms, hint):
    """No package is missing, so the message says what hides the device."""
    monkeypatch.setitem(sys.modules, "jax_cuda13_plugin", types.ModuleType("jax_cuda13_plugin"))
    sys.modules["jax_cuda13_plugin"].__spec__ = importlib.machinery.ModuleSpec("jax_cuda13_plugin", None)
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    with pytest.raises(DeviceError, match=f"this process has only cpu:0.*\nHINT: {hint}"):
        parse_device("gpu:0")


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        (["cpu:1", "cpu:0", "/CPU:1"], r"cpu:1 is listed twice, .*\nHINT: devices=\['cpu:0', 'cpu:1'\]"),
        (
            "cpu:0",
            r"devices='cpu:0': must be a list of devices or a number of devices.\nHINT: devices=\['cpu:0', \.\.\.\], one list",
        ),
        ([], "a strategy needs at least one device"),
    ],
    ids=["twice", "text", "none"],
)
def test_bad_lists_of_devices(devices, message):
    """Text would be read letter by letter. An empty list means all devices in tf.distribute, so it is a mistake."""
    with pytest.raises(DeviceError, match=message):
        phalanx.MirroredStrategy(devices)


def test_too_late_for_more_devices():
    """JAX has started here. The error of JAX is not shown above the message."""
    with pytest.raises(StartupError, match="JAX has already initialized its devices") as caught:
        phalanx.set_virtual_cpu_devices(5)
    assert caught.value.__suppress_context__
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("count", [0, -2])
def test_fewer_than_one_device(count):
    with pytest.raises(InvalidArgumentError, match=f"count={count}: .*a process has at least one CPU device"):
        phalanx.set_virtual_cpu_devices(count)


@pytest.mark.slow
def test_environment_variable_that_is_no_number(run_python):
    """It is refused when the script first asks for a public name."""
    code = (
        "import os, phalanx\n"
        "for value in ('two', '0', '-1', '²', '65537', '9' * 18, '9' * 5000):\n"
        "    os.environ['PHALANX_CPU_DEVICES'] = value\n"
        "    phalanx._apply_environment()\n"
        "    try: phalanx.MirroredStrategy\n"
        "    except phalanx.errors.InvalidArgumentError as e: print('refused', ascii(str(e)))\n"
    )
    found = run_python(code, PHALANX_CPU_DEVICES="two")
    for value in ("two", "0", "-1", "²", "65537", "9" * 18, "9" * 5000):
        message = f"PHALANX_CPU_DEVICES={value!r}: must be a number of devices.\nHINT: PHALANX_CPU_DEVICES=2"
        assert f"refused {ascii(message)[:-1]}" in found


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


@pytest.mark.exhaustive("the eight of all tests")
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


@pytest.mark.cover(["order"], {"jax, phalanx"})
@pytest.mark.slow
@pytest.mark.parametrize("order", ["phalanx, jax", "jax, phalanx"])
def test_environment_gives_two_devices(order, run_python):
    """The variable works after the import of JAX too, if JAX has not started. The backend of Keras is set.

    TensorFlow, Ray, Grain and Orbax are not imported.
    """
    code = (
        f"import sys, {order}, keras\n"
        "heavy = {'tensorflow', 'ray', 'grain', 'orbax', 'torch', 'optax', 'flax'} & set(sys.modules)\n"
        "print([d.id for d in jax.devices()], 'backend', keras.backend.backend(), heavy)\n"
    )
    assert "[0, 1] backend jax set()" in run_python(code, PHALANX_CPU_DEVICES="2")
