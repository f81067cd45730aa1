"""The rendezvous with real members in threads of this process: who is in which generation, and who is told what."""

import os
import queue
import signal
import socket
import threading
from pathlib import Path

import pytest
from tests.waiting import wait_until

from phalanx._src.cluster.connections.listener import Connection, visit
from phalanx._src.cluster.connections.messages import SignOfLife
from phalanx._src.cluster.connections.secret import TOKEN, new_token, secret_of
from phalanx._src.cluster.watch.meeting import Accusation
from phalanx._src.cluster.watch.membership import LEAST, MEMBER, MOST, RENDEZVOUS, Membership
from phalanx._src.launch.elastic.messages import LauncherReport, Presence, environment_of
from phalanx._src.launch.elastic.remote_rendezvous import RemoteRendezvous
from phalanx._src.launch.elastic.rendezvous import Rendezvous
from phalanx._src.launch.plan import ALONE, Machines, free_ports
from phalanx.errors import StartupError

DEADLINE_S = 120.0


class Hall:
    """A rendezvous, whose time is that of the test, and the members that the test has let in.

    Args:
      least: number of processes without which no generation is formed.
      machines: the machines of the group.
    """

    def __init__(self, least, machines=ALONE):
        self.killed, self.said, self.running, self.now_s = [], [], (), 100.0
        self.rendezvous = Rendezvous(
            least,
            dict(os.environ),
            lambda *told: self.killed.append(told),
            self.said.append,
            machines,
            clock=lambda: self.now_s,
        )
        self.rendezvous.start()

    def members(self, *numbers):
        self.running = tuple(sorted({*self.running, *numbers}))
        self.report()
        return [Membership([self.rendezvous.address], number) for number in numbers]

    def report(self, running=None, hopeful=None, **more):
        running = self.running if running is None else running
        return self.rendezvous.report(LauncherReport(running, len(running) if hopeful is None else hopeful, **more))

    def meet(self, members, progress=None, call=0):
        progress = progress or {}
        met = [meeting(m, progress.get(m.number, [0]), call) for m in members]
        return [each() for each in met]

    def until_ready(self, number):
        wait_until(lambda: self.rendezvous._members.connected[number].ready)

    def until_gone(self, number):
        wait_until(lambda: number not in self.rendezvous._members.connected)

    def left_of_two(self):
        """Returns the first of two members, of which the second is lost after their first generation."""
        first, second = members = self.members(0, 1)
        self.meet(members)
        hang_up(second)
        self.until_gone(1)
        return first


def meeting(member, progress=(0,), call=0):
    """Lets a member wait for its generation in a thread. Returns a function that returns the generation, or the error."""
    met = queue.SimpleQueue()

    def meet():
        try:
            met.put(member.meet(call=call, progress=list(progress)))
        except StartupError as e:  # The rendezvous has ended.
            met.put(e)

    threading.Thread(target=meet, daemon=True).start()
    return lambda: met.get(timeout=DEADLINE_S)


def hang_up(member):
    member._contact._connection.socket.shutdown(2)


@pytest.fixture
def hall(monkeypatch, no_service):
    monkeypatch.setenv(TOKEN, new_token())
    monkeypatch.delenv("TF_CONFIG", raising=False)
    halls = []

    def make(least, machines=ALONE):
        halls.append(Hall(least, machines))
        return halls[-1]

    yield make
    os.environ.pop("TF_CONFIG", None)
    for each in halls:
        each.rendezvous.end()


@pytest.mark.slow
def test_first_generation_with_a_real_service(hall, monkeypatch):
    """A process without JAX's devices serves each generation at an address of its own, which no other user reaches. Its end is an error."""
    monkeypatch.undo()
    monkeypatch.setenv(TOKEN, new_token())
    found = hall(1)
    (member,) = members = found.members(0)
    first, second = found.meet(members)[0].service, found.meet(members)[0].service
    assert first != second
    folders = {Path(address.removeprefix("unix:")).parent for address in (first, second)}
    assert [folder.stat().st_mode & 0o777 for folder in folders] == [0o700]
    found.rendezvous._service._process.kill()
    lost = meeting(member)
    wait_until(lambda: found.killed)
    assert "JAX's coordination service did not start" in found.killed[0][1] or "Broken pipe" in found.killed[0][1]
    found.rendezvous._is_over = True
    assert "phalanx run has exited." in str(lost())


def test_first_generation_waits_for_all(hall):
    """Ranks follow the numbers, and all have the same addresses and the same service."""
    found = hall(1)
    generations = found.meet(found.members(0, 1, 2))
    assert [g.rank for g in generations] == [0, 1, 2]
    assert len({(g.number, g.service, g.addresses) for g in generations}) == 1
    assert (generations[0].number, generations[0].service) == (1, "service 1 for 3")
    assert len(set(generations[0].addresses)) == generations[0].size == 3
    assert '"index"' in generations[2].tf_config()


def test_others_form_the_next_generation(hall):
    """Without the one that has died. Ranks keep their order."""
    found = hall(1)
    first, second, third = members = found.members(0, 1, 2)
    found.meet(members)
    hang_up(first)
    generations = found.meet([second, third], {1: [7, 0, 0], 2: [8, 0, 0]})
    assert [(g.number, g.rank, g.size) for g in generations] == [(2, 0, 2), (2, 1, 2)]
    assert found.rendezvous.steps == 8
    wait_until(lambda: found.said == ["Generation 2: workers 1, 2 continue."])


def test_too_few_wait_for_another(hall):
    """With a minimum of two, the one that is left waits until a newcomer is there, and is the first."""
    found = hall(2)
    first = found.left_of_two()
    (newcomer,) = found.members(1)
    assert newcomer.is_late
    waiting = meeting(first, [5, 0, 0])
    wait_until(lambda: found.said == ["Too few workers are left: 1 of at least 2. They wait for others."])
    generations = [*found.meet([newcomer], {1: [-1]}), waiting()]
    assert [(g.number, g.rank) for g in generations] == [(2, 1), (2, 0)]


def test_too_few_who_wait_for_nobody(hall):
    """The launcher ends them, so they are not told to wait."""
    found = hall(2)
    first = found.left_of_two()
    assert found.report((0,), hopeful=1).hopeless
    meeting(first)
    found.until_ready(0)
    wait_until(lambda: found.rendezvous._pending_s)
    found.rendezvous.join(0.3)
    assert not found.said


def test_newcomer_is_announced_to_the_chief(hall):
    """The generation that trains is asked to meet it; only its first rank, which asks the others, once per second."""
    found = hall(1)
    members = found.members(0, 1)
    found.meet(members)
    news = [[], []]
    for member, heard in zip(members, news, strict=True):
        member.changed = heard.append
    (newcomer,) = found.members(2)
    joining = meeting(newcomer, [-1])
    wait_until(lambda: news[0])
    assert news == [["worker 2 joins"], []]
    found.now_s += 1.0
    wait_until(lambda: len(news[0]) > 1)
    assert news == [["worker 2 joins"] * 2, []]
    assert [g.size for g in found.meet(members)] == [3, 3]
    assert joining().rank == 2
    assert not newcomer.is_late


def test_newcomer_in_an_earlier_training(hall):
    """It is told the present one, and does not join; one that waits when the others finish is told too."""
    found = hall(1)
    (first,) = members = found.members(0)
    found.meet(members)
    assert first.begin() == (0, 0)
    (newcomer,) = found.members(1)
    assert newcomer.begin() == (0, 0)
    met = meeting(newcomer, [-1])
    found.until_ready(1)
    assert first.begin() == (1, 1)
    assert met() is None
    assert newcomer.is_late
    (later,) = found.members(2)
    assert later.begin() == (0, 1)


def test_survivor_at_the_end_of_an_earlier_training(hall):
    """If another one has begun the next training, that training is over for it too. It joins the next one as a newcomer."""
    found = hall(1)
    first, second, third = members = found.members(0, 1, 2)
    found.meet(members)
    assert [first.begin(), first.begin()] == [(0, 0), (1, 0)]
    hang_up(third)
    assert meeting(second, [9, 0, 0])() is None
    assert second.is_late
    assert [(g.rank, g.size) for g in found.meet([first], {0: [0, 0, 0]}, call=1)] == [(0, 1)]
    wait_until(lambda: found.said == ["Generation 2: worker 0 continues."])


def test_accused_process_is_killed(hall):
    """By the number of its place, unless it waits for the next generation; an accusation of another generation does not count."""
    found = hall(1)
    first, _, third = members = found.members(4, 5, 6)
    found.meet(members)
    meeting(third)
    found.until_ready(6)
    first._contact.say(Accusation((0,), 9, "none"))
    first.accuse([2, 1], "it stands still")
    wait_until(lambda: found.killed)
    assert found.killed == [(5, "it stands still")]


def test_process_that_is_told_to_end(hall):
    """It waits for no generation, and accuses nobody of none. A sign of life needs no answer."""
    found = hall(1)
    (member,) = found.members(0)
    found.rendezvous._members.connected[0].peer.say(SignOfLife())
    member.accuse([0], "it stands still")
    member.is_leaving = True
    with pytest.raises(SystemExit) as caught:
        member.meet(call=0, progress=[0])
    assert caught.value.code == 128 + signal.SIGTERM
    wait_until(lambda: found.rendezvous.generation == 1)
    assert not found.killed


def test_process_in_place_of_another_one(hall):
    """It may connect before the end of the other one is noticed. What that one has said last is not taken for its own."""
    found = hall(1)
    (first,) = found.members(0)
    connected = found.rendezvous._members.connected
    before = connected[0]
    (second,) = found.members(0)
    found.rendezvous._hear(before)
    assert connected[0] is not before
    assert found.meet([second])[0].number == 1
    wait_until(lambda: not first.is_alive())


def test_process_without_a_number(hall):
    """The rendezvous closes its connection, and goes on."""
    found = hall(1)
    with pytest.raises(StartupError, match="it rejected this process: phalanx run has exited, or another program"):
        Membership([found.rendezvous.address], "first")
    assert found.meet(found.members(0))[0].size == 1


def test_silent_process_is_killed(hall):
    """One that does not even answer for 10 s, while another one waits for the next generation."""
    found = hall(1)
    first, second = members = found.members(0, 1)
    found.meet(members)
    found.now_s += 100.0
    second._contact.say = lambda message: None
    meeting(first, [1])
    wait_until(lambda: found.rendezvous._pending_s)
    found.now_s += 10.0
    found.rendezvous.join(0.5)
    assert not found.killed
    found.now_s += 1.0
    wait_until(lambda: found.killed)
    assert found.killed[0] == (1, "has been silent for 11 s, while the others wait for it")


def test_state_of_the_training(hall):
    """Nobody is gone until all of the generation have ended; a process that takes a place is not gone."""
    found = hall(1)
    first, second = members = found.members(0, 1)
    assert found.report().gone is None
    found.meet(members)
    hang_up(first)
    found.until_gone(0)
    assert found.report().gone is None
    hang_up(second)
    found.until_gone(1)
    assert found.report().gone is None
    assert found.report((1,)).gone is None
    assert found.report(()).gone == (0, 1)
    assert found.report((1,)).gone == (0,)
    assert not found.report().hopeless
    assert found.report(()).hopeless
    assert not found.report((), finished=(0,)).hopeless


def test_last_words_are_heard_before_the_end(hall, monkeypatch):
    """The launcher may notice the end of a process before the rendezvous has read that its training has finished."""
    found, is_held, may_go = hall(1), threading.Event(), threading.Event()
    (member,) = members = found.members(0)
    found.meet(members)
    member.begin()
    hold = lambda *_, **__: is_held.set() or (may_go.wait(DEADLINE_S) and [])  # noqa: E731
    monkeypatch.setattr(found.rendezvous._selector, "select", hold)
    assert is_held.wait(DEADLINE_S)
    member.finish()
    status = found.report((), finished=(0,))
    may_go.set()
    assert status.has_finished


def test_environment_of_a_process():
    """It finds the rendezvous, and no fixed cluster."""
    environment = environment_of(["127.0.0.1:5", "b:5"], 3, 2, 4, {"TF_CONFIG": "{}", "HOME": "/root"})
    assert environment == {"HOME": "/root", RENDEZVOUS: "127.0.0.1:5,b:5", MEMBER: "3", LEAST: "2", MOST: "4"}


def test_end_of_the_rendezvous_is_an_error(hall):
    """For a member that waits for its generation."""
    found = hall(1)
    (first,) = found.members(0)
    found.report((0, 1))
    error = meeting(first)
    found.until_ready(0)
    found.rendezvous._forget(found.rendezvous._members.connected[0])
    assert "phalanx run has exited." in str(error())


def test_nobody_has_the_variables(hall):
    """If only processes are left that have taken over nothing, they are ended, and the group is lost."""
    found = hall(1)
    first, second = members = found.members(0, 1)
    found.meet(members)
    hang_up(first)
    meeting(second, [-1, 0, 0])
    wait_until(lambda: found.killed)
    assert found.killed[0] == (1, "no process that has the variables is left")


def test_message_that_cannot_be_understood(hall):
    """Ends the processes, instead of the thread that all wait for."""
    found = hall(1)
    (first,) = members = found.members(0)
    found.meet(members)
    first._contact._connection.say(b'{"kind": "Readiness", "call": 3}\n')
    wait_until(lambda: found.killed)
    assert found.killed[0][1].startswith("the rendezvous has failed: TypeError(")


def test_stranger_is_not_let_in(hall, monkeypatch):
    """A process with another secret gets an error, and the rendezvous goes on."""
    found = hall(1)
    with monkeypatch.context() as patch:
        patch.setenv(TOKEN, new_token())
        with pytest.raises(RuntimeError, match="another secret"):
            Membership([found.rendezvous.address], 0)
    assert found.meet(found.members(0))[0].size == 1


def test_no_rendezvous_at_the_address(monkeypatch):
    monkeypatch.setenv(TOKEN, new_token())
    with pytest.raises(RuntimeError, match=r"the rendezvous at 127\.0\.0\.1:1.*\n.*HINT|HINT"):
        Membership(["127.0.0.1:1"], 0)


@pytest.fixture
def second_machine(hall, monkeypatch):
    """The rendezvous of two machines, the outpost on the second, and what it was told to kill."""
    monkeypatch.setenv("PHALANX_START_TIMEOUT_S", "120")
    addresses = tuple(f"127.0.0.1:{port}" for port in free_ports(2))
    found, killed = hall(1, Machines(0, addresses)), []

    def outpost():
        connection = visit(addresses[0], secret_of(addresses), {"machine": 1})
        return RemoteRendezvous(0, addresses[0], connection, lambda *told: killed.append(told), "")

    post = outpost()
    post.start()
    yield found, post, killed, outpost
    post.end()


def test_first_generation_waits_for_all_machines(second_machine):
    """Their processes form one generation; each launcher kills its own, and hears what the others do."""
    found, post, killed, _ = second_machine
    (first,) = found.members(0)
    waiting = meeting(first)
    found.until_ready(0)
    wait_until(lambda: found.said == ["Waiting for phalanx run on the machines of these tasks: 1."])
    assert not found.report().hopeless
    assert not found.report().members
    assert post.report(LauncherReport((1,), 1)).gone is None
    # Its kernel notices a machine that disappears.
    assert post._connection.socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    other = Membership([found.rendezvous.address], 1)
    (generation,) = found.meet([other])
    assert (waiting().rank, generation.rank, generation.size) == (0, 1, 2)
    wait_until(lambda: found.report().is_needed)
    wait_until(lambda: post.report(LauncherReport((1,), 1)).members == (0, 1))
    first.accuse([1], "it stands still")
    wait_until(lambda: killed == [(1, "it stands still")])
    assert not found.killed
    post.report(LauncherReport((), 0, finished=(1,)))
    wait_until(lambda: post.report(LauncherReport((), 0, finished=(1,))).has_finished)
    wait_until(lambda: not found.report().is_needed)


def test_launchers_never_learn_that_nobody_is_left(second_machine, monkeypatch):
    """Not even between two messages: they learn of a generation before its processes do, and would end their own."""
    found, post, _, _ = second_machine
    post.report(LauncherReport((1,), 1))
    launchers, statuses = found.rendezvous._launchers, []
    tell = launchers.tell
    monkeypatch.setattr(launchers, "tell", lambda status: (statuses.append(status), tell(status)))
    members = found.members(0, 1)
    for _ in range(2):
        found.meet(members)
    assert {status.generation for status in statuses} >= {1, 2}
    assert {status.gone for status in statuses} == {None}


def test_second_launcher_of_a_machine_is_said(second_machine):
    """The first one ends, and says why."""
    _, post, _, outpost = second_machine
    other = outpost()
    other.start()
    wait_until(lambda: post.report(LauncherReport((1,), 1)).hopeless)
    assert (
        post.report(LauncherReport((), 0)).hopeless
        == "another phalanx run of machine 1 has taken the place of this one"
    )
    assert not other.report(LauncherReport((1,), 1)).hopeless
    other.end()


def test_rendezvous_that_moves_has_not_ended(second_machine):
    """A launcher that has ended does not vote for the next generation. The one of a rendezvous that has moved does."""
    found, post, _, _ = second_machine
    found.rendezvous.end(Presence(3, 1))
    post.join(DEADLINE_S)
    assert (post.is_lost, post.has_ended) == (True, False)


def test_rendezvous_that_says_nothing():
    with socket.create_server(("127.0.0.1", 0)) as server:
        connection = Connection(socket.create_connection(server.getsockname()))
        server.accept()[0].close()
    with pytest.raises(StartupError, match="the group at host0:1: it does not answer"):
        RemoteRendezvous(0, "host0:1", connection, print, "")
    assert connection.fileno() == -1


def test_machine_that_is_lost_may_come_back(second_machine):
    """For a while; then those that are left count."""
    found, post, _, _ = second_machine
    post.report(LauncherReport((1,), 1))
    wait_until(lambda: found.report(()).is_needed)
    post.end()
    wait_until(lambda: not found.report(()).is_needed)
    found.now_s += float(os.environ["PHALANX_START_TIMEOUT_S"]) - 1.0
    assert not found.report(()).hopeless
    found.now_s += 2.0
    assert found.report(()).hopeless == (
        "too few workers are left, 0 of at least 1, after 120 s without phalanx run on the machines of these tasks: 1"
    )
