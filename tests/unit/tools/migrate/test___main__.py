"""The command: what it writes, what it prints, and its exit codes."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from phalanx._src.tools.migrate.__main__ import main

GOOD = "import tensorflow as tf\nx = tf.ones(1)\n"
NEW = "import phalanx\nimport keras\nx = keras.ops.ones(1)\n"


@pytest.fixture
def migrate(tmp_path, monkeypatch, capsys):
    """Runs the command in a folder, and returns its exit code, output and report."""
    monkeypatch.chdir(tmp_path)

    def run(path, output=None, *, in_place=False, check=False):
        code = main(json.dumps({"path": path, "output": output, "in_place": in_place, "check": check}))
        return code, *capsys.readouterr()

    return run


def test_file_is_shown_as_a_diff(migrate, tmp_path):
    (tmp_path / "a.py").write_text(GOOD)
    code, diff, report = migrate("a.py")
    assert code == 0
    assert "-x = tf.ones(1)\n" in diff
    assert "+x = keras.ops.ones(1)\n" in diff
    assert report == "a.py: 1 change, 0 lines to look at\n  tf.ones -> keras.ops.ones\n"
    assert (tmp_path / "a.py").read_text() == GOOD


@pytest.mark.skipif(shutil.which("patch") is None, reason="patch is not installed.")
def test_diff_is_one_for_patch(migrate, tmp_path):
    """Also of a file without a last line feed, with other ends of lines in it, and with a name that is a diff itself."""
    names = {"a.py": GOOD[:-1], "b.py": GOOD + "\f\ny = 'a\x1cb\u2028c'\rz = 1\n", "c\n--- d.py\n+++ d.py.py": GOOD}
    for name, text in names.items():
        (tmp_path / "p" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "p" / name).write_text(text, newline="")
    diff = migrate("p")[1]
    assert migrate("p", "out")[0] == 0
    assert r"--- p/c\n--- d.py\n+++ d.py.py" in diff.split("\n")
    before, after = diff.partition(r"--- p/c\n")[::2]
    assert "+++ d.py" not in (before + after).split("\n")
    subprocess.run(["patch", "-p0"], input=before.encode(), check=True, stdout=subprocess.DEVNULL)
    for name in ("a.py", "b.py"):
        assert (tmp_path / "p" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()


def test_file_is_changed_in_place_once(migrate, tmp_path):
    (tmp_path / "a.py").write_text(GOOD)
    assert migrate("a.py", in_place=True)[0] == 0
    assert (tmp_path / "a.py").read_text() == NEW
    assert migrate("a.py", in_place=True) == (0, "", "a.py: nothing to change\n")


def test_folder_is_written_to_another(migrate, tmp_path):
    for name in ("p/a.py", "p/q/b.py", "p/.git/c.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(GOOD)
    (tmp_path / "p/q/b.py").write_text("import tensorflow as tf\nx = tf.foo(1)\n")
    assert migrate("p", "out")[0] == 1
    assert (tmp_path / "out/a.py").read_text() == NEW
    assert (tmp_path / "out/q/b.py").read_text().count("# phalanx: tf.foo") == 1
    assert not (tmp_path / "out/.git").exists()


def test_check_only_reports(migrate, tmp_path):
    (tmp_path / "a.py").write_text("import tensorflow as tf\nprint 1\n")
    code, diff, report = migrate("a.py", check=True)
    assert (code, diff) == (2, "")
    assert "line 2: this is not Python 3" in report


def test_new_file_gets_the_name_that_is_given(migrate, tmp_path):
    (tmp_path / "a.py").write_text(GOOD)
    assert migrate("a.py", "new.py")[0] == 0
    assert (tmp_path / "new.py").read_text() == NEW


def test_bad_files_of_a_folder_do_not_stop_the_others(migrate, tmp_path):
    """Links are not followed, encodings and line ends stay, and each bad file is named."""
    (tmp_path / "out.py").write_text(GOOD)
    folder = tmp_path / "p"
    (folder / "folder.py").mkdir(parents=True)
    (folder / "link.py").symlink_to("../out.py")
    (folder / "dangling.py").symlink_to("nowhere.py")
    files = {
        "a.py": GOOD.replace("\n", "\r\n").encode(),
        "b.py": b"import tensorflow as tf\ndef f(:\n",
        "c.py": "# coding: latin-1\nimport tensorflow as tf\nx = tf.constant('ä')\n".encode("latin-1"),
        "d.py": b"import tensorflow as tf\nx = '\xe4'\n",
        "e.py": b"",
        "f.py": b"# coding: nosuch\nimport tensorflow as tf\n",
        "h.ipynb": b"{",
    }
    for name, source in files.items():
        (folder / name).write_bytes(source)
    code, _, report = migrate("p", in_place=True)
    assert code == 2
    assert [line.split(":")[0] for line in report.splitlines() if not line.startswith(" ")] == [f"p/{f}" for f in files]
    assert (tmp_path / "out.py").read_text() == GOOD
    assert (folder / "a.py").read_bytes() == NEW.replace("\n", "\r\n").encode()
    assert "ä".encode("latin-1") in (folder / "c.py").read_bytes()
    for name, line in (("b.py", 2), ("d.py", 2), ("h.ipynb", 1), ("f.py", 1)):
        assert (folder / name).read_bytes() == files[name]
        assert f"p/{name}: 0 changes, 1 line to look at\n  line {line}: this is not" in report


def test_nothing_of_a_file_reaches_the_terminal_as_it_is(tmp_path):
    """Names of files, names in them and lines of the diff; a pipe gets the diff as it is. A file may also have a name that is no text."""
    (tmp_path / "\x1b[2J.py").write_text("import tensorflow as tf\nx = tf.ones(1)  # \x1b]0;title\x07\n")
    (tmp_path / os.fsdecode(b"\xff.py")).write_text(GOOD)
    settings = json.dumps({"path": str(tmp_path), "output": None, "in_place": False, "check": False})
    command = [sys.executable, "-m", "phalanx._src.tools.migrate", settings]
    primary, secondary = os.openpty()
    done = subprocess.run(command, stdout=secondary, stderr=subprocess.PIPE, timeout=300, check=True)
    os.close(secondary)
    shown = os.read(primary, 1 << 16)
    assert b"\\x1b]0;title" in shown
    assert b"\\x1b[2J.py: 1 change" in done.stderr
    assert b"\\udcff.py: 1 change" in done.stderr
    assert b"\x1b" not in shown + done.stderr
    piped = subprocess.run(command, capture_output=True, timeout=300, check=True)
    assert b"# \x1b]0;title" in piped.stdout


def test_file_that_cannot_be_written_is_named(migrate, tmp_path):
    (tmp_path / "a.py").write_text(GOOD)
    code, _, report = migrate("a.py", "a.py/new.py")
    assert code == 2
    assert "a.py: File exists" in report
    assert (tmp_path / "a.py").read_text() == GOOD


@pytest.mark.parametrize(
    ("path", "output", "reason"), [("no.py", None, "there is no such file"), (".", "a.py", "a folder needs a folder")]
)
def test_impossible_paths_are_refused(migrate, tmp_path, path, output, reason):
    (tmp_path / "a.py").write_text(GOOD)
    code, _, report = migrate(path, output)
    assert code == 2
    assert reason in report
    assert "HINT" in report


def test_encoding_that_cannot_write_what_it_reads(migrate, tmp_path):
    """Python reads this one, of host names, and writes no lines of more than 63 characters in it."""
    (tmp_path / "a.py").write_text(f"# coding: idna\n{GOOD}y = '{'a' * 100}'\n")
    code, _, report = migrate("a.py", check=True)
    assert code == 2
    assert "line 1: the new program cannot be written in its encoding" in report


def test_nothing_is_written_through_links(migrate, tmp_path):
    """Of another user in the folder for the results. A link that the user has named is followed, and stays."""
    (tmp_path / "p" / "sub").mkdir(parents=True)
    (tmp_path / "out").mkdir()
    (tmp_path / "elsewhere").mkdir()
    for name in ("a.py", "sub/b.py"):
        (tmp_path / "p" / name).write_text(GOOD)
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "out" / "a.py").symlink_to(tmp_path / "victim")
    (tmp_path / "out" / "sub").symlink_to(tmp_path / "elsewhere")
    code, _, report = migrate("p", "out")
    assert code == 2
    assert "out/a.py: It is a link, a folder, a device or a pipe\n" in report
    assert "sub: Not a directory\n" in report
    assert (tmp_path / "victim").read_text() == "mine"
    assert not os.listdir(tmp_path / "elsewhere")
    (tmp_path / "link.py").symlink_to("p/a.py")
    (tmp_path / "p" / "a.py").chmod(0o755)
    assert migrate("link.py", in_place=True)[0] == 0
    assert (tmp_path / "link.py").is_symlink()
    assert ((tmp_path / "p" / "a.py").read_text(), os.stat("p/a.py").st_mode & 0o777) == (NEW, 0o755)


def test_pipes_and_devices_are_not_read(migrate, tmp_path):
    """They may have no end. In a folder they are no files."""
    os.mkfifo(tmp_path / "pipe.py")
    for path in ("pipe.py", "/dev/zero", "x" * 5000):
        code, _, report = migrate(path)
        problem = "there is no such file or folder" if path[0] == "x" else "it is a device or a pipe"
        assert (code, report) == (2, f"phalanx: phalanx migrate {path}: {problem}.\nHINT: phalanx migrate train.py\n")
    (tmp_path / "a.py").write_text(GOOD)
    assert migrate(".", "out")[0] == 0
    assert os.listdir(tmp_path / "out") == ["a.py"]


def test_file_that_becomes_a_pipe_is_reported(migrate, tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe.py")
    monkeypatch.setattr("os.path.isfile", lambda path: True)
    assert migrate("pipe.py") == (2, "", "pipe.py: it is a device or a pipe\n")
