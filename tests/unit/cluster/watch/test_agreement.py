"""How signatures of programs are compared, and what is said of the difference."""

import json

import pytest

from phalanx._src.cluster.connections.messages import decoded, encoded
from phalanx._src.cluster.watch.agreement import CALL, READ, compare, shortened
from phalanx._src.cluster.watch.messages import WATCH_MESSAGES, ComparisonAnswer

EQUAL = {"argument": ["float32[2]", "int32[]"], "operation": ["add", "mul"]}


def test_equal_signatures_agree():
    assert compare({0: EQUAL, 1: dict(EQUAL), 2: EQUAL}) is None


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"argument": ["float32[2]", "int32[1]"]}, "argument 1 is int32[] on ranks 0, 2 and int32[1] on rank 1"),
        ({"argument": ["float32[2]"]}, "argument 1 is int32[] on ranks 0, 2 and (none) on rank 1"),
        ({"operation": ["add", "sub"]}, "operation 1 is mul on ranks 0, 2 and sub on rank 1"),
        ({"argument": ["x"], "operation": ["y"]}, "argument 0 is float32[2] on ranks 0, 2 and x on rank 1"),
    ],
)
def test_first_difference_is_named(other, said):
    """The first part that differs is named, with the ranks that have the same; a difference survives JSON."""
    difference = compare({0: EQUAL, 1: {**EQUAL, **other}, 2: EQUAL})
    assert str(difference) == said
    assert decoded(encoded(ComparisonAnswer(difference)), WATCH_MESSAGES) == ComparisonAnswer(difference)


def test_reads_are_named_with_their_calls():
    """What all read is equal, wherever they do. A read differs from another one, and from a program, whichever rank reads."""
    save, line = {READ: ["variable 'v'"], CALL: ["model.save(path) (train.py:7)"]}, {READ: ["variable 'v'"], CALL: []}
    assert compare({0: save, 1: line, 2: save}) is None
    read = "a read of variable 'v' by model.save(path) (train.py:7)"
    assert str(compare({0: save, 1: EQUAL})) == f"the program is {read} on rank 0 and a step of fit or run on rank 1"
    assert str(compare({0: EQUAL, 1: save})) == f"the program is a step of fit or run on rank 0 and {read} on rank 1"
    both = f"the program is {read} on ranks 0, 2 and a read of variable 'w' on rank 1"
    assert str(compare({0: save, 1: {READ: ["variable 'w'"]}, 2: save})) == both


def test_few_groups_are_shown():
    """Of many ranks that all differ, four are shown."""
    difference = compare({rank: {"argument": [f"float32[{rank}]"]} for rank in range(100)})
    assert str(difference).count(" on rank ") == 4


@pytest.mark.parametrize("place", [0, 39, 40, 4000])
def test_long_signatures_are_told_apart(place):
    """A signature fits into a message, and still differs wherever the whole does."""
    texts = [f"add of float32[{i}]" for i in range(5000)]
    other = texts.copy()
    other[place] = "sub"
    short = [shortened({"operation": t}) for t in (texts, other)]
    assert all(len(json.dumps(s)) < 2000 for s in short)
    assert compare(dict(enumerate(short))).index == min(place, 40)
