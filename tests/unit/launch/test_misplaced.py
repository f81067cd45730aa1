"""Options of the launcher that stand after the script."""

import os

import pytest

from phalanx._src.launch.misplaced import misplaced, warning_of

OPTIONS = {"--workers": True, "--report": False}


@pytest.mark.parametrize(
    ("text", "arguments", "moved", "others"),
    [
        ("", ["--lr", "1"], [], ["--lr", "1"]),
        ("", ["--workers", "2", "--lr", "1"], ["--workers", "2"], ["--lr", "1"]),
        ("", ["--workers=2", "x"], ["--workers=2"], ["x"]),
        ("", ["--report", "x", "--workers"], ["--report", "--workers"], ["x"]),
        ("", ["--workers-per-node", "2"], [], ["--workers-per-node", "2"]),
        ('parser.add_argument("--workers")', ["--workers", "2", "--report"], ["--report"], ["--workers", "2"]),
        ("flags.add('--report')", ["--report"], [], ["--report"]),
        ("# phalanx run --workers 2", ["--workers", "2"], ["--workers", "2"], []),
    ],
)
def test_options_are_divided_from_arguments(tmp_path, text, arguments, moved, others):
    """What the script's text has in quotes is the script's own."""
    script = tmp_path / "train.py"
    script.write_text(text)
    assert misplaced(str(script), arguments, OPTIONS) == (moved, others)


def test_warning_has_the_right_line():
    assert misplaced("package.train", ["--report"], OPTIONS) == (["--report"], [])
    assert "\nHINT: phalanx run --report -- -lead.py" in warning_of("phalanx run", ["-lead.py"], ["--report"], [])
    assert warning_of("phalanx run", ["-m", "package.train"], ["--report"], ["a b"]) == (
        "phalanx: --report comes after package.train, so it is passed to the script and not to phalanx run.\n"
        "HINT: phalanx run --report -m package.train 'a b'"
    )


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), lambda path: path.mkdir()])
def test_only_files_are_read(tmp_path, make):
    """What is read from a pipe, as with `phalanx run <(make_script)`, would be missing when Python reads it."""
    make(tmp_path / "script")
    assert misplaced(str(tmp_path / "script"), ["--workers", "2"], {"--workers": True}) == (["--workers", "2"], [])
