"""Variables that are gathered where a trace uses them."""

import functools
import re
import types

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

import phalanx
from phalanx._src.mesh.layout import REPLICA_AXIS
from phalanx._src.mesh.topology import Topology
from phalanx._src.programs import gathering

ON_CPUS = Topology.of(2)
MESH = ON_CPUS.mesh
W = np.arange(16, dtype="float32").reshape(4, 4)
X = np.linspace(-1, 1, 12, dtype="float32").reshape(3, 4)


def remat(w, x):
    """A number is among the inputs of the backward pass."""
    return jax.grad(lambda a: jax.checkpoint(lambda b, k: jnp.tanh(jnp.tanh(x @ b) @ b.T * k).sum())(a, 2.0))(w)


def loop(w, x):
    """The variable is the same in each step of a scan."""
    return lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, length=3)[0]


FUNCTIONS = {
    "a product": lambda w, x: x @ w,
    "a cast and a product": lambda w, x: x.astype("bfloat16") @ w.astype("bfloat16"),
    "its transpose": lambda w, x: x @ w.T,
    "in a call": lambda w, x: jax.jit(lambda a, b: b @ a + b)(w, x),
    "in a checkpoint": lambda w, x: jax.checkpoint(lambda a, b: jnp.tanh(b @ a))(w, x),
    "in a loop": loop,
    "in a branch": lambda w, x: lax.cond(x.sum() > 0, lambda: x @ w, lambda: x - w[0]),
    "twice": lambda w, x: (x @ w) @ w + w.sum(),
    "unchanged": lambda w, x: (w, x),
    "with nothing else": lambda w, x: jnp.sin(w),
    "the gradient of a checkpoint": remat,
    "its gradient": lambda w, x: jax.grad(lambda a: jnp.tanh(x @ a @ a).sum())(w),
}


def of_shards(fn, dim, topology=ON_CPUS):
    """A program of two replicas that computes `fn(w, x)` from shards of `w`."""

    def replica(shard, x):
        value = gathering.later(topology, shard, dim)
        return gathering.evaluate(jax.make_jaxpr(fn)(value.whole(), x), value, x)

    specs = PartitionSpec(*(None,) * dim, REPLICA_AXIS), PartitionSpec()
    return jax.jit(jax.shard_map(replica, mesh=MESH, in_specs=specs, out_specs=PartitionSpec(), check_vma=False))


@pytest.mark.cover(
    ["name", "dim"], {(name, i % 2) for i, name in enumerate(FUNCTIONS)} | {("a product", 1), ("its gradient", 1)}
)
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_results_are_those_of_whole_variables(name, dim):
    """Whatever a function does with a variable."""
    fn = FUNCTIONS[name]

    found = of_shards(fn, dim)(W, X)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), found, jax.tree.leaves(jax.jit(fn)(W, X)))


@pytest.mark.parametrize(("platform", "operands"), [("gpu", [2, 3, 2, 1]), ("tpu", [2, 2, 3])])
def test_a_checkpoint_gathers_once_per_pass(platform, operands):
    """Its backward pass waits for the gradient before it gathers, except on TPUs, and shares what it gathers."""
    fn = jax.grad(lambda w, x: jnp.cos(jax.checkpoint(lambda a, b: jnp.tanh(b @ a))(w, x)).sum(), argnums=(0, 1))
    topology = types.SimpleNamespace(devices=[types.SimpleNamespace(platform=platform)])
    text = of_shards(fn, 0, topology).lower(W, X).as_text()
    assert text.count('"stablehlo.all_gather"') == 2
    barriers = re.findall(r"optimization_barrier (.*?) :", text)
    assert [len(barrier.split(",")) for barrier in barriers] == operands


def step_of(layers, gather, rows):
    """The text of a training step of some rows, whose kernels are sharded over two replicas."""
    strategy = phalanx.MirroredStrategy(2, layout=phalanx.fully_sharded(min_size=1, gather=gather))
    with strategy.scope():
        dense = [keras.layers.Dense(4, use_bias=False, activation="tanh") for _ in range(layers)]
        model = keras.Sequential([keras.Input((4,)), *dense])
        optimizer = keras.optimizers.SGD(0.1)

    @phalanx.function
    def step(batch):
        def replica(batch):
            with phalanx.GradientTape() as tape:
                loss = keras.ops.sum(model(batch) ** 2)
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
            return loss

        return strategy.run(replica, args=(batch,))

    return step.lower(next(iter(strategy.experimental_distribute_dataset([np.ones((rows, 4), "float32")])))).as_text()


@pytest.mark.parametrize("rows", [4, 3, 1])
@pytest.mark.parametrize(("gather", "times"), [("step", 0), ("layer", 5)])
def test_forward_and_backward_pass_gather(gather, times, rows):
    """Three kernels, of which the backward pass needs two again: for the first one it needs only its input."""
    assert step_of(3, gather, rows).count("stablehlo.all_gather") == times


def test_size_decides_unless_the_user_does():
    """From a gibibyte on, a device does not hold all variables at once."""
    layout = phalanx.fully_sharded()
    assert [layout.gathers_by_layer(n) for n in ((1 << 30) - 1, 1 << 30)] == [False, True]
    assert phalanx.fully_sharded(gather="layer").gathers_by_layer(1)
    assert not phalanx.fully_sharded(gather="step").gathers_by_layer(1 << 40)


@pytest.mark.parametrize(
    ("gather", "platform", "flags", "limit"),
    [
        ("layer", "gpu", "", 15 << 20),
        ("layer", "gpu", "--xla_gpu_reduce_scatter_combine_threshold_bytes=9", None),
        ("layer", "cpu", "", None),
        ("step", "gpu", "", None),
    ],
)
def test_gradients_in_one_message_are_limited(monkeypatch, gather, platform, flags, limit):
    """On GPUs, where XLA counts shards. A flag of the user decides before."""
    monkeypatch.setattr(gathering, "device_name", lambda device: f"{platform}:{device.id}")
    monkeypatch.setenv("XLA_FLAGS", flags)
    strategy = phalanx.MirroredStrategy(2, layout=phalanx.fully_sharded(min_size=1, gather=gather))
    with strategy.scope():
        kernel = keras.Variable(np.zeros((4, 4)))
    options = gathering.compiler_options([kernel], strategy.topology)
    assert options.get("xla_gpu_reduce_scatter_combine_threshold_bytes") == limit
