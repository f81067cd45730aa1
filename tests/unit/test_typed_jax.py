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
