"""The watch: what it judges, and what each process is told and ends with. In most tests the time belongs to the test."""

import contextlib
import functools
import json
import os
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import threading

import pytest
from tests.waiting import wait_until

from phalanx._src.cluster.connections.listener import Connection
from phalanx._src.cluster.connections.messages import SignOfLife, encoded
from phalanx._src.cluster.connections.ports import descriptors_at
from phalanx._src.cluster.watch import departure, verdict
from phalanx._src.cluster.watch import watch as watch_module
from phalanx._src.cluster.watch.agreement import CALL, READ
from phalanx._src.cluster.watch.departure import WatchTime
from phalanx._src.cluster.watch.messages import WATCH_MESSAGES, PaceReport, SaveReport
from phalanx._src.cluster.watch.verdict import SIGTERM, Member, judge_presence, judge_progress
from phalanx._src.cluster.watch.watch import Watch
from phalanx._src.launch.plan import free_ports

DEADLINE_S = 120.0
WITHOUT_A_WORD = "exited without an error message (killed or crashed)"


def member(rank, heard_s=100.0, moved_s=0.0, **known):
    """A process that was heard of at second 100, and has not moved since second 0."""
    return Member(f"rank {rank}", heard_s, moved_s, **known)


def at(turn, **known):
    return {"turn": turn, "step": turn, **known}


def inside(turn, **known):
    return at(turn, is_inside=True, **known)


@pytest.mark.parametrize(
    ("second", "said"),
    [
        ({}, None),
        ({"heard_s": 71.0}, None),
        ({"heard_s": 69.0, "step": 4}, "rank 1 has been silent for 30 s, since step 4: the process,"),
        ({"heard_s": 1.0, "has_left": True}, None),
        ({"end": "failed with ValueError: no"}, "rank 1 failed with ValueError: no"),
    ],
)
def test_presence_names_silent_and_failed_members(second, said):
    """Who was not heard of for long, or has failed, is named; who has come to its end may be silent."""
    verdict = judge_presence([member(0), member(1, **second)], 100.0, stall_s=600.0)
    assert (verdict and verdict.text.startswith(said)) if said else verdict is None
    assert verdict is None or verdict.is_loss == ("end" in second)


@pytest.mark.parametrize(
    ("inside_since_s", "stall_s", "signs_until_s", "is_named"),
    [
        (0.0, 60.0, 99.0, True),
        (0.0, 95.0, 99.0, False),
        (50.0, 60.0, 99.0, False),
        (None, 60.0, 99.0, False),
        # It may have been stopped after its last sign.
        (0.0, 60.0, 80.0, False),
    ],
)
def test_presence_of_one_that_only_gives_signs_of_life(inside_since_s, stall_s, signs_until_s, is_named):
    """It may do so for any time, unless others wait longer than processes may make no progress. Its progress is unknown."""
    busy = member(1, heard_s=10.0, step=3)
    busy.hear(SignOfLife(), signs_until_s)
    own = member(0, moved_s=inside_since_s or 0.0, is_inside=inside_since_s is not None, step=4, turn=4)
    verdict = judge_presence([busy], 100.0, stall_s=stall_s, own=own)
    assert bool(verdict) == is_named
    assert judge_progress([own, busy], 100.0, stall_s=stall_s) is None
    if verdict:
        text = "rank 1 is alive, but has reported nothing for 60 s, since step 3, while others wait"
        assert (verdict.text, verdict.still, verdict.is_loss) == (text, ("rank 1",), False)


@pytest.mark.parametrize(("step", "is_inside", "since"), [(21, True, 20), (21, False, 21), (2, True, 4)])
def test_step_of_one_that_is_silent(step, is_inside, since):
    """It has taken part in what this process has finished, whatever it could still tell."""
    own = member(0, step=step, is_inside=is_inside)
    verdict = judge_presence([member(1, heard_s=1.0, step=4)], 100.0, stall_s=600.0, own=own)
    assert f"since step {since}: " in verdict.text


@pytest.mark.parametrize(
    ("known", "said"),
    [
        # Nobody waits, however long it takes: the user reads data, or thinks.
        ([at(5)] * 3, None),
        ([inside(6), at(5, moved_s=95.0), at(5)], None),
        (
            [inside(6, step=4), at(5, step=3), inside(6)],
            "rank 1 is stuck after step 3; rank 0 has been waiting in step 4 for 100 s",
        ),
        ([at(4), at(4), inside(5)], "rank 0, rank 1 are stuck after step 4; rank 2 has been waiting in step 5 for 100"),
        # It dispatches ahead, and so is not inside any more.
        ([at(9), at(5), at(9)], "rank 1 is stuck after step 5; rank 0"),
        ([inside(2)] * 3, "rank 0, rank 1, rank 2 have not finished step 2 for 100 s, although none is missing"),
        (
            [at(2, has_left=True), inside(2), at(2)],
            "rank 1 has not finished step 2 for 100 s, although the others have",
        ),
        (
            [inside(7), at(6, has_left=True, moved_s=96.0), inside(7)],
            "rank 1 finished its program after step 6; rank 0 has been waiting in step 7 for 4 s",
        ),
        ([at(7, has_left=True), at(7, has_left=True), at(7)], None),
        # It is not known what a silent process has done since, so it makes no progress only if it has left.
        ([inside(2), inside(2, heard_s=59.0), inside(2)], None),
        (
            [inside(2), inside(2, heard_s=59.0, has_left=True), inside(2)],
            "rank 0, rank 1, rank 2 have not finished step 2",
        ),
        # The names of a few fit into a message.
        (
            [inside(7), inside(7), *[at(6)] * 4094],
            "rank 2, rank 3, rank 4, rank 5, rank 6, rank 7, rank 8, rank 9 and 4086 more are stuck after step 6;",
        ),
        (
            [inside(7)] * 4096,
            "rank 0, rank 1, rank 2, rank 3, rank 4, rank 5, rank 6, rank 7 and 4088 more have not finished step 7 for 100 s,",
        ),
    ],
    ids=lambda value: f"{value}"[:60],
)
def test_progress_names_who_stands_still(known, said):
    """Who stands still while somebody waits is named, with the step."""
    verdict = judge_progress([member(rank, **each) for rank, each in enumerate(known)], 100.0, stall_s=60.0)
    assert (verdict and verdict.text.startswith(said)) if said else verdict is None
    assert verdict is None or not verdict.is_loss


@pytest.mark.parametrize(
    ("second", "said"),
    [
        (
            at(6, has_left=True),
            "rank 1 finished its program after step 6; rank 0 has been waiting for 100 s in a read of",
        ),
        (at(6), "rank 1 is stuck after step 6; rank 0 has been waiting for 100 s in a read of variable 'v' by"),
    ],
)
def test_read_that_the_others_do_not_make_is_named(second, said):
    """With the call of the chief that all must make, in place of the advice about steps."""
    signature = {READ: ["variable 'v'"], CALL: ["model.save(path) (train.py:7)"]}
    verdict = judge_progress([member(0, **inside(7), signature=signature), member(1, **second)], 100.0, stall_s=60.0)
    assert verdict.text.startswith(said)
    assert verdict.text.endswith("a read of variable 'v' by model.save(path) (train.py:7)")
    assert verdict.hint.startswith("call model.save, get_weights and variable.numpy() on all workers, not on the chief")


def test_one_that_was_told_to_end_is_lost():
    """A process that SIGTERM ended is named as the loss, once the others wait for it; before, nobody is."""
    members = [member(0, **inside(7)), member(1, **at(6, is_told=True))]
    verdict = judge_progress(members, 100.0, stall_s=600.0)
    assert (verdict.text, verdict.is_loss) == (f"rank 1 {SIGTERM} after step 6", True)
    assert judge_progress(members, 0.1, stall_s=600.0) is None


class Local(socket.socket):
    """An end of a pair, which delivers at once, and has no options of TCP."""

    def setsockopt(self, *_):
        pass


def pair():
    return [Local(fileno=end.detach()) for end in socket.socketpair()]


class Ended(BaseException):
    """The end of a process of a group: its exit status."""


class Group:
    """The watches of some processes. They look at their messages, and time passes, when the test says so."""

    def __init__(self, size, stall_s=60.0, outlive=None):
        self.now_s, self.grace_s, self.statuses = 1000.0, {}, {}
        self.at_first_sleep = lambda: None
        lines = [{} for _ in range(size)]
        for rank in range(1, size):
            lines[0][rank], lines[rank][0] = pair()
        addresses = [f"127.0.0.1:{4000 + rank}" for rank in range(size)]
        self.watches = [
            Watch(addresses, rank, ends, stall_s, outlive, time=WatchTime(lambda: self.now_s, self.sleep))
            for rank, ends in enumerate(lines)
        ]
        self.turns = {rank: watch.turns(longest_s=0.0) for rank, watch in enumerate(self.watches)}
        self.look()

    def __getitem__(self, rank):
        return self.watches[rank]

    def look(self, *stopped):
        """All processes but the stopped ones look at what the others have said."""
        for rank in [*self.turns, *self.turns, *self.turns]:
            if rank in self.turns and rank not in stopped:
                began_s = self.now_s
                try:
                    if next(self.turns[rank], "over") == "over":
                        self.end(rank)
                except Ended as e:
                    self.statuses[rank], self.grace_s[rank] = e.args[0], self.now_s - began_s
                    self.end(rank)

    def wait(self, seconds, *stopped):
        for _ in range(round(2 * seconds)):
            self.now_s += 0.5
            self.look(*stopped)

    def sleep(self, seconds):
        self.at_first_sleep()
        self.at_first_sleep = lambda: None
        self.now_s += seconds

    def end(self, rank):
        """A process ends, however: the kernel closes its connections."""
        self.turns.pop(rank).close()
        for line in self.watches[rank]._connections.streams.values():
            line.close()

    def steps(self, *counts, inside=()):
        """Each process takes so many steps, and those `inside` begin one more."""
        for watch, count in zip(self.watches, counts, strict=True):
            for _ in range(count):
                watch.operations.begin(is_step=True)
                watch.operations.end(is_step=True, has_failed=False)
        for rank in inside:
            self.watches[rank].operations.begin(is_step=True)
        self.wait(1)

    def agree(self, programs):
        """Returns what each of these processes is told of its program, which it is about to run."""
        answers, threads = {}, []

        def ask(rank):
            part = READ if programs[rank].startswith("variable") else "argument"
            answers[rank] = f"{self.watches[rank].agree({part: [programs[rank]]})}"

        for rank in programs:
            answered, waits = self.watches[rank]._comparison._is_answered, threading.Event()
            answered.wait = lambda _, own=answered, waits=waits: waits.set() or threading.Event.wait(own, 0.01)
            threads.append(threading.Thread(target=ask, args=(rank,), daemon=True))
            threads[-1].start()
            wait_until(lambda waits=waits, rank=rank: waits.is_set() or rank in answers)
        while not all(
            self.watches[rank]._comparison._is_answered.is_set() or rank in self.statuses for rank in programs
        ):
            self.wait(0.5)
        for thread in threads:
            thread.join(DEADLINE_S)
        return answers


def place(rank):
    return f"rank {rank} (127.0.0.1:400{rank})"


@pytest.fixture
def group(monkeypatch):
    """Makes groups, whose processes end without ending this one, and only note the connections that they hold."""
    groups = []

    def exits(status):
        raise Ended(status)

    def make(*args, **options):
        groups.append(Group(*args, **options))
        return groups[-1]

    monkeypatch.setattr(departure.os, "_exit", exits)
    monkeypatch.setattr(departure.subprocess, "Popen", lambda command, **_: make.held.append(command[-1]))
    make.held = []
    yield make
    for each in groups:
        for rank in list(each.turns):
            each.end(rank)


@pytest.fixture
def said(capfd):
    """A function that returns what was written since: the verdicts, and the one with which each process has ended."""

    def read():
        text = capfd.readouterr().err
        ends = re.findall(r"Phalanx: (.*(?:\nHINT: .*)?)\nThe cluster cannot continue, so rank (\d) exits\.\n", text)
        return re.findall(r"^Phalanx: (.*)$", text, re.M), {int(rank): verdict for verdict, rank in ends}

    return read


def test_all_end_well(group, said):
    """Nobody is ended who has come to the end, one after the other."""
    three, heard = group(3), []
    three.steps(3, 3, 3)
    listen = three[0]._listen
    three[0]._listen = lambda rank, now_s: heard.append(rank) or listen(rank, now_s)
    for rank in (1, 2, 0):
        assert three[0].others_have_left == (rank == 0)
        three[rank].leave()
        three.wait(100)
        three.end(rank)
        heard.clear()
        three.wait(1)
        assert rank == 0 or heard.count(rank) == 1
    assert (three.statuses, said()) == ({}, ([], {}))


@pytest.mark.parametrize("asking", [0, 2])
@pytest.mark.parametrize("of", ["sync_point", "change_point", "stop_point"])
def test_all_act_at_one_point(group, of, asking):
    """A request of any process reaches all, at the same point, while they pass points at different speeds."""
    three = group(3)
    points, acted = [getattr(watch, of) for watch in three.watches], []
    for turn in range(20):
        if turn == 3:
            points[asking].request("why")
        for rank, point in enumerate(points):
            for _ in range(rank + 1):
                if rank not in [r for r, _ in acted] and not point._is_held and point.is_reached():
                    acted.append((rank, point._passed))
        three.look()
    assert [rank for rank, _ in sorted(acted)] == [0, 1, 2]
    assert len({point for _, point in acted}) == 1


@pytest.mark.parametrize("is_before", [True, False])
def test_others_wait_for_the_file_of_the_first_process(group, is_before):
    """Whoever comes first. A file that it has saved alone, under another name or after another step, does not count."""
    two = group(2)
    two.steps(2, 2)
    two[0].pass_save("best.keras")
    save = functools.partial(two[0].pass_save, "last.keras")
    if is_before:
        save()
        two.look()
    else:
        two.at_first_sleep = lambda: (two.wait(30, 1), save(), two.look())
    began_s = two.now_s
    assert two[1].pass_save("last.keras")
    assert two.now_s - began_s == pytest.approx(0 if is_before else 30, abs=0.1)
    assert (two.statuses, two[1].operations.depth, two[1].operations.turn) == ({}, 0, 2)
    two.steps(1, 1)
    two.at_first_sleep = lambda: (two.wait(7), save(), two.look())
    began_s = two.now_s
    assert two[1].pass_save("last.keras")
    assert two.now_s - began_s == pytest.approx(7, abs=0.1)


@pytest.mark.parametrize("how", ["goes on", "waits", "ends", "dies"])
def test_others_wait_no_longer_than_for_the_next_step(group, how):
    """The first process has not saved, or under another name."""
    two = group(2)
    two.steps(2, 2)
    two.at_first_sleep = {
        "goes on": lambda: two.steps(1, 0),
        "waits": lambda: (two[0].operations.begin(is_step=False), two.wait(8)),
        "ends": lambda: (two[0].leave(), two.look()),
        "dies": lambda: (setattr(two, "at_first_sleep", lambda: None), two.end(0), two.look()),
    }[how]
    began_s = two.now_s
    with contextlib.suppress(Ended):
        assert not two[1].pass_save("last.keras")
    assert two.now_s - began_s < 10
    assert two[1].operations.depth == 0


def test_a_save_that_does_not_end_is_named(group, said):
    """After the time that any other collective operation has."""
    two = group(2, stall_s=60.0)
    two.steps(2, 2)
    two.at_first_sleep = lambda: two.wait(90)
    two[1].pass_save("last.keras")
    assert said()[1][1].startswith(f"{place(0)} is stuck after step 2; {place(1)} has been waiting")


def test_held_process_counts_as_waiting(group):
    """So that one that does not answer is named, until it does."""
    two = group(2)
    first, second = two.watches
    first.sync_point.request("why")
    reasons = []
    thread = threading.Thread(target=lambda: reasons.append(first.sync_point.is_reached()))
    thread.start()
    wait_until(lambda: first.operations.depth)
    assert (first.place, first.operations.report().is_inside, first.steps) == (place(0), True, 0)
    two.look()
    thread.join(DEADLINE_S)
    assert (reasons, second.sync_point.is_reached(), first.operations.depth, first.operations.turn) == (
        ["why"],
        "why",
        0,
        0,
    )


@pytest.mark.parametrize("culprit", [0, 2])
@pytest.mark.parametrize("compares", [False, True])
def test_one_stands_still(group, said, culprit, compares):
    """While the others are in a step, or compare a new program. All end, and say which rank it was and after which step."""
    three, others = group(3, stall_s=2.0), [rank for rank in range(3) if rank != culprit]
    three.steps(5, 5, 5, inside=[] if compares else others)
    if compares:
        three.agree(dict.fromkeys(others, "float32[2]"))
    else:
        three.wait(0.5)
        assert three.statuses == {}
    three.wait(2)
    assert three.statuses == {0: 75, 1: 75, 2: 75}
    still = f"{place(culprit)} is stuck after step 5; {place(others[0])} has been waiting in step 6 for "
    hint = "\nHINT: call fit, evaluate, predict, run and reduce on all workers, with as many"
    assert all(text.startswith(still) and hint in text for text in said()[1].values())


@pytest.mark.parametrize("culprit", [0, 1])
def test_one_is_stopped(group, said, culprit):
    """A process that says nothing is named by the others, those of which rank 0 tells."""
    three = group(3, stall_s=600.0)
    three.steps(4, 4, 4, inside=[0, 1, 2])
    three.wait(29, culprit)
    assert three.statuses == {}
    three.wait(3, culprit)
    others = {0, 1, 2} - {culprit}
    assert three.statuses == dict.fromkeys(others, 75)
    silence = f"{place(culprit)} has been silent for 30 s, since step 5: the process, its machine"
    assert all(text.startswith(silence) for text in said()[1].values())


@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize("how", [WITHOUT_A_WORD, "failed with ValueError: no"])
@pytest.mark.parametrize(("state", "grace_s"), [("inside", 5), ("outside", 20), ("left", 0)])
def test_death_of_one_process_ends_the_others(group, said, culprit, how, state, grace_s):
    """The others say it at once: JAX may end them before. They end by it if the main thread does not in its grace."""
    three, at_once = group(3), []
    others = {0, 1, 2} - {culprit}
    three.steps(2, 2, 2, inside=others if state == "inside" else ())
    if state == "left":
        for rank in others:
            three[rank].leave()
    three.at_first_sleep = lambda: at_once.append(said())
    if how != WITHOUT_A_WORD:
        three[culprit].fail(how)
    three.end(culprit)
    three.look()
    assert three.statuses == dict.fromkeys(others, 75)
    text = f"{place(culprit)} {how}"
    assert all(three[rank].loss() == text for rank in others)
    assert all(grace_s <= three.grace_s[rank] <= grace_s + 1 for rank in others)
    assert said()[1] == dict.fromkeys(others, f"{text}.")
    assert at_once == ([] if state == "left" else [([f"{text}."], {})])
    # Rank 0 keeps JAX's connections open for as long, or JAX would end the others.
    assert group.held == ["20.0"] * (culprit == 1 or how != WITHOUT_A_WORD)


@pytest.mark.parametrize("culprit", [0, 1])
def test_one_that_fails_names_nobody(group, said, culprit):
    """That the others end by its failure is no news to it. It has a grace to end by itself."""
    two, before = group(2), []
    two[culprit].fail("failed with ValueError: no")
    two.look(culprit)
    assert two.statuses == {1 - culprit: 75}
    said()
    two.at_first_sleep = lambda: before.append(said())
    two.look()
    assert before == [([], {})]
    own = "its last error is above, and it has not exited since."
    assert (said(), two.statuses[culprit]) == (([own], {culprit: own}), 75)
    assert 20 <= two.grace_s[culprit] <= 21


def test_one_leaves_early(group, said):
    """It is named soon, and does not wait for the others either."""
    three = group(3)
    three.steps(3, 3, 3, inside=[0, 2])
    three[1].leave()
    three.wait(5)
    assert three.statuses == {0: 75, 1: 75, 2: 75}
    for text in said()[1].values():
        assert text.startswith(
            f"{place(1)} finished its program after step 3; {place(0)} has been waiting in step 4 for"
        )
        assert "\nHINT: no sys.exit() on one worker alone; call fit, evaluate, predict, run and reduce on" in text


@pytest.mark.parametrize(
    ("event", "still", "why"),
    [
        ("dies", [], WITHOUT_A_WORD),
        ("stands still", [2], "is stuck after step 2; rank 0 (127.0.0.1:4000) has been waiting in step 3 for 62 s"),
        ("leaves", [2], "finished its program after step 2, while the others continue"),
    ],
)
def test_group_that_may_lose_processes(group, said, event, still, why):
    """The others hear who is lost and leave the group. One whose main thread does not get out of its step ends."""
    lost = []
    three = group(3, outlive=lambda ranks, why: lost.append((ranks, why)))
    three.steps(2, 2, 2, inside=[0, 1])
    three.at_first_sleep = lambda: [three[rank].close() for rank in (0, 2)]
    if event == "dies":
        three.end(2)
    if event == "leaves":
        three[2].leave()
        assert three[1].loss(0.001) is None
    three.wait(0.5 if event != "stands still" else 62, *[2] * (event != "stands still"))
    text = f"{place(2)} {why}"
    # Of a process of which nobody hears again, rank 0 tells the others as of one that has died.
    assert lost == [(still, text), ([], text)] if event != "stands still" else lost[:2] == [(still, text), ([], text)]
    assert three.statuses[1] == 75
    assert 2 <= three.grace_s[1] <= 3
    assert 0 not in three.statuses


def test_time_to_leave_a_long_step(group):
    """A process whose steps take 2 s gets four of them to leave the group, and no more than that time."""
    two = group(2, outlive=lambda ranks, why: None)
    two[0].operations.begin(is_step=True)
    two.wait(2)
    two[0].operations.end(is_step=True, has_failed=False)
    two.steps(0, 1, inside=[0])
    two.end(1)
    two.wait(0.5)
    assert two.statuses == {0: 75}
    assert 8 <= two.grace_s[0] <= 9


@pytest.mark.parametrize("has_failed", [False, True])
def test_rank_0_leaves_the_others(group, has_failed):
    """They judge for themselves then, whether a step fails in them or never ends, and go on without it."""
    lost = []
    three = group(3, outlive=lambda ranks, why: lost.append(why))
    three.steps(2, 2, 2, inside=[1, 2])
    three[0].leave()
    three.end(0)
    for rank, other in ((1, 2), (2, 1)):
        if has_failed:
            three[rank].operations.end(is_step=True, has_failed=True)
            assert three[rank].loss(0.001) is None
        three.at_first_sleep = three[rank].close
        three.wait(1.5 if has_failed else 5, other)
    assert len(lost) == 2
    assert all(why.startswith(f"{place(0)} finished its program after step 2") for why in lost)
    assert not any(watch.has_told_loss for watch in three.watches)
    assert all(watch.loss() for watch in three.watches[1:])
    assert [watch.has_told_loss for watch in three.watches] == [False, True, True]


def test_report_of_step_times(group, capfd, monkeypatch):
    """Rank 0 waits a little for the others, and shows the times of all if there are some. Only rank 0 has them."""
    monkeypatch.setenv("PHALANX_REPORT", "1")
    group(2)[0].leave()
    assert not capfd.readouterr().err
    two = group(2)
    two[0]._connections.streams[1].say(PaceReport([]))
    for _ in range(3):
        two.steps(1, 1)
    two[1].leave()
    two.at_first_sleep = two.look
    two[0].leave()
    assert [times.rank for times in two[0].step_times] == [0, 1]
    assert two[1].step_times == []
    shown = capfd.readouterr().err
    assert re.search(r"Phalanx: 3 steps\.\nprocess .*\nrank 0 \(127.0.0.1:4000\) .*\nrank 1 \(127.0.0.1:4001\)", shown)


def test_one_that_was_stopped_accuses_nobody(group):
    """Awake again, it hears what was said meanwhile before it judges. If nothing was, it has just begun to listen."""
    two = group(2, stall_s=3.0)
    two[1].leave()
    two.wait(100, 0, 1)
    two.look(1)
    two.end(1)
    two.wait(3)
    assert two.statuses == {}
    both, times = group(2, stall_s=3.0), iter([1000.0, 1100.0])
    both[0]._time = WatchTime(lambda: next(times, 1100.0))
    next(both.turns[0])
    assert both[0]._departure.verdict is None


def test_programs_are_compared(group):
    """All wait until the last one is about to run its program too, and go on at once then, or learn which ranks differ."""
    three = group(3)
    assert three.agree(dict.fromkeys(range(3), "float32[2]")) == {0: "None", 1: "None", 2: "None"}
    difference = "argument 0 is float32[2] on ranks 0, 2 and float32[3] on rank 1"
    programs = {0: "float32[2]", 1: "float32[3]", 2: "float32[2]"}
    assert three.agree(programs) == dict.fromkeys(range(3), difference)
    assert [watch.steps for watch in three.watches] == [0, 0, 0]


def test_interrupted_comparison_is_taken_back(group, monkeypatch):
    """A process that stops waiting for the others does not keep them from comparing later."""
    three = group(3)
    for rank in (0, 2):
        with monkeypatch.context() as patch:
            patch.setattr(three[rank]._comparison._is_answered, "wait", lambda _: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                three[rank].agree({"argument": ["int32[2]"]})
    assert three.agree(dict.fromkeys(range(3), "float32[2]")) == {0: "None", 1: "None", 2: "None"}


@pytest.mark.parametrize("asks", [0, 1])
def test_known_program_against_a_new_one(group, asks):
    """One that waits in a step of a program that it knows is not waited for; a program that all know may go on."""
    two = group(2)
    two.agree({0: "float32[2]", 1: "float32[2]"})
    two.steps(2, 2, inside=[1 - asks])
    assert two.agree({asks: "float32[2]"}) == {asks: "None"}
    new = f"the program is a new one on rank {asks} and one that it has run before on rank {1 - asks}"
    assert two.agree({asks: "int32[2]"}) == {asks: new}


@pytest.mark.parametrize("asks", [0, 1])
def test_read_against_a_known_program(group, asks):
    """The one that reads is told what the other one does, each time."""
    two = group(2)
    two.steps(2, 2, inside=[1 - asks])
    said = {asks: f"a read of variable 'v' on rank {asks}", 1 - asks: f"a step of fit or run on rank {1 - asks}"}
    for _ in range(2):
        (answer,) = two.agree({asks: "variable 'v'"}).values()
        assert answer == f"the program is {said[0]} and {said[1]}"


def test_comparison_inside_of_an_operation_is_skipped(group):
    """A program that runs within another one was compared with it."""
    (first, _) = group(2).watches
    first.operations.begin(is_step=True)
    first.operations.begin(is_step=False)
    assert first.agree({"argument": ["0"]}) is None
    first.operations.end(is_step=False, has_failed=False)
    first.operations.end(is_step=True, has_failed=False)
    assert (first.steps, first.operations.depth, first._comparison.signature) == (1, 0, None)


def test_watch_uses_little_processor_time(group, monkeypatch):
    """It reports and wakes once per tick, whatever the others say, and rank 0 does not judge each of their reports."""
    two, judged, waits = group(2), [], []
    first, second = two.watches
    monkeypatch.setattr(verdict, "judge_progress", lambda *_: judged.append(0))
    reports = []
    monkeypatch.setattr(first._reporter, "report", lambda *_: reports.append(0))
    real = watch_module.selectors.DefaultSelector
    for _ in range(320):
        two.now_s += 1 / 64
        second._reporter.report()
        next(two.turns[0])
    assert len(reports) == 5
    assert 45 <= len(judged) <= 50

    class Selector(real):
        def select(self, timeout):
            waits.append(timeout)
            two.now_s += timeout
            return []

    monkeypatch.setattr(watch_module.selectors, "DefaultSelector", Selector)
    turns = first.turns()
    for _ in range(4):
        next(turns)
    turns.close()
    assert waits == [0.0, 1.0, 1.0, 1.0]


MEMBER = """
import json, os, signal, sys
from phalanx._src.cluster.watch import watch
from phalanx._src.cluster.connections.rollcall import call_roll
from phalanx._src.cluster.connections.secret import Secret
addresses, rank = json.loads(sys.argv[1]), int(sys.argv[2])
own = watch.start(addresses, rank, call_roll(addresses, rank, about="us", secret=Secret("a secret of the cluster"), timeout_s=120).lines, float(sys.argv[3]))
for _ in range(2):
    own.operations.begin(is_step=True)
    own.operations.end(is_step=True, has_failed=False)
def waits():
    own.operations.begin(is_step=True)
    print("inside", flush=True)
    signal.pause()
"""


@pytest.fixture
def processes():
    """Starts real processes, each of which runs some lines after two steps."""
    running = []

    def start(*codes, stall_s=8.0):
        addresses, pipe = json.dumps([f"127.0.0.1:{port}" for port in free_ports(len(codes))]), subprocess.PIPE
        for rank, code in enumerate(codes):
            command = [sys.executable, "-c", MEMBER + code, addresses, str(rank), str(stall_s)]
            running.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True))
        return running

    yield start
    for process in running:
        process.kill()
        process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("culprit", "code", "how"),
    [
        (1, "os._exit(3)", WITHOUT_A_WORD),
        (0, "own.fail('failed with KeyError'); os._exit(1)", "failed with KeyError"),
    ],
)
def test_death_of_a_real_process(processes, culprit, code, how):
    """The kernel closes its connections, and the others learn it at once."""
    codes = ["print(own.loss(120), file=sys.stderr)"] * 3
    codes[culprit] = code
    running = processes(*codes)
    for rank in {0, 1, 2} - {culprit}:
        _, text = running[rank].communicate(timeout=DEADLINE_S)
        assert running[rank].returncode == 0
        assert re.fullmatch(rf"\nPhalanx: (rank {culprit} \(127.0.0.1:\d+\) {re.escape(how)})\.\n\1\n", text)


@pytest.mark.slow
def test_real_process_that_sigstop_holds(processes):
    """The others end, and say where each of their threads is. A main thread whose step has failed does not say it first."""
    # Python 3.13 shows this source in the stack that the watch prints, so the word is put together.
    asks = "print(own.loss(120), '-'.join(['too', 'early']), flush=True)"
    running = processes(
        "waits()", f"own.operations.begin(is_step=True); print('inside', flush=True); {asks}", "waits()"
    )
    # All must be inside the step.
    assert [process.stdout.readline() for process in running] == ["inside\n"] * 3
    running[2].send_signal(signal.SIGSTOP)
    for rank, place in ((0, "in waits"), (1, "in loss")):
        output, text = running[rank].communicate(timeout=DEADLINE_S)
        assert (running[rank].returncode, output) == (75, "")
        assert re.search(r"Phalanx: rank 2 \(127.0.0.1:\d+\) has been silent for 8 s", text)
        assert f"rank {rank} exits.\nThread MainThread (most recent call last):\n" in text
        assert place in text


@pytest.mark.slow
def test_process_that_leaves_its_group_ends_its_watch(connected):
    """And what gives signs of life for it. A process alone has nothing to give them to."""
    for lines in ({}, {1: connected[0]}):
        own = watch_module.start(["127.0.0.1:1", "127.0.0.1:2"][: 1 + len(lines)], 0, lines, 60.0)
        assert (own.pulse is None) == (not lines)
        watch_module.end()
        own.join(DEADLINE_S)
        assert not own.is_alive()
    assert own.pulse._process._process.returncode == -signal.SIGKILL


@pytest.fixture
def connected():
    """The two ends of a real connection, of which the first has connected to the port of the second."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as client,
        server.accept()[0] as accepted,
    ):
        yield client, accepted


def heard_from(line):
    select.select([line], [], [], DEADLINE_S)
    return line.hear(WATCH_MESSAGES)


def heard_to_the_end(line):
    heard, is_open = [], True
    while is_open:
        messages, is_open = heard_from(line)
        heard += messages
    return heard


def test_connections_at_a_port_are_found(connected):
    """Those that others have opened to it, but neither the listener nor their own ends. No descriptor is left open."""
    client, accepted = connected
    before = set(os.listdir("/proc/self/fd"))
    port = accepted.getsockname()[1]
    assert descriptors_at(port, but=set()) == [accepted.fileno()]
    assert descriptors_at(port, but={accepted.fileno()}) == []
    assert client.fileno() not in descriptors_at(port, but=set())
    assert set(os.listdir("/proc/self/fd")) <= before


def test_reset_connection_is_heard_as_closed(connected):
    """A process that dies with unread data resets its connections; what it had said is lost with it."""
    other, line = connected[0], Connection(connected[1])
    other.sendall(encoded(SaveReport(1, "")) + b'{"st')
    assert heard_from(line) == ([SaveReport(1, "")], True)
    other.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    other.close()
    assert heard_from(line) == ([], False)
    line.hang_up()


@pytest.mark.parametrize(
    "said", [b"GET / HTTP/1.1\n", b"[]\n", b"[" * 60_000 + b"\n", b'{"turn": ' + b"9" * 5000 + b"}\n"]
)
def test_connection_that_carries_something_else_is_over(connected, said):
    """The messages that arrived before do not count either, because the sender is unknown."""
    other, line = connected[0], Connection(connected[1])
    other.sendall(encoded(SaveReport(1, "")) + said)
    assert heard_to_the_end(line) == []


def test_last_word_arrives(connected):
    """The last messages of a process arrive, even if it closes the connection with unread messages."""
    leaving, staying = map(Connection, connected)
    for _ in range(20):
        for sender, reader in ((leaving, staying), (staying, leaving)):
            sender.say(SaveReport(1, ""))
            heard_from(reader)
    staying.say(SaveReport(2, ""))
    select.select([leaving], [], [], DEADLINE_S)
    for step in (3, 4, 5):
        leaving.say(SaveReport(step, ""))
    leaving.close()
    assert heard_to_the_end(staying) == [SaveReport(3, ""), SaveReport(4, ""), SaveReport(5, "")]


def test_an_older_report_does_not_undo_that_a_process_has_left():
    """The thread that reports each tick says nothing older than what `leave` has said, however late it comes to run."""
    own, others = pair()
    watch, heard = Watch(["127.0.0.1:1", "127.0.0.1:2"], 1, {0: own}, 60.0), Connection(others)
    is_between, may_go_on = threading.Event(), threading.Event()
    say = watch._connections.say

    def late(message):
        is_between.set()
        may_go_on.wait(DEADLINE_S)
        say(message)

    watch._connections.say = late
    reporting, leaving = threading.Thread(target=watch._reporter.report), threading.Thread(target=watch.leave)
    reporting.start()
    is_between.wait(DEADLINE_S)
    watch._connections.say = say
    leaving.start()
    leaving.join(0.2)
    may_go_on.set()
    for thread in (reporting, leaving):
        thread.join(DEADLINE_S)
    own.close()
    assert [message.has_left for message in heard_to_the_end(heard)] == [False, True]
    others.close()
