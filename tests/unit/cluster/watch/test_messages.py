"""The messages of the watches, as lines of JSON."""

import json
import typing

import pytest

from phalanx._src.cluster.watch import messages
from phalanx._src.cluster.watch.agreement import Difference
from phalanx._src.cluster.watch.pulse import SIGN

EXAMPLES = [
    messages.ProgressReport(2, 1, is_inside=True, has_left=False, is_told=False, has_lost_step=False),
    messages.ComparisonRequest({"argument": ["float32[2]"]}),
    messages.ComparisonRequest(None),
    messages.FailureReport("has ended by ValueError: no"),
    messages.PaceReport([[1, 2, 0.5, 1.0]]),
    messages.ComparisonAnswer(["argument", 0, [[[0], "float32[2]"], [[1], "float32[3]"]]]),
    messages.SaveReport(3, "out/model.keras"),
    messages.VerdictReport("rank 1 is gone", is_loss=True, hint="look there"),
    messages.PointMessage("sync", {"hold": "why"}),
    messages.PairsMessage({"whose": [["127.0.0.1", 4000]]}),
]


@pytest.mark.parametrize("message", EXAMPLES, ids=repr)
def test_message_arrives_as_it_was_sent(message):
    assert messages.from_json(json.loads(json.dumps(messages.as_json(message)))) == message


def test_each_class_has_an_example():
    kinds = set(typing.get_args(messages.WatchMessage)) - {messages.SignOfLife}
    assert {type(message) for message in EXAMPLES} == kinds


@pytest.mark.parametrize("line", [SIGN, b'{"kind": "NewsOfAnotherVersion", "text": ""}'])
def test_unknown_message_is_a_sign_of_life(line):
    assert messages.from_json(json.loads(line)) == messages.SignOfLife()


def test_difference_is_the_same_after_the_answer():
    difference = Difference("argument", 0, [([0], "float32[2]"), ([1], "float32[3]")])
    assert f"{messages.ComparisonAnswer(difference.as_list()).found_difference}" == f"{difference}"
