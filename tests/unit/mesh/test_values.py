"""Distributed values: components, pytrees, and what they refuse."""

import operator

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import phalanx
from phalanx import Mirrored, PerReplica
from phalanx._src.mesh.values import ComponentSizes, ReplicaLocal, is_distributed, map_leaves
from phalanx.errors import ContextError, InvalidArgumentError


@pytest.fixture
def strategy():
    return phalanx.MirroredStrategy(["cpu:0", "cpu:1"])


@pytest.fixture
def value(strategy):
    """[0, 1] on the first replica, [10, 11] on the second."""
    return strategy.experimental_distribute_values_from_function(
        lambda c: np.float32([0, 1]) + 10 * c.replica_id_in_sync_group
    )


def test_components_follow_the_order_of_devices(value):
    """In replica order, one array each, on the device of the replica."""
    assert [v.tolist() for v in value.values] == [[0, 1], [10, 11]]
    assert [[d.id for d in v.devices()] for v in value.values] == [[0], [1]]
    strategy = phalanx.MirroredStrategy(["cpu:5", "cpu:2"])
    ids = strategy.run(lambda: phalanx.get_replica_context().replica_id_in_sync_group)
    assert [(int(v), v.device.id) for v in ids.values] == [(0, 5), (1, 2)]
    replicated = strategy.replicate(jnp.ones(1))
    assert [v.device.id for v in replicated.values] == [5, 2]


def test_repr_is_that_of_tf_distribute(value):
    assert repr(value).startswith("PerReplica:{\n  0: Array([0., 1.]")
    assert repr(Mirrored(3)) == "Mirrored:{\n  0: 3,\n}"
    assert repr(ReplicaLocal(3)) == "ReplicaLocal(3)"


@pytest.mark.parametrize(
    "use",
    [
        *(jnp.sum, jnp.mean, np.asarray, operator.neg, len, iter, float, bool, abs, round),
        lambda v: jnp.ones(2) + v,
        lambda v: v[0],
        lambda v: v.shape,
        lambda v: v == 1,
        lambda v: v != 1,
        lambda v: v > 1,
        lambda v: np.ones(2) @ v,
        lambda v: v**2,
        lambda v: v.mean(),
        lambda v: v.astype("int32"),
        lambda v: v.numpy(),
        lambda v: 1 in v,
        lambda v: np.arange(3)[v],
        lambda v: jnp.arange(3)[v],
        jax.typeof,
        jax.vmap(lambda x: x + 1),
        lambda v: jax.lax.scan(lambda total, x: (total + x, None), 0, v),
        lambda v: jax.tree.map(jnp.sum, v) + 1,
    ],
)
def test_per_replica_is_no_array(value, use):
    """At once; the message lists the ways to make one value of it."""
    with pytest.raises(ContextError, match="a PerReplica used as an array") as e:
        use(value)
    assert "experimental_local_results" in e.value.hint


USES = {
    "jnp.mean": jnp.mean,
    "jnp.concatenate": lambda x: jnp.concatenate([x, x]),
    "keras.ops": keras.ops.max,
    "np.mean": np.mean,
    "jit": lambda x: jax.jit(lambda y: y.mean() + jnp.sum(y))(x),
    "grad": lambda x: jax.grad(lambda w: (w * x).sum())(jnp.float32(1)),
    "sums": lambda x: (x + 1) + (1 + x) + (x - 1) - (1 - x),
    "products": lambda x: (x * 2) + 2 * x - x / 2 + 2 / x,
    "power": lambda x: x**2 + 2**x,
    "remainder": lambda x: x % 2 + 5 % x,
    "floor": lambda x: x // 2 + 5 // x,
    "divmod": lambda x: divmod(x, 2)[0],
    "matmul": lambda x: x @ x + jnp.ones(3) @ x + x @ np.ones(3, "f") + np.ones(3, "f") @ x,
    "unary": lambda x: -x + abs(-x) + (+x),
    "equal": lambda x: x == 1,
    "equal_reflected": lambda x: np.float32(1) == x,
    "unequal": lambda x: x != 1,
    "less": lambda x: x < 2,
    "greater": lambda x: x <= 2,
    "compared_with_arrays": lambda x: jnp.float32([1, 3, 3]) <= x,
    "bits": lambda x: (x > 1) & (x < 3) | ~(x > 0) ^ (x == 2),
    "method": lambda x: x.mean() + x.max(axis=0) + x.std(),
    "astype": lambda x: x.astype("int32"),
    "reshape": lambda x: x.reshape(3, 1).T,
    "properties": lambda x: (x.ndim, x.size, x.shape, x.nbytes, str(x.dtype), x.device.platform),
    "at": lambda x: x.at[0].set(5),
    "index": lambda x: x[1:] + x[0],
    "contains": lambda x: (2 in x, 5 in x, len(x)),
    "lists": lambda x: (x.tolist(), list(map(float, x)), x.numpy().tolist()) if hasattr(x, "numpy") else None,
    "number": lambda x: (int(x[0]), float(x.sum()), bool(x[0]), round(x.sum()), f"{x[2]:.2f}"),
    "position": lambda x: range(20)[x.sum().astype(int)],
    "layer": lambda x: keras.layers.Rescaling(2.0)(x),
    "numpy": lambda x: np.asarray(x, "float64") + np.array(x),
}


@pytest.mark.cover(
    ["use", "which"],
    [(use, 1) for use in USES.values()] + [(USES[name], 0) for name in ("sums", "matmul", "index", "numpy")],
)
@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
@pytest.mark.parametrize("which", [0, 1], ids=["full", "short"])
def test_a_batch_of_one_replica_is_its_array(use, which):
    """A batch that may be short can do with its real rows whatever an array can."""
    strategy = phalanx.OneDeviceStrategy("cpu:1")
    rows = np.float32([4, 5, 6] if which == 0 else [1, 2, 3])
    batches = strategy.experimental_distribute_dataset([np.float32([4, 5, 6, 7]), np.float32([1, 2, 3])])
    batch, expected = (
        list(batches)[which][:3] if which == 0 else list(batches)[1],
        jax.device_put(rows, jax.devices()[1]),
    )
    got, wanted = use(batch), use(expected)
    if wanted is not None:
        assert type(got) is type(wanted)
        assert np.array_equal(np.asarray(got, dtype=object), np.asarray(wanted, dtype=object))


def test_distributed_values_are_keys_by_identity(value):
    """Comparing elements does not take the hash away."""
    other = PerReplica(value.data)
    assert {value: 1, other: 2}[value] == 1
    assert value in [value]
    assert len({Mirrored(1), Mirrored(1)}) == 2
    with pytest.raises(AttributeError, match="'PerReplica' object has no attribute 'todense'"):
        _ = value.todense


def test_components_in_a_function(strategy):
    """A program knows how many rows each replica has."""
    (short,) = strategy.experimental_distribute_dataset([np.arange(3.0)])
    parts = phalanx.function(lambda batch: [part.sum() for part in batch.values])(short)
    assert [float(x) for x in parts] == [1, 2]


def test_mirrored_is_an_array():
    """Unless its value is a nest or an object."""
    value = Mirrored(jnp.float32([1, 2]))
    assert (jnp.asarray(value) + 1).tolist() == [2, 3]
    assert np.asarray(value, dtype="int32").tolist() == [1, 2]
    assert (value + 1).tolist() == [2, 3]
    assert (value == 1).tolist() == [True, False]
    assert float(jnp.mean(value)) == float(value.mean()) == 1.5
    for other in ({"w": 1}, [1, 2], None, "text", object()):
        with pytest.raises(ContextError, match=r"a Mirrored \w+ used as an array: .*\nHINT: mirrored.value"):
            _ = Mirrored(other) + 1


def test_shapes_of_components_have_a_text(value):
    """`jax.eval_shape` returns them."""
    assert repr(jax.eval_shape(lambda v: v, value)) == "PerReplica(ShapeDtypeStruct(shape=(2, 2), dtype=float32))"


def test_values_without_any_components(strategy, value):
    """A function may take all of them together."""
    with pytest.raises(InvalidArgumentError, match="a PerReplica of 0 components"):
        strategy.run(lambda x: x, args=(jax.tree.map(jnp.sum, value),))


def test_mirrored_value_has_a_component_per_device(strategy):
    """One copy per device, with the structure of the value."""
    parts = strategy.replicate({"w": jnp.ones(2), "b": None}).values
    assert [p["w"].devices().pop().id for p in parts] == [0, 1]
    assert [p["b"] for p in parts] == [None, None]
    parts = strategy.run(lambda: Mirrored({"w": jnp.ones(2), "t": "text"})).values
    assert [(p["w"].tolist(), p["t"]) for p in parts] == [([1, 1], "text")] * 2


@pytest.mark.parametrize("through", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_values_are_pytrees_for_jax(value, through):
    """Both kinds keep their class and their components through jax.tree.map and jax.jit. Components are slices there."""
    tree = {"p": value, "m": Mirrored(jnp.float32(3))}
    doubled = through(lambda t: jax.tree.map(lambda x: x * 2, t))(tree)
    assert [v.tolist() for v in doubled["p"].values] == [[0, 2], [20, 22]]
    assert float(doubled["m"].value) == 6
    assert (type(doubled["p"]), type(doubled["m"])) == (PerReplica, Mirrored)
    assert jax.jit(lambda v: v.values[1] - v.values[0])(value).tolist() == [10, 10]


def test_python_objects_may_be_components(strategy):
    """A component need not be an array; such a value is a tree without leaves."""
    value = strategy.experimental_distribute_values_from_function(lambda c: f"replica {c.replica_id_in_sync_group}")
    assert value.values == ("replica 0", "replica 1")
    assert jax.tree.leaves(value) == []
    assert jax.tree.map(lambda x: x, value).values == value.values


def test_padded_components_show_real_rows(strategy):
    (batch,) = strategy.experimental_distribute_dataset([np.arange(5)])
    assert [v.tolist() for v in batch.values] == [[0, 1, 2], [3, 4]]
    assert batch.rows.counts == (3, 2)


def test_a_new_per_replica():
    """It may be made by hand, from one array with a leading replica dim."""
    assert [v.tolist() for v in PerReplica(jnp.arange(4).reshape(2, 2)).values] == [[0, 1], [2, 3]]
    assert int(PerReplica(jnp.int32([3]))) == float(PerReplica(jnp.int32([3]))) == 3
    assert is_distributed(PerReplica(jnp.ones(2)))
    assert not is_distributed(jnp.ones(2))


def test_map_leaves_takes_values_whole(value):
    """A distributed value is one leaf."""
    assert map_leaves(type, [value, 1, {"m": Mirrored([1, 2])}]) == [PerReplica, int, {"m": Mirrored}]


def test_rows_tell_what_is_real():
    """Of components that differ in some dims, also for stacked steps; equal sizes are equal values."""
    rows = ComponentSizes(((3, 2), (1, 2)))
    assert (rows.counts, rows.dims) == ((3, 1), (0,))
    assert rows == ComponentSizes(((3, 2), (1, 2)), first=1)
    assert rows.mask((2, 3, 2, 5))[:, :, 0].tolist() == [[True] * 3, [True, False, False]]
    assert rows.cut(np.ones((3, 2, 5)), 1).shape == (1, 2, 5)
    assert rows.of_steps(4).sizes == ((4, 3, 2), (4, 1, 2))
    assert rows.of_steps(4).without_dims(1) == rows
    assert ComponentSizes.of_counts([2, 2]) is None
    assert ComponentSizes.of_counts([0, 0]).dims == (0,)
