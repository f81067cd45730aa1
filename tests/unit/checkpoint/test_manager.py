"""Numbered checkpoints in a folder."""

import os
import pathlib
import platform
import subprocess
import sys
import time
from types import SimpleNamespace

import keras
import numpy as np
import pytest
from tests import forks

from phalanx import train
from phalanx._src.checkpoint import folder_lock, manager
from phalanx.errors import CheckpointError, InvalidArgumentError
from phalanx.train import Checkpoint, CheckpointManager, CheckpointOptions

NOW = CheckpointOptions(enable_async=False)


@pytest.fixture
def step():
    return keras.Variable(0)


@pytest.fixture
def checkpoint(step):
    return Checkpoint(step=step)


def names(folder):
    return sorted(name for name in os.listdir(folder) if not name.startswith("."))


def test_last_checkpoints_are_kept(tmp_path, checkpoint):
    """As many as asked for, also after a restart."""
    for _ in range(2):
        kept = CheckpointManager(Checkpoint(step=checkpoint.step), tmp_path, max_to_keep=2, checkpoint_name="model")
        kept.restore_or_initialize()
        for _ in range(3):
            kept.save(options=NOW)
    assert kept.checkpoints == [str(tmp_path / f"model-{i}") for i in (5, 6)]
    assert kept.latest_checkpoint == train.latest_checkpoint(tmp_path) == str(tmp_path / "model-6")
    assert names(tmp_path) == ["model-5.safetensors", "model-6.safetensors"]


def test_all_checkpoints_are_kept(tmp_path, checkpoint):
    """With None, and beside those of another name; 10 comes after 9."""
    whole = CheckpointManager(checkpoint, tmp_path, max_to_keep=None)
    other = CheckpointManager(checkpoint, tmp_path, max_to_keep=1, checkpoint_name="best")
    for number in (2, 9, 10):
        whole.save(number, options=NOW)
        other.save(number, options=NOW)
    assert [path.rpartition("/")[2] for path in whole.checkpoints] == ["ckpt-2", "ckpt-9", "ckpt-10"]
    assert len(other.checkpoints) == 1


def test_one_checkpoint_of_some_hours_is_kept(tmp_path, checkpoint):
    """Its time is that of the file. A manager that comes later keeps it too."""
    kept = CheckpointManager(checkpoint, tmp_path, 1, keep_checkpoint_every_n_hours=1.0)
    for hours in (0.5, 1.5, 2.0, 2.6, 3.0):
        path = kept.save(options=NOW)
        at = time.time() + hours * 3600
        os.utime(f"{path}.safetensors", (at, at))
    assert names(tmp_path) == [f"ckpt-{i}.safetensors" for i in (2, 4, 5)]
    later = CheckpointManager(checkpoint, tmp_path, 1, keep_checkpoint_every_n_hours=1.0)
    later.save(options=NOW)
    assert names(tmp_path) == [f"ckpt-{i}.safetensors" for i in (2, 4, 6)]


def test_interval_counts_steps(tmp_path, checkpoint, step):
    """Only some calls save; all with check_interval=False. A restored step counts as saved."""
    kept = CheckpointManager(checkpoint, tmp_path, None, step_counter=step, checkpoint_interval=10)
    saved = []
    for number in range(1, 26):
        step.assign(number)
        if kept.save() is not None:
            saved.append(number)
    assert saved == [1, 11, 21]
    assert kept.save(check_interval=False) is not None
    kept.sync()
    assert kept.checkpoint_interval == 10
    fresh = CheckpointManager(Checkpoint(step=step), tmp_path, None, step_counter=step, checkpoint_interval=10)
    step.assign(0)
    assert fresh.restore_or_initialize() == kept.latest_checkpoint
    assert int(step) == 25
    step.assign(34)
    assert fresh.save() is None


def test_initializes_without_a_checkpoint(tmp_path, checkpoint, step):
    """`init_fn` is called only then."""
    calls = []
    kept = CheckpointManager(checkpoint, tmp_path, 1, init_fn=lambda: calls.append(1))
    assert kept.restore_or_initialize() is None
    kept.save(options=NOW)
    assert kept.restore_or_initialize() == kept.latest_checkpoint
    assert calls == [1]
    assert (kept.checkpoint, kept.directory) == (checkpoint, str(tmp_path))


def test_number_may_be_chosen(tmp_path, checkpoint):
    """A number that is taken is refused, and neither the file nor the counter changes."""
    kept = CheckpointManager(checkpoint, tmp_path, None)
    assert kept.save(100, options=NOW) == str(tmp_path / "ckpt-100")
    with pytest.raises(CheckpointError, match="ckpt-100: the folder contains a checkpoint of this name"):
        kept.save(100)
    assert int(checkpoint.save_counter) == 1


def test_number_follows_a_chosen_one(tmp_path, checkpoint):
    """As a handler saves, after the program has saved with the numbers of its steps. Also after a restart, however it restores."""
    kept = CheckpointManager(checkpoint, tmp_path, None)
    kept.save(100, options=NOW)
    assert kept.save(options=NOW) == str(tmp_path / "ckpt-101")
    again = CheckpointManager(Checkpoint(step=keras.Variable(0)), tmp_path, None)
    again.restore_or_initialize()
    assert again.save(options=NOW) == str(tmp_path / "ckpt-102")
    by_hand = CheckpointManager(Checkpoint(step=keras.Variable(0)), tmp_path, None)
    by_hand.checkpoint.restore(by_hand.latest_checkpoint)
    assert by_hand.save(options=NOW) == str(tmp_path / "ckpt-103")
    other = CheckpointManager(by_hand.checkpoint, tmp_path, None, checkpoint_name="other")
    assert other.save(options=NOW) == str(tmp_path / "other-5")


def test_damaged_checkpoint_names_the_one_before(tmp_path, checkpoint):
    """The HINT is the line to write."""
    kept = CheckpointManager(checkpoint, tmp_path, None)
    for _ in range(3):
        kept.save(options=NOW)
    (tmp_path / "ckpt-3.safetensors").write_bytes(b"torn")
    with pytest.raises(CheckpointError, match=r"HINT: checkpoint.restore\('.*ckpt-2'\), or delete the damaged file"):
        kept.restore_or_initialize()
    for number in (1, 2):
        (tmp_path / f"ckpt-{number}.safetensors").unlink()
    with pytest.raises(CheckpointError, match="HINT: delete it, to begin again; the folder contains no other"):
        kept.restore_or_initialize()


def test_latest_checkpoint_is_that_of_the_save_before(tmp_path):
    """As in programs of tf.train, whose saves end before they return."""
    checkpoint = Checkpoint(large=np.ones(5_000_000))
    kept = CheckpointManager(checkpoint, tmp_path, 3)
    for latest in (
        lambda: kept.latest_checkpoint,
        lambda: train.latest_checkpoint(tmp_path),
        lambda: kept.checkpoints[-1],
    ):
        assert kept.save() == latest()


def test_first_save_into_the_folder_of_a_longer_training(tmp_path, checkpoint):
    """It would be deleted at once, or be older than what is there. Nothing is lost, and the counter stays."""
    kept = CheckpointManager(checkpoint, tmp_path, 3)
    for _ in range(5):
        kept.save(options=NOW)
    fresh = CheckpointManager(Checkpoint(step=keras.Variable(42)), tmp_path, 3)
    with pytest.raises(CheckpointError, match=r"contains .*ckpt-5, which would stay.*\nHINT: manager.restore_or_init"):
        fresh.save()
    assert int(fresh.checkpoint.save_counter) == 0
    assert [path.rpartition("-")[2] for path in kept.checkpoints] == ["3", "4", "5"]
    fresh.restore_or_initialize()
    assert fresh.save(options=NOW).endswith("ckpt-6")


def test_two_programs_cannot_save_into_a_folder(tmp_path, checkpoint, run_python):
    """The second one is told who has it. The lock ends with the process, or once all checkpoints are deleted."""
    own = CheckpointManager(checkpoint, tmp_path, 5)
    for _ in range(2):
        own.save()
        own.delete_all()
        assert os.listdir(tmp_path) == []
    code = (
        "import phalanx, keras\n"
        f"manager = phalanx.train.CheckpointManager(phalanx.train.Checkpoint(step=keras.Variable(1)), {str(tmp_path)!r}, 5)\n"
        "try:\n    manager.save(7)\n    manager.sync()\nexcept phalanx.errors.CheckpointError as e:\n    print(e)\n"
    )
    assert run_python(code, forks.run).strip() == ""
    own.restore_or_initialize()
    own.save(8, options=NOW)
    told = run_python(code.replace("(7)", "(9)"), forks.run)
    assert f"process {os.getpid()} on " in told
    assert "HINT: use another folder for each program" in told
    assert names(tmp_path) == ["ckpt-7.safetensors", "ckpt-8.safetensors"]


def test_lock_that_is_a_link(tmp_path, checkpoint):
    """Another user of the folder cannot choose what is written to."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    folder = tmp_path / "shared"
    folder.mkdir()
    (folder / ".phalanx-checkpoints.lock").symlink_to(victim)
    with pytest.raises(CheckpointError, match=r"the folder cannot be written to: .*\nHINT: use a folder"):
        CheckpointManager(checkpoint, folder, 1).save()
    assert victim.read_text() == "mine"


def _link_to_nothing(folder):
    (folder / "ckpt-0.safetensors").symlink_to("nothing")


def _link_to_itself(folder):
    (folder / "ckpt-0.safetensors").symlink_to("ckpt-0.safetensors")


def _folders(folder):
    (folder / "ckpt-0.safetensors").mkdir()
    (folder / ".ckpt-0.safetensors.1.part").mkdir()


@pytest.mark.parametrize("put", [_link_to_nothing, _link_to_itself, _folders])
def test_links_and_folders_of_the_names_of_checkpoints(tmp_path, checkpoint, put):
    """Other users of the folder cannot end a training with them."""
    put(tmp_path)
    manager = CheckpointManager(checkpoint, tmp_path, 1)
    saved = [manager.save() for _ in range(3)]
    assert manager.checkpoints[-1:] == saved[-1:]
    assert saved[0] not in manager.checkpoints


HOLDER = """
import os, sys
from pathlib import Path
from phalanx._src.checkpoint import folder_lock
folder_lock.occupy(Path(sys.argv[1]))
# The lock does not last as long as the child of a data loader.
if not os.fork():
    sys.stdin.read()
    os._exit(0)
print("occupied", flush=True)
sys.stdin.readline()
"""


def test_process_that_has_left_the_group(tmp_path, checkpoint, monkeypatch):
    """In an elastic group, the new chief waits until it has ended, or has left the folder. In others, it is another program."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "occupied\n"
        saver = CheckpointManager(checkpoint, tmp_path, 2)
        owner = f"process {holder.pid} on {platform.node()}"
        with pytest.raises(CheckpointError, match=f"{owner} saves its checkpoints into this folder too"):
            saver.save(options=NOW)
        told = []
        member = SimpleNamespace(is_late=False, is_between_steps=False)
        monkeypatch.setattr(folder_lock.membership, "own", lambda: member)
        monkeypatch.setattr(folder_lock, "note", lambda text: told.append(text) or holder.kill())
        saver.save(options=NOW)
        assert told == [f"waits until {owner} leaves {tmp_path}, into which it has saved its checkpoints"]
        folder_lock.leave_all(after_save=False)
        assert not (tmp_path / ".phalanx-checkpoints.lock").exists()
        saver.save(options=NOW)
        assert (tmp_path / ".phalanx-checkpoints.lock").read_text() == f"process {os.getpid()} on {platform.node()}\n"


def test_lock_that_is_a_pipe(tmp_path, checkpoint):
    """All processes of a group hear of it."""
    os.mkfifo(tmp_path / ".phalanx-checkpoints.lock")
    with pytest.raises(CheckpointError, match="it is a pipe or a device"):
        CheckpointManager(checkpoint, tmp_path, 1).save()


def test_file_of_another_user_in_a_folder_like_tmp(tmp_path, checkpoint, monkeypatch):
    """It stays, and the training goes on."""
    foreign, unlink = tmp_path / "ckpt-0.safetensors", pathlib.Path.unlink
    foreign.write_text("")

    def refused(path, **options):
        if path == foreign:
            raise PermissionError
        unlink(path, **options)

    monkeypatch.setattr(pathlib.Path, "unlink", refused)
    manager = CheckpointManager(checkpoint, tmp_path, 1)
    saved = [manager.save() for _ in range(3)]
    assert manager.checkpoints == [str(tmp_path / "ckpt-0"), saved[-1]]


def test_what_a_killed_program_left_is_removed(tmp_path, checkpoint):
    """Only once it can write no more."""
    (tmp_path / ".ckpt-3.safetensors.123.part").write_bytes(b"half")
    CheckpointManager(checkpoint, tmp_path, 1).save(options=NOW)
    assert sorted(os.listdir(tmp_path)) == [".phalanx-checkpoints.lock", "ckpt-1.safetensors"]


def test_folder_that_cannot_be_made_is_refused(tmp_path, checkpoint):
    """At the call of `save`."""
    manager = CheckpointManager(checkpoint, tmp_path / "file" / "folder", 1)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"the folder cannot be written to: .*\nHINT: use a folder"):
        manager.save()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"checkpoint": 3}, "checkpoint=3: must be a Checkpoint."),
        ({"directory": 3}, "directory=3"),
        ({"max_to_keep": 0}, "max_to_keep=0: must be 1 or more checkpoints, or None for all."),
        ({"keep_checkpoint_every_n_hours": -1}, "keep_checkpoint_every_n_hours=-1"),
        (
            {"checkpoint_name": "a/b"},
            "checkpoint_name='a/b': must be the beginning of a file name, of at most 200 bytes.",
        ),
        (
            {"checkpoint_name": "a\n"},
            r"checkpoint_name='a\n': must be the beginning of a file name, of at most 200 bytes.",
        ),
        ({"checkpoint_name": "é" * 101}, "must be the beginning of a file name, of at most 200 bytes."),
        (
            {"checkpoint_name": "a\0"},
            r"checkpoint_name='a\x00': must be the beginning of a file name, of at most 200 bytes.",
        ),
        ({"checkpoint_interval": 10}, "either both must be given or none."),
        ({"checkpoint_interval": 0, "step_counter": 1}, "checkpoint_interval=0: must be 1 or more steps."),
        ({"checkpoint_interval": 10, "step_counter": 1}, "step_counter=1"),
        ({"init_fn": 3}, "init_fn=3: is not callable."),
    ],
)
def test_wrong_arguments_are_refused(tmp_path, checkpoint, options, message):
    given = {"checkpoint": checkpoint, "directory": tmp_path, "max_to_keep": 1} | options
    with pytest.raises(InvalidArgumentError) as caught:
        CheckpointManager(**given)
    assert message in str(caught.value)


def test_latest_checkpoint_ignores_other_files(tmp_path, checkpoint):
    """Names without a number or with one that no training reaches, folders, unfinished files."""
    assert train.latest_checkpoint(tmp_path) is None
    checkpoint.write(tmp_path / "final")
    checkpoint.save(tmp_path / "a-b")
    checkpoint.sync()
    (tmp_path / ".c-9.safetensors.1.part").write_text("")
    (tmp_path / f"a-b-{'9' * 200}.safetensors").write_text("")
    assert train.latest_checkpoint(tmp_path) == str(tmp_path / "a-b-1")


def test_iterator_follows_a_folder(tmp_path, checkpoint, monkeypatch):
    """It skips to the latest, and ends when no more come. Before the first it waits for nothing."""
    monkeypatch.setattr(manager, "_POLL_S", 0.02)
    kept = CheckpointManager(checkpoint, tmp_path, None)
    for number in (1, 2):
        kept.save(number, options=NOW)
    # What the training saves after the first timeout; after the second one, it has ended.
    saves = [7]
    found = train.checkpoints_iterator(
        tmp_path, timeout=0.05, timeout_fn=lambda: not saves or kept.save(saves.pop(), options=NOW) is None
    )
    assert list(found) == [str(tmp_path / "ckpt-2"), str(tmp_path / "ckpt-7")]
    assert next(train.checkpoints_iterator(tmp_path, min_interval_secs=10_000)) == str(tmp_path / "ckpt-7")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((3,), "checkpoint_dir=3"), (("a", 0, -1), "timeout=-1"), (("a", 0, 1, 3), "timeout_fn=3")],
)
def test_iterator_refuses_wrong_arguments(arguments, message):
    """At the call, not at the first checkpoint."""
    with pytest.raises(InvalidArgumentError, match=message):
        train.checkpoints_iterator(*arguments)


def test_two_managers_of_a_folder_are_named(tmp_path, checkpoint):
    """The second one has not seen what the first has saved."""
    one, other = CheckpointManager(checkpoint, tmp_path, 3), CheckpointManager(Checkpoint(x=1), tmp_path, 3)
    one.save()
    with pytest.raises(CheckpointError, match=r"the folder contains a checkpoint of this name.*\nHINT: .*save\(2\)"):
        other.save()
    one.save()
    with pytest.raises(CheckpointError, match="which would stay the latest checkpoint"):
        other.save()
    one.sync()


def test_folders_are_no_checkpoints(tmp_path, checkpoint):
    kept = CheckpointManager(checkpoint, tmp_path, 3)
    kept.save(options=NOW)
    (tmp_path / "ckpt-2.safetensors").mkdir()
    assert kept.checkpoints == [str(tmp_path / "ckpt-1")]
    assert kept.restore_or_initialize() == str(tmp_path / "ckpt-1")
    with pytest.raises(CheckpointError, match="there is a folder of this name"):
        kept.save()
    with pytest.raises(CheckpointError, match=r"there is no such file.*\nHINT: one of \S*ckpt-1$"):
        checkpoint.read(tmp_path / "ckpt-2")


def test_another_working_directory_changes_nothing(tmp_path, checkpoint, monkeypatch):
    """Neither in the middle of a save nor between two."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    kept = CheckpointManager(checkpoint, "run", 2)
    kept.save(7)
    os.chdir("elsewhere")
    kept.save()
    kept.sync()
    assert kept.checkpoints == [str(tmp_path / "run" / f"ckpt-{number}") for number in (7, 8)]
    assert names(tmp_path / "elsewhere") == []


def test_fit_of_a_model_outside_all_strategies(tmp_path):
    """Keras's own loop keeps the values: a save takes them from there, and a restore brings them there."""
    x = np.random.default_rng(0).normal(size=(96, 4)).astype("float32")
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)])
    model.compile("adam", "mse")
    checkpoint, layer = Checkpoint(model=model), Checkpoint(layer=model.layers[0])
    first = checkpoint.write(tmp_path / "first", options=NOW)
    weights = model.get_weights()
    states = []

    def at(batch, logs):
        if batch == 1:
            layer.write(tmp_path / "layer", options=NOW)
            states.append(model.get_weights())
        if batch == 2:
            checkpoint.read(first).expect_partial()

    callback = keras.callbacks.LambdaCallback(on_train_batch_end=at)
    model.fit(x, x, batch_size=32, verbose=0, callbacks=[callback])
    for found, wanted in zip(model.get_weights(), weights, strict=True):
        np.testing.assert_array_equal(found, wanted)
    layer.read(tmp_path / "layer").expect_partial()
    for found, wanted in zip(model.get_weights(), states[0], strict=True):
        np.testing.assert_array_equal(found, wanted)
