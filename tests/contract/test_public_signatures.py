"""What a program could write with commit e16423c, it can write today: the same names, the same paths and the same calls."""

import importlib
from itertools import zip_longest
from pathlib import Path

import pytest
from tests.contract.public_signatures import signatures

CHANGELOG = (Path(__file__).parents[2] / "CHANGELOG.md").read_text()
LINES = Path(__file__).with_name("public_signatures.txt").read_text().splitlines()
BEFORE = dict(line.split(": ", 1) for line in LINES)
TODAY = signatures()

DELETED = {
    "phalanx.DistributedIterator.load_state": "phalanx.train.Checkpoint(iterator=iterator).read(path)",
    "phalanx.DistributedIterator.save_state": "phalanx.train.Checkpoint(iterator=iterator).write(path)",
    "phalanx.ReplicaContext.padding": "ReplicaContext.example_mask",
    "phalanx.summary.trackers.MLflowTracker": "phalanx.summary.trackers.Tracker",
    "phalanx.summary.trackers.WandbTracker": "phalanx.summary.trackers.Tracker",
}
"""Names that are gone, and what to use instead. The changelog has both. The methods of a class go with it."""

CHANGED = {
    "phalanx.ReplicaContext": "The engine makes it. Its third argument held masks, and holds the batches that the masks belonged to.",
}
"""Calls that differ, and why no program depends on them."""


def is_accepted(before, today):
    """Whether each call that one signature accepts is accepted by another, with the same defaults."""
    if not before.startswith("call"):
        return before == today
    old, new = before.split()[1:], today.split()[1:]
    is_keyword = lambda p: p.startswith(("--", "**"))  # noqa: E731
    positions = zip_longest([p for p in old if not is_keyword(p)], [p for p in new if not is_keyword(p)])
    added = [p for p in new if p not in old]
    return (
        today.startswith("call")
        and all(p is None or p == q for p, q in positions)
        and all(p in new for p in old if is_keyword(p))
        and all("=" in p or p.startswith("*") for p in added)
    )


@pytest.mark.parametrize(
    ("today", "expected"),
    [
        ("call self x y=1 --z=2", True),
        ("call self x y=1 w=3 --v=None --z=2", True),
        ("call self x y=1 --z=2 **more", True),
        ("call self x w=3 y=1 --z=2", False),
        ("call self x y=1 w --z=2", False),
        ("call self x y=1 --z=2 --w", False),
        ("call self /x y=1 --z=2", False),
        ("call self x y=2 --z=2", False),
        ("call self x y=1", False),
        ("property", False),
    ],
)
def test_comparison_finds_what_breaks_a_call(today, expected):
    assert is_accepted("call self x y=1 --z=2", today) is expected


def test_no_public_name_is_gone():
    is_listed = lambda name: not {name, name.rpartition(".")[0]}.isdisjoint(DELETED)  # noqa: E731
    assert [name for name in BEFORE if name not in TODAY and not is_listed(name)] == []


def test_paths_of_modules_can_be_imported():
    """`import phalanx.x.y` works, and not only the attribute."""
    paths = [name for name, text in BEFORE.items() if text == "module"]
    assert [importlib.import_module(path).__name__ for path in paths] == paths


def test_each_call_is_still_accepted():
    both = {name: (text, TODAY[name]) for name, text in BEFORE.items() if name in TODAY and name not in CHANGED}
    assert {name: texts for name, texts in both.items() if not is_accepted(*texts)} == {}


def test_changelog_names_each_deletion_and_what_to_use():
    pairs = {name.removeprefix("phalanx."): instead for name, instead in DELETED.items()}
    lines = CHANGELOG.splitlines()
    assert [n for n, instead in pairs.items() if not any(f"`{n}`" in x and f"`{instead}`" in x for x in lines)] == []


def test_lists_hold_nothing_that_is_unchanged():
    assert [name for name in DELETED if name in TODAY] == []
    assert [name for name in CHANGED if is_accepted(BEFORE[name], TODAY[name])] == []
