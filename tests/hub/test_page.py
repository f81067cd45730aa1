"""The page about KerasHub is a program that prints what it says."""

import pytest
from tests.docs import test_pages

PAGE = "docs/kerashub.md"

pytest.importorskip("keras_hub", reason="KerasHub is not installed: make test-hub")


def test_page_runs_and_prints_what_it_says(tmp_path):
    """It ends without an error, and prints the page's `text` blocks in their order."""
    printed = test_pages.run(test_pages.program_of(PAGE), tmp_path / "kerashub.py").stdout
    for _, expected in test_pages.blocks(PAGE, "text"):
        assert expected in printed
        printed = printed.partition(expected)[2]
