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
from phalanx.errors import ContextError, InputError, InvalidArgumentError, ReduceOpError
from phalanx.experimental import CommunicationOptions
from phalanx.mesh.topology import Topology

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
    """A readable test id."""
    packs = getattr(value, "num_packs", "")
    return f"{type(value).__name__}{packs}" if isinstance(value, phalanx.CrossDeviceOps) else None


def mirrored(replicas, ops=None):
    """A strategy over the first CPU devices."""
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


@pytest.mark.parametrize(("op", "replicas"), [("SUM", 2), ("MEAN", 3), ("SUM", 5)])
@pytest.mark.parametrize("ops", FAMILY, ids=name)
def test_every_replica_gets_the_result(ops, replicas, op):
    """Odd numbers of replicas included."""
    compiled, values = program(ops, replicas, op)
    for given, got in zip(gradients(replicas), compiled(values), strict=True):
        expected = given.sum(axis=0) if op == "SUM" else given.sum(axis=0) / np.float32(replicas)
        np.testing.assert_allclose(got, np.stack([expected] * replicas), rtol=1e-6)
        assert op == "MEAN" or got.dtype == given.dtype


def collectives(compiled):
    """How many operands all all-reduces have together, how many copies there are."""
    text = compiled.as_text()
    reduces = re.findall(r" all-reduce(?:-start)?\(([^)]*)\)", text)
    return sum(len(r.split(",")) for r in reduces), len(re.findall(r" collective-permute(?:-start)?\(", text))


@pytest.mark.parametrize(
    ("ops", "expected"),
    [
        (NcclAllReduce(num_packs=0), (5, 0)),
        (NcclAllReduce(num_packs=1), (2, 0)),
        (NcclAllReduce(num_packs=3), (3, 0)),
        (HierarchicalCopyAllReduce(num_packs=0), (0, 5 * 3)),
        (HierarchicalCopyAllReduce(num_packs=1), (0, 2 * 3)),
        (ReductionToOneDevice(), (0, 5 * 6)),
    ],
    ids=name,
)
def test_number_and_kind_of_collectives(ops, expected):
    """Four replicas: one all-reduce a buffer, or copies only; int32 has a buffer of its own.

    With `num_packs=3` the floats of 12, 4, 20 and 16 bytes fill two buffers: one is closed at a third of the bytes.
    """
    compiled, _ = program(ops, 4)
    assert collectives(compiled) == expected


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


def test_hierarchical_copies_fewer_times_than_one_device():
    """Eight replicas: the tree has 3 + 1 + 3 rounds of copies, the star 14."""
    tree, _ = program(HierarchicalCopyAllReduce(), 8)
    star, _ = program(ReductionToOneDevice(), 8)
    assert collectives(tree)[1] == 2 * 7
    assert collectives(star)[1] == 5 * 14


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


@pytest.mark.parametrize(("op", "replicas"), [("SUM", 2), ("MEAN", 3), ("SUM", 4)])
@pytest.mark.parametrize("num_packs", [0, 1])
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
    """The sums of rounded values are rounded once: 256 + 1 + 1 + 1 is 260 in bfloat16, but 256 if each addition rounds."""
    compiled, values = program(NcclAllReduce(), 4, "SUM", NARROW, [np.float32([[256], [1], [1], [1]])])
    assert compiled(values)[0].tolist() == [[260.0]] * 4


def test_wire_dtype_rounds_to_nearest():
    """What is sent is rounded, not cut: of 1 + 1/128 and 3/512 more the next bfloat16 is 1 + 2/128."""
    compiled, values = program(NcclAllReduce(), 2, "SUM", NARROW, [np.float32([[1 + 7 / 512], [0]])])
    assert compiled(values)[0].tolist() == [[1 + 2 / 128]] * 2


def test_wire_dtype_leaves_others_alone():
    """Integers and floats that are narrow already are as exact as without it."""
    given = [np.int32([[123457], [1]]), np.float16([[1.001], [1]]), np.array([[1], [2]], jnp.bfloat16)]
    compiled, values = program(NcclAllReduce(), 2, "SUM", NARROW, given)
    for x, got in zip(given, compiled(values), strict=True):
        assert got.dtype == x.dtype
        np.testing.assert_array_equal(got[1], x.sum(axis=0))


def test_wire_dtype_halves_what_is_sent():
    """Per replica an all-reduce sends each element twice, and so do an all-to-all and an all-gather, of 16 bits each."""
    compiled, _ = program(NcclAllReduce(), 4, "SUM", NARROW, [np.ones((4, 1000), "float32")])
    assert sorted(sent(compiled)) == [("u16", 250)] * 4 + [("u16", 1000)]


@pytest.mark.parametrize("ops", FAMILY, ids=name)
def test_bits_are_equal_on_all_replicas(ops):
    """Whatever the order of summation, mirrored variables stay mirrored."""
    strategy = mirrored(5, ops)
    x = strategy.experimental_distribute_values_from_function(
        lambda c: np.random.default_rng(c.replica_id_in_sync_group).normal(size=64).astype("float32")
    )
    merge = lambda s, x: s.extended.reduce_to("SUM", x, x)  # noqa: E731
    results = strategy.run(lambda x: phalanx.get_replica_context().merge_call(merge, args=(x,)), args=(x,)).values
    for other in results[1:]:
        np.testing.assert_array_equal(results[0], other)
    np.testing.assert_allclose(results[0], np.sum(x.values, axis=0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("ops", FAMILY, ids=name)
def test_training_is_the_same_with_every_operation(ops):
    """A strategy aggregates gradients through its own operations."""
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


def test_reduce_to_a_device_of_others():
    """The message lists the strategy's devices."""
    with pytest.raises(InvalidArgumentError, match=r"reduce_to_device='cpu:5': is not one of .*\['cpu:0', 'cpu:1'\]"):
        mirrored(2, ReductionToOneDevice(reduce_to_device="cpu:5"))


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
        """What every replica must hold."""
        return jax.lax.pmax(per_replica_value, phalanx.REPLICA_AXIS)


def test_own_algorithm_serves_batch_reduce():
    """One method serves reduce, batch_reduce and the optimizer."""
    strategy = mirrored(3, Largest())
    x = strategy.experimental_distribute_values_from_function(lambda c: float(c.replica_id_in_sync_group))
    one, two = strategy.extended.batch_reduce_to("SUM", [(x, x), (x, "cpu:0")])
    assert (float(one.value), float(two.value)) == (2.0, 2.0)


def test_base_class_says_what_to_override():
    """The abstract hook."""
    strategy = mirrored(2, phalanx.CrossDeviceOps())
    x = strategy.experimental_distribute_values_from_function(lambda c: 1.0)
    with pytest.raises(NotImplementedError, match="CrossDeviceOps must override reduce_implementation"):
        strategy.extended.reduce_to("SUM", x, x)


@pytest.mark.parametrize("ops", [NcclAllReduce(), ReductionToOneDevice(), Largest()], ids=name)
def test_broadcast_gives_value_of_first_replica(ops):
    """Every replica gets the first one's value."""
    strategy = mirrored(3, ops)

    def replica_fn():
        x = phalanx.get_replica_context().replica_id_in_sync_group + 7.0
        return phalanx.get_replica_context().merge_call(lambda _, x: ops.broadcast(x, x), args=(x,))

    assert [float(v) for v in strategy.run(replica_fn).values] == [7.0] * 3


@pytest.mark.parametrize("cls", [NcclAllReduce, HierarchicalCopyAllReduce])
def test_negative_num_packs(cls):
    """Refused when it is made."""
    with pytest.raises(InvalidArgumentError, match="num_packs=-1: must be 0"):
        cls(num_packs=-1)


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
    """Each is refused before anything is sent."""
    with pytest.raises(error, match=match):
        NcclAllReduce().batch_reduce("SUM", [pair])


def test_unknown_operation_is_refused():
    """Only SUM and MEAN."""
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


@pytest.mark.parametrize("fn", [jnp.multiply, product], ids=["of two", "of a list"])
@pytest.mark.parametrize("way", WAYS)
def test_every_reduction_accumulates(way, fn):
    """3 x 4, however it is asked for."""
    strategy = mirrored(2, ReductionToOneDevice(accumulation_fn=fn))
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
    """The rows of a short batch that are padding are not among them: (1 + 2) x 3."""
    strategy = mirrored(2, ReductionToOneDevice(accumulation_fn=product))
    batch = next(iter(strategy.experimental_distribute_dataset([np.float32([1, 2, 3])])))
    results = strategy.run(lambda x: x * 1, args=(batch,))
    assert float(strategy.reduce("SUM", results, axis=0)) == 9.0


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


def test_own_algorithm_serves_every_reduction():
    """What a strategy is given for its reductions is not gone round."""
    strategy = mirrored(3, Largest())
    x = strategy.experimental_distribute_values_from_function(lambda c: float(c.replica_id_in_sync_group))
    assert float(strategy.reduce("SUM", x, axis=None)) == 2.0


def test_accumulation_of_several_steps():
    """What `run_steps` returned for padded batches has other rows in each step."""
    strategy = mirrored(2, ReductionToOneDevice(accumulation_fn=product))
    iterator = iter(strategy.experimental_distribute_dataset(np.arange(5.0, dtype="float32"), batch_size=2))
    results = strategy.run_steps(lambda x: x * 1, iterator, 3)
    with pytest.raises(
        InputError, match="reduce.axis=0. of a result of run_steps, with cross-device operations that do not add"
    ):
        strategy.reduce("SUM", results, axis=0)


@pytest.mark.parametrize(
    ("fn", "match"),
    [
        (1, "accumulation_fn=1: is not callable"),
        (lambda: 1, "must take two arrays, or the list of all of them"),
        (lambda a, b, c: a, "must take two arrays, or the list of all of them"),
        (max, "must take two arrays, or the list of all of them"),
    ],
)
def test_bad_accumulation_is_refused_early(fn, match):
    """Refused when it is made."""
    with pytest.raises(InvalidArgumentError, match=match):
        ReductionToOneDevice(accumulation_fn=fn)


def test_accumulation_of_another_shape():
    """The message says what came out of it."""
    strategy = mirrored(2, ReductionToOneDevice(accumulation_fn=jnp.stack))
    x = strategy.experimental_distribute_values_from_function(lambda c: np.ones(3, "float32"))
    with pytest.raises(InvalidArgumentError, match=r"of 2 arrays float32\[3\]: it returned an array float32\[2, 3\]"):
        strategy.reduce("SUM", x, axis=None)


def test_outside_a_program():
    """A typed error for arrays too, where JAX would name an axis."""
    for call in (
        lambda: NcclAllReduce().broadcast(jnp.float32(1), "cpu:0"),
        lambda: NcclAllReduce().reduce("SUM", jnp.float32(1), "cpu:0"),
        lambda: ReductionToOneDevice().batch_reduce("MEAN", [(1.0, "cpu:0")]),
    ):
        with pytest.raises(
            ContextError, match="a cross-device operation outside merge_call: it runs only inside a program"
        ):
            call()


def test_names_of_the_hooks():
    """Those of tf.distribute, for callers by keyword."""
    ops = Largest()

    def replica_fn(x):
        one = ops.reduce_implementation(
            reduce_op=phalanx.ReduceOp.SUM, per_replica_value=x, destinations=x, options=CommunicationOptions()
        )
        pairs = [(x, x)]
        (two,) = ops.batch_reduce_implementation(
            reduce_op=phalanx.ReduceOp.SUM, value_destination_pairs=pairs, options=CommunicationOptions()
        )
        return one, two, ops.broadcast_implementation(tensor=x, destinations=x)

    strategy = mirrored(2)
    x = strategy.experimental_distribute_values_from_function(lambda c: np.float32([3, 4])[c.replica_id_in_sync_group])
    assert [float(v.values[0]) for v in strategy.run(replica_fn, args=(x,))] == [4.0, 4.0, 3.0]
