"""The page on `phalanx migrate` shows what the command does, and its program trains."""

import json
import re
from pathlib import Path

import numpy as np

from phalanx._src.tools.migrate.__main__ import main

PAGE = (Path(__file__).parents[2] / "docs" / "migrate.md").read_text()
((DIFF,), (MENDED,), (REPORT,)) = (
    re.findall(pattern, PAGE, re.DOTALL)
    for pattern in (r"```diff\n(.*?)```", r"```python\n(.*?)```", r"```text\n(train.py: .*?)```")
)


def side_of_the_diff(marks):
    """Returns the program before or after the diff: the lines with one of these marks."""
    return "".join(line[1:] for line in DIFF.splitlines(keepends=True) if line[0] in marks)


def test_diff_of_the_page_is_that_of_the_command(tmp_path, monkeypatch, capsys):
    """The program before the diff becomes the program after it, and the report has the lines that are shown."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(side_of_the_diff(" -\n"))
    assert main(json.dumps({"path": "train.py", "output": "new.py", "in_place": False, "check": False})) == 1
    assert Path("new.py").read_text() == side_of_the_diff(" +\n")
    printed = capsys.readouterr().err
    for line in REPORT.replace("  ...\n", "").splitlines():
        assert line in printed


def test_program_of_the_page_trains_once_it_is_mended():
    """With the line that the page writes by hand, the program after the diff learns."""
    marked = r" *# phalanx: if: .*?\n *if .*?\n.*?\n"
    program, mended = re.subn(marked, MENDED, side_of_the_diff(" +\n"))
    assert mended == 1
    names = {}
    exec(compile(program, "new.py", "exec"), names)
    x = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
    (batch,) = names["strategy"].experimental_distribute_dataset((x, x[:, :1]), batch_size=32)
    losses = [float(names["train"](*batch)) for _ in range(20)]
    assert losses[-1] < losses[0] / 2
