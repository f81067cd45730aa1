# SPDX-License-Identifier: Apache-2.0
"""Text that comes from elsewhere, as a terminal may show it: names in files, and what other processes and the environment say."""

import unicodedata

_KEPT = "\n\t"
_UNSEEN = {"Cc", "Cs", "Zl", "Zp"}
"""The categories of Unicode of what moves or colours on a terminal, what no terminal can be sent, and what breaks lines."""

_TURNED = {*map(chr, range(0x202A, 0x202F)), *map(chr, range(0x2066, 0x206A))}
"""What makes text run in the other direction, so that it looks like other text."""


def printable(text: str) -> str:
    """Returns text whose control characters, except for line feeds and tabs, are written out.

    Example:
      >>> printable("\\x1b[2Jname\\n")
      '\\\\x1b[2Jname\\n'
    """
    if text.isprintable():
        return text
    return "".join(map(_shown, text))


def _shown(character: str) -> str:
    if character in _KEPT or not (unicodedata.category(character) in _UNSEEN or character in _TURNED):
        return character
    return character.encode("unicode_escape").decode()
