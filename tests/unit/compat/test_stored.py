"""Weight files of Keras load into shards, of which each is read alone."""

import tracemalloc
import zipfile

import jax
import keras
import numpy as np
import pytest

import phalanx

SIDE = 1024


def made(strategy=None, dtype="float32", seed=0):
    """A model with a kernel of 4 MiB (half of it in bfloat16), whole or in four shards."""
    keras.utils.set_random_seed(seed)
    layers = [keras.Input((SIDE,)), keras.layers.Dense(SIDE, bias_initializer="normal", dtype=dtype)]
    if strategy is None:
        return keras.Sequential(layers)
    with strategy.scope():
        return keras.Sequential(layers)


def fully_sharded():
    return phalanx.MirroredStrategy([f"cpu:{i}" for i in range(4)], layout=phalanx.fully_sharded())


def saved(folder, name, dtype="float32"):
    """A model, and the path of the file with its weights."""
    model, path = made(dtype=dtype), str(folder / name)
    if name.endswith(".keras"):
        model.save(path)
    else:
        model.save_weights(path, **({"max_shard_size": 1} if name.endswith(".json") else {}))
    return model, path


def assert_same(model, other):
    for variable, expected in zip(model.weights, other.weights, strict=True):
        np.testing.assert_array_equal(variable.numpy(), expected.numpy(), err_msg=variable.path)


@pytest.mark.cover(
    ["dtype", "name"], {("bfloat16", "w.keras"), ("float32", "w.weights.h5"), ("bfloat16", "w.weights.json")}
)
@pytest.mark.parametrize("name", ["w.weights.h5", "w.weights.json", "w.keras"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_files_load_into_shards(tmp_path, name, dtype):
    """The values are those of the file, and each device has its shard, even if the file has another dtype than the model."""
    model, path = saved(tmp_path, name, dtype)
    for own in (dtype, "float32"):
        sharded = made(fully_sharded(), own, seed=1)
        sharded.load_weights(path)
        assert_same(sharded, model)
        kernel = sharded.layers[0].kernel.value
        assert {shard.data.shape for shard in kernel.addressable_shards} == {(SIDE // 4, SIDE)}


@pytest.mark.parametrize("name", ["w.weights.h5", "w.keras"])
def test_no_whole_variable_is_read(tmp_path, name):
    """NumPy allocates the shards, and no whole kernel besides."""
    path = saved(tmp_path, name)[1]
    strategy, sharded = fully_sharded(), made(fully_sharded(), seed=1)
    tracemalloc.start()
    try:
        with strategy.scope():
            keras.models.load_model(path) if name.endswith(".keras") else sharded.load_weights(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1.5 * 4 * SIDE * SIDE


def test_load_model_reads_no_file_at_once(tmp_path):
    """Keras unpacks the weights of a `.keras` file next to it if they do not fit into memory; for shards, it always does."""
    model, path = saved(tmp_path, "w.keras")
    with fully_sharded().scope():
        sharded = keras.models.load_model(path)
    assert_same(sharded, model)
    assert len(sharded.layers[0].kernel.value.addressable_shards) == 4
    assert [file.name for file in tmp_path.iterdir()] == ["w.keras"]


def test_compressed_files_load_into_shards(tmp_path):
    """An archive that another program has compressed is read as Keras reads it."""
    model, path = saved(tmp_path, "w.keras")
    again = str(tmp_path / "compressed.keras")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(again, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    sharded = made(fully_sharded(), seed=1)
    sharded.load_weights(again)
    assert_same(sharded, model)


def test_assigned_arrays_reach_devices_in_shards():
    """No array that an assignment makes is larger than a shard, and the caller may change his array afterwards."""
    others = {
        id(a): a for a in jax.live_arrays()
    }  # Of tests before this one. Held, so that no new array gets their ids.
    strategy, whole = fully_sharded(), np.ones((SIDE, SIDE))
    with strategy.scope():
        variable = keras.Variable("zeros", shape=(SIDE, SIDE))
    sizes = []

    class Watched(np.ndarray):
        """Remembers the sizes of the parts that are asked for."""

        def __getitem__(self, index):
            part = super().__getitem__(index)
            sizes.append(part.size)
            return part

    variable.assign(whole.view(Watched))
    whole[:] = 2
    assert {*sizes} == {SIDE * SIDE // 4}
    assert float(keras.ops.max(variable)) == 1
    arrays = [a for a in jax.live_arrays() if id(a) not in others]
    assert max(shard.data.nbytes for a in arrays for shard in a.addressable_shards) <= 4 * SIDE * SIDE
