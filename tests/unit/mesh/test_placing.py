"""Arrays of the host and of devices, placed with one sharding again and again."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import phalanx
from phalanx._src.mesh import placing


@pytest.fixture(params=[["cpu:0"], ["cpu:1", "cpu:0"]], ids=["one", "two"])
def topology(request):
    return phalanx.MirroredStrategy(request.param).topology


def first_address(array):
    return array.addressable_shards[0].data.unsafe_buffer_pointer()


def test_arrays_on_their_devices_are_not_put_again(topology, monkeypatch):
    """Nor are arrays of NumPy whose shape is known. A guard of transfers allows both, as it allows `device_put`."""
    here = {"array": jnp.arange(6.0) + 1, "key": jax.random.key(3)}
    if len(topology.devices) > 1:
        here = jax.device_put(here, NamedSharding(Mesh(np.array(topology.devices), ("mine",)), PartitionSpec()))
    else:
        here = jax.device_put(here, topology.devices[0])
    host = {"numbers": np.arange(4.0), "scalar": np.array(True), "empty": np.zeros((0, 2), "int8")}
    topology.put_replicated(host)
    with monkeypatch.context() as patch, jax.transfer_guard("disallow"):
        patch.delattr(jax, "device_put")
        placed = topology.put_replicated(here | host)
    for name, value in (here | host).items():
        assert placed[name].sharding == topology.replicated
        assert placed[name].dtype == jnp.asarray(value).dtype
        assert (placed[name] == value).all()
    assert first_address(placed["array"]) == first_address(here["array"])


def test_arrays_keep_what_jax_knows_of_them(topology):
    """A weak type, and the message of a deleted array; an array on another device moves."""
    put = topology.put_replicated
    assert put(jnp.asarray(2.0)).weak_type
    assert put(jax.device_put(np.ones(3), jax.devices()[3])).sharding == topology.replicated
    gone = jnp.ones(3)
    gone.delete()
    with pytest.raises(RuntimeError, match="Array has been deleted"):
        put(gone)


@pytest.mark.cover(
    ["topology", "dtype"],
    [(["cpu:0"], dtype) for dtype in ("bool", ml_dtypes.bfloat16, "int64", "complex128")]
    + [(["cpu:1", "cpu:0"], dtype) for dtype in ("int8", "float16", "float32", "float64")],
)
@pytest.mark.parametrize(
    "dtype", ["bool", "int8", "float16", ml_dtypes.bfloat16, "float32", "int64", "float64", "complex128"]
)
def test_both_ways_are_those_of_device_put(topology, monkeypatch, dtype):
    """Of the first array of a shape, which is put slowly, and of the next; also if shapes are forgotten in between."""
    monkeypatch.setattr(placing, "_MOST_SHAPES", 2)
    for shape in ((2, 3), (2, 0), (2, 3), (2, 3)):
        x = np.ones(shape, dtype)[::-1]
        for sharding, placed in (
            (topology.replicated, topology.put_replicated(x)),
            (topology.per_replica, topology.put_per_replica([x[: topology.num_replicas]])[0]),
        ):
            expected = jax.device_put(x[: topology.num_replicas] if sharding is topology.per_replica else x, sharding)
            assert (placed.aval, placed.sharding, placed.committed) == (expected.aval, expected.sharding, True)
            assert (placed == expected).all()


def test_parts_go_to_all_devices_of_a_replica():
    """Two replicas of two devices each."""
    topology = phalanx.MirroredStrategy([f"cpu:{i}" for i in range(4)], model_axis=("model", 2)).topology
    for _ in range(2):
        (placed,) = topology.put_per_replica([np.arange(6).reshape(2, 3)])
        assert [(s.device.id, s.data.ravel().tolist()) for s in placed.addressable_shards] == [
            (0, [0, 1, 2]),
            (1, [0, 1, 2]),
            (2, [3, 4, 5]),
            (3, [3, 4, 5]),
        ]


def test_masked_arrays_are_not_unmasked(topology):
    with pytest.raises(ValueError, match="masked arrays are not supported"):
        topology.put_replicated(np.ma.masked_array([1.0, 2.0], [True, False]))
