"""Checkpoint files."""

import os
import subprocess

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from phalanx._src.checkpoint import store
from phalanx.errors import CheckpointError

DTYPES = [
    *(
        "bool",
        "int8",
        "uint8",
        "int16",
        "uint16",
        "int32",
        "uint32",
        "int64",
        "uint64",
        "float16",
        "float32",
        "float64",
    ),
    *("bfloat16", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "int4", "uint4"),
]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_comes_back(tmp_path, dtype):
    """With any number of dims, also of size 0."""
    arrays = {"a": np.arange(6).reshape(2, 3).astype(dtype), "s": np.ones((), dtype), "e": np.zeros((0, 2), dtype)}
    file = store.file_of(tmp_path / "c")
    store.write(file, arrays, {"own": [1, None]})
    stored = store.CheckpointFile(tmp_path / "c")
    assert stored.notes["own"] == [1, None]
    assert dict(stored.items()).keys() == arrays.keys() == stored.names
    for name, array in arrays.items():
        assert stored.spec(name) == (array.shape, jnp.dtype(dtype))
        got = stored.array(name)
        assert (got.dtype, got.shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(got, array)


def test_other_programs_read_the_arrays(tmp_path, run_python):
    """The library safetensors, and Orbax, whose threads end with its process."""
    array = np.arange(6, dtype="float32").reshape(2, 3)
    file = tmp_path / "c.safetensors"
    store.write(file, {"dense/kernel": array}, {})
    np.testing.assert_array_equal(safetensors.numpy.load_file(file)["dense/kernel"], array)
    code = (
        "from orbax.checkpoint import v1 as ocp\n"
        "context = ocp.Context()\n"
        "context.checkpoint_layout = ocp.options.CheckpointLayout.SAFETENSORS\n"
        f"with context:\n    print(ocp.load({str(file)!r})['dense/kernel'].tolist())\n"
    )
    assert str(array.tolist()) in run_python(code)


def test_missing_file_names_what_is_there(tmp_path):
    """A wrong number is answered with the last ones."""
    with pytest.raises(
        CheckpointError, match=r"c-2.safetensors: there is no such file.\nHINT: .* contains no checkpoint"
    ):
        store.CheckpointFile(tmp_path / "c-2")
    store.write(tmp_path / "c-1.safetensors", {}, {})
    with pytest.raises(CheckpointError, match=r"HINT: one of .*c-1$"):
        store.CheckpointFile(tmp_path / "c-2")


@pytest.mark.parametrize("length", [0, 5, 100, -1])
def test_truncated_file_is_refused(tmp_path, length):
    file = tmp_path / "c.safetensors"
    store.write(file, {"a": np.zeros(100)}, {})
    os.truncate(file, length if length >= 0 else file.stat().st_size - 1)
    with pytest.raises(
        CheckpointError, match=r"is incomplete, or not a checkpoint .*\nHINT: delete it, to begin again"
    ):
        store.CheckpointFile(file)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_damaged_array_is_refused(tmp_path, dtype):
    """One bit that has changed is enough."""
    file = store.file_of(tmp_path / "a")
    store.write(file, {"sound": np.ones(3), "damaged": np.ones(101, jnp.dtype(dtype))}, {"values": {}})
    content = bytearray(file.read_bytes())
    content[-2] ^= 0x40
    file.write_bytes(content)
    stored = store.CheckpointFile(file)
    np.testing.assert_array_equal(stored.array("sound"), np.ones(3))
    with pytest.raises(
        CheckpointError, match=r"is damaged: damaged is not what was saved.\nHINT: delete it, .*; and check the disk"
    ):
        stored.array("damaged")


def test_files_that_are_refused(tmp_path):
    """Text, arrays that Phalanx did not write, and a folder, whose hint is the line to write."""
    (tmp_path / "text.safetensors").write_text("not a checkpoint, but a long text")
    with pytest.raises(CheckpointError, match="incomplete, or not a checkpoint"):
        store.CheckpointFile(tmp_path / "text")
    safetensors.numpy.save_file({"a": np.zeros(2)}, tmp_path / "other.safetensors")
    with pytest.raises(CheckpointError, match=r"not written by Phalanx .*\nHINT: safetensors.numpy.load_file"):
        store.CheckpointFile(tmp_path / "other")
    store.write(store.file_of(tmp_path / "folder" / "ckpt-1"), {}, {"values": {}})
    with pytest.raises(CheckpointError, match=r"HINT: it is a folder: phalanx.train.latest_checkpoint\('.*folder'\)"):
        store.CheckpointFile(tmp_path / "folder")


def test_existing_file_is_not_replaced(tmp_path):
    """The older checkpoint stays."""
    store.write(tmp_path / "c.safetensors", {"a": np.ones(1)}, {})
    with pytest.raises(CheckpointError, match="the file exists already"):
        store.write(tmp_path / "c.safetensors", {"a": np.zeros(1)}, {})
    assert store.CheckpointFile(tmp_path / "c").array("a") == 1


def test_folder_that_cannot_be_written_is_refused(tmp_path):
    """A file where the folder should be: root may write anywhere else."""
    (tmp_path / "folder").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot be written: .*\nHINT: use a folder that this user may write to"):
        store.write(tmp_path / "folder" / "c.safetensors", {"a": np.zeros(1)}, {})


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MB, where this user may mount one."""
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", tmp_path], check=False, capture_output=True
    )
    if done.returncode:
        pytest.skip("this user may not mount a file system")
    yield tmp_path
    subprocess.run(["umount", tmp_path], check=True)


def test_full_disk_leaves_the_older_checkpoint(small_disk):
    store.write(small_disk / "c-1.safetensors", {"a": np.ones(1000)}, {})
    with pytest.raises(
        CheckpointError, match=r"the disk is full. Earlier checkpoints are unharmed.\nHINT: delete files"
    ):
        store.write(small_disk / "c-2.safetensors", {"a": np.zeros(1_000_000)}, {})
    assert [f.name for f in small_disk.iterdir()] == ["c-1.safetensors"]
    assert store.CheckpointFile(small_disk / "c-1").array("a").sum() == 1000
