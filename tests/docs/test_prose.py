"""The English of pages that a native reader has gone through: phrases that were rewritten there do not come back."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    *(str(page.relative_to(ROOT)) for page in sorted((ROOT / "docs").rglob("*.md"))),
]
PHRASES = {
    r"how-manieth": "a number, named",
    r"\banew\b": "again, or new",
    r"\bmeanwhile\b": "while, or in the meantime",
    r"\bof which\b": "whose, or a sentence of its own",
    r"\bthat which\b": "what",
    r"\ball get\b": "every X gets",
    r"\bfor ever\b": "forever",
    r"(?<=[.!?] )Those of\b": "the noun",
    r"(?<![Tt]here )\b(is|are) no (?!longer|more|less|such|need|other)[a-z]+\b(?! left)": "is not a",
    r"\b(one|two|three|\d+) [a-z]+ an? (batch|device|dtype|epoch|execution|group|leaf|process|replica|row|second|server|shard|step|thread|variable|worker)\b": "per",
    r"\b(bytes|rows|steps|tokens) an? (second|step|device|replica)\b": "per",
}


def prose_of(page):
    """Returns the lines of a page, with code left out."""
    text = (ROOT / page).read_text(encoding="utf-8")
    text = re.sub(r"^```.*?^```$", lambda block: "\n" * block.group().count("\n"), text, flags=re.MULTILINE | re.DOTALL)
    return [re.sub(r"`[^`]*`", "", line) for line in text.splitlines()]


@pytest.mark.parametrize("page", PAGES)
def test_page_has_none_of_the_phrases(page):
    """Each phrase is one that no native reader uses; what to write instead stands beside it."""
    found = [
        f"{page}:{number}: {match.group()!r}: write {instead}"
        for number, line in enumerate(prose_of(page), 1)
        for phrase, instead in PHRASES.items()
        for match in [re.search(phrase, line)]
        if match
    ]
    assert not found, "\n".join(found)
