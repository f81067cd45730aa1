"""Pages whose Python blocks are cells of one session, each followed by a `text` block with what it prints.

A cell prints as in a notebook: its output, then the value of its last expression, or the error that ends it.

    .venv/bin/python tests/docs/cells.py docs/errors.md     writes what the cells print now into the page
"""

import ast
import contextlib
import io
import json
import linecache
import os
import re
import subprocess
import sys
import tempfile
import types
from pathlib import Path
from typing import NamedTuple

_CELL = re.compile(
    r"^```(?:python|\{code-cell\})[^\n]*\n(?P<code>.*?)^```\n(?:\n```text\n(?P<text>.*?)^```\n)?",
    re.MULTILINE | re.DOTALL,
)
_PORT = re.compile(r"127\.0\.0\.1:\d+")


class Cell(NamedTuple):
    """A block of Python.

    Args:
      line: the number of its first line in the page.
      code: its text.
      expected: what the page says that it prints.
    """

    line: int
    code: str
    expected: str


def cells_of(text):
    """Returns the cells of a page."""
    return [
        Cell(text[: match.start("code")].count("\n") + 1, match["code"], match["text"] or "")
        for match in _CELL.finditer(text)
    ]


def printed_by(cells, folder, timeout_s):
    """Runs cells in a process of their own on two virtual CPU devices, and returns what each prints."""
    result = subprocess.run(
        [sys.executable, str(Path(__file__).resolve()), "--run"],
        input=json.dumps([cell.code for cell in cells]),
        cwd=folder,
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "PHALANX_CPU_DEVICES": "2",
            "PYTHONIOENCODING": "utf-8",
            "COLUMNS": "100",
        },
        capture_output=True,
        encoding="utf-8",
        timeout=timeout_s,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Warning" not in result.stderr, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def written(text, outputs):
    """Returns the page with these outputs."""
    remaining = iter(outputs)

    def with_output(match):
        code = match.group().partition("\n```\n")[0] + "\n```\n"
        printed = next(remaining)
        return code + (f"\n```text\n{printed}```\n" if printed else "")

    return _CELL.sub(with_output, text)


def _run_all():
    codes = json.load(sys.stdin)
    # The session is the module __main__, as in a notebook, so that workers get its functions by value.
    session = sys.modules["__main__"] = types.ModuleType("__main__")
    outputs = [_run(f"cell_{number}.py", code, vars(session)) for number, code in enumerate(codes, 1)]
    print()
    print(json.dumps(outputs), flush=True)


def _run(name, code, namespace):
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    tree = ast.parse(code, name)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            exec(compile(tree, name, "exec"), namespace)
            value = last and eval(compile(ast.Expression(last.value), name, "eval"), namespace)
            if value is not None:
                print(repr(value))
        except Exception as error:
            print(f"{type(error).__module__}.{type(error).__name__}: {error}")
    printed = _PORT.sub("127.0.0.1:12345", out.getvalue())
    return "".join(line.rstrip() + "\n" for line in printed.splitlines())


if __name__ == "__main__":
    if sys.argv[1:] == ["--run"]:
        _run_all()
    else:
        for path in map(Path, sys.argv[1:]):
            page = path.read_text(encoding="utf-8")
            with tempfile.TemporaryDirectory() as folder:
                path.write_text(written(page, printed_by(cells_of(page), folder, timeout_s=600)), encoding="utf-8")
