"""Step times: what a process measures, what it sends, and for whom the others wait."""

import pytest

from phalanx._src.cluster.watch.pace import Paces, StepTimes, Stopwatch, table_of


def samples_of(outside, inside=0.001, count=400, each=400):
    """What a process takes in several turns, if the time before a step is `outside(step)` and all leave a step together."""
    watch, now_s, taken = Stopwatch(), 0.0, []
    for step in range(count):
        now_s = now_s + outside(step)
        watch.begin(step, step, now_s, is_step=True)
        now_s += inside
        watch.end(now_s)
        if step % each == each - 1:
            taken += watch.take()
    return taken + watch.take()


def test_median_and_99th_percentile():
    """Of the time from one step to the next, with one slow step among a hundred."""
    paces = Paces(1)
    paces.hear(0, samples_of(lambda step: 0.5 if step % 100 == 50 else 0.01, each=10))
    (found,) = paces.step_times()
    assert found.rank == 0
    assert found.median_s == pytest.approx(0.011)
    assert found.p99_s == pytest.approx(0.501)
    assert (found.waited_for, found.waited_s) == (0.0, 0.0)


@pytest.mark.parametrize("each", [10, 400])
def test_others_wait_for_the_last(each):
    """At every fourth step, whether all steps are sent or only some."""
    paces = Paces(3)
    for rank in range(3):
        paces.hear(rank, samples_of(lambda step, r=rank: 0.03 if r == 1 and step % 4 == 0 else 0.01, each=each))
    first, second, third = paces.step_times()
    assert second.waited_for == pytest.approx(0.25, abs=0.02 if each == 10 else 0.2)
    assert second.waited_s == pytest.approx(0.02)
    assert first.waited_for == third.waited_for == 0.0


def test_share_of_a_long_training():
    """Percentiles are those of the last steps, but all steps count for the waits."""
    paces = Paces(2)
    for step in range(10_000):
        for rank, before_s in enumerate((0.01, 0.03)):
            paces.hear(rank, [(step, step, before_s, 0.04)])
    first, second = paces.step_times()
    assert (first.waited_for, second.waited_for) == (0.0, 1.0)
    assert second.waited_s == pytest.approx(0.02)


def test_small_differences_do_not_count():
    """One twentieth of a step, or a millisecond, is no wait."""
    paces = Paces(2)
    for rank in range(2):
        paces.hear(rank, samples_of(lambda step, r=rank: 0.1 + 0.004 * r, each=10))
    assert [times.waited_for for times in paces.step_times()] == [0.0, 0.0]


def test_other_operations_count_as_arrivals():
    """The wait for a process may be in an exchange before the step; its time is no step."""
    paces = Paces(2)
    for rank in range(2):
        watch, now_s = Stopwatch(), 0.0
        for turn in range(40):
            now_s += 0.02 if turn % 2 == 0 and rank == 1 else 0.005
            watch.begin(turn // 2, turn, now_s, is_step=turn % 2 == 1)
            watch.end(now_s)
            if turn % 20 == 19:
                paces.hear(rank, watch.take())
    first, second = paces.step_times()
    assert (first.waited_for, second.waited_for) == (0.0, 1.0)
    assert second.waited_s == pytest.approx(0.015)
    assert second.median_s == pytest.approx(0.025)


def test_few_samples_are_sent():
    """However many steps there are, and the same ones by all processes."""
    first, second = samples_of(lambda _: 0.01, count=4000, each=4000), samples_of(lambda _: 0.02, count=4000, each=4000)
    assert 8 <= len(first) <= 24
    assert [sample[0] for sample in first] == [sample[0] for sample in second]


def test_failed_step_is_not_measured():
    """Nor the time until the next one."""
    watch = Stopwatch()
    watch.begin(0, 0, 1.0, is_step=True)
    assert watch.last_s == 0.0
    watch.end(1.5)
    assert watch.last_s == 0.5
    watch.begin(1, 1, 2.0, is_step=True)
    assert watch.last_s == 0.5
    watch.cancel()
    watch.begin(1, 1, 9.0, is_step=True)
    watch.end(9.5)
    assert watch.take() == [(1, 1, 0.5, 1.0)]


def test_process_that_sends_nothing_costs_no_memory():
    """Steps that cannot be compared are forgotten."""
    paces = Paces(2)
    for step in range(5000):
        paces.hear(0, [(step, step, 0.01, 0.02)])
    assert len(paces._pending) == 1024
    assert [times.rank for times in paces.step_times()] == [0]


def test_table_names_the_processes():
    times = [StepTimes(0, 0.01, 0.02, 0.0, 0.0), StepTimes(1, 0.01, 0.02, 0.5, 0.003)]
    _, first, second = table_of(times, {0: "rank 0 (a:1)", 1: "rank 1 (b:1)"}).splitlines()
    assert first == "rank 0 (a:1)       10.0    20.0  never"
    assert second == "rank 1 (b:1)       10.0    20.0  at 50% of the steps, 3.0 ms each"
