import sys

import keras
import numpy as np
import pytest
from stores import Store

import phalanx
from phalanx._src.tools.checkpoint.__main__ import ls
from phalanx.errors import CheckpointError, InvalidArgumentError, MissingDependencyError

X, Y = np.ones((8, 3), "float32"), np.zeros((8, 2), "float32")


def made(seed):
    keras.utils.set_random_seed(seed)
    with phalanx.OneDeviceStrategy("cpu:0").scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        model.compile("adam", "mse")
    return model


@pytest.fixture(params=["memory", "disk"])
def store(request, tmp_path):
    """A folder that is not there yet, of a store in memory and of one that other processes see."""
    if request.param == "disk":
        return f"store://{tmp_path}/run"
    return f"memory://{tmp_path.name}/run"


@pytest.fixture
def broken(monkeypatch, tmp_path):
    """Returns a function that makes calls of a store fail as without a network, and the folder of this store."""

    def breaks(*names):
        monkeypatch.setattr(Store, "failures", dict.fromkeys(names, RuntimeError("no route to the store")))

    return breaks, f"store://{tmp_path}/run"


def test_a_manager_keeps_its_files_there(store):
    """They are saved, found, restored and deleted as on a disk, by two managers one after the other."""
    model = made(0)
    model.fit(X, Y, verbose=0)
    manager = phalanx.train.CheckpointManager(phalanx.train.Checkpoint(model=model), store, max_to_keep=2)
    paths = [manager.save() for _ in range(3)]
    assert paths == [f"{store}/ckpt-{number}" for number in (1, 2, 3)]
    assert manager.checkpoints == paths[1:]
    assert phalanx.train.latest_checkpoint(store) == paths[2]

    other = made(1)
    manager = phalanx.train.CheckpointManager(phalanx.train.Checkpoint(model=other), store, max_to_keep=2)
    assert manager.restore_or_initialize() == paths[2]
    for ours, theirs in zip(other.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert manager.save() == f"{store}/ckpt-4"
    assert manager.checkpoints == [paths[2], f"{store}/ckpt-4"]
    manager.delete_all()
    assert manager.checkpoints == []


def test_times_of_files_decide_what_is_kept(store):
    """With `keep_checkpoint_every_n_hours`, which compares when they were saved."""
    checkpoint = phalanx.train.Checkpoint(step=keras.Variable(0))
    manager = phalanx.train.CheckpointManager(checkpoint, store, 1, keep_checkpoint_every_n_hours=100.0)
    paths = [manager.save() for _ in range(3)]
    assert manager.checkpoints == paths[2:]


def test_fit_continues_from_a_backup_there(store):
    """BackupAndRestore and ModelCheckpoint take such folders too."""
    backup = lambda: phalanx.keras.BackupAndRestore(f"{store}/backup", delete_checkpoint=False)  # noqa: E731
    best = phalanx.keras.ModelCheckpoint(f"{store}/best", monitor="loss")
    made(0).fit(X, Y, epochs=2, verbose=0, callbacks=[backup(), best])
    assert best.latest_checkpoint == f"{store}/best/model-2"
    epochs = []
    continued = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: epochs.append(epoch))
    made(1).fit(X, Y, epochs=4, verbose=0, callbacks=[backup(), continued])
    assert epochs == [2, 3]


def test_contents_are_read_without_objects(store):
    path = phalanx.train.Checkpoint(w=keras.Variable([1.0, 2.0]), epoch=3).write(f"{store}/one")
    assert phalanx.train.list_variables(path) == [("w", [2])]
    np.testing.assert_array_equal(phalanx.train.load_variable(path, "w"), [1, 2])
    assert phalanx.train.load_checkpoint(path).values["epoch"] == 3


def test_the_command_line_reads_them(tmp_path, capsys):
    checkpoint = phalanx.train.Checkpoint(w=keras.Variable([1.0, 2.0]))
    phalanx.train.CheckpointManager(checkpoint, f"store://{tmp_path}/run", 3).save()
    checkpoint.sync()
    assert ls(f"store://{tmp_path}/run") == 0
    printed = capsys.readouterr().out
    assert "ckpt-1.safetensors" in printed
    assert "cannot be read" not in printed
    with pytest.raises(CheckpointError, match="the folder contains no checkpoint"):
        ls(f"store://{tmp_path}/other")


def test_what_is_there_stays(store):
    checkpoint = phalanx.train.Checkpoint(w=keras.Variable(1.0))
    checkpoint.write(f"{store}/one")
    checkpoint.sync()
    with pytest.raises(CheckpointError, match="the file exists already"):
        checkpoint.write(f"{store}/one")
    with pytest.raises(CheckpointError, match=r"there is no such file.\nHINT: one of .*/one"):
        checkpoint.read(f"{store}/two")


def test_damaged_files_are_refused(tmp_path):
    checkpoint = phalanx.train.Checkpoint(w=keras.Variable([1.0, 2.0]))
    checkpoint.write(f"store://{tmp_path}/one")
    checkpoint.sync()
    file = tmp_path / "one.safetensors"
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(CheckpointError, match="the file cannot be read: it is incomplete"):
        checkpoint.read(f"store://{tmp_path}/one")


def test_a_folder_that_cannot_be_written_is_an_error_at_once(broken):
    breaks, folder = broken
    breaks("pipe_file")
    with pytest.raises(CheckpointError, match="cannot be written: RuntimeError: no route to the store"):
        phalanx.train.CheckpointManager(phalanx.train.Checkpoint(w=keras.Variable(1.0)), folder, 3)


def test_a_save_that_fails_is_an_error_of_the_next_call(broken):
    """And what is there stays the latest."""
    breaks, folder = broken
    checkpoint = phalanx.train.Checkpoint(w=keras.Variable(1.0))
    manager = phalanx.train.CheckpointManager(checkpoint, folder, 3)
    first = manager.save()
    manager.sync()
    breaks("put_file")
    manager.save()
    with pytest.raises(CheckpointError, match="cannot be written: RuntimeError: no route to the store"):
        manager.sync()
    breaks()
    assert manager.checkpoints == [first]


def test_a_store_that_does_not_answer_is_not_empty(broken):
    """A program that took it for a new one would begin again."""
    breaks, folder = broken
    checkpoint = phalanx.train.Checkpoint(w=keras.Variable(1.0))
    path = checkpoint.write(f"{folder}/ckpt-1")
    checkpoint.sync()
    breaks("ls", "find", "glob", "info", "exists", "isfile", "cat_file", "modified")
    with pytest.raises(
        CheckpointError, match=r"the folder cannot be read: RuntimeError.*\nHINT: check its name, and the cred"
    ):
        phalanx.train.latest_checkpoint(folder)
    with pytest.raises(CheckpointError, match="no route to the store"):
        checkpoint.read(path)
    with pytest.raises(CheckpointError, match="no route to the store"):
        checkpoint.write(f"{folder}/ckpt-2")


def test_what_nobody_knows():
    checkpoint = phalanx.train.Checkpoint(w=keras.Variable(1.0))
    with pytest.raises(InvalidArgumentError, match=r"nope://x: is no folder of a store: .*\nHINT: gs://bucket/folder"):
        phalanx.train.CheckpointManager(checkpoint, "nope://x", 3)


def test_a_store_that_cannot_be_opened(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"zip://x: the store cannot be opened: .*\nHINT: check its name"):
        phalanx.train.CheckpointManager(phalanx.train.Checkpoint(w=keras.Variable(1.0)), "zip://x", 3)


def test_missing_packages_are_named(monkeypatch):
    checkpoint = phalanx.train.Checkpoint(w=keras.Variable(1.0))
    for missing in ("gcsfs", "upath"):
        monkeypatch.setitem(sys.modules, missing, None)
        with pytest.raises(MissingDependencyError, match=r"HINT: pip install universal-pathlib gcsfs"):
            phalanx.train.CheckpointManager(checkpoint, "gs://bucket/run", 3)


def test_file_addresses_are_folders_of_the_disk(tmp_path):
    checkpoint = phalanx.train.Checkpoint(w=keras.Variable(1.0))
    assert phalanx.train.CheckpointManager(checkpoint, f"file://{tmp_path}/run", 3).save() == f"{tmp_path}/run/ckpt-1"
    checkpoint.sync()
    assert (tmp_path / "run" / "ckpt-1.safetensors").exists()


def test_folders_that_must_be_on_a_disk():
    """Python would make a folder `gs:` in the current one."""
    for call in (
        phalanx.summary.create_file_writer,
        phalanx.keras.TensorBoard,
        lambda folder: phalanx.estimator.RunConfig(model_dir=folder),
        lambda folder: phalanx.keras.SidecarEvaluator(made(0), X, folder),
    ):
        with pytest.raises(InvalidArgumentError, match="is a folder of a store, but must be one of a file system"):
            call("gs://bucket/run")
