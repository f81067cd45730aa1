"""The page on `phalanx migrate` shows what the command does."""

import json
import re
from pathlib import Path

from phalanx._src.tools.migrate.__main__ import main

PAGE = (Path(__file__).parents[2] / "docs" / "migrate.md").read_text()


def test_diff_of_the_page_is_that_of_the_command(tmp_path, monkeypatch, capsys):
    """The program before the diff becomes the program after it, and the report has the lines that are shown."""
    (diff,) = re.findall(r"```diff\n(.*?)```", PAGE, re.DOTALL)
    before, after = (
        "".join(line[1:] for line in diff.splitlines(keepends=True) if line[0] in kept) for kept in (" -\n", " +\n")
    )
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(before)
    assert main(json.dumps({"path": "train.py", "output": "new.py", "in_place": False, "check": False})) == 1
    assert Path("new.py").read_text() == after
    (report,) = re.findall(r"```text\n(train.py: .*?)```", PAGE, re.DOTALL)
    printed = capsys.readouterr().err
    for line in report.replace("  ...\n", "").splitlines():
        assert line in printed
