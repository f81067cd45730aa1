"""All functions that reduce give the dtype and the value of `jnp.sum` or `jnp.mean`, on one replica and on two."""

import jax.numpy as jnp
import numpy as np
import pytest
from replica_values import per_replica

import phalanx
from phalanx.errors import ReduceOpError

LARGE = {
    "int8": 100,
    "uint8": 200,
    "int32": 2**30,
    "uint32": 2**31,
    "float16": 60_000,
    "bfloat16": 200,
}


def context():
    return phalanx.get_replica_context()


def both(reduce):
    """A function of a strategy and values, that returns their sums and means."""
    return lambda strategy, values: {op: reduce(strategy, op, values) for op in ("SUM", "MEAN")}


def merged(reduce):
    """The same in a merge function."""
    return in_replica(lambda values: context().merge_call(both(reduce), args=(values,)))


def in_replica(replica_fn):
    return lambda strategy, values: strategy.experimental_local_results(strategy.run(replica_fn, args=(values,)))[0]


def moved(strategy, op, values):
    results = strategy.extended.batch_reduce_to(op, [(x, "cpu:0") for x in values])
    return results if phalanx.in_cross_replica_context() else strategy.experimental_local_results(results)[0]


REDUCE = {
    "reduce": both(lambda s, op, x: s.reduce(op, x, axis=None)),
    "rows": both(lambda s, op, x: s.reduce(op, x, axis=0)),
    "dims": both(lambda s, op, x: s.reduce(op, x, axis=(0, 1))),
    "all_reduce": in_replica(lambda x: {op: context().all_reduce(op, x) for op in ("SUM", "MEAN")}),
    "reduce_to": both(moved),
    "merged reduce": merged(lambda s, op, x: s.reduce(op, x, axis=None)),
    "merged rows": merged(lambda s, op, x: s.reduce(op, x, axis=0)),
    "merged reduce_to": merged(moved),
}
OPS = {
    "default": None,
    "tree": phalanx.HierarchicalCopyAllReduce(),
    "one device": phalanx.ReductionToOneDevice(),
    "user's": phalanx.ReductionToOneDevice(accumulation_fn=lambda x, y: x + y),
}


COVER = {
    *((2, "default", how) for how in REDUCE),
    *((1, "default", how) for how in ("reduce", "all_reduce", "merged rows")),
    *((2, "tree", how) for how in ("rows", "merged reduce")),
    *((2, "one device", how) for how in ("dims", "all_reduce")),
    *((2, "user's", how) for how in ("reduce_to", "merged reduce_to")),
}


@pytest.mark.cover(["replicas", "ops", "how"], COVER)
@pytest.mark.parametrize("how", REDUCE)
@pytest.mark.parametrize(
    ("replicas", "ops"), [(1, "default"), *((2, name) for name in OPS)], ids=lambda x: str(x).replace(" ", "_")
)
def test_functions_have_one_table_of_dtypes(replicas, ops, how):
    """Terms whose sum wraps or overflows in their own dtype. Bools are refused."""
    strategy = phalanx.MirroredStrategy([f"cpu:{i}" for i in range(replicas)], cross_device_ops=OPS[ops])
    axis = {"rows": (0, 1), "dims": None, "merged rows": (0, 1)}.get(how, 0)
    arrays = [np.full((replicas, 3, 2), value).astype(jnp.dtype(dtype)) for dtype, value in LARGE.items()]
    results = REDUCE[how](strategy, [per_replica(strategy, *x) for x in arrays])
    for op, function in (("SUM", jnp.sum), ("MEAN", jnp.mean)):
        for x, result in zip(arrays, results[op], strict=True):
            expected = function(jnp.asarray(x), axis=axis)
            assert result.dtype == expected.dtype, (op, x.dtype)
            np.testing.assert_array_equal(result, expected, str((op, x.dtype)))
    with pytest.raises(ReduceOpError, match="a value of dtype bool: bools have no sum or mean"):
        REDUCE[how](strategy, [per_replica(strategy, *np.ones((replicas, 3, 2), bool))])


@pytest.mark.parametrize("replicas", [1, 2])
def test_what_all_replicas_share_has_the_dtype(replicas):
    """A mean of one value is the value, in the dtype of a mean."""
    strategy = phalanx.MirroredStrategy([f"cpu:{i}" for i in range(replicas)])
    for value in (7, np.int8(7), jnp.int32(7), phalanx.Mirrored(jnp.int32(7))):
        mean = strategy.reduce("MEAN", value, axis=None)
        assert (mean.dtype, float(mean)) == ("float32", 7)
    with pytest.raises(ReduceOpError, match="bools have no sum or mean"):
        strategy.reduce("MEAN", jnp.bool_(True), axis=None)


def test_mean_over_rows_of_padded_batches():
    """In the real rows only, as `jnp.mean` of them: 4,095 rows whose sum wraps in int32 and overflows in float16."""
    strategy = phalanx.MirroredStrategy(["cpu:0", "cpu:1"])
    for rows in (np.full(4095, 1_000_000, "int32"), np.full(4095, 20, "float16")):
        (batch,) = strategy.experimental_distribute_dataset(rows, batch_size=4096)
        dtype = jnp.mean(rows).dtype
        mean = strategy.reduce("MEAN", batch, axis=0)
        assert (mean.dtype, float(mean)) == (dtype, pytest.approx(float(jnp.mean(rows)), rel=1e-6))
        (one,) = strategy.experimental_distribute_dataset(rows[:1], batch_size=2)
        counted = strategy.run(lambda x: context().all_reduce("MEAN", x[0]), args=(one,))
        assert [(x.dtype, float(x)) for x in counted.values] == [(dtype, rows[0])] * 2
