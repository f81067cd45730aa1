"""Which cores each replica has."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx._src.mesh.device_assignment import DeviceAssignment, DeviceOrderMode
from phalanx._src.mesh.device_assignment import TPUTopology as Topology
from phalanx.errors import InvalidArgumentError


def topology_of(*shape, tasks=1):
    """A full mesh, its cores in C order, dealt out to the tasks in turn."""
    return Topology(
        mesh_shape=shape, device_coordinates=np.array(list(np.ndindex(*shape))).reshape(tasks, -1, len(shape))
    )


CUBE = topology_of(2, 2, 2)


def test_topology_of_two_hosts():
    """Every core has a task, a number on it, and a name."""
    topology = topology_of(2, 2, 2, tasks=2)
    assert (topology.num_tasks, topology.num_tpus_per_task, topology.mesh_rank) == (2, 4, 3)
    assert topology.mesh_shape.tolist() == [2, 2, 2]
    assert topology.task_ordinal_at_coordinates([1, 0, 1]) == 1
    assert topology.tpu_device_ordinal_at_coordinates([1, 0, 1]) == 1
    assert topology.tpu_device_name_at_coordinates((0, 1, 1)) == "/task:0/device:TPU:3"
    assert topology.cpu_device_name_at_coordinates((1, 1, 1), job="worker") == "/job:worker/task:1/device:CPU:0"
    assert topology.missing_devices.shape == (0, 3)


def test_mesh_with_a_hole():
    """A place without a core is known, and nothing can be assigned there."""
    topology = Topology(mesh_shape=(1, 3), device_coordinates=[[[0, 0], [0, 2]]])
    assert topology.missing_devices.tolist() == [[0, 1]]
    with pytest.raises(
        InvalidArgumentError,
        match=r"coordinates=\(0, 1\): the mesh .* has no core at these coordinates.*\nHINT: coordinates such as \(0, 0\)",
    ):
        DeviceAssignment.build(topology, num_replicas=2).logical_to_physical  # noqa: B018


@pytest.mark.parametrize(
    ("shape", "replicas", "wanted"),
    [
        ([1, 1, 2], 4, [["000", "001"], ["010", "011"], ["100", "101"], ["110", "111"]]),
        ([2, 1, 1], 2, [["000", "100"], ["001", "101"]]),
        ([1, 2, 2], 2, [["000", "001", "010", "011"], ["100", "101", "110", "111"]]),
        (None, 1, [["000"]]),
    ],
)
def test_blocks_of_a_cube_match_hand_written(shape, replicas, wanted):
    """Coordinates in a cube of eight cores, written by hand."""
    assignment = DeviceAssignment.build(CUBE, shape, None, replicas)
    assert assignment.core_assignment.tolist() == [[list(map(int, core)) for core in block] for block in wanted]


def test_four_coordinates_on_a_mesh_of_fewer_dims():
    """As TensorFlow code for TPUs has them. Those that the mesh has not must be zero."""
    assignment = DeviceAssignment(CUBE, [[[0, 1, 0, 0], [0, 1, 1, 0]], [[1, 0, 0, 0], [1, 0, 1, 0]]])
    assert assignment.core_assignment.tolist() == [[[0, 1, 0], [0, 1, 1]], [[1, 0, 0], [1, 0, 1]]]
    for topology in (CUBE, topology_of(2, 1, 1, 2), topology_of(8)):
        single = DeviceAssignment(topology, DeviceAssignment.SINGLE_CORE)
        assert single.core_assignment.tolist() == DeviceAssignment.build(topology).core_assignment.tolist()
        assert topology.tpu_device_name_at_coordinates([0, 0, 0, 0, 0]) == single.tpu_device()
    with pytest.raises(InvalidArgumentError, match=r"core_assignment of shape \(1, 1, 4\): must be integers of shape"):
        DeviceAssignment(CUBE, [[[0, 0, 0, 1]]])


def test_strided_blocks_fill_the_gaps():
    assignment = DeviceAssignment.build(topology_of(8), [2], [2], num_replicas=4)
    assert assignment.core_assignment[..., 0].tolist() == [[0, 2], [1, 3], [4, 6], [5, 7]]


def test_names_of_an_assignment():
    """Where the logical devices of a replica are, in each of the ways that tf.distribute has."""
    assignment = DeviceAssignment.build(topology_of(2, 2, 2, tasks=2), [1, 1, 2], num_replicas=4)
    assert (assignment.num_replicas, assignment.num_cores_per_replica) == (4, 2)
    assert assignment.coordinates(3, 1) == (1, 1, 1)
    assert assignment.logical_to_physical[3].tolist() == [[1, 2], [1, 3]]
    assert (assignment.tpu_ordinal(3, 1), assignment.tpu_device(2, 1)) == (3, "/task:1/device:TPU:1")
    assert assignment.host_device(0, 1, job="w") == "/job:w/task:0/device:CPU:0"
    assert assignment.lookup_replicas(task_id=1, logical_core=0) == [2, 3]


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=3).flatmap(
        lambda mesh: st.tuples(st.just(mesh), st.tuples(*(st.integers(1, n) for n in mesh)), st.data())
    )
)
def test_every_block_is_whole_and_alone(case):
    """Each replica has as many cores as its block, no core has two replicas, and all lie in the mesh."""
    mesh, shape, data = case
    stride = [data.draw(st.integers(1, m // n)) for m, n in zip(mesh, shape, strict=True)]
    most = math.prod(m // (n * s) * s for m, n, s in zip(mesh, shape, stride, strict=True))
    replicas = data.draw(st.integers(1, most))
    cores = DeviceAssignment.build(topology_of(*mesh), list(shape), stride, replicas).core_assignment
    assert cores.shape == (replicas, math.prod(shape), len(mesh))
    assert len({tuple(c) for c in cores.reshape(-1, len(mesh)).tolist()}) == replicas * math.prod(shape)
    for block in cores:
        offsets = (block - block[0]).tolist()
        assert offsets == [
            [i * s for i, s in zip(at, stride, strict=True)] for at in itertools.product(*map(range, shape))
        ]


build = DeviceAssignment.build


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: build(None), r"topology=None: must be a Topology.\nHINT: .*initialize_tpu_system"),
        (lambda: build(CUBE, [2, 2]), r"computation_shape=\[2, 2\]: the mesh .* has 3 dims.\nHINT"),
        (lambda: build(CUBE, [0, 1, 1]), r"computation_shape=.*must be positive integers.\nHINT"),
        (lambda: build(CUBE, [1, 1, 1], [1, 1]), r"computation_stride=\[1, 1\]: the mesh"),
        (lambda: build(CUBE, [1, 1, 4]), r"a block of shape \[1, 1, 4\] does not fit.*\nHINT: .*\[1, 1, 2\]"),
        (lambda: build(CUBE, [1, 1, 2], num_replicas=5), r"num_replicas=5: .*1 to 4.*\nHINT: .*=4"),
        (lambda: build(CUBE, num_replicas=0), r"num_replicas=0: .*\nHINT: num_replicas=8"),
        (lambda: DeviceAssignment(CUBE, [[[0, 0, 0]]] * 2), r"core_assignment=.*: a core is assigned twice.\nHINT"),
        (
            lambda: DeviceAssignment(CUBE, [[[0, 0, 2]]]),
            r"core_assignment=.*: a core lies outside the mesh of shape .*\nHINT",
        ),
        (lambda: DeviceAssignment(CUBE, [[0, 0, 0]]), r"core_assignment of shape \(1, 3\): must be integers of shape"),
        (lambda: build(CUBE).coordinates(0, 1), r"replica=0, logical_core=1: there are 1 replicas of 1"),
        (lambda: build(CUBE).lookup_replicas(1, 0), r"task_id=1, logical_core=0: no replica.*\nHINT"),
        (lambda: Topology(), r"mesh_shape=None: must be positive integers.\nHINT: mesh_shape=\(2, 2, 2\)"),
        (lambda: Topology("text"), r"serialized='text': must be the result of Topology.serialized\(\).\nHINT"),
        (
            lambda: Topology(None, (2,), [[[0], [0]]]),
            "device_coordinates=.*: two cores have the same coordinates.\nHINT",
        ),
        (lambda: Topology(None, (2,)), r"device_coordinates of shape \(0,\)"),
    ],
)
def test_what_does_not_fit(call, message):
    with pytest.raises(InvalidArgumentError, match=f"(?s){message}"):
        call()


def test_topology_survives_serialization():
    topology = topology_of(2, 2, 2, tasks=2)
    other = Topology(serialized=topology.serialized())
    assert other.mesh_shape.tolist() == [2, 2, 2]
    np.testing.assert_array_equal(other.device_coordinates, topology.device_coordinates)


def test_order_of_blocks():
    """That of the mesh is the only one."""
    built = DeviceAssignment.build(topology_of(2, 2), num_replicas=3, device_order_mode=DeviceOrderMode.MESH)
    assert built.core_assignment.tolist() == [[[0, 0]], [[0, 1]], [[1, 0]]]
    message = "device_order_mode=.*RING.*: must be AUTO or MESH: blocks are assigned in the order of the mesh"
    with pytest.raises(InvalidArgumentError, match=message):
        DeviceAssignment.build(topology_of(2, 2), device_order_mode=DeviceOrderMode.RING)
