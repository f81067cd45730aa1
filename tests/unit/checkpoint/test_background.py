"""What a process waits for."""

import threading

from phalanx._src.checkpoint import background


def test_files_of_other_processes_are_waited_for(tmp_path):
    """`wait` returns when the file is there."""
    file = tmp_path / "a.safetensors"
    background.expect(file)
    threading.Timer(0.2, file.touch).start()
    background.wait()
    assert file.exists()


def test_files_that_nobody_writes_are_not_waited_for(tmp_path, monkeypatch):
    """For long; and not at all if another one is expected since."""
    monkeypatch.setattr(background, "_SILENCE_S", 0.1)
    background.expect(tmp_path / "never")
    background.wait()
    monkeypatch.setattr(background, "_SILENCE_S", 1000.0)
    background.expect(tmp_path / "never")
    first = background._writing
    (tmp_path / "there").touch()
    background.expect(tmp_path / "there")
    first.join()
    background.wait()
