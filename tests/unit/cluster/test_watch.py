"""The watch: what it judges, and with real processes, without JAX, what each of them is told and ends with."""

import json
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from contextlib import suppress

import pytest

from phalanx.cluster.door import Line, encoded
from phalanx.cluster.verdict import SIGTERM, Member, judge_presence, judge_progress
from phalanx.cluster.watch import Watch, _connections_at
from phalanx.launch.plan import free_ports

pytestmark = pytest.mark.slow

DEADLINE_S = 120.0
STALL_S = 3.0
MEMBER = """
import json, os, signal, sys, time
from phalanx.cluster import watch
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
from phalanx.cluster.rollcall import call_roll
from phalanx.cluster.secret import Secret
addresses, rank = json.loads(sys.argv[1]), int(sys.argv[2])
own = watch.start(addresses, rank, call_roll(addresses, rank, about="us", secret=Secret("a secret of the cluster"), timeout_s=20), float(sys.argv[3]))
def steps(count):
    for _ in range(count):
        own.begin(is_step=True)
        own.end(is_step=True, has_failed=False)
def waits(forever=600):
    own.begin(is_step=True)
    time.sleep(forever)
def leave():
    own.leave()
    time.sleep(600)
print("here", flush=True)
"""


def member(rank, **known):
    """A process that was heard of at second 100, and has not moved since second 0."""
    return Member(f"rank {rank}", heard_s=known.pop("heard_s", 100.0), moved_s=known.pop("moved_s", 0.0), **known)


@pytest.mark.parametrize(
    ("second", "said"),
    [
        ({}, None),
        ({"heard_s": 71.0}, None),
        ({"heard_s": 69.0, "step": 4}, "rank 1 has said nothing for 30 s, since step 4: the process,"),
        ({"heard_s": 1.0, "has_left": True}, None),
        ({"end": "has ended by ValueError: no"}, "rank 1 has ended by ValueError: no"),
    ],
)
def test_presence_names_silent_and_failed_members(second, said):
    """Who was not heard of for long, or has failed, is named; who has come to its end may be silent."""
    verdict = judge_presence([member(0), member(1, **second)], 100.0, stall_s=600.0)
    assert (verdict and verdict.text.startswith(said)) if said else verdict is None
    assert verdict is None or verdict.is_loss == ("end" in second)


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
        ([{"turn": 5}, {"turn": 5}, {"turn": 5}], None),
        ([{"turn": 6, "step": 6, "is_inside": True}, {"turn": 5, "moved_s": 95.0}, {"turn": 5}], None),
        (
            [{"turn": 6, "step": 4, "is_inside": True}, {"turn": 5, "step": 3}, {"turn": 6, "is_inside": True}],
            "rank 1 stands still after step 3, and rank 0 has waited in step 4 for 100 s",
        ),
        (
            [{"turn": 4, "step": 4}, {"turn": 4, "step": 4}, {"turn": 5, "step": 5, "is_inside": True}],
            "rank 0, rank 1 stand still after step 4, and rank 2 has waited in step 5 for 100 s",
        ),
        # It dispatches ahead, and so is not inside any more.
        ([{"turn": 9, "step": 9}, {"turn": 5, "step": 5}, {"turn": 9}], "rank 1 stands still after step 5, and rank 0"),
        (
            [{"turn": 2, "step": 2, "is_inside": True}] * 3,
            "rank 0, rank 1, rank 2 cannot end step 2 for 100 s, while all of them are there",
        ),
        (
            [{"turn": 2, "step": 2, "has_left": True}, {"turn": 2, "step": 2, "is_inside": True}, {"turn": 2}],
            "rank 1 cannot end step 2 for 100 s, while the others have ended theirs",
        ),
        (
            [
                {"turn": 7, "step": 7, "is_inside": True},
                {"turn": 6, "step": 6, "has_left": True, "moved_s": 96.0},
                {"turn": 7, "step": 7, "is_inside": True},
            ],
            "rank 1 has ended its program after step 6, and rank 0 has waited in step 7 for 4 s",
        ),
        ([{"turn": 7, "has_left": True}, {"turn": 7, "has_left": True}, {"turn": 7}], None),
    ],
)
def test_progress_names_who_stands_still(known, said):
    """Who stands still while somebody waits is named, with the step."""
    verdict = judge_progress([member(rank, **each) for rank, each in enumerate(known)], 100.0, stall_s=60.0)
    assert (verdict and verdict.text.startswith(said)) if said else verdict is None
    assert verdict is None or not verdict.is_loss


def test_a_silent_process_does_not_stand_still():
    """Nobody knows what it has done since its last message, so it is not said to make no progress."""
    members = [member(rank, turn=2, step=2, is_inside=True) for rank in range(3)]
    members[1].heard_s = 59.0
    assert judge_progress(members, 100.0, stall_s=60.0) is None
    members[1].has_left = True
    assert judge_progress(members, 100.0, stall_s=60.0).text.startswith("rank 0, rank 1, rank 2 cannot end step 2")


def test_one_that_was_told_to_end_is_lost():
    """A process that SIGTERM ended is named as the loss, once the others wait for it; before, nobody is."""
    waiting, told = {"turn": 7, "step": 7, "is_inside": True}, {"turn": 6, "step": 6, "is_told": True}
    members = [member(0, **waiting), member(1, **told)]
    verdict = judge_progress(members, 100.0, stall_s=600.0)
    assert (verdict.text, verdict.is_loss) == (f"rank 1 {SIGTERM} after step 6", True)
    assert judge_progress(members, 0.1, stall_s=600.0) is None


@pytest.mark.parametrize(
    ("late", "said"),
    [
        (
            True,
            "rank 2, rank 3, rank 4, rank 5, rank 6, rank 7, rank 8, rank 9 and 4086 more stand still after step 6,",
        ),
        (
            False,
            "rank 0, rank 1, rank 2, rank 3, rank 4, rank 5, rank 6, rank 7 and 4088 more cannot end step 7 for 100 s,",
        ),
    ],
)
def test_thousands_that_stand_still_are_counted(late, said):
    """A verdict names a few processes, so that it fits into the messages of the watch."""
    waiting, behind = {"turn": 7, "step": 7, "is_inside": True}, {"turn": 6, "step": 6}
    members = [member(rank, **(behind if late and rank > 1 else waiting)) for rank in range(4096)]
    assert judge_progress(members, 100.0, stall_s=60.0).text.startswith(said)


class Processes:
    """Some ranks; each runs some lines once all are there."""

    def __init__(self, *codes, member=MEMBER, stall_s=STALL_S):
        addresses = json.dumps([f"127.0.0.1:{port}" for port in free_ports(len(codes))])
        pipe = subprocess.PIPE
        self.running = [
            subprocess.Popen(
                [sys.executable, "-c", member + code, addresses, str(rank), str(stall_s)],
                stdout=pipe,
                stderr=pipe,
                text=True,
            )
            for rank, code in enumerate(codes)
        ]

    def __enter__(self):
        for process in self.running:
            assert process.stdout.readline() == "here\n"
        return self

    def __exit__(self, *_):
        for process in self.running:
            # SIGTERM lets it write down what it has run, if this is being measured; one that was stopped is woken.
            process.terminate()
            process.send_signal(signal.SIGCONT)
        for process in self.running:
            with suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=DEADLINE_S)
            process.kill()
            process.communicate()

    def ends(self, *ranks):
        """Waits until these have ended; returns exit statuses and what each has printed last."""
        deadline = time.monotonic() + DEADLINE_S
        found = []
        for rank in ranks:
            _, text = self.running[rank].communicate(timeout=max(0.1, deadline - time.monotonic()))
            found.append((self.running[rank].returncode, text))
        return found


def test_all_end_well():
    """Nobody is ended who has come to the end, one after the other."""
    with Processes("steps(3); own.leave(); time.sleep(0.5)", "steps(3); own.leave()", "steps(3); own.leave()") as three:
        assert three.ends(0, 1, 2) == [(0, "")] * 3


@pytest.mark.parametrize("asking", [0, 2])
def test_all_act_at_one_point(asking):
    """A request of any process reaches all, at the same point, while they pass points at different speeds."""
    code = """
point = 0
while True:
    point += 1
    if point == 3 and {asks}:
        own.sync_point.request(f"{{own.place.partition(' (')[0]}} must end")
    if reason := own.sync_point.is_reached():
        break
    time.sleep({pause})
print(point, reason, flush=True)
own.leave()
while rank == 0 and not own.others_have_left:
    time.sleep(0.01)
print("left", flush=True)
"""
    codes = [code.format(asks=rank == asking, pause=0.01 * (rank + 1)) for rank in range(3)]
    with Processes(*codes) as three:
        said = [process.stdout.readline() for process in three.running]
        assert len(set(said)) == 1
        assert said[0].endswith(f" rank {asking} must end\n")
        assert [process.stdout.readline() for process in three.running] == ["left\n"] * 3
        assert three.ends(0, 1, 2) == [(0, "")] * 3


@pytest.mark.parametrize("culprit", [0, 2])
def test_one_stands_still(culprit):
    """All end; all say which rank it was and after which step, and where each of their threads is."""
    codes = ["steps(5); waits()"] * 3
    codes[culprit] = "steps(5); time.sleep(600)"
    with Processes(*codes) as three:
        for rank, (status, text) in enumerate(three.ends(0, 1, 2)):
            assert status == 75
            assert f"Phalanx: rank {culprit} (127.0.0.1:" in text
            assert ") stands still after step 5, and rank " in text
            assert f"rank {rank} ends here.\nThread MainThread (most recent call last):\n" in text
            assert ("in waits" in text) == (rank != culprit)


@pytest.mark.parametrize("culprit", [0, 1])
def test_one_is_stopped(culprit):
    """A process that SIGSTOP holds says nothing, and is named by the others."""
    inside = "own.begin(is_step=True); print('inside', flush=True); time.sleep(600)"
    with Processes(inside, inside, inside) as three:
        # All must be inside the step, and know it of each other, or the stopped one is one that stands still before it.
        assert [process.stdout.readline() for process in three.running] == ["inside\n"] * 3
        time.sleep(STALL_S / 3)
        three.running[culprit].send_signal(signal.SIGSTOP)
        others = [rank for rank in range(3) if rank != culprit]
        for status, text in three.ends(*others):
            assert status == 75
            assert f"Phalanx: rank {culprit} (127.0.0.1:" in text
            assert f"has said nothing for {STALL_S:g} s" in text


@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize(
    ("code", "how"),
    [
        ("os._exit(3)", "has ended without a word: it was killed, or has crashed"),
        ("own.fail('has ended by ValueError: no'); os._exit(1)", "has ended by ValueError: no"),
    ],
)
def test_death_of_one_process_ends_the_others(culprit, code, how):
    """The others learn it at once, and end by it where their main thread does not."""
    codes = ["steps(2); waits()"] * 3
    codes[culprit] = f"steps(2); {code}"
    learn = "steps(2)\nprint(own.loss(20), file=sys.stderr)"
    codes[2] = learn
    with Processes(*codes) as three:
        ((status, text),) = three.ends(2)
        assert status == 0
        assert text.startswith(f"\nPhalanx: rank {culprit} (127.0.0.1:")
        assert text.endswith(f") {how}\n")
        ((status, text),) = three.ends(1 - culprit)
        assert status == 75
        assert how in text


@pytest.mark.parametrize("culprit", [0, 1])
def test_one_that_fails_names_nobody(culprit):
    """That the others end by its failure is no news to it."""
    codes = ["own.loss(20); own.fail('has ended by PeerLostError: it'); os._exit(1)"] * 2
    codes[culprit] = "own.fail('has ended by ValueError: no'); time.sleep(3); os._exit(1)"
    with Processes(*codes) as two:
        assert two.ends(culprit) == [(1, "")]


def test_one_leaves_early():
    """It is named soon, and does not wait for the others either."""
    with Processes("steps(4); waits()", "steps(3); leave()", "steps(4); waits()") as three:
        for status, text in three.ends(0, 1, 2):
            assert status == 75
            assert "has ended its program after step 3, and rank 0 (127.0.0.1:" in text
            assert "\nHINT: call fit, evaluate, predict, run and reduce on all workers, with as many" in text


AGREE = "print(own.agree({'argument': [%s]}), flush=True); own.leave(); time.sleep(1)"


def test_equal_programs_go_on():
    """All wait until the last one is about to run its program too, and go on at once then."""
    codes = [AGREE % "'float32[2]'", "time.sleep(0.7); " + AGREE % "'float32[2]'", AGREE % "'float32[2]'"]
    with Processes(*codes, stall_s=20) as three:
        assert [process.stdout.readline() for process in three.running] == ["None\n"] * 3
        assert three.ends(0, 1, 2) == [(0, "")] * 3


def test_different_programs_are_named():
    """All are told which ranks differ."""
    with Processes(AGREE % "'float32[2]'", AGREE % "'float32[3]'", AGREE % "'float32[2]'", stall_s=20) as three:
        said = "argument 0 is float32[2] on ranks 0, 2 and float32[3] on rank 1\n"
        assert [process.stdout.readline() for process in three.running] == [said] * 3


@pytest.mark.parametrize("culprit", [0, 2])
def test_one_never_compiles(culprit):
    """Who does not come to the comparison is named as in a step."""
    codes = ["steps(5); " + AGREE % "'float32[2]'"] * 3
    codes[culprit] = "steps(5); time.sleep(600)"
    with Processes(*codes) as three:
        for status, text in three.ends(0, 1, 2):
            assert status == 75
            assert re.search(
                rf"rank {culprit} \(\S+\) stands still after step 5, and rank \d \(\S+\) has waited in step 6", text
            )


@pytest.mark.parametrize("asks", [0, 1])
def test_known_program_against_a_new_one(asks):
    """One that waits in a step of a program that it knows is not waited for; a program that all know may go on."""
    first = "own.agree({'argument': ['float32[2]']}); "
    codes = [first + "steps(2); waits(20)"] * 2
    codes[asks] = first + "steps(2); " + AGREE % "'float32[2]'" + "; " + AGREE % "'int32[2]'"
    with Processes(*codes, stall_s=60) as two:
        said = [two.running[asks].stdout.readline() for _ in range(2)]
        assert said == [
            "None\n",
            f"the program is a new one on rank {asks} and one that it has run before on rank {1 - asks}\n",
        ]


def test_interrupted_comparison_is_taken_back():
    """A process that stops waiting for the others does not keep them from comparing later."""
    interrupted = (
        "import signal\nsignal.signal(signal.SIGALRM, lambda *_: 1 / 0)\nsignal.setitimer(signal.ITIMER_REAL, 0.3)\n"
        "try:\n    own.agree({'argument': ['int32[2]']})\nexcept ZeroDivisionError:\n    " + AGREE % "'float32[2]'"
    )
    with Processes(interrupted, "time.sleep(1); " + AGREE % "'float32[2]'", interrupted, stall_s=20) as three:
        assert [process.stdout.readline() for process in three.running] == ["None\n"] * 3


def test_watch_uses_little_processor_time():
    """A watch wakes once a tick, whatever the others say: the rest of the time is the program's."""
    busy = (
        "start = time.process_time(); time.sleep(2); print(time.process_time() - start, file=sys.stderr)\nown.leave()"
    )
    with Processes(busy, busy, busy) as three:
        for status, text in three.ends(0, 1, 2):
            assert status == 0
            assert float(text) < 0.1


def test_reports_are_judged_together():
    """Judging takes time for each process, so rank 0 does not do it for each of the reports that arrive one by one."""
    counts = (
        "judged, judge = [], watch.judge_progress\n"
        "watch.judge_progress = lambda *args, **kwargs: judged.append(0) or judge(*args, **kwargs)\n"
        "time.sleep(2.5); print(len(judged), file=sys.stderr); own.leave()"
    )
    reports = "time.sleep(0.5)\nfor _ in range(200):\n    own._report(); time.sleep(0.005)\nown.leave()"
    with Processes(counts, reports, stall_s=60) as two:
        ((status, text),) = two.ends(0)
        assert status == 0
        assert int(text) < 60


def test_one_that_was_stopped_accuses_nobody():
    """Awake again, it hears what was said meanwhile before it judges."""
    ours, theirs = f"time.sleep({3 * STALL_S}); own.leave()", "own.leave(); print('left', flush=True); time.sleep(600)"
    with Processes(ours, theirs, member=MEMBER.replace("float(sys.argv[3])", f"600.0 if rank else {STALL_S}")) as two:
        two.running[0].send_signal(signal.SIGSTOP)
        # Nothing that the other one says from here on depends on the load of the machine: it has left.
        assert two.running[1].stdout.readline() == "left\n"
        time.sleep(1.5 * STALL_S)
        two.running[0].send_signal(signal.SIGCONT)
        assert two.ends(0) == [(0, "")]


def test_a_death_is_told_at_once():
    """Also while the main thread is elsewhere: JAX may end this process before the grace is over."""
    with Processes("os._exit(0)", "time.sleep(2); os._exit(7)") as two:
        ((status, text),) = two.ends(1)
        assert status == 7
        assert text.endswith(") has ended without a word: it was killed, or has crashed.\n")


def test_comparison_inside_of_an_operation_is_skipped():
    """A program that runs within another one was compared with it."""
    nested = (
        "own.begin(is_step=True); own.begin(is_step=False); print(own.agree({'argument': [str(rank)]}), flush=True)\n"
        "own.end(is_step=False, has_failed=False); own.end(is_step=True, has_failed=False); own.leave(); time.sleep(1)"
    )
    with Processes(nested, nested, stall_s=20) as two:
        assert [process.stdout.readline() for process in two.running] == ["None\n"] * 2


def test_stall_is_told_by_the_watch_alone():
    """The main thread, whose step has failed by then, waits until the watch has ended the process."""
    # Python 3.13 shows this source in the stack that the watch prints, so the word is put together.
    asks = "steps(5); own.begin(is_step=True); print(own.loss(60), '-'.join(['too', 'early']), flush=True)"
    with Processes(asks, "steps(5); time.sleep(600)") as two:
        ((status, text),) = two.ends(0)
        assert status == 75
        assert "rank 1 (127.0.0.1:" in text
        assert "too-early" not in text


def test_one_that_has_left_ends_without_grace():
    """Its main thread has nothing more to say about the death of another one."""
    with Processes("steps(1); leave()", "steps(1); time.sleep(1); os._exit(3)") as two:
        ((status, text),) = two.ends(0)
        assert status == 75
        assert "has ended without a word: it was killed, or has crashed" in text


def test_connections_at_a_port_are_found():
    """Those that others have opened to it, but neither the listener nor their own ends."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client, server.accept()[0] as accepted:
            assert _connections_at(port, but=set()) == [accepted.fileno()]
            assert _connections_at(port, but={accepted.fileno()}) == []
            assert client.fileno() not in _connections_at(port, but=set())


def test_reset_connection_is_heard_as_closed():
    """A process that dies with unread data resets its connections; what it had said is lost with it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        other = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
        line = Line(accepted)
        other.sendall(b'{"step": 1}\n{"st')
        select.select([accepted], [], [], DEADLINE_S)
        assert line.hear() == ([{"step": 1}], True)
        other.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        other.close()
        select.select([accepted], [], [], DEADLINE_S)
        assert line.hear() == ([], False)
        line.hang_up()
        accepted.close()


def heard_to_the_end(line):
    """All messages of a connection, up to its end."""
    heard, is_open = [], True
    while is_open:
        select.select([line.connection], [], [], DEADLINE_S)
        messages, is_open = line.hear()
        heard += messages
    return heard


def test_last_word_arrives():
    """The last messages of a process arrive, even if it closes the connection with unread messages."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        own, (others, _) = socket.create_connection(server.getsockname()), server.accept()
        leaving, staying = Line(own), Line(others)
        for _ in range(20):
            for sender, reader in ((leaving, staying), (staying, leaving)):
                sender.send(encoded({"step": 1}))
                select.select([reader.connection], [], [], DEADLINE_S)
                reader.hear()
        staying.send(encoded({"step": 2}))
        select.select([own], [], [], DEADLINE_S)
        for step in (3, 4, 5):
            leaving.send(encoded({"step": step}))
        own.close()
        assert heard_to_the_end(staying) == [{"step": 3}, {"step": 4}, {"step": 5}]
        others.close()


def test_an_older_report_does_not_undo_that_a_process_has_left():
    """The thread that reports each tick says nothing older than what `leave` has said, however late it comes to run."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        own, (others, _) = socket.create_connection(server.getsockname()), server.accept()
        watch, heard = Watch(["127.0.0.1:1", "127.0.0.1:2"], 1, {0: own}, STALL_S), Line(others)
        is_between, may_go_on = threading.Event(), threading.Event()
        say = watch._say

        def late(message):
            is_between.set()
            may_go_on.wait(DEADLINE_S)
            say(message)

        watch._say = late
        reporting = threading.Thread(target=watch._report)
        reporting.start()
        is_between.wait(DEADLINE_S)
        watch._say = say
        leaving = threading.Thread(target=watch.leave)
        leaving.start()
        leaving.join(0.2)
        may_go_on.set()
        for thread in (reporting, leaving):
            thread.join(DEADLINE_S)
        own.close()
        assert [message["has_left"] for message in heard_to_the_end(heard)] == [False, True]
        others.close()
