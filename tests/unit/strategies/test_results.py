"""One value of what the replicas hold: `reduce`, `gather` and local results."""

import re

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from replica_values import per_replica, replica_id

import phalanx
from phalanx import Mirrored, ReduceOp
from phalanx.errors import InputError, InvalidArgumentError, ReduceOpError


@pytest.mark.parametrize(
    ("op", "components", "axis", "expected"),
    [
        ("SUM", ([1.0, 2.0], [3.0, 4.0]), None, [4, 6]),
        ("MEAN", ([1.0, 2.0], [3.0, 4.0]), None, [2, 3]),
        ("mean", (1, 2), None, 1.5),
        ("SUM", (1, 2), None, 3),
        ("SUM", ([1.0, 2.0], [3.0, 4.0]), 0, 10),
        ("MEAN", ([1.0, 2.0], [3.0, 4.0]), -1, 2.5),
        ("MEAN", ([1.0, 1.0, 1.0], [4.0]), 0, 1.75),
        ("SUM", ([1.0, 1.0, 1.0], [4.0]), 0, 7),
        ("MEAN", (np.zeros(0), [4.0]), 0, 4),
        ("SUM", (np.zeros(0), np.zeros(0)), 0, 0),
        ("MEAN", (np.zeros(0), np.zeros(0)), 0, np.nan),
        ("SUM", ([[1.0, 2.0]], [[3.0, 4.0]]), 1, [10]),
        ("MEAN", ([[1.0, 2.0]], [[3.0, 4.0], [5.0, 6.0]]), 0, [3, 4]),
        ("MEAN", ([[1.0, 2.0]], [[3.0, 4.0], [5.0, 6.0]]), (0, 1), 3.5),
        ("MEAN", ([[1.0, 2.0]], [[3.0, 4.0]]), (0, 1), 2.5),
    ],
)
@pytest.mark.parametrize("inside", [False, True], ids=["outside", "in_function"])
def test_reduce_weighs_real_rows_alike(strategy, op, components, axis, expected, inside):
    """Over the replicas, and over dims; a mean over rows weighs every real row the same."""
    value = per_replica(strategy, *components)
    reduce = lambda v: strategy.reduce(op, v, axis)  # noqa: E731
    result = (phalanx.function(reduce) if inside else reduce)(value)
    np.testing.assert_allclose(result, expected)
    assert isinstance(result, jax.Array)


def test_reduce_of_nests(strategy):
    value = {"a": [per_replica(strategy, 1.0, 2.0)], "b": (per_replica(strategy, [1], [5]), None)}
    result = strategy.reduce(ReduceOp.SUM, value, axis=None)
    assert (float(result["a"][0]), result["b"][0].tolist(), result["b"][1]) == (3.0, [6], None)


@pytest.mark.parametrize(
    ("op", "value", "axis", "error", "match"),
    [
        ("MAX", 1.0, None, ReduceOpError, "reduce_op='MAX': is not a ReduceOp"),
        ("SUM", 2.0, None, ReduceOpError, r"reduce\(SUM\) of .*: it is not a per-replica value.*\nHINT: ReduceOp.MEAN"),
        ("SUM", (1.0, 2.0), 0, ReduceOpError, "axis=0: a scalar has no dims"),
        ("SUM", ([1.0], [2.0]), 1, ReduceOpError, "axis=1: the value has dims 0 to 0"),
        *[
            ("SUM", ([1.0], [2.0]), axis, ReduceOpError, re.escape(f"axis={axis!r}: must be an integer"))
            for axis in ("rows", True, 0.5, [0])
        ],
        ("SUM", ([True], [False]), None, ReduceOpError, "a value of dtype bool: bools have no sum or mean"),
        ("SUM", ("a", "b"), None, ReduceOpError, r"reduce of PerReplica.*: its components are not arrays of numbers"),
        *[
            ("SUM", v, axis, InputError, rf"reduce\(axis={axis}\): the components have different numbers of rows")
            for v, axis in ((([1.0, 2.0], [3.0]), None), (([[1.0, 2.0]] * 2, [[3.0, 4.0]]), 1))
        ],
    ],
)
def test_bad_reduce_leaves_next_one_working(strategy, op, value, axis, error, match):
    """Typed, with the value, and the next reduce works."""
    if isinstance(value, tuple):
        parts = value if isinstance(value[0], str) else [np.asarray(v) for v in value]
        value = strategy.experimental_distribute_values_from_function(lambda c: parts[c.replica_id_in_sync_group])
    with pytest.raises(error, match=match):
        strategy.reduce(op, value, axis)
    assert float(strategy.reduce("SUM", per_replica(strategy, 1.0, 2.0), None)) == 3


@pytest.mark.parametrize("axis", [True, 1.0])
def test_bad_reduce_after_a_good_one(strategy, axis):
    """An axis that compares equal to one that worked is refused all the same."""
    value = per_replica(strategy, [[1.0, 2.0]], [[3.0, 4.0]])
    assert strategy.reduce("SUM", value, axis=1).tolist() == [10]
    with pytest.raises(ReduceOpError, match=f"axis={axis}: must be an integer"):
        strategy.reduce("SUM", value, axis=axis)


def test_reduce_of_what_all_replicas_share(strategy):
    """A mean is the value, and so is what `gather` returns. Each replica would sum its rows: 2 x (2 + 4)."""
    with strategy.scope():
        v = keras.Variable(3.0)
    for value in (v, 5.0, np.float32([1, 2]), Mirrored(np.float32([1, 2]))):
        np.testing.assert_array_equal(strategy.reduce("MEAN", value, axis=None), np.asarray(value))
    with pytest.raises(ReduceOpError, match="it is not a per-replica value"):
        strategy.reduce("SUM", v, axis=None)
    assert [float(strategy.reduce(op, np.float32([2, 4]), axis=0)) for op in ("SUM", "MEAN")] == [12, 3]
    assert strategy.gather(np.ones(2), axis=0).tolist() == [1, 1]


@pytest.mark.parametrize(
    ("components", "axis", "expected"),
    [
        (([1, 2], [3, 4]), 0, [1, 2, 3, 4]),
        (([1, 2], [3]), 0, [1, 2, 3]),
        ((np.zeros(0, int), [3]), 0, [3]),
        *[(([[1], [2]], [[3], [4]]), axis, [[1, 3], [2, 4]]) for axis in (1, -1)],
    ],
)
def test_gather_concatenates_real_rows_in_order(strategy, components, axis, expected):
    assert strategy.gather(per_replica(strategy, *components), axis).tolist() == expected


@pytest.mark.parametrize(
    ("components", "axis", "error", "match"),
    [
        (
            (1.0, 2.0),
            0,
            ReduceOpError,
            r"axis=0: a scalar has no dims.\nHINT: return jnp.reshape\(x, 1\) from the replica",
        ),
        (([1.0], [2.0]), 1, ReduceOpError, "axis=1: the value has dims 0 to 0"),
        (([1.0], [2.0]), None, ReduceOpError, "axis=None: must be an integer"),
        (
            ([[1.0]] * 2, [[2.0]]),
            1,
            InputError,
            r"gather\(axis=1\): the components have different sizes in dim 0.\nHINT: axis=0",
        ),
    ],
)
def test_bad_gather_leaves_next_one_working(strategy, components, axis, error, match):
    """Typed, and later collectives are not poisoned."""
    with pytest.raises(error, match=match):
        strategy.gather(per_replica(strategy, *components), axis)
    assert strategy.gather(per_replica(strategy, [1], [2]), 0).tolist() == [1, 2]


def test_gather_of_unequal_components_in_a_function(strategy):
    """The program knows the numbers of rows."""
    step = phalanx.function(lambda v: strategy.gather(v, axis=0))
    assert step(per_replica(strategy, [1, 2], [3])).tolist() == [1, 2, 3]
    assert step(per_replica(strategy, [1, 2], [3, 4])).tolist() == [1, 2, 3, 4]


def test_results_of_a_short_batch_are_short(strategy):
    """What has a row for each row of the batch loses its padding too."""
    (batch,) = strategy.experimental_distribute_dataset([np.arange(5.0)])
    doubled = strategy.run(lambda x: x * 2, args=(batch,))
    assert [v.tolist() for v in doubled.values] == [[0, 2, 4], [6, 8]]
    assert strategy.gather(doubled, axis=0).tolist() == [0, 2, 4, 6, 8]


def test_local_results_are_one_value_per_replica(strategy):
    """One value, or one nest, a replica; what is not distributed comes alone."""
    value = strategy.run(lambda: {"a": replica_id(), "b": None})
    one, two = strategy.experimental_local_results(value)
    assert (float(one["a"]), float(two["a"]), one["b"], two["b"]) == (0, 1, None, None)
    assert strategy.experimental_local_results([1, 2]) == ([1, 2],)
    mirrored = strategy.experimental_local_results(strategy.replicate(jnp.ones(2)))
    assert [m.tolist() for m in mirrored] == [[1, 1], [1, 1]]


def test_local_results_can_be_combined(strategy):
    """With each other, with what the replicas share, and with arrays on a device; keys too. None leaves its device for that."""
    parts = np.float32([[1, 2], [3, 5]])
    local = strategy.experimental_local_results(per_replica(strategy, *parts))
    shared = strategy.experimental_local_results(strategy.replicate(jnp.float32([10, 20])))
    assert sum(local).tolist() == parts.sum(0).tolist()
    assert (local[0] == local[1]).tolist() == (parts[0] == parts[1]).tolist()
    assert jnp.stack(local).tolist() == keras.ops.stack(local).tolist() == parts.tolist()
    assert jax.jit(jnp.dot)(local[1], shared[0]).tolist() == parts[1] @ [10, 20]
    assert (local[1] + strategy.reduce("SUM", per_replica(strategy, *parts), axis=None)).tolist() == [7, 12]
    assert (jax.device_put(1.0, jax.devices()[1]) + local[0]).device.id == 1
    assert [x.device.id for x in (*local, *shared)] == [0, 1, 0, 1]
    keys = strategy.experimental_local_results(strategy.run(lambda: jax.random.key(7)))
    assert jax.random.key_data(jnp.stack(keys)).tolist() == [jax.random.key_data(jax.random.key(7)).tolist()] * 2


def test_values_that_are_no_arrays(strategy):
    """One check for what is placed, gathered or reduced; a deleted array is named."""
    deleted = jnp.ones(2)
    deleted.delete()
    no_array, is_deleted = (
        "not an array of numbers.\nHINT: pass arrays",
        r"an array float32\[2\]: it was deleted, or donated",
    )
    for call, match in (
        (lambda: strategy.replicate("x"), no_array),
        (lambda: strategy.replicate({"w": "x"}), no_array),
        (lambda: strategy.extended.broadcast_to(object(), "cpu:0"), no_array),
        (lambda: strategy.extended.reduce_to("MEAN", "x", "cpu:0"), no_array),
        (lambda: strategy.replicate(deleted), is_deleted),
        (lambda: strategy.gather(deleted, axis=0), is_deleted),
        (lambda: strategy.reduce("MEAN", deleted, axis=None), is_deleted),
    ):
        with pytest.raises(ReduceOpError, match=match):
            call()
    with pytest.raises(InvalidArgumentError, match="a value with the number 1180591620717411303424: it does not fit"):
        strategy.replicate({"w": 2**70})
    with pytest.raises(InvalidArgumentError, match="value_fn=1: is not callable"):
        strategy.experimental_distribute_values_from_function(1)
    with pytest.raises(InvalidArgumentError, match="strategy=1: must be a strategy"):
        phalanx.explain_sharding(np.ones(4), 1)


def test_lone_mirrored_result_is_told_apart(strategy):
    """JAX compares the structures of all results, that of a PerReplica after that of a Mirrored too."""
    assert isinstance(strategy.run(lambda: Mirrored(jnp.ones(2))), Mirrored)
    replica_ids = strategy.run(lambda: jnp.ones(()) * phalanx.get_replica_context().replica_id_in_sync_group)
    assert [float(x) for x in replica_ids.values] == [0.0, 1.0]


def test_random_keys_are_gathered_and_not_reduced(strategy):
    keys = strategy.run(lambda: jax.random.split(jax.random.key(0)))
    with pytest.raises(ReduceOpError, match="dtype key<fry>: random keys have no sum or mean.\nHINT: strategy.exp"):
        strategy.reduce("SUM", keys, axis=None)
    assert strategy.gather(keys, axis=0).shape == (4,)
