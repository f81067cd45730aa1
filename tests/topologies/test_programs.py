"""Steps of two models under every synchronous strategy, compiled for TPUs and GPUs that are not here: `make test-topologies`."""

import functools
import os
import re
import subprocess
import sys

import keras
import numpy as np
import pytest

import phalanx
from phalanx._src.tools.estimate import targets
from phalanx._src.tools.estimate.step import at_first_step, compiled

pytest.importorskip("libtpu", reason="make test-topologies")
pytest.importorskip("jax_cuda12_plugin", reason="make test-topologies")

WIDTH, LENGTH, WORDS = 256, 64, 2048
SLICES = "2*v5e:4x4"
ROWS = 8 * 4096
GPUS = ("h100:8", "h100:512x8")
TOPOLOGIES = ("v5e:4x4", "v5p:2x2x2", "v6e:16x16", SLICES, "v5p:16x16x16", *GPUS)


def mlp():
    """A dense model: inputs and outputs of one row, and the model."""
    layers = [keras.layers.Dense(WIDTH, activation="relu") for _ in range(6)]
    return (WIDTH,), (10,), keras.Sequential([keras.Input((WIDTH,)), *layers, keras.layers.Dense(10)])


def wide():
    """A dense model whose kernels have eight rows for each of 4,096 devices. TPUs store eight rows at a time."""
    layers = [keras.layers.Dense(n) for n in (2048, ROWS)]
    return (ROWS,), (ROWS,), keras.Sequential([keras.Input((ROWS,)), *layers])


def transformer():
    """Attention and dense layers."""
    words = keras.Input((LENGTH,))
    x = keras.layers.Embedding(WORDS, WIDTH)(words)
    h = keras.layers.LayerNormalization()(x)
    x = x + keras.layers.MultiHeadAttention(2, WIDTH // 2)(h, h, use_causal_mask=True)
    x = x + keras.layers.Dense(WIDTH)(keras.layers.Dense(4 * WIDTH, activation="gelu")(x))
    return (LENGTH,), (10,), keras.Model(words, keras.layers.Dense(10)(keras.ops.mean(x, axis=1)))


def tpu_with_logical_devices():
    """Replicas of two cores."""
    topology = phalanx.tpu.experimental.initialize_tpu_system()
    assignment = phalanx.tpu.experimental.DeviceAssignment.build(topology, [2, 1, 1, 1], num_replicas=1)
    return phalanx.TPUStrategy(experimental_device_assignment=assignment)


def model_axis():
    """Replicas of two devices, which divide the variables."""
    return phalanx.MirroredStrategy(2, model_axis=("model", 2), layout=phalanx.fully_sharded("model"))


STRATEGIES = {
    "mirrored": lambda: phalanx.MirroredStrategy(1),
    "multi_worker": phalanx.MultiWorkerMirroredStrategy,
    "tpu": phalanx.TPUStrategy,
    "logical_devices": tpu_with_logical_devices,
    "model_axis": model_axis,
    "fully_sharded": lambda: phalanx.MirroredStrategy(1, layout=phalanx.fully_sharded()),
}
GATHERED = {
    f"gathered_by_{when}_x{count}": lambda count=count, when=when: phalanx.MirroredStrategy(
        count, layout=phalanx.fully_sharded(gather=when)
    )
    for when in ("step", "layer")
    for count in (1, 4)
}
CENTRAL = {"central": lambda: phalanx.experimental.CentralStorageStrategy(["cpu:0"])}
"""Its variables are on one device of a machine, so it has no program for many machines."""
WHOLE = ("mirrored", "multi_worker", "tpu")
"""The strategies under which each device has all variables."""


@functools.cache
def program(build, name, topology, policy="float32", rows=64):
    """Compiles the first step of `fit`, and returns it with the number of trained parameters and of devices."""
    count = 0

    def train():
        nonlocal count
        with (STRATEGIES | GATHERED | CENTRAL)[name]().scope():
            keras.config.set_dtype_policy(policy)
            try:
                x, y, model = build()
            finally:
                keras.config.set_dtype_policy("float32")
            model.compile("adam", "mse")
        count = model.count_params()
        model.fit(np.ones((rows, *x)), np.ones((rows, *y)), batch_size=rows, verbose=0)

    (target,) = targets.parse([topology])
    found = at_first_step(train, lambda step: compiled(step.lower(target.devices(), step.layout)))
    return found, count, target.num_devices


def sums(found):
    """The collectives that add arrays."""
    return [c for c in found.program.collectives if c.kind in ("all-reduce", "reduce-scatter")]


LARGEST_TPU = pytest.param(
    "v5p:16x16x16",
    marks=pytest.mark.xfail(
        strict=True, reason="over 4,096 chips, XLA replaces all-gather by updates and an all-reduce"
    ),
)
every_row = pytest.mark.parametrize("topology", TOPOLOGIES)
every_model = pytest.mark.parametrize("build", [mlp, transformer])


@every_row
@every_model
@pytest.mark.parametrize("name", WHOLE)
def test_gradients_are_summed_in_few_messages(build, name, topology):
    """Each gradient is summed once, and one message carries many of them."""
    found, count, _ = program(build, name, topology)
    num_bytes = sum(c.num_bytes for c in sums(found) if not c.is_between_slices)
    assert len([c for c in sums(found) if not c.is_between_slices]) <= 6
    assert num_bytes == pytest.approx(4 * count, rel=0.02)


@pytest.mark.parametrize("topology", [LARGEST_TPU if t == "v5p:16x16x16" else t for t in TOPOLOGIES])
def test_shards_are_gathered_and_scattered(topology):
    """No device has all variables, and no message sums all gradients for everybody."""
    found, count, _ = program(wide, "fully_sharded", topology)
    whole = program(wide, "mirrored", topology)[0]
    batch = 64 * 2 * ROWS * 4
    assert found.memory.arguments - batch < 0.2 * (whole.memory.arguments - batch)
    assert "all-gather" in {c.kind for c in found.program.collectives}
    scattered = sum(c.num_bytes for c in found.program.collectives if c.kind == "reduce-scatter")
    summed = sum(c.num_bytes for c in found.program.collectives if c.kind == "all-reduce")
    assert scattered or summed <= 4 * count * 1.02


def deep():
    """Equal layers, each of which fills 32 MB on a device that has all of it."""
    layers = [keras.layers.Dense(4096, activation="relu", use_bias=False) for _ in range(8)]
    return (4096,), (4096,), keras.Sequential([keras.Input((4096,)), *layers])


@pytest.mark.parametrize(("count", "topology", "rows"), [(1, "v5e:4x4", 64), (4, "v5e:2x2", 15), (1, "h100:2x8", 64)])
def test_a_device_holds_few_gathered_layers(count, topology, rows):
    """With the gathers where the layers are, the temporary memory is that of four layers and the shards of the gradients.

    So it is if one of four replicas has fewer rows, which must be known when the step is traced: on as many devices as the target has.
    """
    kernel, shards = 2 * 4096**2, 8 * 2 * 4096**2 // 16
    by_step, by_layer = (
        program(deep, f"gathered_by_{when}_x{count}", topology, "bfloat16", rows)[0].memory.temporary
        for when in ("step", "layer")
    )
    assert by_layer < 4 * kernel + shards
    assert by_step > 7 * kernel


class Recomputed(keras.layers.Layer):
    """Two dense layers, which the backward pass computes again."""

    def build(self, shape):
        self.expand, self.contract = keras.layers.Dense(4 * 1024, activation="gelu"), keras.layers.Dense(1024)
        self.expand.build(shape)
        self.contract.build((*shape[:-1], 4 * 1024))

    def call(self, x):
        return keras.remat(lambda h: h + self.contract(self.expand(h)))(x)


def recomputed(blocks):
    """Equal blocks, each of which fills 17 MB on a device that has all of it."""
    return (1024,), (1024,), keras.Sequential([keras.Input((1024,)), *(Recomputed() for _ in range(blocks))])


def test_a_block_that_is_computed_again_is_gathered_twice():
    """In the forward and in the backward pass. The shards of the gradients of four further blocks are smaller than one gathered block."""
    kernels = 8 * 1024**2
    few, many = (
        program(functools.partial(recomputed, n), "gathered_by_layer_x1", "h100:2x8", "mixed_bfloat16")[0]
        for n in (2, 6)
    )
    gathered = [sum(c.num_bytes for c in x.program.collectives if c.kind == "all-gather") for x in (few, many)]
    assert gathered[1] - gathered[0] < 4 * 2 * 2 * kernels * 1.02
    assert many.memory.temporary - few.memory.temporary < 2 * kernels


@every_model
@pytest.mark.parametrize("topology", GPUS)
@pytest.mark.parametrize("name", [name for name in STRATEGIES if name != "model_axis"])
def test_gpus_communicate_while_they_compute(build, name, topology):
    """Every sum of gradients starts before other operations and ends after them. TPUs wait for each.

    With a model axis, the devices of a replica also add activations, for which the next layer waits.
    """
    found, _, _ = program(build, name, topology)
    assert sums(found)
    assert all(c.is_async for c in sums(found))


@every_model
def test_central_storage_sums_gradients_only(build):
    """The devices of one machine return the sum of the gradients. The update is a program of the parameter device."""
    found, count, _ = program(build, "central", "h100:8")
    assert [(c.kind, len(c.group)) for c in found.program.collectives] == [("all-reduce", 8)]
    assert found.program.collectives[0].num_bytes == pytest.approx(4 * count, rel=0.02)
    assert found.memory.arguments < 4 * count * 1.1
    assert found.program.num_transfers == 0


@every_row
@every_model
@pytest.mark.parametrize("name", ["logical_devices", "model_axis"])
def test_replicas_of_several_devices(build, name, topology):
    """Gradients are summed over the devices of a slice that hold the same part: every second one."""
    found, _, num_devices = program(build, name, topology)
    assert num_devices // (4 if topology == SLICES else 2) in {len(c.group) for c in sums(found)}


@every_row
@every_model
@pytest.mark.parametrize("name", STRATEGIES)
def test_state_is_updated_in_place(build, name, topology):
    """The memory of all variables and slots is reused, and no value goes to the host."""
    found, _, _ = program(build, name, topology)
    assert found.memory.reused >= 0.9 * (found.memory.arguments - 64 * 4 * (WIDTH + 10 + 2))
    assert found.program.num_transfers == 0


@pytest.mark.parametrize("name", WHOLE)
def test_slices_are_connected_by_shards(name):
    """Between slices, a device sends its part of a sum that its slice has already made."""
    found, count, _ = program(transformer, name, SLICES)
    far = sum(c.num_bytes for c in found.program.collectives if c.is_between_slices)
    assert 0 < far <= 4 * count / 16 * 1.1


@every_row
@every_model
def test_bfloat16_is_kept(build, topology):
    """Every product of a model in mixed bfloat16 has a bfloat16 operand. The other one is bfloat16, too, or the batch.

    In a kernel of Triton, the operands are said to be float32, and are rounded to bfloat16 by the product itself.
    """
    found, _, _ = program(build, "mirrored", topology, "mixed_bfloat16")
    text = found.program.text
    dtypes = dict(re.findall(r"^\s+(?:ROOT )?%([\w.-]+) = \(?(\w+)\[", text, re.MULTILINE))
    products = re.findall(r" (?:dot|convolution)\(%([\w.-]+), %([\w.-]+)([^\n]*)", text)
    products += re.findall(r' custom-call\(%([\w.-]+), %([\w.-]+)([^\n]*custom_call_target="__cublas)', text)
    assert len(products) >= 6
    assert all("bf16" in {dtypes[a], dtypes[b]} or "algorithm=dot_bf16_bf16" in rest for a, b, rest in products)


def test_plugin_that_gave_up():
    """Without JAX_PLATFORMS=cpu, the plugin looks for GPUs, and JAX has no compiler for them afterwards."""
    script = "import jax, phalanx; jax.devices(); phalanx.estimate(lambda: None, ['h100:8'])"
    environment = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert "HINT: JAX_PLATFORMS=cpu" in done.stderr
