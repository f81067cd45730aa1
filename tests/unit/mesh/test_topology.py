"""The mesh of devices, and how replicas spread over it."""

import types

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import phalanx
from phalanx._src.mesh.devices import summary_of
from phalanx._src.mesh.layout import layout_of
from phalanx._src.mesh.requirements import require_own_rows
from phalanx._src.mesh.topology import Topology
from phalanx.errors import DeviceError, InvalidArgumentError, SlipWarning


def test_mesh_keeps_order_of_devices():
    """One automatic axis over the devices in the order given."""
    topology = Topology.of(["cpu:3", "cpu:1"])
    assert topology.mesh.axis_names == (phalanx.REPLICA_AXIS,)
    assert topology.mesh.axis_types == (AxisType.Auto,)
    assert [d.id for d in topology.mesh.devices] == [3, 1]
    assert topology.per_replica.spec == PartitionSpec("replica")
    assert topology == Topology.of(["cpu:3", "cpu:1"])


def test_further_axes_spread_a_replica():
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
        (
            ("rows", 3),
            r"^model_axis=\('rows', 3\): 4 devices cannot .* of 3 devices.\nHINT: model_axis=\(\"rows\", 2\)$",
        ),
        (("model", 9), r"4 devices cannot be divided into replicas of 9 devices.\nHINT: model_axis=\(\"model\", 4\)$"),
        (("model", 0), "sizes of axes must be positive integers.\nHINT: model_axis="),
        (("model", True), "sizes of axes must be positive integers"),
        (("replica", 2), "names of axes must be unique, and 'replica' is reserved.\nHINT"),
        (("", 2), "names of axes must be strings"),
        ("model", "model_axis='model': must be a pair of a name and a size.\nHINT: model_axis="),
    ],
)
def test_axes_that_are_none(axis, message):
    with pytest.raises(InvalidArgumentError, match=message):
        phalanx.MirroredStrategy([f"cpu:{i}" for i in range(4)], model_axis=axis)


def test_model_axis_on_one_device():
    """No other size helps, only more devices."""
    with pytest.raises(InvalidArgumentError, match=r"1 devices cannot be divided .*\nHINT: a multiple of 2 devices$"):
        phalanx.MirroredStrategy(["cpu:0"], model_axis=("model", 2))


def _device(name, process=0):
    """Returns what a topology asks of a device, for devices that this machine does not have."""
    platform, number = name.split(":")
    return types.SimpleNamespace(platform=platform, id=int(number), process_index=process)


def test_devices_of_two_platforms_are_refused():
    with pytest.raises(DeviceError, match=r"platforms cpu and tpu, .*\nHINT: devices=\['tpu:0'\]"):
        Topology((_device("tpu:0"), _device("cpu:0")))


@pytest.mark.parametrize(
    ("processes", "per_replica", "line"),
    [
        ([0], 1, "1 replica on gpu:0"),
        ([0, 0, 0, 0], 2, "2 replicas of 2 devices each on gpu:0, gpu:1, gpu:2, gpu:3"),
        ([0] * 16, 1, "16 replicas on gpu:0, gpu:1, ..., gpu:15"),
        ([0, 1], 1, "2 replicas on 2 workers with 1 GPU device each"),
        ([0, 0, 3, 3], 1, "4 replicas on 2 workers with 2 GPU devices each"),
    ],
)
def test_line_for_the_user(processes, per_replica, line):
    """Names, as long as one process has them and they fit into a line."""
    devices = [_device(f"cuda:{i}", process) for i, process in enumerate(processes)]
    assert summary_of(devices, per_replica) == line


def test_processes_that_share_one_replica_of_several():
    """They would read different rows, and the replica needs one batch."""
    devices = tuple(_device(f"tpu:{i}", process=i // 3) for i in range(4))
    with pytest.raises(
        DeviceError, match=r"(?s)replica 1 on .*devices of two processes.*\nHINT: a model axis whose size"
    ):
        Topology(devices, (("model", 2),))


def test_processes_with_different_numbers_of_devices():
    """Each would take the same share of a batch, and JAX cannot gather from them: it ended in its raw error at the first step."""
    devices = tuple(_device(f"cuda:{i}", process) for i, process in enumerate([0, 1, 1]))
    with pytest.raises(
        DeviceError, match=r"(?s)processes with 1 and 2 devices: all .*\nHINT: .*--devices-per-worker 1,"
    ):
        Topology(devices)


@pytest.mark.parametrize(
    ("processes", "per_replica", "rows_of"),
    [
        pytest.param([0, 0, 1, 1], 1, (0, 1), id="replicas of one device"),
        pytest.param([1, 1, 0, 0], 2, (0, 1), id="the second process first"),
        pytest.param([0, 1, 2, 3], 2, (0, 2), id="two processes have one replica"),
        pytest.param([0, 1, 2, 3], 4, (0,), id="all have one replica"),
    ],
)
def test_processes_that_read_rows(processes, per_replica, rows_of):
    """Those that run the same replicas read the same rows, as one input worker."""
    devices = tuple(_device(f"tpu:{i}", process=process) for i, process in enumerate(processes))
    topology = object.__new__(Topology)  # These devices are not here, so that JAX makes no mesh of them.
    vars(topology).update(devices=devices, axes=(("model", per_replica),))
    require_own_rows(devices, list(map(topology._replicas_of, topology.workers)))
    assert topology.input_workers == rows_of


def test_default_strategy_places_nothing():
    """Its topology is a null object: one replica, and values come back as they are."""
    nowhere = phalanx.get_strategy().topology
    value = np.zeros(2)
    assert not nowhere.has_devices
    assert (nowhere.num_replicas, nowhere.num_workers, nowhere.worker_index) == (1, 1, 0)
    assert list(nowhere.local_replicas) == [0]
    assert nowhere.put_replicated(value) is value
    assert nowhere.put_variable(value, nowhere.sharding_of("path", (1,))) is value
    assert nowhere.divided_dim("path", (2,)) is None
    assert nowhere.devices == nowhere.first_devices == nowhere.local_devices == ()


def test_layout_for_other_numbers_of_workers():
    """A rule that does not fit one of them is refused. A layout that then shards less is named, with the bytes."""
    shapes = {shape: jax.ShapeDtypeStruct(shape, "float32") for shape in ((12,), (6,))}
    rules = Topology.of(["cpu:0", "cpu:1"], layout=layout_of({"v": ("replica",)}))
    rules.require_layout([("v", shapes[12,])], [1, 2, 3])
    message = r"the rule for variable 'v' \(6,\) of a layout in an elastic group of 2 to 3 workers: with 2 workers, the 4 devices"
    with pytest.raises(InvalidArgumentError, match=message):
        rules.require_layout([("v", shapes[6,])], [2, 3])
    sharded = Topology.of(["cpu:0", "cpu:1"], layout=layout_of(phalanx.fully_sharded(min_size=1)))
    with pytest.warns(SlipWarning, match="does not shard v with 2 workers: then each device holds these 24 bytes"):
        sharded.require_layout([("v", shapes[6,]), ("w", shapes[12,])], [2, 3])
    Topology.of(["cpu:0"]).require_layout([("v", shapes[6,])], [2, 3])
