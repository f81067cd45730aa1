"""The policy table: every cell of reading and assigning, with the values worked out by hand."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import phalanx
from phalanx.errors import AggregationError, ContextError, NestedWriteError, VariableError
from phalanx.programs.slots import components_of
from phalanx.tracing.policy import Combine, Policy, Write, describe, policy_of


@pytest.fixture
def strategy():
    """Two replicas."""
    return phalanx.MirroredStrategy(["cpu:0", "cpu:1"])


def replica_id():
    """The number of the replica that runs."""
    return phalanx.get_replica_context().replica_id_in_sync_group


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
    ("auto", "only_first_replica", "float32"): ([(1, 1), (11, 11), (9, 9), (11, 11)], [1, 11, 9, 11]),
    ("on_write", "only_first_replica", "int32"): ([(1, 1), (11, 11), (9, 9), (11, 11)], [1, 11, 9, 11]),
    ("auto", "none", "float32"): ([(1, 2), (11, 12), (9, 8), (11, 11)], [1.5, 11.5, 8.5, 11]),
    ("on_write", "none", "float32"): ([(1, 2), (11, 12), (9, 8), (11, 11)], [1.5, 11.5, 8.5, 11]),
    ("auto", "none", "int32"): ([(1, 2), (11, 12), (9, 8), (11, 11)], [1, 11, 9, 11]),
    ("on_read", "sum", "float32"): ([(1, 2), (11, 2), (9, -2), (11, 1)], [3, 13, 7, 12]),
    ("on_read", "sum", "int32"): ([(1, 2), (11, 2), (9, -2), (11, 1)], [3, 13, 7, 12]),
    ("on_read", "mean", "float32"): ([(1, 2), (11, 12), (9, 8), (11, 11)], [1.5, 11.5, 8.5, 11]),
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
ROWS = list(WRITES)
ids = "-".join


@pytest.mark.parametrize("number", range(4), ids=["assign", "assign_add", "assign_sub", "add_one"])
@pytest.mark.parametrize("row", ROWS, ids=ids)
def test_write_in_replica_context(strategy, row, number):
    """A replica reads what it wrote as the row says, and so does the code outside."""
    v = make(strategy, *row)

    def replica_fn():
        OPERATIONS[number](v)
        return v.value * 1

    inside, outside = WRITES[row]
    assert tuple(map(float, strategy.run(replica_fn).values)) == inside[number]
    assert v.numpy() == outside[number]
    assert v.numpy().dtype == row[2]


@pytest.mark.parametrize("number", range(4), ids=["assign", "assign_add", "assign_sub", "add_one"])
@pytest.mark.parametrize("row", ROWS, ids=ids)
def test_write_returns_the_new_value(strategy, row, number):
    """What an assignment returns is what a read after it gives."""
    v = make(strategy, *row)
    returned = strategy.run(lambda: keras.ops.convert_to_tensor(OPERATIONS[number](v)) * 1)
    assert tuple(map(float, returned.values)) == WRITES[row][0][number]


@pytest.mark.parametrize("where", ["scope", "outside", "function"])
@pytest.mark.parametrize("row", ROWS, ids=ids)
def test_write_in_cross_replica_context(strategy, row, where):
    """Values and increments are stored as they are, whatever the aggregation."""
    v = make(strategy, *row)

    def write():
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
    assert (float(added), v.numpy()) == (11, 3)


@pytest.mark.parametrize("row", ROWS, ids=ids)
def test_write_in_merge_call(strategy, row):
    """A merge function is cross-replica context: an increment counts once."""
    v = make(strategy, *row)

    def merge(_):
        v.assign_add(1)
        v.assign(v.value + 4)

    strategy.run(lambda: phalanx.get_replica_context().merge_call(merge))
    assert v.numpy() == 15


@pytest.mark.parametrize("row", ROWS, ids=ids)
@pytest.mark.parametrize("inside", [True, False], ids=["merge_call", "scope"])
def test_write_in_update_context(strategy, row, inside):
    """`extended.update` assigns freely."""
    v = make(strategy, *row)
    update = lambda s: s.extended.update(v, lambda v, x: v.assign(x), args=(7,))  # noqa: E731
    if inside:
        strategy.run(lambda: phalanx.get_replica_context().merge_call(update))
    else:
        with strategy.scope():
            update(strategy)
    assert v.numpy() == 7


@pytest.mark.parametrize("row", ROWS, ids=ids)
def test_read_in_merge_call_is_the_combined_value(strategy, row):
    """A cross-replica read inside the program gives what a read outside would."""
    v = make(strategy, *row)

    def replica_fn():
        v.assign(replica_id() + 1)
        return phalanx.get_replica_context().merge_call(lambda _: v.value * 1.0)

    assert tuple(map(float, strategy.run(replica_fn).values)) == (WRITES[row][1][0],) * 2


@pytest.mark.parametrize(
    ("row", "after_two"),
    [
        (("auto", "sum", "float32"), (16, 16, 16)),
        (("auto", "mean", "float32"), (13, 13, 13)),
        (("auto", "none", "float32"), (12.5, 13.5, 13)),
        (("auto", "none", "int32"), (12, 13, 12)),
        (("on_read", "sum", "float32"), (12, 4, 16)),
        (("on_read", "mean", "float32"), (12, 14, 13)),
        (("on_read", "only_first_replica", "int32"), (12, 14, 12)),
    ],
    ids=lambda x: ids(x) if isinstance(x[0], str) else "",
)
def test_second_step_continues(strategy, row, after_two):
    """On-read variables keep each replica's own value from step to step, the others start from the combined one."""
    v = make(strategy, *row)

    def replica_fn():
        v.assign_add(replica_id() + 1)
        return v.value * 1

    strategy.run(replica_fn)
    values = strategy.run(replica_fn).values
    assert (*map(float, values), v.numpy()) == after_two


@pytest.mark.parametrize("write", ["assign", "assign_add", "assign_sub"])
def test_trainable_without_aggregation_is_refused(strategy, write):
    """The message names the variable and both remedies; nothing was changed."""
    v = make(strategy, "auto", "none", trainable=True)
    with pytest.raises(AggregationError, match=r"assign to variable 'v' \(\) float32 in replica context") as e:
        strategy.run(lambda: getattr(v, write)(1.0))
    assert 'aggregation="mean"' in e.value.hint
    assert "merge_call" in e.value.hint
    assert v.numpy() == 10


def test_both_remedies_work(strategy):
    """What the hint says can be written instead, can."""
    v = make(strategy, "auto", "none", trainable=True)
    strategy.run(lambda: phalanx.get_replica_context().merge_call(lambda strategy: v.assign(11.0)))
    assert v.numpy() == 11
    w = make(strategy, "auto", "mean", trainable=True)
    strategy.run(lambda: w.assign(12.0))
    assert w.numpy() == 12


def test_mean_of_integers_is_refused(strategy):
    """As in tf.distribute, where it is refused when the variable is made."""
    with pytest.raises(AggregationError, match="the mean of int32 values is not a value of dtype int32"):
        make(strategy, "auto", "mean", dtype="int32")
    v = make(phalanx.get_strategy(), "auto", "mean", dtype="int32")
    with pytest.raises(AggregationError, match="the mean of int32 values is not a value of dtype int32"):
        strategy.run(lambda: v.assign_add(1))


def test_synchronization_none_is_refused(strategy):
    """As in tf.distribute."""
    with pytest.raises(AggregationError, match="a strategy keeps the replicas of a variable equal"):
        make(strategy, "none", "sum")
    v = make(phalanx.get_strategy(), "none", "sum")
    with pytest.raises(AggregationError, match="a strategy keeps the replicas of a variable equal"):
        strategy.run(lambda: v.assign_add(1))


@pytest.mark.parametrize("row", ROWS, ids=ids)
@pytest.mark.parametrize("kind", ["one_device", "default"])
def test_one_replica_has_ordinary_variables(kind, row):
    """With one replica every row is the same."""
    strategy = phalanx.get_strategy() if kind == "default" else phalanx.OneDeviceStrategy("cpu:0")
    v = make(strategy, *row)
    strategy.run(lambda: v.assign_add(1))
    assert v.numpy() == 11
    strategy.run(lambda: v.assign(4))
    assert v.numpy() == 4


def test_on_read_components(strategy):
    """`experimental_local_results` gives what each replica holds; it adds up to what is read."""
    v = make(strategy, "on_read", "sum")
    strategy.run(lambda: v.assign_add(replica_id() + 1))
    assert [float(x) for x in strategy.experimental_local_results(v)] == [11, 2]
    assert float(strategy.reduce("SUM", v, axis=None)) == 13


def test_on_read_assigned_from_outside(strategy):
    """The components of before are dropped: the next step starts from the assigned value."""
    v = make(strategy, "on_read", "sum")
    strategy.run(lambda: v.assign_add(replica_id() + 1))
    v.assign(0.0)
    assert components_of(v) is None
    strategy.run(lambda: v.assign_add(replica_id() + 1))
    assert v.numpy() == 3


@pytest.mark.parametrize("aggregation", ["sum", "mean"])
def test_components_agree_with_the_value(strategy, aggregation):
    """Components of an on-read variable that no step has touched combine to its value too."""
    v = make(strategy, "on_read", aggregation)
    parts = [float(x) for x in strategy.experimental_local_results(v)]
    assert (sum(parts) if aggregation == "sum" else np.mean(parts)) == 10
    assert float(strategy.reduce(aggregation, v, axis=None)) == 10


def test_mirrored_variable_local_results_are_copies(strategy):
    """Components of an on-write variable are equal, and stay alive after the next step."""
    v = make(strategy, "auto", "sum")
    held = strategy.experimental_local_results(v)
    strategy.run(lambda: v.assign_add(1))
    assert [float(x) for x in held] == [10, 10]


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint32", "bfloat16"])
def test_other_dtypes_keep_their_dtype(strategy, dtype):
    """The first replica's value, or the mean, in the dtype of the variable."""
    with strategy.scope():
        v = keras.Variable(0, dtype=dtype, trainable=False)
    strategy.run(lambda: v.assign(keras.ops.cast(1 - replica_id(), dtype)))
    assert v.value.dtype == dtype
    assert float(v.numpy()) == (0.5 if dtype == "bfloat16" else 1.0)


@pytest.mark.parametrize("write", ["assign", "assign_add"])
def test_wrong_shape_leaves_the_variable(strategy, write):
    """A typed error, before anything runs."""
    with strategy.scope():
        v = keras.Variable([1.0, 2.0], aggregation="sum")
    with pytest.raises(ValueError, match="shape"):
        strategy.run(lambda: getattr(v, write)([1.0, 2.0, 3.0]))
    assert v.numpy().tolist() == [1.0, 2.0]


def test_increment_of_wrong_shape(strategy):
    """The message says which shape fits."""
    with strategy.scope():
        v = keras.Variable([1.0, 2.0], aggregation="sum", name="v")
    with pytest.raises(VariableError, match=r"an increment of shape \(2, 2\) to variable 'v' \(2,\) float32"):
        strategy.run(lambda: v.assign_add(np.ones((2, 2))))


def test_assign_of_a_per_replica_value(strategy):
    """In cross-replica context the components would diverge; it is refused."""
    v = make(strategy, "auto", "sum")
    value = strategy.run(lambda: replica_id() * 1.0)
    with pytest.raises(ContextError, match="it has one component per replica, not a single value"):
        v.assign(value)


def test_assign_of_a_local_value_in_merge_call(strategy):
    """An argument of a merge function has no one value either."""
    v = make(strategy, "auto", "sum")
    merge = lambda _, x: v.assign(x)  # noqa: E731
    with pytest.raises(ContextError, match="reduce"):
        strategy.run(lambda: phalanx.get_replica_context().merge_call(merge, args=(replica_id() * 1.0,)))


def test_assign_of_a_reduced_value_in_merge_call(strategy):
    """What such code writes instead."""
    v = make(strategy, "auto", "none", trainable=True)
    merge = lambda s, x: v.assign(s.reduce("SUM", x, axis=None))  # noqa: E731
    strategy.run(lambda: phalanx.get_replica_context().merge_call(merge, args=(replica_id() + 1.0,)))
    assert v.numpy() == 3


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


TRANSFORMATIONS = {
    "jit": lambda write: jax.jit(write)(0.0),
    "vmap": lambda write: jax.vmap(write)(jnp.ones(2)),
    "grad": lambda write: jax.grad(write)(1.0),
    "checkpoint": lambda write: jax.checkpoint(write)(0.0),
    "cond": lambda write: jax.lax.cond(True, write, lambda x: x, 0.0),
    "scan": lambda write: jax.lax.scan(lambda c, _: (write(c), None), 0.0, length=2),
    "while_loop": lambda write: jax.lax.while_loop(lambda x: x < 1, write, 0.0),
}


@pytest.mark.parametrize("inside", TRANSFORMATIONS)
@pytest.mark.parametrize("operation", ["assign", "assign_add"])
def test_write_in_a_transformation_is_refused(strategy, inside, operation):
    """The message names the variable, this file and the function to use; nothing leaks, the next step works."""
    v = make(strategy, "on_read", "sum")

    def write(x):
        getattr(v, operation)(1.0)
        return x + 1.0

    with pytest.raises(NestedWriteError, match=r"variable 'v' .* at .*test_policy.py:\d+") as e:
        strategy.run(lambda: TRANSFORMATIONS[inside](write))
    assert "phalanx.scan" in e.value.hint
    strategy.run(lambda: write(0.0))
    assert v.numpy() == (2 if operation == "assign" else 12)


@pytest.mark.parametrize(("aggregation", "expected"), [("sum", 14), ("mean", 12), ("none", 12)])
def test_write_in_phalanx_scan_body(strategy, aggregation, expected):
    """Two increments of 1 on two replicas."""
    v = make(strategy, "auto", aggregation)
    strategy.run(lambda: phalanx.scan(lambda c, _: (c, v.assign_add(1.0) * 0), 0.0, length=2))
    assert v.numpy() == expected


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
    """The rows themselves."""
    assert policy_of(make(strategy, *row, trainable=trainable)) == expected


def test_describe_names_path_shape_and_dtype():
    """A variable is named by path, shape and dtype."""
    assert describe(keras.Variable(np.zeros((2, 3)), name="kernel")) == "variable 'kernel' (2, 3) float32"
