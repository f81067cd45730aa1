"""Reading checkpoints without the objects: in Python, and on the command line, as a user runs it."""

import json
import os
import subprocess
import sys

import keras
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from keras import layers

import phalanx
from phalanx._src.checkpoint import store
from phalanx._src.tools.checkpoint.__main__ import COMMANDS
from phalanx._src.tools.checkpoint.__main__ import _time as time_of
from phalanx.errors import CheckpointError
from phalanx.train import Checkpoint, CheckpointManager, list_variables, load_checkpoint, load_variable


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with two checkpoints of a model, one step apart."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3, name="first"), layers.BatchNormalization()])
    model.compile("adam", "mse")
    half = keras.Variable([1.0, 2.0], dtype="bfloat16")
    checkpoint = Checkpoint(model=model, half=half, epoch=3, name="run 7")
    manager = CheckpointManager(checkpoint, tmp_path_factory.mktemp("checkpoints"), 5)
    manager.save()
    model.fit(np.ones((8, 4)), np.ones((8, 3)), verbose=0)
    checkpoint.epoch = 4
    manager.save()
    manager.sync()
    np.save(tmp_path_factory.getbasetemp() / "weights.npy", model.layers[0].kernel.numpy())
    return manager.directory


@pytest.fixture
def kernel(tmp_path_factory):
    """The weights of the first layer at the second save."""
    return np.load(tmp_path_factory.getbasetemp() / "weights.npy")


def run(*arguments, cwd=None):
    """Runs `phalanx checkpoint` in a process of its own."""
    command = [
        sys.executable,
        "-c",
        "from phalanx._src.tools.cli import main; main()",
        "checkpoint",
        *map(str, arguments),
    ]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300, check=False)


def test_reads_what_was_saved(folder, kernel):
    """Names, shapes, dtypes, arrays and other values, of a folder's latest checkpoint or of a file."""
    reader = load_checkpoint(folder)
    assert reader.get_variable_to_shape_map()["model/layers/first/kernel"] == [4, 3]
    assert reader.get_variable_to_dtype_map()["half"] == ml_dtypes.bfloat16
    assert reader.has_tensor("half")
    assert not reader.has_tensor("whole")
    assert reader.values == {"epoch": 4, "name": "run 7"}
    np.testing.assert_array_equal(reader.get_tensor("model/layers/first/kernel"), kernel)
    first = f"{folder}/ckpt-1"
    assert ("model/layers/first/kernel", [4, 3]) in list_variables(first)
    assert load_checkpoint(first).values["epoch"] == 3
    assert not np.array_equal(load_variable(first, "model/layers/first/kernel"), kernel)


def test_reads_a_save_of_this_program(tmp_path):
    """It waits until the file is there."""
    path = Checkpoint(x=np.arange(3)).save(tmp_path / "ckpt")
    assert load_variable(path, "x").tolist() == [0, 1, 2]


def test_names_that_are_not_there(folder):
    """The nearest name is shown."""
    with pytest.raises(CheckpointError, match=r"model/layers/first/Kernel \(nearest: model/layers/first/kernel\)"):
        load_variable(folder, "model/layers/first/Kernel")
    with pytest.raises(CheckpointError, match="there is no such file"):
        load_checkpoint(f"{folder}/ckpt-9")


def test_architecture_is_saved_once_and_without_the_optimizer(folder):
    """Keras creates the same model from it."""
    models = load_checkpoint(folder).models
    assert list(models) == ["model"]
    assert json.loads(models["model"])["compile_config"] is None
    copy = keras.models.model_from_json(models["model"])
    assert [type(layer) for layer in copy.layers] == [layers.Dense, layers.BatchNormalization]
    assert copy.layers[0].name == "first"
    assert copy.input_shape == (None, 4)


class Bare(keras.Model):
    """A model that Keras cannot describe."""

    def __init__(self, function):
        super().__init__()
        self.dense = layers.Dense(2)
        self.function = function

    def call(self, x):
        return self.function(self.dense(x))

    def get_config(self):
        raise RuntimeError("no configuration")


def test_models_that_cannot_be_described_are_saved(tmp_path, capsys):
    """Their variables are there, and the export says what to do."""
    model = Bare(np.tanh)
    model.function = keras.ops.tanh
    model(np.ones((1, 3)))
    path = Checkpoint(model=model).save(tmp_path / "ckpt")
    reader = load_checkpoint(path)
    assert reader.models == {}
    assert reader.has_tensor("model/dense/kernel")
    with pytest.raises(
        CheckpointError, match=r"the models whose architecture it contains are: none[^§]*model.save\(file\)"
    ):
        COMMANDS["export"](path, str(tmp_path / "m.keras"), "")


@pytest.mark.exhaustive("the other tests of this file, without processes")
@pytest.mark.slow
def test_commands_as_a_user_runs_them(folder, tmp_path):
    """With their exit codes."""
    differs = run("diff", f"{folder}/ckpt-1", folder)
    assert differs.returncode == 1, differs.stderr
    missing = run("show", "nothing", cwd=tmp_path)
    assert missing.returncode == 2
    assert missing.stderr.startswith("phalanx: the checkpoint nothing.safetensors: there is no such file.\nHINT: ")
    helped = run("--help")
    assert all(f"  {name} " in helped.stdout for name in COMMANDS)
    exported = run("export", folder, tmp_path / "model.npz", "--object", "half")
    assert exported.returncode == 0, exported.stderr
    with np.load(tmp_path / "model.npz") as arrays:
        assert {name: array.tolist() for name, array in arrays.items()} == {"half": [1.0, 2.0]}


def test_large_exports_become_several_files(folder, tmp_path):
    """No file has more bytes of arrays than it may, and the index has the place of each, as on the Hugging Face Hub."""
    COMMANDS["export"](folder, str(tmp_path / "model.safetensors"), "model", 60)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    reader = load_checkpoint(folder)
    names = {name for name in reader.get_variable_to_shape_map() if name.startswith("model/")}
    assert index["weight_map"].keys() == names
    assert index["metadata"]["total_size"] == sum(reader.get_tensor(name).nbytes for name in names)
    files = {*index["weight_map"].values()}
    assert {file.name for file in tmp_path.iterdir()} == files | {"model.safetensors.index.json"}
    assert min(files) == f"model-00001-of-{len(files):05d}.safetensors"
    for file in files:
        arrays = safetensors.numpy.load_file(tmp_path / file)
        assert sum(array.nbytes for array in arrays.values()) <= 60
        for name, array in arrays.items():
            assert index["weight_map"][name] == file
            np.testing.assert_array_equal(array, reader.get_tensor(name))
    with pytest.raises(CheckpointError, match="the file exists already"):
        COMMANDS["export"](folder, str(tmp_path / "model.safetensors"), "model")


@pytest.mark.parametrize("name", ["a.npz", "a.safetensors", "a.keras", "b.safetensors.index.json"])
def test_export_does_not_write_through_a_link(folder, tmp_path, name):
    """Other users of the folder may have made it, and it may lead to a file that is not there yet."""
    (tmp_path / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="the file exists already"):
        COMMANDS["export"](folder, str(tmp_path / name.removesuffix(".index.json")), "")
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("name", ["a-00001-of-00006.safetensors", "a-00003-of-00006.safetensors"])
def test_parts_of_an_export_are_not_written_through_links(folder, tmp_path, name):
    (tmp_path / "victim").write_text("mine")
    (tmp_path / name).symlink_to(tmp_path / "victim")
    with pytest.raises(CheckpointError, match=rf"{name}: the file cannot be written: .*It is a link"):
        COMMANDS["export"](folder, str(tmp_path / "a.safetensors"), "model", 60)
    assert (tmp_path / "victim").read_text() == "mine"


def test_link_that_appears_during_an_export(folder, tmp_path, monkeypatch):
    """After the check at the beginning."""
    monkeypatch.setattr("os.path.lexists", lambda path: False)
    for name in ("a.npz", "a.safetensors", "a.keras", "b.safetensors.index.json"):
        (tmp_path / name).symlink_to(tmp_path / "elsewhere")
        with pytest.raises(CheckpointError, match="cannot be written: .*It is a link"):
            COMMANDS["export"](
                folder, str(tmp_path / name.removesuffix(".index.json")), "model", 60 if "b" in name[:1] else 10**9
            )
    assert not (tmp_path / "elsewhere").exists()


def test_numbers_that_the_format_lacks(tmp_path):
    path = store.file_of(tmp_path / "c")
    store.write(path, {"a": np.ones(2, "complex128")}, {"values": {}, "names": {}, "aliases": {}})
    with pytest.raises(CheckpointError, match=r"the format has no complex128, which a has.\nHINT: .*\.npz"):
        store.export_arrays(tmp_path / "x.safetensors", dict(store.CheckpointFile(path).items()))


def test_list_of_a_folder(folder, capsys, tmp_path):
    """Number of arrays and size; a file that is broken does not hide the others."""
    assert COMMANDS["ls"](folder) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["checkpoint", "saved", "size", "arrays"]
    assert [(line.split()[0], int(line.split()[-1])) for line in lines[1:]] == [
        (f"{folder}/ckpt-1.safetensors", 12),
        (f"{folder}/ckpt-2.safetensors", 20),
    ]
    (tmp_path / "ckpt-1.safetensors").write_bytes(b"torn")
    (tmp_path / "ckpt-2.safetensors").symlink_to("nowhere")
    saved = Checkpoint(x=1)
    saved.write(tmp_path / "ckpt-3")
    saved.sync()
    COMMANDS["ls"](str(tmp_path))
    lines = capsys.readouterr().out.splitlines()[1:]
    assert ["cannot be read" in line for line in lines] == [True, True, False]
    for number in (2, 3):
        (tmp_path / f"ckpt-{number}.safetensors").unlink()
    for path, message in (
        (tmp_path / "none", "there is no such folder"),
        (tmp_path / ("x" * 300), "there is no such folder"),
        (tmp_path / "ckpt-1.safetensors", r"it is a file.\nHINT: phalanx checkpoint show "),
    ):
        with pytest.raises(CheckpointError, match=message):
            COMMANDS["ls"](str(path))
    (tmp_path / "ckpt-1.safetensors").unlink()
    with pytest.raises(CheckpointError, match="contains no checkpoint"):
        COMMANDS["ls"](str(tmp_path))


def test_time_of_any_year():
    """File systems store more years than the C library can name."""
    assert time_of(2.0**62) == "unknown"
    assert time_of(0.0).startswith(("1969-12-31", "1970-01-01"))


def test_names_are_sorted_by_number(tmp_path, capsys):
    """`v/2` comes before `v/10`."""
    path = Checkpoint(v=[np.ones(1)] * 12).write(tmp_path / "a")
    COMMANDS["show"](path)
    COMMANDS["diff"](path, Checkpoint().write(tmp_path / "b"))
    rows = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert [row for row in rows if row.startswith("v/")] == [f"v/{i}" for i in range(12)] * 2


def test_contents_of_a_checkpoint(folder, capsys):
    """Each array with shape, dtype and size; then the other values."""
    COMMANDS["show"](f"{folder}/ckpt-1")
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["model/layers/first/kernel", "(4,", "3)", "float32", "48", "B"] in rows
    assert ["half", "(2,)", "bfloat16", "4", "B"] in rows
    assert ["epoch", "int", "3"] in rows
    assert rows[-1][:2] == ["12", "arrays,"]


def test_differences_of_two_checkpoints(tmp_path, capsys):
    """What is missing, what has another shape or dtype, and how far values are apart."""
    one, same = np.ones(2), {"same": np.ones(2)}
    first = same | {"moved": np.zeros((2, 2)), "shape": one, "dtype": one + 0, "gone": 1, "number": 5}
    second = same | {"moved": np.diag([0.5, 0]), "shape": np.ones(3), "dtype": np.ones(2, "f"), "number": 6}
    first, second = first | {"turned": one * 3j}, second | {"turned": one * (4 + 0j)}
    paths = [Checkpoint(**x).write(tmp_path / name) for name, x in (("a", first), ("b", second | {"new": np.ones(1)}))]
    assert COMMANDS["diff"](paths[0], paths[0]) == 0
    assert capsys.readouterr().out == "They are equal.\n"
    assert COMMANDS["diff"](*paths) == 1
    rows = {row[0]: " ".join(row[1:]) for row in map(str.split, capsys.readouterr().out.splitlines()[1:])}
    assert rows == {
        "moved": "float64 (2, 2) float64 (2, 2) 1 of 4 values, by up to 0.5",
        "turned": "complex128 (2,) complex128 (2,) 2 of 2 values, by up to 5",
        "shape": "float64 (2,) float64 (3,) shape",
        "dtype": "float64 (2,) float32 (2,) dtype",
        "gone": "1 missing",
        "number": "5 6",
        "new": "float64 (1,) missing",
    }


def test_exports_can_be_loaded(folder, tmp_path, kernel):
    """A model that Keras loads; and arrays that NumPy and safetensors load."""
    for name in ("m.keras", "m.npz", "m.safetensors"):
        assert COMMANDS["export"](folder, str(tmp_path / name), "") == 0
    model = keras.saving.load_model(tmp_path / "m.keras")
    np.testing.assert_array_equal(model.layers[0].kernel.numpy(), kernel)
    with np.load(tmp_path / "m.npz") as arrays:
        np.testing.assert_array_equal(arrays["model/layers/first/kernel"], kernel)
        assert arrays["half"].dtype == np.float32
    arrays = safetensors.numpy.load_file(tmp_path / "m.safetensors")
    np.testing.assert_array_equal(arrays["model/layers/first/kernel"], kernel)
    assert arrays["half"].dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize("key", ["_a", "a/b", "save", "model~1", ""])
def test_models_of_any_name_are_exported(tmp_path, key):
    """With their weights. The root of a checkpoint may be a dict of models, or contain lists of them."""
    model = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
    model.set_weights([np.full((2, 1), 7.0), np.ones(1)])
    path = Checkpoint({key: [model]}, model=keras.Variable(1)).write(tmp_path / "a")
    (name,) = load_checkpoint(path).models
    assert COMMANDS["export"](path, str(tmp_path / "m.keras"), name) == 0
    np.testing.assert_array_equal(keras.saving.load_model(tmp_path / "m.keras").get_weights()[0], [[7.0], [7.0]])


@pytest.mark.parametrize(
    ("output", "name", "message"),
    [
        ("m.h5", "", r"must end with .npz, .safetensors or .keras.\nHINT: .*/m\.npz$"),
        ("m.npz", "net", r"it contains only half, model, save_counter"),
        ("m.keras", "net", r"the models whose architecture it contains are: model[^§]*HINT: --object model"),
        ("no/m.npz", "", r"there is no folder .*/no.\nHINT: mkdir -p .*/no"),
    ],
)
def test_exports_that_cannot_be(folder, tmp_path, output, name, message):
    """The error says what the checkpoint contains."""
    with pytest.raises(phalanx.errors.PhalanxError, match=message):
        COMMANDS["export"](folder, str(tmp_path / output), name)
    assert not os.listdir(tmp_path)


def test_export_replaces_no_file(folder, tmp_path):
    (tmp_path / "m.npz").write_text("mine")
    with pytest.raises(CheckpointError, match="the file exists already"):
        COMMANDS["export"](folder, str(tmp_path / "m.npz"), "")
    assert (tmp_path / "m.npz").read_text() == "mine"


def test_model_that_is_larger_than_its_file(folder, tmp_path, monkeypatch):
    """It is not made: a small file would fill the memory."""
    text = keras.Sequential([keras.Input((1,)), layers.Dense(1)]).to_json().replace('"units": 1', '"units": 1000000000')
    monkeypatch.setattr("phalanx._src.checkpoint.reader.CheckpointReader.models", {"model": text})
    with pytest.raises(CheckpointError, match=r"its variables would have 8 GB, more than the file has"):
        COMMANDS["export"](folder, str(tmp_path / "m.keras"), "")


@pytest.mark.parametrize("depth", [0, 2])
def test_model_whose_layers_cannot_be_imported(folder, tmp_path, monkeypatch, depth):
    """The cause that Keras names is told in one line, without the configurations of the models around it, and the way around it."""
    config = {"class_name": "Mine", "module": "nowhere", "config": {}, "registered_name": "nowhere>Mine"}
    for _ in range(depth):
        config = json.loads(keras.Sequential([keras.Input((1,))]).to_json()) | {
            "config": {"name": "outer", "layers": [config]}
        }
    monkeypatch.setattr("phalanx._src.checkpoint.reader.CheckpointReader.models", {"model": json.dumps(config)})
    words = (
        r"Keras cannot create the model 'model' .*: Could not locate class 'Mine'.*@keras.saving.register_keras_serializable.*\n"
        r'HINT: in your program, with @keras.* above .*: checkpoint.restore\(path\), model.save\("m.keras"\). This command imports none of'
    )
    with pytest.raises(CheckpointError, match=words) as e:
        COMMANDS["export"](folder, str(tmp_path / "m.keras"), "")
    assert "registered_name" not in str(e.value)
