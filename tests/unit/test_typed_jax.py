"""The names of JAX that are not public stand in one file, and do what we rely on."""

import re
from pathlib import Path

import jax
import numpy as np
import pytest

import phalanx
from phalanx._src import typed_jax

SOURCES = Path(phalanx.__file__).parent


def test_one_file_has_the_private_names():
    users = [
        path.relative_to(SOURCES).as_posix()
        for path in SOURCES.rglob("*.py")
        if re.search(r"^\s*(from|import) jax(lib)?\._", path.read_text(), re.MULTILINE)
    ]
    assert users == ["_src/typed_jax.py"]


def test_batched_device_put_is_device_put():
    """It places parts on devices, as the sharding says."""
    devices = jax.devices()[:2]
    sharding = jax.sharding.NamedSharding(jax.make_mesh((2,), ("x",), devices=devices), typed_jax.partition_spec("x"))
    expected = jax.device_put(np.arange(6.0).reshape(2, 3), sharding)
    parts = [np.arange(3.0)[None], np.arange(3.0, 6.0)[None]]
    placed = typed_jax.batched_device_put(expected.aval, sharding, [part.astype("float32") for part in parts], devices)
    assert placed.sharding == expected.sharding
    np.testing.assert_array_equal(placed, expected)


def test_explicit_transfers_pass_a_guard():
    """As those of `device_put`. Without it, the same call does not pass."""
    expected = jax.device_put(np.float32([1.0]), device := jax.devices()[0])

    def put():
        return typed_jax.batched_device_put(expected.aval, expected.sharding, [np.float32([1.0])], [device])

    with jax.transfer_guard("disallow"):
        with pytest.raises(Exception, match="Disallowed host-to-device transfer"):
            put()
        with typed_jax.explicit_transfer():
            np.testing.assert_array_equal(jax.device_get(put()), expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "complex64"])
def test_sums_beside_another_axis(dtype):
    """XLA for CPUs would end the process if bfloat16 is summed over one axis, and the program is partitioned along another one."""
    mesh = jax.make_mesh((2, 2), ("x", "y"), (jax.sharding.AxisType.Auto,) * 2, devices=jax.devices()[:4])
    spec = typed_jax.partition_spec
    x = jax.device_put(np.arange(16).reshape(4, 4).astype(dtype), jax.sharding.NamedSharding(mesh, spec("x", "y")))

    def sums(x):
        scattered = x if dtype == "complex64" else typed_jax.psum_scatter(x, "x", dim=0)
        return typed_jax.psum({"sum": x}, "x"), scattered

    mapped = jax.shard_map(
        sums, mesh=mesh, in_specs=spec("x"), out_specs=(spec(), spec("x")), axis_names={"x"}, check_vma=False
    )
    total, scattered = jax.jit(mapped)(x)
    expected = np.asarray(x).reshape(2, 2, 4).sum(0)
    assert total["sum"].dtype == scattered.dtype == x.dtype
    np.testing.assert_array_equal(total["sum"], expected)
    if dtype != "complex64":
        np.testing.assert_array_equal(scattered, expected)
