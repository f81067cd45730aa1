"""Weights that a process reads along while another one writes their file. With real processes: tests/cluster/test_sharded_variables.py."""

import io
import zipfile

import h5py
import keras
import numpy as np
import pytest
from keras.src.legacy.saving import legacy_h5_format
from keras.src.saving import saving_api, saving_lib
from keras.src.utils import io_utils

from phalanx._src.compat import saving


class Noted(keras.layers.Layer):
    """A layer that notes when its variables are saved, and writes a file of its own."""

    reads = []

    def build(self, shape):
        self.kernel = self.add_weight(shape=(600, 600))

    def call(self, x):
        return x

    def save_own_variables(self, store):
        self.reads.append(self.name)
        store["kernel"] = self.kernel

    def save_assets(self, inner_path):
        with open(f"{inner_path}/words.txt", "w") as file:
            file.write("a")


@pytest.fixture
def model(monkeypatch):
    monkeypatch.setattr(Noted, "reads", [])
    made = keras.Sequential([keras.Input((2,)), Noted(name="first"), Noted(name="second")])
    made.compile("adam", "mse")
    return made


def values_in(file):
    """The names of the arrays in an HDF5 file."""
    names = []
    file.visititems(lambda name, item: names.append(name) if isinstance(item, h5py.Dataset) else None)
    return names


def test_a_model_is_read_in_order_and_nowhere_written(model):
    """Keras accepts a file in memory, whose archive has no array."""
    nowhere = saving._Nowhere()
    saving_lib.save_model(model, nowhere)
    assert Noted.reads == ["first", "second"]
    with zipfile.ZipFile(nowhere) as archive:
        assert {"config.json", "model.weights.h5"} <= set(archive.namelist())
        with h5py.File(io.BytesIO(archive.read("model.weights.h5"))) as file:
            assert values_in(file) == []
    assert len(nowhere.getvalue()) < 100_000


def test_weights_are_read_in_order_and_nowhere_written(model):
    """The class of Keras's store checks the name, and takes a file in memory."""
    nowhere = saving._Nowhere()
    saving_lib.save_weights_only(model, nowhere)
    assert Noted.reads == ["first", "second"]
    assert len(nowhere.getvalue()) < 100_000


def test_a_file_in_memory_belongs_to_who_has_opened_it(model):
    file = io.BytesIO()
    saving_lib.save_model(model, file)
    with zipfile.ZipFile(file) as archive, h5py.File(io.BytesIO(archive.read("model.weights.h5"))) as weights:
        assert sum(name.endswith("kernel") for name in values_in(weights)) == 2


FUNCTIONS = [
    (saving_lib, "save_model"),
    (saving_lib, "save_weights_only"),
    (legacy_h5_format, "save_model_to_hdf5"),
    (keras.Model, "export"),
    (keras.export.ExportArchive, "write_out"),
]


@pytest.fixture
def second_process(monkeypatch):
    """Extends the functions once more, as in a process that does not write. Returns the paths that were saved."""
    paths = []
    for owner, name in [*FUNCTIONS, (io_utils, "ask_to_proceed_with_overwrite")]:
        monkeypatch.setattr(owner, name, getattr(owner, name))
    saving.on_save(lambda owner, path, write, read: paths.append(path) or read(), lambda: False)
    return paths


@pytest.mark.parametrize("suffix", [".keras", ".weights.h5", ".weights.json", ".h5", ""])
def test_every_way_to_save_writes_nothing(model, tmp_path, second_process, suffix):
    """An existing file stays, and is not asked for."""
    path = str(tmp_path / f"model{suffix}")
    if suffix:
        (tmp_path / f"model{suffix}").write_text("old")
    if ".weights" in suffix:
        model.save_weights(path, overwrite=False, max_shard_size=1 if "json" in suffix else None)
    else:
        saving_api.save_model(model, filepath=path, overwrite=False, zipped=bool(suffix))
    assert second_process == [path]
    assert [p.read_text() for p in tmp_path.iterdir()] == ["old"] * bool(suffix)
    assert Noted.reads == (["first", "second"] if suffix != ".h5" else [])


def test_exports_go_to_a_folder_that_is_deleted(tmp_path, monkeypatch):
    """Keras's own functions need other libraries: one that writes a file stands for them."""
    written = []

    def write(self, filepath, verbose=None):
        written.append(filepath)
        np.save(filepath, np.zeros(1))

    for owner, name in FUNCTIONS[3:]:
        monkeypatch.setattr(owner, name, write)
    for owner, name in [*FUNCTIONS[:3], (io_utils, "ask_to_proceed_with_overwrite")]:
        monkeypatch.setattr(owner, name, getattr(owner, name))
    saving.on_save(lambda owner, path, write, read: read(), lambda: False)
    keras.Sequential([keras.Input((2,))]).export(tmp_path / "model.npy", verbose=False)
    keras.export.ExportArchive.write_out(None, str(tmp_path / "model.npy"))
    assert [path.rpartition("/")[2] for path in written] == ["model.npy"] * 2
    assert not list(tmp_path.iterdir())
