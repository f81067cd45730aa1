"""What a process waits for."""

import threading
import time

import pytest

from phalanx._src.checkpoint import background, shards
from phalanx._src.checkpoint.store import sum_of_contents, write
from phalanx.errors import CheckpointError


def nothing():
    """What a process without pieces writes."""


def test_files_of_other_processes_are_waited_for(tmp_path):
    """`wait` returns when the file is there."""
    file = tmp_path / "a.safetensors"
    background.expect({file}, nothing)
    threading.Timer(0.2, file.touch).start()
    background.wait()
    assert file.exists()


def test_files_in_the_folder_of_the_chief(tmp_path, monkeypatch):
    """Programs of tf.distribute give each worker a folder, in which nobody writes a file."""
    monkeypatch.setattr(background, "_SILENCE_S", 1000.0)
    there = tmp_path / "chief" / "a.safetensors"
    there.parent.mkdir()
    background.expect({tmp_path / "workertemp_1" / "a.safetensors", there}, nothing)
    threading.Timer(0.2, there.touch).start()
    background.wait()
    assert there.exists()


def test_files_that_other_processes_rename(tmp_path, monkeypatch):
    """An unfinished file may get its last name, or go, at any moment after it was listed."""
    monkeypatch.setattr(background, "_POLL_S", 0.0)

    def write():
        end_s = time.monotonic() + 0.5
        while time.monotonic() < end_s:
            part = tmp_path / ".a.safetensors.1.part"
            part.touch()
            part.rename(tmp_path / "b")
        (tmp_path / "a.safetensors").touch()

    thread = threading.Thread(target=write)
    background.expect({tmp_path / "a.safetensors"}, nothing)
    thread.start()
    background.wait()
    thread.join()
    assert (tmp_path / "a.safetensors").exists()


def test_files_that_nobody_writes_are_not_waited_for(tmp_path, monkeypatch):
    """For long; and not at all if another one is expected since."""
    monkeypatch.setattr(background, "_SILENCE_S", 0.1)
    background.expect({tmp_path / "never"}, nothing)
    background.wait()
    monkeypatch.setattr(background, "_SILENCE_S", 1000.0)
    background.expect({tmp_path / "never"}, nothing)
    first = background._writing
    (tmp_path / "there").touch()
    background.expect({tmp_path / "there"}, nothing)
    first.join()
    background.wait()


def test_pieces_of_other_processes_are_waited_for(tmp_path, monkeypatch):
    """Until they are there; a process that does not write them is named."""
    file = tmp_path / "a.safetensors"
    first = shards.file_of_rank(file, 0)
    complete = tmp_path / "complete.safetensors"
    write(complete, {}, {"values": {}, "names": {}, "aliases": {}})
    first.parent.mkdir()
    first.touch()  # Some stores show a file before they have all of it.
    thread = threading.Timer(0.2, complete.replace, (first,))
    thread.start()
    assert background.sums_of_pieces(file, [0]) == {"0": sum_of_contents(first)}
    thread.join()
    monkeypatch.setattr(background, "_PIECES_S", 0.1)
    with pytest.raises(
        CheckpointError, match=r"rank 1 has not written .*00001.*\nHINT: a folder that all machines share"
    ):
        background.sums_of_pieces(file, [0, 1])
