"""The messages of the watches, as lines of JSON."""

import typing

import pytest

from phalanx._src.cluster.connections.messages import SignOfLife, decoded, encoded
from phalanx._src.cluster.watch import messages, sync_point
from phalanx._src.cluster.watch.agreement import Difference
from phalanx._src.cluster.watch.pairs import PairsAnswer, PairsQuestion
from phalanx._src.cluster.watch.pulse import SIGN

EXAMPLES = [
    messages.ProgressReport(2, 1, is_inside=True, has_left=False, is_told=False, has_lost_step=False),
    messages.ComparisonRequest({"argument": ["float32[2]"]}),
    messages.ComparisonRequest(None),
    messages.FailureReport("has ended by ValueError: no"),
    messages.PaceReport([(1, 2, 0.5, 1.0)]),
    messages.ComparisonAnswer(Difference("argument", 0, [([0], "float32[2]"), ([1], "float32[3]")])),
    messages.ComparisonAnswer(Difference("program", None, [([0, 1], "a new one")])),
    messages.ComparisonAnswer(None),
    messages.SaveReport(3, "out/model.keras"),
    messages.VerdictReport("rank 1 is gone", is_loss=True, hint="look there"),
    messages.MessageAtPoint("sync", sync_point.PointRequest("why")),
    messages.MessageAtPoint("sync", sync_point.PointHold("why")),
    messages.MessageAtPoint("sync", sync_point.PointCount(3)),
    messages.MessageAtPoint("sync", sync_point.PointAgreement(4, "why")),
    PairsQuestion(1, (("127.0.0.1", 4000), ("::1", 1)), (("127.0.0.1", 5000),)),
    PairsAnswer(2, 1, (), 0),
]


@pytest.mark.parametrize("message", EXAMPLES, ids=repr)
def test_message_arrives_as_it_was_sent(message):
    assert decoded(encoded(message), messages.WATCH_MESSAGES) == message


def test_each_class_has_an_example():
    kinds = set(typing.get_args(messages.WatchMessage)) - {SignOfLife}
    assert {type(message) for message in EXAMPLES} == kinds


@pytest.mark.parametrize("line", [SIGN, b'{"kind": "NewsOfAnotherVersion", "text": ""}', b'{"kind": ["SaveReport"]}'])
def test_unknown_message_is_a_sign_of_life(line):
    assert decoded(line, messages.WATCH_MESSAGES) == SignOfLife()


@pytest.mark.parametrize(
    "line",
    [
        b'{"kind": "SaveReport", "turn": 1}',
        b'{"kind": "SaveReport", "turn": 1, "name": "a", "size": 3}',
        b'{"kind": "SaveReport", "turn": true, "name": "a"}',
        b'{"kind": "SaveReport", "turn": 1, "name": ["a"]}',
        b'{"kind": "SaveReport", "turn": 1, "name": null}',
        b'{"kind": "PaceReport", "samples": [[1, 2, 0.5]]}',
        b'{"kind": "ComparisonAnswer", "difference": {"kind": "Difference", "part": "argument"}}',
        b'{"kind": "ComparisonAnswer", "difference": ["argument", 0, []]}',
    ],
)
def test_fields_of_a_message_are_checked(line):
    with pytest.raises((TypeError, ValueError), match="argument|in a message is no|shorter"):
        decoded(line, messages.WATCH_MESSAGES)


@pytest.mark.parametrize("line", [b"GET / HTTP/1.1", b"[]", b'{"turn": ' + b"9" * 5000 + b"}", b"\xff"])
def test_line_that_is_no_message(line):
    with pytest.raises(ValueError, match=r"JSON|digits|decode|Expecting"):
        decoded(line, messages.WATCH_MESSAGES)


def test_time_without_a_fraction_is_a_number():
    """Another program may write it so."""
    line = b'{"kind": "PaceReport", "samples": [[1, 2, 0, 1]]}'
    assert decoded(line, messages.WATCH_MESSAGES) == messages.PaceReport([(1, 2, 0, 1)])
