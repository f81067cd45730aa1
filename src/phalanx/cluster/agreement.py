# SPDX-License-Identifier: Apache-2.0
"""How the signatures of programs are compared between processes: pure functions."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

Signature = Mapping[str, Sequence[str]]
"""What must be equal about a program on all processes: of each part, such as its arguments, a list of short texts."""

_LONGEST = 40
_SHOWN_GROUPS = 4
_NOTHING = "(none)"


@dataclass(frozen=True)
class Difference:
    """How programs of several processes differ first.

    Args:
      part: the part of their signatures.
      index: the place in its list; None for the whole.
      groups: ranks that have the same there, and what that is.

    Example:
      >>> print(Difference("argument", 0, [([0, 2], "float32[2]"), ([1], "float32[3]")]))
      argument 0 is float32[2] on ranks 0, 2 and float32[3] on rank 1
    """

    part: str
    index: int | None
    groups: list[tuple[list[int], str]]

    def as_list(self) -> list[object]:
        """Returns it as JSON can hold it."""
        return [self.part, self.index, self.groups]

    def __str__(self) -> str:
        said = [f"{text} on {_ranks(ranks)}" for ranks, text in self.groups[:_SHOWN_GROUPS]]
        part = f"the {self.part}" if self.index is None else f"{self.part} {self.index}"
        return f"{part} is {' and '.join(said)}"


def compare(signatures: Mapping[int, Signature]) -> Difference | None:
    """Returns where the signatures of ranks differ first; None if they are equal.

    Example:
      >>> compare({0: {"argument": ["float32[2]"]}, 1: {"argument": ["float32[2]"]}})
    """
    ranks = sorted(signatures)
    for part in signatures[ranks[0]]:
        for index, texts in enumerate(zip_longest(*(signatures[r][part] for r in ranks), fillvalue=_NOTHING)):
            if len(set(texts)) > 1:
                groups = {text: [r for r, its in zip(ranks, texts, strict=True) if its == text] for text in texts}
                return Difference(part, index, [(found, text) for text, found in groups.items()])
    return None


def shortened(signature: Signature) -> dict[str, list[str]]:
    """Returns a signature that fits into one message: of a long list the beginning, and a hash of the rest."""
    return {part: [*texts[:_LONGEST], *_hash_of(texts[_LONGEST:])] for part, texts in signature.items()}


def _hash_of(texts: Sequence[str]) -> list[str]:
    if not texts:
        return []
    return [f"one of {len(texts)} more ({hashlib.sha256(' '.join(texts).encode()).hexdigest()[:16]})"]


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
