"""Functions of any kind, drawn at random: each replica gives what they give on its rows, with what the others send."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from tests.draws import draws

import phalanx
from phalanx._src.programs.stages import IndivisibleError, StagedTrace, Stages

WIDTH = 2
context = phalanx.get_replica_context

ALONE = {
    "double": lambda x: 2 * x,
    "center": lambda x: x - x.mean(0),
    "sort": lambda x: jnp.sort(x, axis=0),
    "reverse": lambda x: x[::-1],
    "running": lambda x: jnp.cumsum(x, axis=0) / (1 + jnp.arange(len(x)))[:, None],
    "weigh": lambda x: jax.nn.softmax(x, axis=0) * len(x),
    "attend": lambda x: jax.nn.softmax(x @ x.T, axis=-1) @ x,
    "twice": lambda x: jnp.concatenate([x, x * 0.5]),
    "first": lambda x: x[:1],
    "called": jax.jit(lambda x: jnp.tanh(x) + x.shape[0]),
    "looped": lambda x: lax.scan(lambda carry, row: (0.5 * carry + row, carry), jnp.zeros(WIDTH), x)[1],
    "branched": lambda x: lax.cond(x.sum() > 0, lambda: x + 1, lambda: x - len(x)),
}
"""What a replica does with its rows alone."""

TOGETHER = {
    "sum": (
        lambda x: x + context().all_reduce("SUM", x.sum(0)),
        lambda xs: [x + sum(y.sum(0) for y in xs) for x in xs],
    ),
    "mean": (
        lambda x: x - context().all_reduce("MEAN", x.max()),
        lambda xs: [x - np.mean([y.max() for y in xs]) for x in xs],
    ),
    "count": (
        lambda x: x / context().all_reduce("SUM", x.shape[0]),
        lambda xs: [x / sum(len(y) for y in xs) for x in xs],
    ),
    "gather": (
        lambda x: x + context().all_gather(x, axis=0).mean(0),
        lambda xs: [x + np.concatenate(xs).mean(0) for x in xs],
    ),
    "gather all": (
        lambda x: context().all_gather(x, axis=0) * x[0],
        lambda xs: [np.concatenate(xs) * x[0] for x in xs],
    ),
}
"""What replicas do together, and the same with the rows of all in NumPy."""

OPERATIONS = st.lists(st.sampled_from([*ALONE, *TOGETHER]), min_size=1, max_size=4)


def simulated(operations, parts):
    """Returns what each replica that has rows has in the end."""
    for name in operations:
        parts = (
            TOGETHER[name][1](parts) if name in TOGETHER else [np.asarray(ALONE[name](jnp.asarray(x))) for x in parts]
        )
    return parts


@draws(5, 120)
@hypothesis.given(OPERATIONS, st.integers(1, 3), st.integers(1, 9))
def test_any_function_of_the_rows(operations, replicas, num_rows):
    """Also if some replicas have none."""
    hypothesis.assume(operations.count("twice") + operations.count("gather all") < 3)
    rows = np.random.default_rng(num_rows).normal(size=(num_rows, WIDTH)).astype("float32")

    def replica(x):
        for name in operations:
            x = TOGETHER[name][0](x) if name in TOGETHER else ALONE[name](x)
        return x, x.sum()

    strategy = phalanx.MirroredStrategy([f"cpu:{i}" for i in range(replicas)])
    (batch,) = strategy.experimental_distribute_dataset([rows])
    found, sums = strategy.run(replica, args=(batch,))
    parts = [x for x in np.array_split(rows, replicas) if len(x)]
    values, sums = (list(map(np.asarray, strategy.experimental_local_results(x))) for x in (found, sums))
    for value, total, expected in zip(values, sums, simulated(operations, parts), strict=False):
        np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(total, expected.sum(), rtol=1e-4, atol=1e-4)


def mapped(fn):
    """Calls a function of one float32 array (4,) on each of two devices."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("replica",))
    spec = PartitionSpec("replica")
    map_over = functools.partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return jax.jit(map_over(fn))(jnp.arange(8, dtype="float32"))


def traces(*functions):
    """Traces functions of as many rows as their numbers say."""
    return [StagedTrace(lambda x, fn=fn: [fn(x)], [jax.ShapeDtypeStruct((size,), "float32")]) for size, fn in functions]


def test_stages_are_few_and_late():
    """What an exchange needs is computed just before it; the rest where its inputs are."""
    seen = []

    def body(x):
        def fn(x):
            early = lax.psum(x.sum(), "replica")
            late = jnp.sin(x) * early
            return jnp.cos(x).sum() + lax.psum(late.sum(), "replica")

        (trace,) = traces((4, fn))
        seen.extend([[eqn.primitive.name for eqn in stage.part] for stage in trace.stages])
        return jnp.asarray(Stages([trace]).run([x], None))

    total = mapped(body)
    assert [("sin" in part, "cos" in part) for part in seen] == [(False, True), (True, False), (False, False)]
    x = np.arange(8)
    expected = (np.sin(x) * x.sum()).sum() + np.cos(x).reshape(2, 4).sum(1)
    np.testing.assert_allclose(total, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        pytest.param(lambda x: lax.psum(x[:1], "replica").sum(), r"psum\w* at .*test_stages.py:\d+", id="other shapes"),
        pytest.param(lambda x: lax.pmax(x.sum(), "replica"), r"p\w+ at", id="another operation"),
        pytest.param(lambda x: x.sum(), r"psum\w* at", id="none"),
        pytest.param(
            lambda x: lax.psum(x.sum(), "replica").astype("int32"), "its results have other dtypes", id="results"
        ),
    ],
)
def test_traces_that_exchange_something_else(other, message):
    """The message names the first operation that differs."""

    def body(x):
        Stages(traces((4, lambda x: lax.psum(x.sum(), "replica")), (3, other)))
        return x

    with pytest.raises(IndivisibleError, match=message):
        mapped(body)


def test_equal_parts_are_compiled_once():
    """What does not depend on the rows is no branch: the update after the sum of gradients."""

    def fn(x):
        return jnp.tan(lax.psum(jnp.sin(x).sum(), "replica"))

    texts = []

    def body(x):
        stages = Stages(traces((4, fn), (3, fn)))
        run = lambda x: stages.run([x], lax.axis_index("replica"))[0][None]  # noqa: E731
        texts.append(str(jax.make_jaxpr(run)(x)))
        return run(x)

    x = np.arange(8)
    total = np.sin(x[:4]).sum() + np.sin(x[4:7]).sum()
    np.testing.assert_allclose(mapped(body), [np.tan(total)] * 2, rtol=1e-4)
    assert (texts[0].count("sin "), texts[0].count("tan ")) == (2, 1)
