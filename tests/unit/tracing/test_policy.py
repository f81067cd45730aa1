"""The policy table: every cell of reading and assigning, with the values worked out by hand."""

import jax
import keras
import numpy as np
import pytest

import phalanx
from phalanx._src.programs.slots import components_of
from phalanx._src.tracing.policy import Combine, Policy, Write, describe, policy_of
from phalanx.errors import AggregationError, ContextError, NestedWriteError, VariableError
from phalanx.experimental import LocalSGD


def replica_id():
    return phalanx.get_replica_context().replica_id_in_sync_group


def merged(fn, *args):
    return phalanx.get_replica_context().merge_call(fn, args=args)


def make(strategy, synchronization, aggregation, dtype="float32", trainable=False):
    """A variable of a row of the table that holds 10."""
    with strategy.scope():
        return keras.Variable(
            10, dtype=dtype, trainable=trainable, synchronization=synchronization, aggregation=aggregation, name="v"
        )


# A row, what the replicas hold inside the program, and what is read outside it: after the replicas did assign(1 and 2),
# assign_add(1 and 2), assign_sub(1 and 2), assign_add(1 and 1), each from 10.
WRITES = {
    ("auto", "sum", "float32"): ([(3, 3), (13, 13), (7, 7), (12, 12)], [3, 13, 7, 12]),
    ("on_write", "sum", "float32"): ([(3, 3), (13, 13), (7, 7), (12, 12)], [3, 13, 7, 12]),
    ("auto", "sum", "int32"): ([(3, 3), (13, 13), (7, 7), (12, 12)], [3, 13, 7, 12]),
    ("auto", "mean", "float32"): ([(1.5, 1.5), (11.5, 11.5), (8.5, 8.5), (11, 11)], [1.5, 11.5, 8.5, 11]),
    ("on_write", "mean", "float32"): ([(1.5, 1.5), (11.5, 11.5), (8.5, 8.5), (11, 11)], [1.5, 11.5, 8.5, 11]),
    ("auto", "mean", "int32"): ([(1, 1), (11, 11), (9, 9), (11, 11)], [1, 11, 9, 11]),
    ("auto", "only_first_replica", "float32"): ([(1, 1), (11, 11), (9, 9), (11, 11)], [1, 11, 9, 11]),
    ("on_write", "only_first_replica", "int32"): ([(1, 1), (11, 11), (9, 9), (11, 11)], [1, 11, 9, 11]),
    ("auto", "none", "float32"): ([(1, 2), (11, 12), (9, 8), (11, 11)], [1.5, 11.5, 8.5, 11]),
    ("on_write", "none", "float32"): ([(1, 2), (11, 12), (9, 8), (11, 11)], [1.5, 11.5, 8.5, 11]),
    ("auto", "none", "int32"): ([(1, 2), (11, 12), (9, 8), (11, 11)], [1, 11, 9, 11]),
    ("on_read", "sum", "float32"): ([(1, 2), (11, 2), (9, -2), (11, 1)], [3, 13, 7, 12]),
    ("on_read", "sum", "int32"): ([(1, 2), (11, 2), (9, -2), (11, 1)], [3, 13, 7, 12]),
    ("on_read", "mean", "float32"): ([(1, 2), (11, 12), (9, 8), (11, 11)], [1.5, 11.5, 8.5, 11]),
    ("on_read", "mean", "int8"): ([(1, 2), (11, 12), (9, 8), (11, 11)], [1, 11, 8, 11]),
    ("on_read", "only_first_replica", "float32"): ([(1, 2), (11, 12), (9, 8), (11, 11)], [1, 11, 9, 11]),
    ("on_read", "none", "float32"): ([(1, 2), (11, 12), (9, 8), (11, 11)], [1.5, 11.5, 8.5, 11]),
    ("on_read", "none", "int32"): ([(1, 2), (11, 12), (9, 8), (11, 11)], [1, 11, 9, 11]),
}
OPERATIONS = [
    lambda v: v.assign(replica_id() + 1),
    lambda v: v.assign_add(replica_id() + 1),
    lambda v: v.assign_sub(replica_id() + 1),
    lambda v: v.assign_add(1),
]
every_row = pytest.mark.parametrize("row", WRITES, ids="-".join)
some_rows = pytest.mark.cover(
    ["row"],
    {
        ("auto", "sum", "float32"),
        ("on_write", "mean", "float32"),
        ("auto", "mean", "int32"),
        ("on_write", "only_first_replica", "int32"),
        ("auto", "none", "float32"),
        ("on_read", "sum", "int32"),
        ("on_read", "mean", "int8"),
        ("on_read", "only_first_replica", "float32"),
        ("on_read", "none", "float32"),
    },
)
"""Each synchronization, aggregation and dtype."""


@every_row
def test_write_in_replica_context(strategy, row):
    """A replica reads what it wrote as the row says, and an assignment returns that. So does the code outside."""
    variables = [make(strategy, *row) for _ in OPERATIONS]

    def replica_fn():
        written = [keras.ops.convert_to_tensor(write(v)) * 1 for write, v in zip(OPERATIONS, variables, strict=True)]
        return written, [v.value * 1 for v in variables]

    inside, outside = WRITES[row]
    for found in strategy.run(replica_fn):
        assert [tuple(map(float, x.values)) for x in found] == inside
    assert [v.numpy() for v in variables] == outside
    assert {v.numpy().dtype for v in variables} == {np.dtype(row[2])}


@some_rows
@every_row
def test_write_in_cross_replica_context(strategy, row):
    """Values and increments are stored as they are, whatever the aggregation."""
    for where in ("scope", "outside", "function"):
        v = make(strategy, *row)

        def write(v=v):
            v.assign_add(1)
            added = v.value * 1
            v.assign(5)
            v.assign_sub(2)
            return added

        if where == "scope":
            with strategy.scope():
                added = write()
        else:
            added = write() if where == "outside" else phalanx.function(write)()
        assert (where, float(added), v.numpy()) == (where, 11, 3)


@some_rows
@every_row
def test_merge_call_is_cross_replica_context(strategy, row):
    """An increment counts once, `extended.update` assigns freely, there and in a scope, and a read gives the combined value."""
    written, updated, read = (make(strategy, *row) for _ in range(3))
    update = lambda s, value: s.extended.update(updated, lambda v, x: v.assign(x), args=(value,))  # noqa: E731

    def merge(strategy):
        written.assign_add(1)
        written.assign(written.value + 4)
        update(strategy, 7)
        return read.value * 1.0

    def replica_fn():
        read.assign(replica_id() + 1)
        return merged(merge)

    assert tuple(map(float, strategy.run(replica_fn).values)) == (WRITES[row][1][0],) * 2
    assert (written.numpy(), updated.numpy()) == (15, 7)
    with strategy.scope():
        update(strategy, 8)
    assert updated.numpy() == 8


@some_rows
@every_row
def test_one_replica_has_ordinary_variables(row):
    for strategy in (phalanx.get_strategy(), phalanx.OneDeviceStrategy("cpu:0")):
        v = make(strategy, *row)
        strategy.run(lambda v=v: v.assign_add(1))
        assert v.numpy() == 11
        strategy.run(lambda v=v: v.assign(4))
        assert v.numpy() == 4


SECOND_STEPS = {
    ("auto", "sum", "float32"): (16, 16, 16),
    ("auto", "mean", "float32"): (13, 13, 13),
    ("auto", "none", "float32"): (12.5, 13.5, 13),
    ("auto", "none", "int32"): (12, 13, 12),
    ("on_read", "sum", "float32"): (12, 4, 16),
    ("on_read", "mean", "float32"): (12, 14, 13),
    ("on_read", "only_first_replica", "int32"): (12, 14, 12),
}


def test_second_step_continues(strategy):
    """On-read variables keep each replica's own value from step to step, the others start from the combined one."""
    variables = [make(strategy, *row) for row in SECOND_STEPS]

    def replica_fn():
        for v in variables:
            v.assign_add(replica_id() + 1)
        return [v.value * 1 for v in variables]

    strategy.run(replica_fn)
    found = [(*map(float, x.values), v.numpy()) for x, v in zip(strategy.run(replica_fn), variables, strict=True)]
    assert dict(zip(SECOND_STEPS, found, strict=True)) == SECOND_STEPS


@pytest.mark.parametrize("write", ["assign", "assign_add", "assign_sub"])
def test_trainable_without_aggregation_is_refused(strategy, write):
    """A value that may differ is refused. The message names the variable and the remedies, which work; nothing was changed."""
    v = make(strategy, "auto", "none", trainable=True)
    with pytest.raises(AggregationError, match=r"assign to variable 'v' \(\) float32 in replica context") as e:
        strategy.run(lambda: getattr(v, write)(replica_id()))
    assert 'aggregation="mean"' in e.value.hint
    assert "merge_call" in e.value.hint
    assert v.numpy() == 10
    strategy.run(lambda: merged(lambda strategy: v.assign(11.0)))
    assert v.numpy() == 11
    w = make(strategy, "auto", "mean", trainable=True)
    strategy.run(lambda: w.assign(12.0))
    assert w.numpy() == 12


@pytest.mark.parametrize(
    ("row", "match"),
    [
        (("auto", "mean", "bool"), "bools have no mean"),
        (("none", "sum"), "a strategy keeps the replicas of a variable equal"),
    ],
)
def test_rows_without_a_meaning_are_refused(strategy, row, match):
    """When the variable is made in a scope, as in tf.distribute. Outside all scopes Keras has no use for them."""
    with pytest.raises(AggregationError, match=match):
        make(strategy, *row)
    v = make(phalanx.get_strategy(), *row)
    with pytest.raises(AggregationError, match=match):
        strategy.run(lambda: v.assign_add(1))


def test_on_read_components(strategy):
    """`experimental_local_results` gives what each replica holds; it adds up to what is read. An assignment drops them."""
    v = make(strategy, "on_read", "sum")
    add = lambda: v.assign_add(replica_id() + 1)  # noqa: E731
    strategy.run(add)
    assert [float(x) for x in strategy.experimental_local_results(v)] == [11, 2]
    assert float(strategy.reduce("SUM", v, axis=None)) == 13
    v.assign(0.0)
    assert components_of(v) is None
    strategy.run(add)
    assert v.numpy() == 3


@pytest.mark.parametrize(("aggregation", "combine"), [("sum", sum), ("mean", np.mean)])
def test_components_agree_with_the_value(strategy, aggregation, combine):
    """Components of an on-read variable that no step has touched combine to its value too."""
    v = make(strategy, "on_read", aggregation)
    assert combine([float(x) for x in strategy.experimental_local_results(v)]) == 10
    assert float(strategy.reduce(aggregation, v, axis=None)) == 10


def test_mirrored_variable_local_results_are_copies(strategy):
    """Components of an on-write variable are equal, and stay alive after the next step."""
    v = make(strategy, "auto", "sum")
    held = strategy.experimental_local_results(v)
    strategy.run(lambda: v.assign_add(1))
    assert [float(x) for x in held] == [10, 10]


def test_other_dtypes_keep_their_dtype(strategy):
    """The first replica's value, or the mean, in the dtype of the variable."""
    expected = {"bool": 1.0, "int8": 1.0, "uint32": 1.0, "bfloat16": 0.5}
    with strategy.scope():
        variables = [keras.Variable(0, dtype=dtype, trainable=False) for dtype in expected]
    strategy.run(lambda: [v.assign(keras.ops.cast(1 - replica_id(), v.dtype)) for v in variables])
    assert {str(v.value.dtype): float(v.numpy()) for v in variables} == expected


@pytest.mark.parametrize(
    ("synchronization", "options"), [("auto", {}), ("on_read", {}), ("auto", {"local_updates": LocalSGD()})], ids=str
)
def test_means_of_integers_are_exact(synchronization, options):
    """A counter goes on where a float32 has no odd numbers, and near the largest number. A fraction is cut off."""
    strategy = phalanx.MirroredStrategy(["cpu:0", "cpu:1"], **options)
    with strategy.scope():
        v, narrow = (
            keras.Variable(value, dtype=dtype, trainable=False, synchronization=synchronization, aggregation="mean")
            for value, dtype in ((2_000_000_001, "int32"), (-126, "int8"))
        )
    for _ in range(2):
        strategy.run(lambda: (v.assign(v + 2), narrow.assign(narrow - keras.ops.cast(replica_id(), "int8"))))
    assert (int(v.value), str(v.value.dtype)) == (2_000_000_005, "int32")
    assert (int(narrow.value), str(narrow.value.dtype)) == (
        -127 if options or synchronization == "on_read" else -126,
        "int8",
    )


def test_mean_of_a_float16_variable_does_not_overflow(strategy):
    v = make(strategy, "auto", "mean", "float16")
    strategy.run(lambda: v.assign(60_000))
    assert v.numpy() == 60_000


def test_sum_of_small_integers_keeps_the_dtype(strategy):
    """The components of an on-read variable are summed in int32, and read in int8."""
    variables = [make(strategy, synchronization, "sum", "int8") for synchronization in ("auto", "on_read")]
    strategy.run(lambda: [v.assign(1) for v in variables])
    assert [(int(v.numpy()), str(v.value.dtype)) for v in variables] == [(2, "int8")] * 2


def test_wrong_shape_leaves_the_variable(strategy):
    """A typed error, before anything runs; that of an increment says which shape fits."""
    with strategy.scope():
        v = keras.Variable([1.0, 2.0], aggregation="sum", name="v")
    for write in (v.assign, v.assign_add):
        with pytest.raises(ValueError, match="shape"):
            strategy.run(lambda write=write: write([1.0, 2.0, 3.0]))
    with pytest.raises(VariableError, match=r"an increment of shape \(2, 2\) to variable 'v' \(2,\) float32"):
        strategy.run(lambda: v.assign_add(np.ones((2, 2))))
    assert v.numpy().tolist() == [1.0, 2.0]


def test_values_of_one_replica_are_refused_for_all(strategy):
    """Components would diverge, in cross-replica context and in a merge function. Such code writes a reduced value."""
    v = make(strategy, "auto", "sum")
    value = strategy.run(lambda: replica_id() * 1.0)
    with pytest.raises(ContextError, match="it has one component per replica, not a single value"):
        v.assign(value)
    with pytest.raises(ContextError, match="reduce"):
        strategy.run(lambda: merged(lambda _, x: v.assign(x), replica_id() * 1.0))
    w = make(strategy, "auto", "none", trainable=True)
    strategy.run(lambda: merged(lambda s, x: w.assign(s.reduce("SUM", x, axis=None)), replica_id() + 1.0))
    assert w.numpy() == 3


def test_assign_from_a_mirrored_variable(strategy):
    """Works in every context."""
    v, w = make(strategy, "auto", "mean"), make(strategy, "auto", "mean")
    w.assign(4)
    strategy.run(lambda: v.assign(w))
    assert v.numpy() == 4
    v.assign_add(w)
    assert v.numpy() == 8


def test_initial_values_are_equal_on_all_devices(strategy):
    """A random first value is drawn once."""
    with strategy.scope():
        v = keras.Variable(keras.initializers.RandomNormal(seed=1), shape=(4,))
    a, b = (np.asarray(s.data) for s in v.value.addressable_shards)
    np.testing.assert_array_equal(a, b)


def test_several_writes_in_one_step(strategy):
    """A read sees the write before it, and the program ends with the last one."""
    v = make(strategy, "auto", "sum")

    def replica_fn():
        v.assign_add(1)
        doubled = v.value * 2
        v.assign_add(1)
        return doubled

    assert [float(x) for x in strategy.run(replica_fn).values] == [24, 24]
    assert v.numpy() == 14


@pytest.mark.parametrize("operation", ["assign", "assign_add"])
def test_write_in_a_transformation_is_refused(strategy, operation):
    """The message names the variable, this file and the function to use; nothing leaks, the next step works."""
    v = make(strategy, "on_read", "sum")

    def write(x):
        getattr(v, operation)(1.0)
        return x + 1.0

    with pytest.raises(NestedWriteError, match=r"variable 'v' .* at .*test_policy.py:\d+") as e:
        strategy.run(lambda: jax.lax.scan(lambda c, _: (write(c), None), 0.0, length=2))
    assert "phalanx.scan" in e.value.hint
    strategy.run(lambda: write(0.0))
    assert v.numpy() == (2 if operation == "assign" else 12)


@pytest.mark.parametrize(
    ("row", "trainable", "expected"),
    [
        (("auto", "sum", "int32"), True, Policy(Write.NOW, Combine.SUM)),
        (("auto", "none", "float32"), True, Policy(Write.REFUSED, Combine.MEAN)),
        (("auto", "none", "float32"), False, Policy(Write.AT_BOUNDARY, Combine.MEAN)),
        (("auto", "none", "int32"), True, Policy(Write.AT_BOUNDARY, Combine.FIRST)),
        (("on_read", "sum", "float32"), False, Policy(Write.AT_BOUNDARY, Combine.SUM, on_read=True)),
        (("on_read", "none", "bool"), False, Policy(Write.AT_BOUNDARY, Combine.FIRST)),
    ],
)
def test_policy_of_variable_is_its_row(strategy, row, trainable, expected):
    assert policy_of(make(strategy, *row, trainable=trainable)) == expected


def test_describe_names_path_shape_and_dtype():
    assert describe(keras.Variable(np.zeros((2, 3)), name="kernel")) == "variable 'kernel' (2, 3) float32"
