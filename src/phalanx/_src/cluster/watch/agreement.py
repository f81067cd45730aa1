# SPDX-License-Identifier: Apache-2.0
"""Compares the signatures of programs between processes, with pure functions."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from phalanx.errors import listed

Signature = Mapping[str, Sequence[str]]
"""Properties of a program that must be equal in all processes: a list of short texts per part, such as `argument`."""

READ = "read"
"""The part of a signature of what all processes must ask for each time: a read of values of which none of them has all."""

CALL = "call"
"""The part of the signature of a read that is shown, but not compared: the call in the user's program, such as `model.save`."""

# A long message could exceed the buffer of a socket that does not block, and would be cut off.
_LONGEST = 40
_SHOWN_GROUPS = 4
_NOTHING = "(none)"


@dataclass(frozen=True)
class Difference:
    """The first difference between the programs of several processes.

    Args:
      part: part of the signature that differs.
      index: index in the list of that part. None means the whole part.
      groups: one pair per distinct value: the ranks that have it, and the value.

    Example:
      >>> print(Difference("argument", 0, [([0, 2], "float32[2]"), ([1], "float32[3]")]))
      argument 0 is float32[2] on ranks 0, 2 and float32[3] on rank 1
    """

    part: str
    index: int | None
    groups: list[tuple[list[int], str]]

    def __str__(self) -> str:
        said = [f"{text} on {_ranks(ranks)}" for ranks, text in self.groups[:_SHOWN_GROUPS]]
        part = f"the {self.part}" if self.index is None else f"{self.part} {self.index}"
        return f"{part} is {' and '.join(said)}"


def compare(signatures: Mapping[int, Signature]) -> Difference | None:
    """Returns the first difference between the signatures of the ranks, or None if they are equal.

    Example:
      >>> compare({0: {"argument": ["float32[2]"]}, 1: {"argument": ["float32[2]"]}})
    """
    ranks = sorted(signatures)
    reads = [tuple(signatures[rank].get(READ, ())) for rank in ranks]
    if any(reads) and len(set(reads)) > 1:
        calls = [call_of(signatures[rank]) for rank in ranks]
        groups = {call: [r for r, its in zip(ranks, calls, strict=True) if its == call] for call in calls}
        return Difference("program", None, [(its_ranks, call) for call, its_ranks in groups.items()])
    if any(reads):
        return None
    for part in signatures[ranks[0]]:
        for index, texts in enumerate(zip_longest(*(signatures[r].get(part, ()) for r in ranks), fillvalue=_NOTHING)):
            if len(set(texts)) > 1:
                groups = {text: [r for r, its in zip(ranks, texts, strict=True) if its == text] for text in texts}
                return Difference(part, index, [(found, text) for text, found in groups.items()])
    return None


def call_of(signature: Signature) -> str:
    """Returns, for messages, what a process that sent a signature is about to do."""
    if READ not in signature:
        return "a step of fit or run"
    return " by ".join([f"a read of {signature[READ][0]}", *signature.get(CALL, ())])


def shortened(signature: Signature) -> dict[str, list[str]]:
    """Returns a signature that fits into one message: long lists are cut, and a hash stands for the rest."""
    return {part: [*texts[:_LONGEST], *_hash_of(texts[_LONGEST:])] for part, texts in signature.items()}


def _hash_of(texts: Sequence[str]) -> list[str]:
    if not texts:
        return []
    return [f"one of {len(texts)} more ({hashlib.sha256(' '.join(texts).encode()).hexdigest()[:16]})"]


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {listed([*map(str, ranks)])}"
