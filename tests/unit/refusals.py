"""Calls that are refused: the error, the words of its message and a hint."""

import re

import pytest


def refused(error, words):
    """Expects an error with these words, in this order, and a hint. A text is a regular expression."""
    text = words if isinstance(words, str) else ".*".join(map(re.escape, words))
    return pytest.raises(error, match=text if isinstance(words, str) else f"(?s)(?=.*\nHINT: ){text}")


def refusals(error, *cases, call=lambda case: case()):
    """Returns a test: for each pair of a case and the words of its error, `call(case)` is refused, in an empty folder."""

    @pytest.mark.parametrize(("case", "words"), cases)
    def test(case, words, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        with refused(error, words):
            call(case)

    return test
