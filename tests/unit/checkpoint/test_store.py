"""Checkpoint files."""

import json
import os
import subprocess

import jax.numpy as jnp
import keras
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st
from tests import forks
from tests.draws import draws

from phalanx._src.checkpoint import store
from phalanx.errors import CheckpointError, PhalanxError
from phalanx.keras import BackupAndRestore
from phalanx.train import Checkpoint, CheckpointManager

NOTES = {"values": {}, "names": {}, "aliases": {}}
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
    store.write(file, arrays, NOTES | {"own": [1, None]})
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
    store.write(file, {"dense/kernel": array}, NOTES)
    np.testing.assert_array_equal(safetensors.numpy.load_file(file)["dense/kernel"], array)
    code = (
        "from orbax.checkpoint import v1 as ocp\n"
        "context = ocp.Context()\n"
        "context.checkpoint_layout = ocp.options.CheckpointLayout.SAFETENSORS\n"
        f"with context:\n    print(ocp.load({str(file)!r})['dense/kernel'].tolist())\n"
    )
    assert str(array.tolist()) in run_python(code, forks.run)


def test_missing_file_names_what_is_there(tmp_path):
    """A wrong number is answered with the last ones."""
    with pytest.raises(
        CheckpointError, match=r"c-2.safetensors: there is no such file.\nHINT: .* contains no checkpoint"
    ):
        store.CheckpointFile(tmp_path / "c-2")
    store.write(tmp_path / "c-1.safetensors", {}, NOTES)
    with pytest.raises(CheckpointError, match=r"HINT: one of .*c-1$"):
        store.CheckpointFile(tmp_path / "c-2")


@pytest.mark.parametrize("length", [0, 5, 100, -1])
def test_truncated_file_is_refused(tmp_path, length):
    file = tmp_path / "c.safetensors"
    store.write(file, {"a": np.zeros(100)}, NOTES)
    os.truncate(file, length if length >= 0 else file.stat().st_size - 1)
    with pytest.raises(
        CheckpointError, match=r"is incomplete, or not a checkpoint .*\nHINT: delete it, to begin again"
    ):
        store.CheckpointFile(file)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_damaged_array_is_refused(tmp_path, dtype):
    """One bit that has changed is enough."""
    file = store.file_of(tmp_path / "a")
    store.write(file, {"sound": np.ones(3), "damaged": np.ones(101, jnp.dtype(dtype))}, NOTES)
    content = bytearray(file.read_bytes())
    content[-2] ^= 0x40
    file.write_bytes(content)
    stored = store.CheckpointFile(file)
    np.testing.assert_array_equal(stored.array("sound"), np.ones(3))
    with pytest.raises(
        CheckpointError, match=r"is damaged: damaged is not what was saved.\nHINT: delete it, .*; and check the disk"
    ):
        stored.array("damaged")


def test_file_that_has_grown_is_refused(tmp_path):
    """Checksums cover all of it."""
    file = store.file_of(tmp_path / "a")
    store.write(file, {"a": np.ones(3)}, NOTES)
    with open(file, "ab") as opened:
        opened.write(b"x")
    with pytest.raises(CheckpointError, match="some bytes belong to none"):
        store.CheckpointFile(file)


def test_files_that_are_refused(tmp_path):
    """Text, arrays that Phalanx did not write, and a folder, whose hint is the line to write."""
    (tmp_path / "text.safetensors").write_text("not a checkpoint, but a long text")
    with pytest.raises(CheckpointError, match="incomplete, or not a checkpoint"):
        store.CheckpointFile(tmp_path / "text")
    safetensors.numpy.save_file({"a": np.zeros(2)}, tmp_path / "other.safetensors")
    with pytest.raises(CheckpointError, match=r"not written by Phalanx .*\nHINT: safetensors.numpy.load_file"):
        store.CheckpointFile(tmp_path / "other")
    store.write(store.file_of(tmp_path / "folder" / "ckpt-1"), {}, NOTES)
    with pytest.raises(CheckpointError, match=r"HINT: it is a folder: phalanx.train.latest_checkpoint\('.*folder'\)"):
        store.CheckpointFile(tmp_path / "folder")


@pytest.mark.parametrize(
    ("name", "file", "message"),
    [
        ("a.keras", "a.keras", r"a Keras model.\nHINT: keras.models.load_model\('.*a.keras'\)"),
        ("a.weights.h5", "a.weights.h5", r"Keras weights.\nHINT: model.load_weights\('.*a.weights.h5'\)"),
        (
            "ckpt-1",
            "ckpt-1.index",
            r"a TensorFlow checkpoint.\nHINT: tf.train.load_checkpoint\('.*ckpt-1'\), and assign",
        ),
        ("a.npz", "a.npz", "Phalanx has not written the file at this path.\nHINT: the path that save returned"),
    ],
)
def test_files_of_other_programs_are_named(tmp_path, name, file, message):
    """Instead of "there is no such file", for the path that the user sees in the folder."""
    (tmp_path / file).write_bytes(b"content")
    with pytest.raises(CheckpointError, match=message):
        Checkpoint().restore(tmp_path / name)


def test_file_of_holes_is_refused(tmp_path):
    """It would fill the memory with zeros, and takes no place on the disk."""
    size = 10**12
    header = {"a": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}, "__metadata__": notes_of()}
    text = json.dumps(header).encode()
    file = store.file_of(tmp_path / "c")
    file.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(file, 8 + len(text) + size)
    with pytest.raises(CheckpointError, match=r"only \d+ were ever written.*\nHINT: .*cp --sparse=never"):
        store.CheckpointFile(file)


def test_values_that_would_fill_the_memory_are_neither_read_nor_written(tmp_path):
    """An empty list takes 26 times its three bytes of text. A file that also has large arrays may contain many."""
    file, values = tmp_path / "c.safetensors", {"values": {"a": [[]] * 2_000_000}}
    with pytest.raises(
        CheckpointError, match=r"could not be restored: the values in .* would fill [\s\S]*HINT: arrays"
    ):
        store.write(file, {"w": np.ones(2)}, NOTES | values)
    assert not os.listdir(tmp_path)
    header = b'{"__metadata__": {"notes": "' + b"[]," * 4_000_000 + b'"}}'
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(CheckpointError, match=r"the file cannot be read: .* would fill 1.2 GB of memory"):
        store.CheckpointFile(file)


def test_deep_notes_are_refused(tmp_path):
    """Deeper than Python can read."""
    deep = {"format": store.OLD_FORMAT, "notes": '{"values": {"v": ' + "[" * 20_000 + "]" * 20_000 + "}}"}
    safetensors.numpy.save_file({"a": np.zeros(2)}, store.file_of(tmp_path / "c"), deep)
    with pytest.raises(CheckpointError, match="its notes cannot be read .RecursionError"):
        store.CheckpointFile(tmp_path / "c")


def test_links_of_others_are_not_written_to(tmp_path):
    """The file that becomes the checkpoint has a name that nobody knows before."""
    victim, file = tmp_path / "victim", store.file_of(tmp_path / "c")
    victim.write_text("mine")
    (tmp_path / f".{file.name}.{os.getpid()}.part").symlink_to(victim)
    store.write(file, {"a": np.ones(2)}, NOTES)
    assert victim.read_text() == "mine"
    assert not file.is_symlink()


def test_existing_file_is_not_replaced(tmp_path):
    """The older checkpoint stays."""
    store.write(tmp_path / "c.safetensors", {"a": np.ones(1)}, NOTES)
    with pytest.raises(CheckpointError, match="the file exists already"):
        store.write(tmp_path / "c.safetensors", {"a": np.zeros(1)}, NOTES)
    assert store.CheckpointFile(tmp_path / "c").array("a") == 1


def test_folder_that_cannot_be_written_is_refused(tmp_path):
    """A file where the folder should be: root may write anywhere else."""
    (tmp_path / "folder").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot be written: .*\nHINT: use another folder, because"):
        store.write(tmp_path / "folder" / "c.safetensors", {"a": np.zeros(1)}, NOTES)


def test_names_that_are_too_long(tmp_path):
    with pytest.raises(CheckpointError, match=r"cannot be written: File name too long.*\nHINT: use a shorter name"):
        store.write(tmp_path / f"{'x' * 300}.safetensors", {"a": np.zeros(1)}, NOTES)


def test_what_is_no_disk_is_not_full():
    with pytest.raises(CheckpointError, match=r"/proc: the file cannot be written: .*\nHINT: use a folder that"):
        store.require_room("/proc", 100)


def test_only_checkpoints_are_proposed(tmp_path):
    for name in ("c-1", "c-2"):
        store.write(tmp_path / f"{name}.safetensors", {"a": np.ones(1)}, NOTES)
    for name in ("c-3", "other"):
        (tmp_path / f"{name}.safetensors").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match=r"there is no such file.\nHINT: one of \S*c-1, \S*c-2$"):
        store.CheckpointFile(tmp_path / "none")
    with pytest.raises(CheckpointError, match=r"cannot be read.*\nHINT: checkpoint.restore\('\S*c-2'\)"):
        store.CheckpointFile(tmp_path / "c-3")


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
    store.write(small_disk / "c-1.safetensors", {"a": np.ones(1000)}, NOTES)
    with pytest.raises(
        CheckpointError, match=r"the disk is full. Earlier checkpoints are unharmed.\nHINT: delete files"
    ):
        store.write(small_disk / "c-2.safetensors", {"a": np.zeros(1_000_000)}, NOTES)
    assert [f.name for f in small_disk.iterdir()] == ["c-1.safetensors"]
    assert store.CheckpointFile(small_disk / "c-1").array("a").sum() == 1000


def objects(start):
    """Numbers, arrays, text and a state, in a new checkpoint."""
    values = np.arange(40.0) * start
    table = {"mean": [start, "text" * int(start)], "half": values[:9].astype("bfloat16"), "small": np.int8(start)}
    return Checkpoint(
        w=keras.Variable(values), b=values.astype("float32"), n=start, more=table, rng=np.random.default_rng(int(start))
    )


def contents(checkpoint):
    """All values of such a checkpoint."""
    half = checkpoint.more["half"].astype("float32").tolist()
    rest = [checkpoint.more["mean"], half, int(checkpoint.more["small"]), checkpoint.rng.bit_generator.state]
    return [checkpoint.w.numpy().tolist(), checkpoint.b.tolist(), checkpoint.n, *rest]


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    checkpoint = objects(3.0)
    path = checkpoint.write(tmp_path_factory.mktemp("original") / "a")
    checkpoint.sync()
    return store.file_of(path).read_bytes(), contents(checkpoint), objects(1.0), contents(objects(1.0))


CORRUPTIONS = st.one_of(
    st.tuples(st.just("flip"), st.integers(0, 1 << 20), st.integers(0, 7)),
    st.tuples(st.just("swap"), st.integers(0, 1 << 20), st.integers(0, 1 << 20)),
    st.tuples(st.just("cut"), st.integers(0, 1 << 20), st.integers(1, 64)),
    st.tuples(st.just("end"), st.integers(0, 1 << 20), st.just(0)),
    st.tuples(st.just("zeros"), st.integers(0, 1 << 20), st.integers(1, 64)),
)


def corrupted(content, kind, place, size):
    """Changes a file as disks, copies and programs do."""
    new, place = bytearray(content), place % len(content)
    if kind == "flip":
        new[place] ^= 1 << size
    elif kind == "swap":
        other, place = size % (len(new) // 8) * 8, place // 8 * 8
        new[place : place + 8], new[other : other + 8] = new[other : other + 8], new[place : place + 8]
    elif kind == "cut":
        del new[place : place + size]
    elif kind == "end":
        del new[place:]
    else:
        new[place : place + size] = bytes(len(new[place : place + size]))
    return bytes(new)


@draws(40, 2000)
@given(CORRUPTIONS)
def test_corrupted_files_are_right_or_refused(tmp_path_factory, original, corruption):
    """With a typed error, and nothing is half restored."""
    content, wanted, target, before = original
    file = tmp_path_factory.getbasetemp() / "corrupted.safetensors"
    file.write_bytes(corrupted(content, *corruption))
    try:
        target.read(file).assert_consumed()
    except PhalanxError:
        assert contents(target) == before
    else:
        assert contents(target) == wanted
        vars(target).update(vars(objects(1.0)))


def test_bits_of_all_notes_are_covered(tmp_path, original):
    """Each bit of what comes before the arrays, and the order of all words."""
    content = original[0]
    header = 8 + int.from_bytes(content[:8], "little")
    file = tmp_path / "a.safetensors"
    for place in range(0, header, 23):
        file.write_bytes(corrupted(content, "flip", place, place % 8))
        with pytest.raises(CheckpointError, match="damaged|cannot be read|not written by Phalanx"):
            store.CheckpointFile(file)


def notes_of(**changes):
    notes = NOTES | {"dtypes": {}, "sums": {"a": 0}, "values": {"v": {"__array__": "a"}}} | changes
    return {"format": store.OLD_FORMAT, "notes": json.dumps(notes)}


@pytest.mark.parametrize(
    "metadata",
    [
        {"format": store.OLD_FORMAT},
        {"format": store.OLD_FORMAT, "notes": "{"},
        {"format": store.OLD_FORMAT, "notes": "[]"},
        notes_of(sums={}),
        notes_of(values={"v": {"__array__": "b"}}),
        notes_of(values=[]),
        notes_of(dtypes={"a": "no dtype"}),
        *(
            notes_of(dtypes={"a": dtype})
            for dtype in ("V0", "S0", "U1", "str", "void", "(2,", "(2,)i4", "i4,f4", "float32 ", "f4")
        ),
        notes_of(dtypes={"b": "float32"}),
        notes_of(names={"a": 3}),
        notes_of(aliases=None),
        notes_of(values={"v": [{"__array__": "a"}, {"__array__": "a"}]}),
        {"format": store._FORMAT, "notes": "{}"},
    ],
)
def test_malformed_files_are_refused(tmp_path, metadata):
    """By one error, whatever is missing or wrong in them."""
    safetensors.numpy.save_file({"a": np.zeros(2)}, tmp_path / "a.safetensors", metadata)
    with pytest.raises(CheckpointError, match="the file is damaged: its "):
        store.CheckpointFile(tmp_path / "a")


def test_file_that_becomes_shorter_is_refused(tmp_path):
    """While it is open. The process would die of SIGBUS if the file were mapped into memory."""
    file = tmp_path / "c.safetensors"
    store.write(file, {"a": np.ones(100_000), "b": np.ones(100_000)}, NOTES)
    stored = store.CheckpointFile(file)
    os.truncate(file, 1_000_000)
    np.testing.assert_array_equal(stored.array("a"), np.ones(100_000))
    with pytest.raises(CheckpointError, match="is damaged: b cannot be read: the file ends too early"):
        stored.array("b")


def header_of(entries, size=800):
    """Returns a file whose list of contents is `entries`."""
    header = json.dumps(entries).encode()
    return len(header).to_bytes(8, "little") + header + bytes(size)


@pytest.mark.parametrize(
    ("entries", "problem"),
    [
        ({"a": {"dtype": "F64", "shape": [100], "data_offsets": [0, 801]}}, "an array ends after the file"),
        ({"a": {"dtype": "F64", "shape": [99], "data_offsets": [0, 800]}}, "another size than its shape"),
        ({"a": {"dtype": "F64", "shape": [-100], "data_offsets": [0, 800]}}, "'shape': "),
        ({"a": {"dtype": 5, "shape": [], "data_offsets": [0, 8]}}, "'dtype': 5"),
        ({"a": {"dtype": "F64", "shape": [], "data_offsets": [0]}}, "not enough values"),
        ({"a": [0, 8]}, "list indices"),
        ({name: {"dtype": "F64", "shape": [100], "data_offsets": [0, 800]} for name in "ab"}, "its arrays overlap"),
        ([], "pop expected"),
    ],
    ids=["too long", "shape", "negative", "dtype", "one offset", "list", "overlap", "no dict"],
)
def test_lists_of_contents_that_are_none(tmp_path, entries, problem):
    (tmp_path / "a.safetensors").write_bytes(header_of(entries))
    with pytest.raises(CheckpointError, match=f"incomplete, or not a checkpoint .*{problem}"):
        store.CheckpointFile(tmp_path / "a")


def test_header_longer_than_the_file_is_refused(tmp_path):
    (tmp_path / "a.safetensors").write_bytes((2**62).to_bytes(8, "little") + b"{}")
    with pytest.raises(CheckpointError, match="its list of contents ends after the file"):
        store.CheckpointFile(tmp_path / "a")


def test_archives_take_any_name_but_those_that_lead_out(tmp_path):
    """`file` is an argument of `numpy.savez`."""
    store.export_arrays(tmp_path / "a.npz", {"file": np.arange(3), "x/y": np.ones(2, "float16")})
    with np.load(tmp_path / "a.npz") as arrays:
        assert {name: array.tolist() for name, array in arrays.items()} == {"file": [0, 1, 2], "x/y": [1.0, 1.0]}
    with pytest.raises(CheckpointError, match=r"takes no array of the name 'x/\.\./\.\./y'.\nHINT: .*b.safetensors"):
        store.export_arrays(tmp_path / "b.npz", {"x/../../y": np.ones(1)})


@pytest.mark.parametrize(
    ("value", "dtypes"),
    [
        ({"__bytes__": 3}, {}),
        ({"__complex__": [1, 2, 3]}, {}),
        ({"__complex__": [10**400, 0]}, {}),
        ({"__tuple__": 3}, {}),
        ({"__array__": "a"}, {"a": "complex128"}),
    ],
)
def test_malformed_values_are_refused(tmp_path, value, dtypes):
    """When they are read."""
    array = np.zeros((2, 3), np.uint8)
    metadata = notes_of(values={"v": value}, dtypes=dtypes)
    safetensors.numpy.save_file({"a": array}, tmp_path / "a.safetensors", metadata)
    with pytest.raises(CheckpointError, match="the file is damaged: "):
        store.CheckpointFile(tmp_path / "a").value("v")


def test_folder_without_rights_is_told_when_a_manager_is_made(tmp_path):
    """A file where a folder should be; a name that is too long."""
    (tmp_path / "file").write_text("")
    for folder, message in ((tmp_path / "file" / "c", "Not a directory"), (tmp_path / ("x" * 300), "too long")):
        for make in (lambda: CheckpointManager(Checkpoint(), folder, 1), lambda: BackupAndRestore(folder)):  # noqa: B023
            with pytest.raises(CheckpointError, match=f"cannot be written: .*{message}"):
                make()
    assert CheckpointManager(Checkpoint(), tmp_path / "new" / "folder", 1).latest_checkpoint is None
    assert not (tmp_path / "new").exists()


def test_disk_without_room_is_told_when_a_manager_is_made(small_disk):
    """For all arrays that the objects have so far."""
    CheckpointManager(Checkpoint(a=np.zeros(1000)), small_disk, 1)
    with pytest.raises(CheckpointError, match="the disk is full"):
        CheckpointManager(Checkpoint(a=np.zeros(1000), b=[keras.Variable(np.zeros(300_000))]), small_disk / "c", 1)
