"""Opening the files of other users, and writing into folders that others may write to."""

import ast
import json
import os
import tracemalloc
from pathlib import Path

import pytest

from phalanx._src.cluster import untrusted
from phalanx._src.cluster.untrusted import (
    SparseFileError,
    new_file,
    open_data,
    open_to_append,
    opened_folder,
    parse_json,
    read_data,
    require_memory,
)

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
    count = 50_000 // len(value)
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


def write(file, below=None):
    with new_file(file, below) as opened:
        opened.write(b"new")


NOT_FILES = {
    "link": lambda path: path.symlink_to(path.parent / "victim"),
    "link to nothing": lambda path: path.symlink_to(path.parent / "nothing"),
    "link to a device": lambda path: path.symlink_to("/dev/null"),
    "pipe": os.mkfifo,
    "folder": Path.mkdir,
}


@pytest.mark.parametrize("make", NOT_FILES.values(), ids=NOT_FILES)
@pytest.mark.parametrize("opened", [write, open_to_append])
def test_nothing_is_written_through_links(tmp_path, make, opened):
    """Nor waits for the other end of a pipe."""
    (tmp_path / "victim").write_text("mine")
    make(tmp_path / "file")
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(OSError, match=r"It is a|Too many levels of symbolic links|Is a directory|No such device"):
        opened(tmp_path / "file")
    assert (tmp_path / "victim").read_text() == "mine"
    assert sorted(os.listdir(tmp_path)) == before


def test_lines_are_appended_to_a_file(tmp_path):
    """A new one, or one that is there already; never to a device."""
    for line in ("first\n", "second\n"):
        with open_to_append(tmp_path / "file") as opened:
            opened.write(line)
    assert (tmp_path / "file").read_text() == "first\nsecond\n"
    with pytest.raises(OSError, match="It is a device or a pipe"):
        open_to_append(Path("/dev/null"))


def test_folder_is_opened_but_not_made(tmp_path):
    for _ in range(2):
        with pytest.raises(FileNotFoundError), opened_folder(tmp_path / "folder", tmp_path):
            pass
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").touch()
    with opened_folder(tmp_path / "folder", tmp_path) as descriptor:
        assert os.listdir(descriptor) == ["file"]


def test_link_in_place_of_a_folder_is_not_followed(tmp_path):
    """But for the folder that the user has chosen."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "chosen").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "chosen")
    write(tmp_path / "link" / "a" / "b" / "file", tmp_path / "link")
    assert (tmp_path / "chosen" / "a" / "b" / "file").read_text() == "new"
    (tmp_path / "chosen" / "inner").symlink_to(tmp_path / "elsewhere")
    for folder in ("inner", "inner/deep"):
        with pytest.raises(NotADirectoryError):
            write(tmp_path / "link" / folder / "file", tmp_path / "link")
    assert not os.listdir(tmp_path / "elsewhere")


def test_file_is_written_completely_or_not_at_all(tmp_path):
    """It keeps the permissions of the one that it replaces."""
    file = tmp_path / "file"
    file.write_text("old")
    file.chmod(0o751)

    def fail():
        with new_file(file) as opened:
            opened.write(b"half")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert (os.listdir(tmp_path), file.read_text()) == (["file"], "old")
    write(file)
    assert (os.listdir(tmp_path), file.read_text(), file.stat().st_mode & 0o777) == (["file"], "new", 0o751)


PRIVATE = {
    "_src/cluster/connections/secret.py": "new, in a folder of this user",
    "_src/cluster/processes/training.py": "in a folder of this user",
    "_src/cluster/untrusted.py": "see above",
    "_src/checkpoint/remote.py": "in a temporary folder of this user",
    "_src/checkpoint/folder_lock.py": "a lock, which may not be a link",
    "_src/checkpoint/store.py": "an archive in a file that is open",
    "_src/parameter_server/processes/session.py": "in a folder of this user",
    "_src/tools/bench/recorder.py": "in a temporary folder of this user",
    "_src/tools/child.py": "/dev/null",
    "_src/tools/results.py": "a picture in a file that is open",
    "estimator/exporting/writing.py": "in a new folder with a random name",
    "summary/events.py": "sounds in the memory",
}
"""The modules that write files themselves, and why no link of another user can be there."""


def test_files_are_written_in_one_place():
    """Except those in folders of this user."""
    sources, writers = Path(untrusted.__file__).parents[2], set()
    for path in sources.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            texts = {arg.value for arg in node.args[1:] if isinstance(arg, ast.Constant) and isinstance(arg.value, str)}
            opens = name in ("open", "ZipFile", "GzipFile") and texts & {m + b for m in "wax" for b in ("", "b")}
            flags = name == "open" and any(getattr(n, "attr", "") in ("O_WRONLY", "O_CREAT") for n in ast.walk(node))
            if (
                opens
                or flags
                or name in ("write_text", "write_bytes", "savefig", "save_file", "copy", "copyfile")
                and (name[:4] != "copy" or getattr(getattr(node.func, "value", None), "id", "") == "shutil")
            ):
                writers.add(str(path.relative_to(sources)))
    assert writers == set(PRIVATE)
