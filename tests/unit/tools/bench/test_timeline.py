"""The parts of steps, from moments that were made up: they add up, and each kind of delay goes into its part."""

import re

import pytest

from phalanx._src.tools.bench.timeline import NAMES, Moments, Result, parts_of

STEPS = 6


def process(rank=0, *, read=0.0, host=0.0, compute=1.0, others=None, exchange=0.5, count=1):
    """The moments of a process with these seconds in each step; `others` is the slowest own part of all."""
    slowest, now = max(compute, others or 0.0), 100.0
    calls, waits, own, ends = [], [], [], []
    for _ in range(STEPS):
        waits.append((now, now + read))
        began = now + read + host
        calls.append(began)
        own.append(began + compute)
        now = began + slowest + exchange
        ends.append(now)
    return Moments(rank, count, count, 8, calls, waits, {str(rank): own}, {str(rank): ends})


def means(*processes):
    """The parts of the steps after the first, which are all equal."""
    steps, late = parts_of(processes, 1)
    assert len(steps) == STEPS - 1
    found = {name: getattr(steps[0], name) for name in NAMES}
    for step in steps:
        assert {name: getattr(step, name) for name in NAMES} == pytest.approx(found)
        assert step.step == pytest.approx(sum(found.values()))
    return {name: round(value, 6) for name, value in found.items()}, late


def test_parts_of_one_process():
    """Each in its place; they add up to the step."""
    found, late = means(process(read=0.25, host=0.125))
    assert found == {"input": 0.25, "host": 0.125, "compute": 1.0, "wait": 0.0, "exchange": 0.5}
    assert late == {0: 0.0}


def test_slow_process_is_waited_for():
    """The others wait for it; the parts are means over the replicas."""
    found, late = means(process(0, compute=1.0, others=3.0, count=2), process(1, compute=3.0, count=2))
    assert found == {"input": 0.0, "host": 0.0, "compute": 2.0, "wait": 1.0, "exchange": 0.5}
    assert late == pytest.approx({0: -2.0, 1: 2.0})


def test_reading_beside_the_computation_costs_nothing():
    """Only the time in which no replica computes counts."""
    quick = process(host=0.1)
    read_ahead = [(call + 0.2, call + 0.9) for call in quick.calls]
    steps, _ = parts_of([Moments(0, 1, 1, 8, quick.calls, read_ahead, quick.own, quick.ends)], 1)
    assert steps[0].input == pytest.approx(0.0)
    assert steps[0].host == pytest.approx(0.1)


def test_calls_that_come_early():
    """A program that was called while the one before still ran begins when that one has ended."""
    quick = process()
    early = [call - 0.4 for call in quick.calls]
    steps, _ = parts_of([Moments(0, 1, 1, 8, early, [], quick.own, quick.ends)], 1)
    assert steps[0].host == pytest.approx(0.0)
    assert steps[0].compute == pytest.approx(1.0)


def test_several_steps_in_a_call():
    """Only the first of them has a time before it."""
    quick = process(host=0.5)
    steps, _ = parts_of([Moments(0, 1, 1, 8, quick.calls[::3], [], quick.own, quick.ends)], 1)
    assert [round(step.host, 6) for step in steps] == [0.0, 0.0, 0.5, 0.0, 0.0]


def result(**parts):
    """A result with these milliseconds."""
    return Result(2, 1, 2, 10.0, 80.0, dict.fromkeys(NAMES, 0.0) | parts, 1, [10.0])


@pytest.mark.parametrize(
    ("parts", "sentence"),
    [
        ({"compute": 9, "host": 1}, r"bound by its computation \(90% of the step\)"),
        ({"compute": 5, "input": 5}, r"bound by its input \(50% of the step\): read faster"),
        ({"compute": 7, "host": 3}, r"bound by Python code between the steps \(30% of the step\): steps_per_execution"),
        ({"compute": 6, "wait": 4}, r"bound by rank 1, for which the others wait \(80% of the step\): replica_weights"),
        ({"compute": 1, "wait": 4, "host": 5}, r"bound by rank 1, for which the others wait"),
        ({"compute": 2, "exchange": 8}, r"bound by the exchange between replicas \(80% of the step\): larger batches"),
    ],
)
def test_sentence_names_the_largest_part(parts, sentence):
    """Apart from the computation, which is what the devices are for."""
    assert re.match(sentence, result(**parts).verdict)


def test_one_replica_has_no_exchange():
    """The update of its weights is computation."""
    one = Result(1, 1, 1, 10.0, 80.0, dict.fromkeys(NAMES, 0.0) | {"compute": 5, "exchange": 4, "host": 1}, 0, [10.0])
    assert one.verdict.startswith("bound by its computation (90% of the step)")


def test_slow_device_is_named():
    """A single process has no ranks, so the sentence speaks of replicas."""
    one = Result(1, 2, 2, 10.0, 80.0, dict.fromkeys(NAMES, 0.0) | {"compute": 6, "wait": 4}, 0, [10.0])
    assert one.verdict.startswith("bound by the slowest replica, for which the others wait (40% of the step)")


def test_efficiency_is_per_replica():
    """Rows per second, against another number of replicas; unknown without rows."""
    one = Result(1, 1, 1, 10.0, 50.0, dict.fromkeys(NAMES, 1.0), 0, [10.0])
    assert result().efficiency(one) == pytest.approx(0.8)
    assert Result(1, 2, 2, 10.0, None, {}, 0, []).efficiency(one) is None
    assert [result().name, one.name] == ["2 processes of 1 device", "1 device"]
