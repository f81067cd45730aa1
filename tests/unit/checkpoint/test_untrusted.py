"""Which files of other users are opened."""

import os

import pytest

from phalanx._src.checkpoint.untrusted import SparseFileError, open_data, read_data


@pytest.mark.parametrize(
    "make",
    [
        lambda path: path.write_bytes(b"data"),
        lambda path: path.touch(),
        lambda path: path.symlink_to(__file__),
    ],
    ids=["data", "empty", "link to a file"],
)
def test_files_are_read(tmp_path, make):
    make(tmp_path / "file")
    assert read_data(tmp_path / "file") == (tmp_path / "file").read_bytes()


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda path: path.mkdir(), OSError),
        (lambda path: path.symlink_to("/dev/zero"), ValueError),
        (lambda path: path.symlink_to(path), OSError),
        (os.mkfifo, ValueError),
        (lambda path: None, OSError),
    ],
    ids=["folder", "device", "link to itself", "pipe", "nothing"],
)
def test_others_are_not(tmp_path, make, error):
    """Without waiting: a pipe has no other end here."""
    make(tmp_path / "file")
    with pytest.raises(error):
        open_data(tmp_path / "file")


def test_large_file_of_holes_is_not_opened(tmp_path):
    """A small one is: zeros that fit into memory do no harm."""
    path = tmp_path / "file"
    path.write_bytes(b"data")
    os.truncate(path, 100_000_000)
    open_data(path).close()
    os.truncate(path, 10**12)
    with pytest.raises(SparseFileError, match="of its 1000000000000 bytes, only 4096 were"):
        open_data(path)


def test_open_file_stays_if_a_pipe_takes_its_name(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"data")
    with open_data(path) as opened:
        path.unlink()
        os.mkfifo(path)
        assert opened.read() == b"data"
