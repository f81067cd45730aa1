"""Text from elsewhere, on a terminal."""

import warnings

import pytest

from phalanx.errors import StartupError, warn_of_slip
from phalanx.errors.printable import printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("rank 1\n\tends", "rank 1\n\tends"),
        ("größe 😀 \u200d", "größe 😀 \u200d"),
        ("\x1b]0;TITLE\x07\x1b[2J", "\\x1b]0;TITLE\\x07\\x1b[2J"),
        ("a\rb\x9bc\x00", "a\\rb\\x9bc\\x00"),
        ("\u202ey\u2066p.\u2028", "\\u202ey\\u2066p.\\u2028"),
        ("\ud800", "\\ud800"),
        ("", ""),
    ],
)
def test_what_moves_a_terminal_is_written_out(text, shown):
    assert printable(text) == shown


def test_errors_and_warnings_are_printable():
    """Their parts may come from files, other processes and the environment."""
    error = StartupError("\x1b[2Jrank", "\x1b]52;c;ZXZpbA==\x07", "\x9b")
    assert "\x1b" not in str(error)
    assert (error.asked, error.hint) == ("\\x1b[2Jrank", "\\x9b")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_slip("\x1b[2J", "none")
    assert "\x1b" not in str(caught[0].message)
