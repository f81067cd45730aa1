"""Pages that are sessions print what they say, and the page about errors has all of them."""

import inspect
import re
from pathlib import Path

import pytest
from cells import cells_of, printed_by, written

from phalanx import errors

ROOT = Path(__file__).parents[2]
PAGES = [
    "docs/errors.md",
    "docs/extend.md",
    *(f"docs/notebooks/{p.name}" for p in (ROOT / "docs/notebooks").glob("*.md")),
]
DEADLINE_S = 600  # On a busy machine; alone, each takes less than a tenth of it.


def text_of(page):
    """Returns the text of a page."""
    return (ROOT / page).read_text(encoding="utf-8")


@pytest.mark.exhaustive("test_pages.py: the README and docs/start.md begin with the same programs")
@pytest.mark.parametrize("page", PAGES)
def test_cells_print_what_the_page_says(page, tmp_path):
    """`.venv/bin/python tests/docs/cells.py PAGE` writes the new output into the page; read the difference before you commit it."""
    cells = cells_of(text_of(page))
    printed = printed_by(cells, tmp_path, DEADLINE_S)
    for cell, output in zip(cells, printed, strict=True):
        assert output == cell.expected, f"{page}:{cell.line}"


def test_writing_the_same_output_changes_nothing():
    """What is compared is what is written."""
    for page in PAGES:
        assert written(text_of(page), [cell.expected for cell in cells_of(text_of(page))]) == text_of(page)


def test_each_error_has_an_example():
    """Each class has a section, whose example prints its name; errors print a HINT too."""
    sections = dict(re.findall(r"^### (\w+)\n(.*?)(?=^##|\Z)", text_of("docs/errors.md"), re.MULTILINE | re.DOTALL))
    classes = [c for _, c in inspect.getmembers(errors, inspect.isclass) if c.__module__ == errors.__name__]
    assert {*sections} == {c.__name__ for c in classes} - {"PhalanxError"}
    for name, section in sections.items():
        (cell,) = cells_of(section)
        assert re.search(rf"^(phalanx\.errors\.)?{name}: ", cell.expected, re.MULTILINE), name
        assert "HINT: " in cell.expected, name
