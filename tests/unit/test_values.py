"""Distributed values: components, pytrees, and what they refuse."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import phalanx
from phalanx import Mirrored, PerReplica
from phalanx.errors import ContextError
from phalanx.values import ReplicaLocal, RowMask, is_distributed, map_leaves


@pytest.fixture
def strategy():
    """Two replicas."""
    return phalanx.MirroredStrategy(["cpu:0", "cpu:1"])


@pytest.fixture
def value(strategy):
    """[0, 1] on the first replica, [10, 11] on the second."""
    return strategy.experimental_distribute_values_from_function(
        lambda c: np.float32([0, 1]) + 10 * c.replica_id_in_sync_group
    )


def test_components_live_on_their_devices(value):
    """In replica order, one array each."""
    assert [v.tolist() for v in value.values] == [[0, 1], [10, 11]]
    assert [[d.id for d in v.devices()] for v in value.values] == [[0], [1]]


def test_components_follow_the_order_of_devices():
    """Replica order, not device order."""
    strategy = phalanx.MirroredStrategy(["cpu:5", "cpu:2"])
    ids = strategy.run(lambda: phalanx.get_replica_context().replica_id_in_sync_group)
    assert [(int(v), v.device.id) for v in ids.values] == [(0, 5), (1, 2)]
    replicated = strategy.replicate(jnp.ones(1))
    assert [v.device.id for v in replicated.values] == [5, 2]


def test_repr(value):
    """As in tf.distribute."""
    assert repr(value).startswith("PerReplica:{\n  0: Array([0., 1.]")
    assert repr(Mirrored(3)) == "Mirrored:{\n  0: 3,\n}"
    assert repr(ReplicaLocal(3)) == "ReplicaLocal(3)"


@pytest.mark.parametrize(
    "use",
    [
        lambda v: jnp.sum(v),
        lambda v: np.asarray(v),
        lambda v: jnp.ones(2) + v,
        lambda v: v[0],
        lambda v: v.shape,
        len,
        iter,
        float,
    ],
)
def test_per_replica_is_no_array(value, use):
    """The message lists the ways to make one value of it."""
    with pytest.raises(ContextError, match="a PerReplica used as an array") as e:
        use(value)
    assert "experimental_local_results" in e.value.hint


def test_per_replica_of_one_replica_is_its_array():
    """Without the padded rows."""
    rows = RowMask(jnp.array([[True, True, False]]), 2)
    value = PerReplica(jnp.float32([[1, 2, 2]]), rows)
    assert value.shape == (2,)
    assert value.dtype == jnp.float32
    assert len(value) == 2
    assert jnp.sum(value) == np.asarray(value).sum() == 3
    assert (value + 1).tolist() == (1 + value).tolist() == [2, 3]
    assert (value - 1).tolist() == [0, 1]
    assert (1 - value).tolist() == [0, -1]
    assert (value * 2).tolist() == (2 * value).tolist() == [2, 4]
    assert (value / 2).tolist() == [0.5, 1]
    assert [float(x) for x in value] == [float(value[0]), 2.0]
    assert int(PerReplica(jnp.int32([3]))) == 3
    assert float(PerReplica(jnp.int32([3]))) == 3.0


def test_mirrored_is_an_array():
    """It is known to be one value."""
    value = Mirrored(jnp.float32([1, 2]))
    assert (jnp.asarray(value) + 1).tolist() == [2, 3]
    assert np.asarray(value, dtype="int32").tolist() == [1, 2]


def test_mirrored_components(strategy):
    """One copy a device, with the structure of the value."""
    parts = strategy.replicate({"w": jnp.ones(2), "b": None}).values
    assert [p["w"].devices().pop().id for p in parts] == [0, 1]
    assert [p["b"] for p in parts] == [None, None]


@pytest.mark.parametrize("through", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_pytrees(value, through):
    """Both kinds keep their class and their components through jax.tree.map and jax.jit."""
    tree = {"p": value, "m": Mirrored(jnp.float32(3))}
    doubled = through(lambda t: jax.tree.map(lambda x: x * 2, t))(tree)
    assert [v.tolist() for v in doubled["p"].values] == [[0, 2], [20, 22]]
    assert float(doubled["m"].value) == 6
    assert (type(doubled["p"]), type(doubled["m"])) == (PerReplica, Mirrored)


def test_values_inside_jit(value):
    """Components are slices there."""
    assert jax.jit(lambda v: v.values[1] - v.values[0])(value).tolist() == [10, 10]


def test_python_objects(strategy):
    """A component need not be an array; such a value is a tree without leaves."""
    value = strategy.experimental_distribute_values_from_function(lambda c: f"replica {c.replica_id_in_sync_group}")
    assert value.values == ("replica 0", "replica 1")
    assert jax.tree.leaves(value) == []
    assert jax.tree.map(lambda x: x, value).values == value.values


def test_padded_components(strategy):
    """Components are shown without their padding."""
    (batch,) = strategy.experimental_distribute_dataset([np.arange(5)])
    assert [v.tolist() for v in batch.values] == [[0, 1, 2], [3, 4]]
    assert batch.rows.per_replica_counts.tolist() == [3, 2]


def test_a_new_per_replica():
    """May be made by hand, from one array with a leading replica dim."""
    assert [v.tolist() for v in PerReplica(jnp.arange(4).reshape(2, 2)).values] == [[0, 1], [2, 3]]
    assert is_distributed(PerReplica(jnp.ones(2)))
    assert not is_distributed(jnp.ones(2))


def test_map_leaves(value):
    """A distributed value is one leaf."""
    assert map_leaves(type, [value, 1, {"m": Mirrored([1, 2])}]) == [PerReplica, int, {"m": Mirrored}]


def test_row_masks_are_compared_by_identity():
    """Leaves of one batch share one mask object."""
    a, b = RowMask(np.ones((2, 1), bool), 2), RowMask(np.ones((2, 1), bool), 2)
    assert a != b
    assert a == a  # noqa: PLR0124
