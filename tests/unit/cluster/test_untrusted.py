"""Which files of other users are opened."""

import json
import os
import tracemalloc

import pytest

from phalanx._src.cluster import untrusted
from phalanx._src.cluster.untrusted import SparseFileError, open_data, parse_json, read_data, require_memory

VALUES = (
    "[]",
    "{}",
    "[1]",
    "[" * 90 + "]" * 90,
    '{"":0}',
    '{"a":[]}',
    '"ab"',
    '"\u00e9\u20ac"',
    "1.5",
    "999",
    '{"%x":%d}',
    "1",
)


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


@pytest.mark.parametrize("value", VALUES)
def test_values_of_json_take_no_more_memory_than_is_allowed(monkeypatch, value):
    """The smallest file in which a text is allowed has a third of the memory that its values take, or more."""
    monkeypatch.setattr(untrusted, "_LARGE", 0)
    count = 200_000 // len(value)
    values = [value % (i, i) if "%" in value else value for i in range(count)]
    data = f"[{','.join(values)}]".encode()
    least, most = 1, 1000 * len(data)
    while least < most:
        size = (least + most) // 2
        try:
            require_memory(data, size)
            most = size
        except ValueError:
            least = size + 1
    tracemalloc.start()
    try:
        assert len(parse_json(data, least)) == count
        assert tracemalloc.get_traced_memory()[1] <= 3 * least
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "text", ["[" + "[]," * 4_000_000 + "1]", json.dumps("[]," * 10_000_000), '"\u20ac' + " " * 30_000_000 + '"']
)
def test_json_that_would_fill_the_memory_is_not_parsed(text):
    """Also in a text, from which values are parsed later."""
    with pytest.raises(ValueError, match=r"^the values in its \d+ bytes of JSON would fill \d\.\d GB of memory$"):
        parse_json(text.encode())
