"""`TPUStrategy` on virtual devices: logical devices, and what does not fit."""

import re
from collections import namedtuple
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import phalanx
import phalanx.testing
from phalanx._src.mesh import tpu_system
from phalanx._src.mesh.device_assignment import DeviceAssignment, TPUTopology
from phalanx.errors import ContextError, DeviceError, InvalidArgumentError, TraceError

X = np.random.default_rng(0).random((8, 4), "float32")


@pytest.fixture(autouse=True)
def topology():
    yield phalanx.testing.virtual_topology((2, 2, 2))
    phalanx.tpu.experimental.shutdown_tpu_system()


def strategy_of(topology, shape, replicas, **options):
    return phalanx.TPUStrategy(None, DeviceAssignment.build(topology, shape, num_replicas=replicas), **options)


def batch_of(strategy):
    return next(iter(strategy.experimental_distribute_dataset([X])))


def lowered(strategy, fn, *args):
    """The text of the program before and after XLA has divided it."""
    program = phalanx.function(lambda *a: strategy.run(fn, args=a)).lower(*args)
    return program.as_text(), program.compile().as_text()


def test_replicas_and_devices(topology):
    """A replica has the devices at the coordinates that the assignment gives it, which may be some of all."""
    strategy = strategy_of(topology, [2, 1, 1], 4)
    assert [d.id for d in strategy.topology.devices] == [0, 4, 1, 5, 2, 6, 3, 7]
    assert strategy.topology.axes == (("model", 2),)
    assert strategy.extended.worker_devices == ("cpu:0", "cpu:1", "cpu:2", "cpu:3")
    assert strategy.extended.experimental_require_static_shapes
    assert strategy_of(topology, [1, 1, 2], 3).num_replicas_in_sync == 3


def test_assigned_value_keeps_dtype_and_bits(topology):
    """It is the same, of the same dtype, infinities included."""
    strategy = strategy_of(topology, [1, 1, 2], 4)
    values = [jnp.asarray([0, 1, 3, jnp.inf])]
    values += [jnp.asarray([0, 1, 3, 1]).astype(dtype) for dtype in ("bfloat16", "int4", "int32", "bool")]
    assign = strategy.experimental_assign_to_logical_device
    for results in strategy.run(lambda: [[assign(value, device) for value in values] for device in (0, 1)]):
        for result, value in zip(results, values, strict=True):
            for own in result.values:
                assert own.dtype == value.dtype
                np.testing.assert_array_equal(own, value)


def test_assigned_value_is_sent(topology):
    """In the compiled program the logical devices of a replica, and they alone, get it from one of them."""
    strategy = strategy_of(topology, [1, 1, 2], 4)
    before, after = lowered(
        strategy, lambda x: strategy.experimental_assign_to_logical_device(x * 2, 1), batch_of(strategy)
    )
    assert re.search(r'sharding_constraint .*\[\{"model"\}, \{\}, \{\}\]> : tensor<2x2x4xf32>', before)
    assert re.search(r"all-reduce\(.*replica_groups=\[4,2\]<=\[8\]", after)


def test_split_shows_in_the_program(topology):
    strategy = strategy_of(topology, [1, 2, 2], 2)
    weights = jnp.ones((4, 16))

    def fn(x):
        x = strategy.experimental_split_to_logical_devices(x, [2, 2])
        return strategy.experimental_split_to_logical_devices(jnp.tanh(x @ weights), [1, 4])

    before, after = lowered(strategy, fn, batch_of(strategy))
    assert '[{"model_0"}, {"model_1"}]> : tensor<4x4xf32>' in before
    assert '[{}, {"model_0", "model_1"}]> : tensor<4x16xf32>' in before
    # Of 4 rows and 16 columns each device has a quarter.
    assert re.search(r"f32\[4,4\]\S* tanh", after)


def test_parts_in_c_order(topology):
    """The last dim is divided between neighbours."""
    strategy = strategy_of(topology, [1, 2, 2], 2)

    def fn(x):
        split = strategy.experimental_split_to_logical_devices(x, [2, 2])
        return phalanx.Mirrored(phalanx.get_replica_context().all_reduce("SUM", split))

    whole = strategy.run(fn, args=(X[:4],)).value
    placed = {s.device.id: np.asarray(s.data) for s in whole.addressable_shards}
    assert placed[0].shape == (2, 2)
    for device, (row, column) in enumerate([(0, 0), (0, 2), (2, 0), (2, 2)]):
        np.testing.assert_array_equal(placed[device], 2 * X[row : row + 2, column : column + 2])


def test_gradients_are_unchanged(topology):
    """Through all three verbs, as without them."""
    strategy = strategy_of(topology, [1, 1, 2], 2)
    with strategy.scope():
        w = keras.Variable(np.full((4, 2), 0.3, "float32"))

    def fn(x):
        with phalanx.GradientTape() as tape:
            h = strategy.experimental_split_to_logical_devices(jnp.tanh(x @ w), [2, 1])
            h = strategy.experimental_assign_to_logical_device(h * h, 1)
            loss = strategy.experimental_replicate_to_logical_devices(h).sum()
        return phalanx.get_replica_context().all_reduce("SUM", tape.gradient(loss, w))

    wanted = jax.grad(lambda w: (jnp.tanh(X @ w) ** 2).sum())(np.full((4, 2), 0.3, "float32"))
    np.testing.assert_allclose(strategy.run(fn, args=(batch_of(strategy),)).values[0], wanted, rtol=1e-6)


def test_one_logical_device(topology):
    """The verbs are there, and have nothing to do."""
    strategy = strategy_of(topology, None, 2)

    def fn(x):
        x = strategy.experimental_assign_to_logical_device(x, 0)
        x = strategy.experimental_split_to_logical_devices(x, [1, 1])
        return strategy.experimental_replicate_to_logical_devices(x)

    np.testing.assert_array_equal(strategy.gather(strategy.run(fn, args=(batch_of(strategy),)), axis=0), X)


@pytest.mark.parametrize(
    ("verb", "given", "message"),
    [
        ("assign_to_logical_device", 2, r"logical_device_id=2: .*0 to 1.*\nHINT"),
        ("assign_to_logical_device", -1, r"logical_device_id=-1: .*\nHINT"),
        ("assign_to_logical_device", "a", r"logical_device_id='a': .*\nHINT"),
        ("split_to_logical_devices", [2], "one positive integer per dim.\nHINT"),
        ("split_to_logical_devices", [0, 2], "one positive integer per dim.\nHINT"),
        ("split_to_logical_devices", [3, 1], "3 does not divide dim 0, which has size 4.\nHINT"),
        ("split_to_logical_devices", [2, 2], r"the product must be 2, the number of logical devices.*\nHINT: \[2, 1\]"),
    ],
)
def test_bad_logical_devices(topology, verb, given, message):
    """A ValueError, as in tf.distribute, that says what there is."""
    strategy = strategy_of(topology, [1, 1, 2], 2)
    with pytest.raises(InvalidArgumentError, match=f"(?s){message}") as caught:
        strategy.run(lambda x: getattr(strategy, f"experimental_{verb}")(x, given), args=(batch_of(strategy),))
    assert isinstance(caught.value, ValueError)


def test_split_in_another_order_than_the_devices():
    """The product is right, so the message says which order the factors have."""
    strategy = strategy_of(phalanx.testing.virtual_topology((6,)), [6], 1)
    split = lambda parts: strategy.run(lambda: strategy.experimental_split_to_logical_devices(jnp.ones((6, 6)), parts))  # noqa: E731
    assert split([2, 3]).shape == (6, 6)
    with pytest.raises(InvalidArgumentError, match="must be 6, .* with the prime factors in the order 2 x 3"):
        split([3, 2])


def test_one_device_under_spmd(topology):
    """No logical device is addressed alone there, as in tf.distribute. XLA divides compiled programs alone, so none is eager."""
    strategy = strategy_of(topology, [1, 1, 2], 2, experimental_spmd_xla_partitioning=True)
    with pytest.raises(InvalidArgumentError, match=r"(?s)assign_to_logical_device with .*spmd.*\nHINT: .*split_to"):
        strategy.run(lambda: strategy.experimental_assign_to_logical_device(1.0, 0))
    assert strategy.run(lambda: strategy.experimental_replicate_to_logical_devices(1.0)).values[0] == 1
    with pytest.raises(InvalidArgumentError, match=r"(?s)RunOptions\(eager=True\).*2 devices.*\nHINT: .*OneDevice"):
        strategy.run(lambda: 1, options=phalanx.RunOptions(eager=True))


def test_verbs_outside_a_replica(topology):
    """They say where an array of a replica's program is."""
    strategy = strategy_of(topology, [1, 1, 2], 2)
    call = lambda *_: strategy.experimental_replicate_to_logical_devices(1.0)  # noqa: E731
    merge = lambda: strategy.run(lambda: phalanx.get_replica_context().merge_call(call))  # noqa: E731
    for scope, fn in ((nullcontext(), call), (strategy.scope(), call), (nullcontext(), merge)):
        with scope, pytest.raises(ContextError, match=r"(?s)outside a replica function.*\nHINT: .*strategy.run"):
            fn()


def test_dynamic_shapes_are_refused(topology):
    """What an array's values decide has no shape in a compiled program."""
    strategy = strategy_of(topology, None, 2)
    with pytest.raises(TraceError, match=r"(?s)whose shape depends on the values.*\nHINT: jnp.where"):
        strategy.run(lambda x: x[x > 0].sum(), args=(batch_of(strategy),))


def test_machine_without_tpus():
    phalanx.tpu.experimental.shutdown_tpu_system()
    for make in (phalanx.TPUStrategy, phalanx.tpu.experimental.initialize_tpu_system):
        with pytest.raises(DeviceError, match=r"(?s)no TPU, only cpu.*\nHINT: .*virtual_topology\(\(2, 2, 2\)\)"):
            make(phalanx.cluster_resolver.TPUClusterResolver("local"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda _: phalanx.testing.virtual_topology((4, 4)),
            r"needs 16 CPU devices, but this process has 8.\nHINT: .*\(16\)",
        ),
        (lambda _: phalanx.testing.virtual_topology((0, 4)), r"mesh_shape=\(0, 4\): must be positive integers.\nHINT"),
        (lambda _: phalanx.TPUStrategy("local"), r"cluster_resolver='local': must be a ClusterResolver.\nHINT"),
        (
            lambda _: phalanx.TPUStrategy(None, [[0]]),
            r"experimental_device_assignment=.*must be a DeviceAssignment.\nHINT",
        ),
        (
            lambda topology: phalanx.TPUStrategy(DeviceAssignment.build(topology, [1, 1, 2], num_replicas=4)),
            r"HINT: TPUStrategy\(experimental_device_assignment=assignment\)",
        ),
    ],
)
def test_bad_systems_are_refused(topology, make, message):
    """Typed errors. The hint for an assignment as the first argument names the argument that it is for."""
    with pytest.raises(InvalidArgumentError, match=f"(?s){message}"):
        make(topology)


def test_assignment_of_another_system():
    """One of more cores, or of more hosts, than there are."""
    places = np.arange(16).reshape(2, 8, 1)
    for tasks, cores in ((1, 16), (2, 8)):
        other = TPUTopology(mesh_shape=(16,), device_coordinates=places.reshape(tasks, cores, 1))
        with pytest.raises(DeviceError, match=r"this job has 8 devices of the platform 'cpu'.\nHINT: .*set_virtual"):
            phalanx.TPUStrategy(None, DeviceAssignment.build(other))


def test_coordinates_of_tpus():
    """As JAX tells them: x, y, z and the core of a chip, from wherever a slice begins."""
    chips = [((2, 4, 0), 0), ((2, 4, 0), 1), ((3, 4, 0), 0), ((3, 4, 0), 1)]
    core = namedtuple("core", ["coords", "core_on_chip", "process_index"])
    devices = [core(*chip, i // 2) for i, chip in enumerate(chips)]
    found = tpu_system._of_devices(devices)
    assert found.mesh_shape.tolist() == [2, 1, 1, 2]
    assert found.device_coordinates.tolist() == [[[0, 0, 0, 0], [0, 0, 0, 1]], [[1, 0, 0, 0], [1, 0, 0, 1]]]
