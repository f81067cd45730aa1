"""Whether the training has ended, as a launcher tells an evaluator."""

import pytest

from phalanx._src.cluster.processes import training


@pytest.mark.parametrize("path", [None, ""])
def test_nobody_tells_without_a_launcher(monkeypatch, path):
    """Without the variable it is unknown, rather than false."""
    monkeypatch.delenv(training.ENDED, raising=False)
    if path is not None:
        monkeypatch.setenv(training.ENDED, path)
    assert training.has_ended() is None


def test_end_is_told_by_a_file(monkeypatch, tmp_path):
    """The file comes whole, with its word, and nothing else is left beside it."""
    path = tmp_path / "training.ended"
    monkeypatch.setenv(training.ENDED, str(path))
    assert training.has_ended() is False
    training.note_end(path, "succeeded")
    assert training.has_ended() is True
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("training.ended", "succeeded")]
