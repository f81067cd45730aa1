"""Every cross-device operation against NumPy, and what it compiles to."""

import re

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import phalanx
from phalanx import HierarchicalCopyAllReduce, NcclAllReduce, ReductionToOneDevice
from phalanx._src.mesh.topology import Topology
from phalanx.errors import ContextError, InputError, InvalidArgumentError, ReduceOpError
from phalanx.experimental import CommunicationOptions

SHAPES = [(3,), (), (2, 2), (5,), (1, 4)]
DTYPES = ["float32", "float32", "int32", "float32", "float32"]
FAMILY = [
    NcclAllReduce(),
    NcclAllReduce(num_packs=0),
    NcclAllReduce(num_packs=3),
    HierarchicalCopyAllReduce(),
    HierarchicalCopyAllReduce(num_packs=0),
    HierarchicalCopyAllReduce(num_packs=3),
    ReductionToOneDevice(),
]


def name(value):
    return (
        f"{type(value).__name__}{getattr(value, 'num_packs', '')}"
        if isinstance(value, phalanx.CrossDeviceOps)
        else None
    )


def mirrored(replicas, ops=None):
    return phalanx.MirroredStrategy([f"cpu:{i}" for i in range(replicas)], cross_device_ops=ops)


def gradients(replicas):
    """What every replica holds: small integers, so that all orders of summation agree."""
    random = np.random.default_rng(0)
    return [random.integers(-9, 9, (replicas, *s)).astype(d) for s, d in zip(SHAPES, DTYPES, strict=True)]


def program(ops, replicas, op="SUM", options=None, values=None):
    """The compiled program of one batch_reduce, and its arguments: those given, or `gradients`."""
    topology = Topology.of([f"cpu:{i}" for i in range(replicas)])

    def replica(values):
        own = [x[0] for x in values]
        return [x[None] for x in ops.batch_reduce(op, [(x, x) for x in own], options)]

    spec = PartitionSpec(phalanx.REPLICA_AXIS)
    mapped = jax.shard_map(replica, mesh=topology.mesh, in_specs=(spec,), out_specs=spec, check_vma=False)
    values = jax.device_put(gradients(replicas) if values is None else values, topology.per_replica)
    return jax.jit(mapped).lower(values).compile(), values


@pytest.mark.cover(
    ["ops", "op", "replicas"], [(ops, *(("MEAN", 3), ("SUM", 5))[i % 2]) for i, ops in enumerate(FAMILY)]
)
@pytest.mark.parametrize(("op", "replicas"), [("MEAN", 3), ("SUM", 5)])
@pytest.mark.parametrize("ops", FAMILY, ids=name)
def test_every_replica_gets_the_result(ops, replicas, op):
    """Whatever the order of summation, all have the same bits, so that mirrored variables stay mirrored."""
    random = np.random.default_rng(0).normal(size=(replicas, 64)).astype("float32")
    given = [*gradients(replicas), random]
    compiled, values = program(ops, replicas, op, values=given)
    for x, got in zip(given, compiled(values), strict=True):
        expected = x.sum(axis=0) if op == "SUM" else x.sum(axis=0) / np.float32(replicas)
        np.testing.assert_allclose(got[0], expected, rtol=1e-6, atol=1e-5 if x is random else 0)
        np.testing.assert_array_equal(got, np.stack([got[0]] * replicas))
        assert op == "MEAN" or got.dtype == x.dtype


def collectives(compiled):
    """How many operands all all-reduces have together, how many copies there are."""
    text = compiled.as_text()
    reduces = re.findall(r" all-reduce(?:-start)?\(([^)]*)\)", text)
    return sum(len(r.split(",")) for r in reduces), len(re.findall(r" collective-permute(?:-start)?\(", text))


@pytest.mark.cover(["replicas"], {4})
@pytest.mark.parametrize(
    ("ops", "replicas", "expected"),
    [
        (NcclAllReduce(num_packs=0), 4, (5, 0)),
        (NcclAllReduce(num_packs=1), 4, (2, 0)),
        (NcclAllReduce(num_packs=3), 4, (3, 0)),
        (HierarchicalCopyAllReduce(num_packs=0), 4, (0, 5 * 3)),
        (HierarchicalCopyAllReduce(num_packs=1), 4, (0, 2 * 3)),
        (HierarchicalCopyAllReduce(), 8, (0, 2 * 7)),
        (ReductionToOneDevice(), 4, (0, 5 * 6)),
        (ReductionToOneDevice(), 8, (0, 5 * 14)),
    ],
    ids=name,
)
def test_number_and_kind_of_collectives(ops, replicas, expected):
    """One all-reduce per buffer, or copies only; int32 has a buffer of its own.

    With `num_packs=3` the floats of 12, 4, 20 and 16 bytes fill two buffers: one is closed at a third of the bytes.
    The tree of eight replicas has 3 + 1 + 3 rounds of copies, the star 14.
    """
    assert collectives(program(ops, replicas)[0]) == expected


@pytest.mark.parametrize(
    ("ops", "expected"),
    [
        (None, (2, 0)),
        (NcclAllReduce(num_packs=0), (3, 0)),
        (NcclAllReduce(num_packs=1), (1, 0)),
        (HierarchicalCopyAllReduce(), (0, 1)),
        (ReductionToOneDevice(), (0, 6)),
    ],
    ids=name,
)
def test_collectives_of_a_training_step(ops, expected):
    """Three gradients on two replicas: by default the large one has its own; the optimizer's own state needs none."""
    strategy = mirrored(2, ops)
    with strategy.scope():
        weights = [keras.Variable(np.ones((2, i), "float32")) for i in (1, 2, 5000)]
        optimizer = keras.optimizers.Adam(0.1)
        optimizer.build(weights)
    replica_fn = lambda: optimizer.apply([w.value * 2 for w in weights], weights)  # noqa: E731
    step = phalanx.function(lambda: strategy.run(replica_fn))
    assert collectives(step.lower().compile()) == expected


def sent(compiled):
    """Dtypes and numbers of elements of what collectives send, in the order of the text."""
    lines = re.findall(r" = (.*) (?:all-reduce|all-to-all|all-gather)(?:-start)?\(", compiled.as_text())
    arrays = [array for line in lines for array in re.findall(r"(\w+)\[([\d,]*)\]", line)]
    return [(dtype, int(np.prod([int(d) for d in dims.split(",") if d]))) for dtype, dims in arrays]


@pytest.mark.parametrize(
    ("bytes_per_pack", "expected"),
    [(1 << 20, [("f32", 13), ("s32", 4)]), (16, [("f32", 4), ("f32", 4), ("f32", 5), ("s32", 4)])],
)
def test_bytes_per_pack_changes_the_program_only(bytes_per_pack, expected):
    """Options fill buffers by size; the numbers stay."""
    compiled, values = program(NcclAllReduce(), 2, options=CommunicationOptions(bytes_per_pack=bytes_per_pack))
    assert sorted(sent(compiled)) == expected
    for given, got in zip(gradients(2), compiled(values), strict=True):
        np.testing.assert_array_equal(got[1], given.sum(axis=0))


@pytest.mark.parametrize("options", [None, CommunicationOptions(bytes_per_pack=1 << 20)], ids=["count", "bytes"])
def test_one_buffer_does_not_hold_any_number_of_arrays(options):
    """XLA would take long to compile it."""
    values = [np.full((2, 2), i, "float32") for i in range(80)]
    compiled, values = program(NcclAllReduce(), 2, options=options, values=values)
    assert sorted(sent(compiled)) == [("f32", 32), ("f32", 128)]
    np.testing.assert_array_equal([x[1, 0] for x in compiled(values)], np.arange(80) * 2)


NARROW = CommunicationOptions(wire_dtype="bfloat16")


@pytest.mark.cover(["replicas"], {3, 4})
@pytest.mark.parametrize(("num_packs", "replicas", "op"), [(0, 2, "SUM"), (0, 3, "MEAN"), (1, 4, "SUM")])
def test_wire_dtype_sums_are_close_and_equal(num_packs, replicas, op):
    """Near the sum of the float64 values, and equal on all replicas; odd sizes, scalars and empty arrays included."""
    random = np.random.default_rng(0)
    given = [random.normal(size=(replicas, *shape)).astype("float32") for shape in [(7,), (), (0,), (3, 5), (1001,)]]
    compiled, values = program(NcclAllReduce(num_packs), replicas, op, NARROW, given)
    for x, got in zip(given, compiled(values), strict=True):
        total, magnitude = x.astype("float64").sum(axis=0), np.abs(x).sum(axis=0)
        scale = replicas if op == "MEAN" else 1
        assert got.dtype == np.float32
        assert (np.abs(got[0] * scale - total) <= 0.01 * magnitude).all()
        np.testing.assert_array_equal(got, np.stack([got[0]] * replicas))


def test_wire_dtype_adds_in_float32():
    """The sums of rounded values are rounded once: 256 + 1 + 1 + 1 is 260 in bfloat16, but 256 if each addition rounds.

    What is sent is rounded, not cut: of 1 + 1/128 and 3/512 more the next bfloat16 is 1 + 2/128. Integers, and floats that are
    narrow already, are as exact as without it.
    """
    others = [np.int32([[123457], [1]] * 2), np.float16([[1.001], [1]] * 2), np.array([[1], [2]] * 2, jnp.bfloat16)]
    given = [np.float32([[256], [1], [1], [1]]), np.float32([[1 + 7 / 512], [0], [0], [0]]), *others]
    compiled, values = program(NcclAllReduce(), 4, "SUM", NARROW, given)
    expected = [[260.0], [1 + 2 / 128], *(x.sum(axis=0) for x in others)]
    for x, got, sums in zip(given, compiled(values), expected, strict=True):
        assert got.dtype == x.dtype
        np.testing.assert_array_equal(got, [sums] * 4)


def test_wire_dtype_halves_what_is_sent():
    """Per replica an all-reduce sends each element twice, and so do an all-to-all and an all-gather, of 16 bits each."""
    compiled, _ = program(NcclAllReduce(), 4, "SUM", NARROW, [np.ones((4, 1000), "float32")])
    assert sorted(sent(compiled)) == [("u16", 250)] * 4 + [("u16", 1000)]


@pytest.mark.parametrize("ops", [NcclAllReduce(3), HierarchicalCopyAllReduce(), ReductionToOneDevice()], ids=name)
def test_training_is_the_same_with_every_operation(ops):
    strategy = mirrored(3, ops)
    with strategy.scope():
        v = keras.Variable([1.0, 2.0])
        optimizer = keras.optimizers.SGD(1.0)

    def step():
        scale = phalanx.get_replica_context().replica_id_in_sync_group + 1.0
        optimizer.apply([jnp.array([1.0, 10.0]) * scale], [v])

    strategy.run(step)
    assert v.numpy().tolist() == [1.0 - 6.0, 2.0 - 60.0]


@pytest.mark.parametrize("root", [0, 2])
def test_reduce_to_device(root):
    """The device that accumulates may be any of the strategy's, under any of its names."""
    ops = ReductionToOneDevice(reduce_to_device=f"/device:CPU:{root}")
    strategy = mirrored(3, ops)
    x = strategy.experimental_distribute_values_from_function(lambda c: float(c.replica_id_in_sync_group + 1))
    assert float(strategy.extended.reduce_to("MEAN", x, x).value) == 2.0
    assert ops.reduce_to_device == f"cpu:{root}"


@pytest.mark.parametrize(("op", "expected"), [("SUM", 24.0), ("MEAN", 6.0)])
def test_accumulation_fn_replaces_the_sum(op, expected):
    """A product instead of a sum; a mean divides it by the number of replicas."""
    strategy = mirrored(4, ReductionToOneDevice(accumulation_fn=jnp.multiply))
    x = strategy.experimental_distribute_values_from_function(lambda c: float(c.replica_id_in_sync_group + 1))
    reduced = strategy.extended.reduce_to(op, x, x)
    assert [float(v) for v in reduced.values] == [expected] * 4


class Largest(phalanx.CrossDeviceOps):
    """An algorithm of one's own: the largest value instead of the sum."""

    def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
        return jax.lax.pmax(per_replica_value, phalanx.REPLICA_AXIS)


def test_own_algorithm_serves_every_reduction():
    """One method serves reduce, batch_reduce and the optimizer. The base class says that it is missing."""
    strategy = mirrored(3, Largest())
    x = strategy.experimental_distribute_values_from_function(lambda c: float(c.replica_id_in_sync_group))
    one, two = strategy.extended.batch_reduce_to("SUM", [(x, x), (x, "cpu:0")])
    assert [float(v) for v in (one.value, two.value, strategy.reduce("SUM", x, axis=None))] == [2.0, 2.0, 2.0]
    strategy = mirrored(2, phalanx.CrossDeviceOps())
    x = strategy.experimental_distribute_values_from_function(lambda c: 1.0)
    with pytest.raises(NotImplementedError, match="CrossDeviceOps must override reduce_implementation"):
        strategy.extended.reduce_to("SUM", x, x)


@pytest.mark.parametrize("ops", [NcclAllReduce(), ReductionToOneDevice(), Largest()], ids=name)
def test_broadcast_gives_value_of_first_replica(ops):
    strategy = mirrored(3, ops)

    def replica_fn():
        x = phalanx.get_replica_context().replica_id_in_sync_group + 7.0
        return phalanx.get_replica_context().merge_call(lambda _, x: ops.broadcast(x, x), args=(x,))

    assert [float(v) for v in strategy.run(replica_fn).values] == [7.0] * 3


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: NcclAllReduce(num_packs=-1), "num_packs=-1: must be 0"),
        (lambda: HierarchicalCopyAllReduce(num_packs=-1), "num_packs=-1: must be 0"),
        (lambda: ReductionToOneDevice(accumulation_fn=1), "accumulation_fn=1: is not callable"),
        *[
            (lambda fn=fn: ReductionToOneDevice(accumulation_fn=fn), "must take two arrays, or the list of all of them")
            for fn in (lambda: 1, lambda a, b, c: a, max)
        ],
        (
            lambda: mirrored(2, ReductionToOneDevice(reduce_to_device="cpu:5")),
            r"reduce_to_device='cpu:5': is not one of .*\['cpu:0', 'cpu:1'\]",
        ),
        (
            lambda: mirrored(2, ReductionToOneDevice(accumulation_fn=jnp.stack)).reduce(
                "SUM", phalanx.PerReplica(np.ones((2, 3), "float32")), axis=None
            ),
            r"of 2 arrays float32\[3\]: it returned an array float32\[2, 3\]",
        ),
    ],
)
def test_bad_operations_are_refused(make, match):
    """When they are made, or where what they return shows."""
    with pytest.raises(InvalidArgumentError, match=match):
        make()


@pytest.mark.parametrize(
    ("pair", "error", "match"),
    [
        ((1.0, None), InvalidArgumentError, "destinations=None: must be a value"),
        ((1.0, ""), InvalidArgumentError, "destinations='': must be a value"),
        ([1.0, 1.0], InvalidArgumentError, r"pair=\[1.0, 1.0\]: must be a tuple \(value, destinations\)"),
        ((1.0,), InvalidArgumentError, "must be a tuple"),
        ((True, "cpu:0"), ReduceOpError, "bools have no sum or mean"),
        (("text", "cpu:0"), ReduceOpError, "not an array of numbers"),
        ((phalanx.PerReplica(jnp.ones(2)), "cpu:0"), ContextError, "it runs only inside a program"),
    ],
)
def test_bad_pairs_are_refused(pair, error, match):
    """Each is refused before anything is sent, and so is an operation other than SUM and MEAN."""
    with pytest.raises(error, match=match):
        NcclAllReduce().batch_reduce("SUM", [pair])
    with pytest.raises(ReduceOpError, match="reduce_op='MAX': is not a ReduceOp"):
        NcclAllReduce().reduce("MAX", 1.0, "cpu:0")


def product(values):
    """As tf.distribute's functions of accumulation: of the list of all values."""
    total = values[0]
    for value in values[1:]:
        total = total * value
    return total


WAYS = {
    "reduce": lambda s, x: s.reduce("SUM", x, axis=None),
    "reduce in a function": lambda s, x: phalanx.function(lambda x: s.reduce("SUM", x, axis=None))(x),
    "extended.reduce_to": lambda s, x: s.extended.reduce_to("SUM", x, x).value,
    "extended.batch_reduce_to": lambda s, x: s.extended.batch_reduce_to("SUM", [(x, x), (x, x)])[1].value,
    "all_reduce": lambda s, x: s.run(lambda x: phalanx.get_replica_context().all_reduce("SUM", x), args=(x,)).values[1],
    "merge_call": lambda s, x: s.run(
        lambda x: phalanx.get_replica_context().merge_call(lambda s, x: s.reduce("SUM", x, axis=None), args=(x,)),
        args=(x,),
    ).values[1],
}


@pytest.mark.parametrize("way", WAYS)
def test_every_reduction_accumulates(way):
    strategy = mirrored(2, ReductionToOneDevice(accumulation_fn=product))
    x = strategy.experimental_distribute_values_from_function(lambda c: np.float32([3, 4])[c.replica_id_in_sync_group])
    assert float(WAYS[way](strategy, x)) == 12.0


@pytest.mark.parametrize(("op", "axis", "expected"), [("SUM", 0, 21.0), ("MEAN", 0, 5.25), ("MEAN", None, [3.0, 5.0])])
def test_reduce_over_rows_accumulates(op, axis, expected):
    """Each replica sums its rows; a mean divides what they accumulate to by the rows of all, or by the replicas."""
    strategy = mirrored(2, ReductionToOneDevice(accumulation_fn=product))
    rows = np.float32([[1, 2], [6, 5]] if axis is None else [[1, 2], [3, 4]])
    x = strategy.experimental_distribute_values_from_function(lambda c: rows[c.replica_id_in_sync_group])
    np.testing.assert_allclose(strategy.reduce(op, x, axis=axis), expected)


def test_reduce_of_padded_rows_accumulates():
    """Padding is not among the rows of a short batch: (1 + 2) x 3. What `run_steps` returned has rows in dim 1."""
    strategy = mirrored(2, ReductionToOneDevice(accumulation_fn=product))
    batch = next(iter(strategy.experimental_distribute_dataset([np.float32([1, 2, 3])])))
    results = strategy.run(lambda x: x * 1, args=(batch,))
    assert float(strategy.reduce("SUM", results, axis=0)) == 9.0
    iterator = iter(strategy.experimental_distribute_dataset(np.arange(6.0, dtype="float32"), batch_size=3))
    results = strategy.run_steps(lambda x: x * 1, iterator, 3)
    with pytest.raises(
        InputError, match="reduce.axis=0. of a result of run_steps, with cross-device operations that do not add"
    ):
        strategy.reduce("SUM", results, axis=0)


@pytest.mark.parametrize("layout", [None, phalanx.fully_sharded(min_size=1)], ids=["whole", "divided"])
def test_optimizers_accumulate_gradients(layout):
    """The gradients 3 and 4 make a step of 12, and an assignment with aggregation "sum" one to 12, also of divided variables."""
    ops = ReductionToOneDevice(accumulation_fn=product)
    strategy = phalanx.MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops=ops, layout=layout)
    with strategy.scope():
        v, total = keras.Variable([0.0, 0.0]), keras.Variable(0.0, aggregation="sum", trainable=False)
        optimizer = keras.optimizers.SGD(1.0)
        optimizer.build([v])

    def step():
        x = phalanx.get_replica_context().replica_id_in_sync_group + 3.0
        total.assign(x)
        optimizer.apply([jnp.stack([x, x])], [v])

    strategy.run(step)
    assert v.numpy().tolist() == [-12.0, -12.0]
    assert float(total.value) == 12.0


def test_outside_a_program():
    """A typed error for arrays too, where JAX would name an axis."""
    match = "a cross-device operation outside merge_call: it runs only inside a program"
    for call in (
        lambda: NcclAllReduce().broadcast(jnp.float32(1), "cpu:0"),
        lambda: NcclAllReduce().reduce("SUM", jnp.float32(1), "cpu:0"),
        lambda: ReductionToOneDevice().batch_reduce("MEAN", [(1.0, "cpu:0")]),
    ):
        with pytest.raises(ContextError, match=match):
            call()


def test_names_of_the_hooks():
    """Those of tf.distribute, for callers by keyword."""
    ops, given = Largest(), {"reduce_op": phalanx.ReduceOp.SUM, "options": CommunicationOptions()}

    def replica_fn(x):
        one = ops.reduce_implementation(**given, per_replica_value=x, destinations=x)
        (two,) = ops.batch_reduce_implementation(**given, value_destination_pairs=[(x, x)])
        return one, two, ops.broadcast_implementation(tensor=x, destinations=x)

    strategy = mirrored(2)
    x = strategy.experimental_distribute_values_from_function(lambda c: np.float32([3, 4])[c.replica_id_in_sync_group])
    assert [float(v.values[0]) for v in strategy.run(replica_fn, args=(x,))] == [4.0, 4.0, 3.0]
