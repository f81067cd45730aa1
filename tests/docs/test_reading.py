"""A reader of the pages finds a way on, code that fits, and examples with output and pictures."""

import datetime
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
READ = sorted(
    {*DOCS.rglob("*.md")} - {*DOCS.glob("api/*.md"), DOCS / "changelog.md"}
)  # Others are looked up, not read.
WIDTH = 88  # Longer lines are cut at the right edge of the site.
LANGUAGES = r"python|\{code-cell\}|bash|shell"
PICTURE_BYTES = 40_000


def text_of(page):
    """Returns the text of a page without its tables of contents."""
    return re.sub(r"^```\{toctree\}.*?^```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", READ, ids=lambda page: str(page.relative_to(DOCS)))
def test_page_ends_with_a_next_step(page):
    """The last paragraph links to another page."""
    last = text_of(page).rstrip().split("\n\n")[-1]
    assert re.search(r"\]\((?!#|https?:)", last), last


def test_lines_of_code_fit_on_the_page():
    """No reader scrolls sideways to read a program or a command."""
    long_lines = [
        f"{page.relative_to(ROOT)}: {line}"
        for page in DOCS.rglob("*.md")
        for block in re.findall(rf"^```(?:{LANGUAGES})[^\n]*\n(.*?)^```$", text_of(page), re.MULTILINE | re.DOTALL)
        for line in block.splitlines()
        if len(line) > WIDTH
    ]
    assert not long_lines, "\n".join(long_lines)


def test_gallery_has_every_example_with_its_output():
    """Each program of `examples` is run by a block that shows output and time; `make gallery` writes them."""
    blocks = re.findall(r"^```console\n\$ (.*)\n((?:.*\n)*?)```$", text_of(DOCS / "examples.md"), re.MULTILINE)
    shown = {name for command, _ in blocks for name in re.findall(r"examples/(\w+\.py)", command)}
    assert shown == {path.name for path in (ROOT / "examples").glob("*.py")}
    for command, printed in blocks:
        assert re.search(r".\n# \d+ s of CPU time\n$", printed), command


def test_gallery_has_its_date():
    """The page says when its output was written, in the words that `make gallery` updates."""
    date = runpy.run_path(str(DOCS / "gallery.py"))["DATE"].search(text_of(DOCS / "examples.md"))
    assert datetime.date.fromisoformat(date[0]) >= datetime.date(2026, 11, 28)


def test_pictures_of_the_gallery_are_small():
    """Those that programs draw are reduced, so that the page and the repository stay small."""
    pictures = re.findall(r"!\[.+?\]\((.*?)\)", text_of(DOCS / "examples.md"))
    assert len(pictures) >= 3
    assert all((DOCS / picture).stat().st_size < PICTURE_BYTES for picture in pictures)
