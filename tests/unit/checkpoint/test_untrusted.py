"""Whether a file of another user can be read to its end."""

import os

import pytest

from phalanx._src.checkpoint.untrusted import bytes_on_disk, is_data, is_of_holes


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda path: path.write_bytes(b"data"), True),
        (lambda path: path.touch(), True),
        (lambda path: path.symlink_to(__file__), True),
        (lambda path: path.mkdir(), False),
        (lambda path: path.symlink_to("/dev/zero"), False),
        (lambda path: path.symlink_to(path), False),
        (os.mkfifo, False),
        (lambda path: None, False),
    ],
    ids=["data", "empty", "link to a file", "folder", "device", "link to itself", "pipe", "nothing"],
)
def test_only_files_are_data(tmp_path, make, expected):
    make(tmp_path / "file")
    assert is_data(tmp_path / "file") is expected


def test_large_file_of_holes_is_no_data(tmp_path):
    """A small one is: zeros that fit into memory do no harm."""
    path = tmp_path / "file"
    path.write_bytes(b"data")
    os.truncate(path, 100_000_000)
    assert (is_of_holes(path), is_data(path)) == (False, True)
    os.truncate(path, 10**12)
    assert (is_of_holes(path), is_data(path)) == (True, False)
    assert bytes_on_disk(path) < 10**6
