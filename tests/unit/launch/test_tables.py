"""Tables of text from elsewhere."""

import pytest

from phalanx._src.launch.tables import print_table


@pytest.mark.parametrize("has_box", [True, False])
def test_cells_mean_what_they_say(capsys, has_box):
    """Neither markup nor control characters have an effect, nor are they errors."""
    name = "\x1b]0;TITLE\x07[/][red]x[/red]\n| a | row"
    print_table(("name", "[b]size"), [(name, "[link=http://a]1"), ("y", ":smile:")], title="[/]", has_box=has_box)
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    for words in ("\\x1b]0;TITLE\\x07[/][red]x[/red]\\n| a | row", "[b]size", "[link=http://a]1", ":smile:", "[/]"):
        assert words in shown
