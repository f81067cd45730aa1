"""What pages promise exists, and no page denies it: tests of guarantees, benchmarks, and answers to a lost process."""

import re
from pathlib import Path

import pytest
from benchmarks.__main__ import MODULES

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_restarts_are_not_the_only_answer(page):
    """A page that answers a lost process with `--max-restarts` also names elastic groups (parameter servers have none)."""
    text = page.read_text(encoding="utf-8")
    answers = [line for line in text.splitlines() if "--max-restarts" in line and "parameter servers" not in line]
    assert not answers or re.search(r"--workers (\d+:\d+|MIN:MAX)|recovery\.md|elastic group", text)


def test_every_guarantee_is_shown():
    """Each row of the table names files that exist, and each law of the contract tests has a row with its number."""
    page = (ROOT / "docs/guarantees.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d\w?) \| (.*?) \| (.*?) \|$", page, re.MULTILINE)
    files = [(number, file) for number, _, tests in rows for file in re.findall(r"`(.+?)`", tests)]
    assert len(rows) >= 12
    assert [file for _, file in files if not (ROOT / file).is_file()] == []
    laws = {(m[1], f"tests/contract/{m[0]}") for m in map(_law, (ROOT / "tests/contract").iterdir()) if m}
    assert laws
    assert laws <= {*files}
    others = re.findall(r"`(tests/[\w/.*-]+)", page)
    assert [name for name in others if not [*ROOT.glob(name)]] == []


def _law(path):
    return re.fullmatch(r"test_law(\d\w?)_\w+\.py", path.name)


def test_every_benchmark_of_a_page_exists():
    """Each `python -m benchmarks NAME` is a command, and CONTRIBUTING.md has its targets for none that does not exist."""
    pages = {page: page.read_text(encoding="utf-8") for page in (*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "DESIGN.md")}
    named = {(page.name, name) for page, text in pages.items() for name in re.findall(r"-m benchmarks ([a-z_]+)", text)}
    assert len(named) > 20
    assert [(page, name) for page, name in sorted(named) if name not in MODULES] == []
    targets = pages[ROOT / "CONTRIBUTING.md"].partition("## Targets of the benchmarks")[2].partition("\n## ")[0]
    assert {*re.findall(r"^\| `(\w+)`", targets, re.MULTILINE)} <= {*MODULES}
