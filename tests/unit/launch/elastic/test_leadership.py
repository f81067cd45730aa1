"""Machines with real connections in threads of this process: which of them holds the rendezvous, and who can form a generation."""

import os
import queue
import socket
import sys
import threading
import time
from contextlib import suppress
from types import SimpleNamespace

import pytest
from tests.waiting import DEADLINE_S, wait_until

from phalanx._src.cluster.connections import listener
from phalanx._src.cluster.connections.messages import SignOfLife
from phalanx._src.cluster.connections.secret import TOKEN, new_token
from phalanx._src.cluster.watch import meeting
from phalanx._src.cluster.watch.contact import Contact
from phalanx._src.cluster.watch.membership import Membership
from phalanx._src.launch.elastic import leadership
from phalanx._src.launch.elastic.leadership import Leadership
from phalanx._src.launch.elastic.messages import GroupStatus, LauncherReport, Presence
from phalanx._src.launch.elastic.rendezvous import Rendezvous
from phalanx._src.launch.plan import Machines, free_ports
from phalanx.errors import InvalidArgumentError, StartupError


class Places:
    """Machines with a launcher and one process each. A context manager.

    Args:
      count: number of machines.
    """

    def __init__(self, count):
        self.addresses = tuple(f"127.0.0.1:{port}" for port in free_ports(count))
        self.launchers, self.members, self.killed, self.said = {}, {}, [], []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for member in self.members.values():
            member.is_leaving = True
            member.close()
        for launcher in self.launchers.values():
            launcher.end()

    def start(self, *machines, least=1):
        """Starts the launchers of these machines, and reports that the process of each runs."""
        for machine in machines:
            self.launchers[machine] = launcher = Leadership(
                least,
                dict(os.environ),
                lambda *told: self.killed.append(told),
                self.said.append,
                Machines(machine, self.addresses),
            )
            launcher.start()
            launcher.report(LauncherReport((machine,), 1))

    def meet(self, *machines, progress=0):
        """Lets the processes of these machines, some of which may be new, wait for their generation. Returns it by machine."""
        met = {machine: self.meeting(machine, progress) for machine in machines}
        return {machine: wait() for machine, wait in met.items()}

    def meeting(self, machine, progress=0):
        """Lets a process wait for its generation in a thread. Returns a function that returns the generation."""
        if machine not in self.members:
            self.members[machine] = Membership(self.addresses, machine)
        met = queue.SimpleQueue()

        def meet():
            with suppress(SystemExit, StartupError):  # The test is over.
                met.put(self.members[machine].meet(call=0, progress=[progress]))

        threading.Thread(target=meet, daemon=True).start()
        return lambda: met.get(timeout=DEADLINE_S)

    def join(self, newcomer, others):
        """Lets a process wait for its generation, and then those that train. Returns its generation."""
        wait = self.meeting(newcomer, -1)
        leader = self.launchers[self.launchers[newcomer].machine]._role
        wait_until(lambda: newcomer in leader._members.connected and leader._members.connected[newcomer].ready)
        self.meet(*others, progress=8)
        return wait()

    def leave(self, machine):
        """Ends the process of a machine."""
        member = self.members.pop(machine)
        member.is_leaving = True
        member.close()

    def kill(self, *machines):
        """Ends the launcher of a machine and its process."""
        for machine in machines:
            self.leave(machine)
            self.launchers.pop(machine).end()

    def leaders(self):
        """The machine with the rendezvous, as each machine sees it."""
        return {machine: launcher.machine for machine, launcher in self.launchers.items()}


@pytest.fixture
def places(monkeypatch, no_service):
    monkeypatch.setenv(TOKEN, new_token())
    monkeypatch.delenv("TF_CONFIG", raising=False)
    monkeypatch.setenv("PHALANX_START_TIMEOUT_S", "120")
    yield Places
    os.environ.pop("TF_CONFIG", None)


def test_next_machine_takes_over(places):
    """The first of those that are left; the others follow it, and their processes go on. The one that comes back follows too."""
    with places(3) as group:
        group.start(0, 1, 2)
        first = group.meet(0, 1, 2)
        assert {g.number for g in first.values()} == {1}
        group.kill(0)
        second = group.meet(1, 2, progress=7)
        assert {machine: (g.number, g.rank, g.size) for machine, g in second.items()} == {1: (2, 0, 2), 2: (2, 1, 2)}
        # The processes may have come before their launcher.
        wait_until(lambda: group.leaders() == {1: 1, 2: 1})
        group.start(0)
        wait_until(lambda: group.leaders() == {0: 1, 1: 1, 2: 1})
        status = group.launchers[1].report(LauncherReport((1,), 1))
        assert (status.generation, status.members, status.steps, status.gone) == (2, (1, 2), 7, None)
        third = group.join(0, (1, 2))
        assert (third.number, third.rank, third.size) == (3, 2, 3)
        group.kill(1)
        assert {g.size for g in group.meet(2, 0, progress=9).values()} == {2}
        # Not the machine of the first task, but the first of those that are left.
        wait_until(lambda: group.leaders() == {2: 0, 0: 0})
        assert [text for text in group.said if "takes its place" in text] == [
            f"The launcher at {group.addresses[machine]}, which coordinated all machines, has ended. This machine takes its place."
            for machine in (0, 1)
        ]
        assert not group.killed


def test_only_one_of_two_that_look_at_once_takes_over(places, monkeypatch):
    """A look takes its time where a machine does not answer, and the first of the others may have taken over meanwhile."""
    look = Leadership._look

    def slow_look(self, **how):
        presences = look(self, **how)
        time.sleep(0.5)
        return presences

    with places(3) as group:
        group.start(0, 1, 2)
        group.meet(0, 1, 2)
        monkeypatch.setattr(Leadership, "_look", slow_look)
        monkeypatch.setattr(leadership, "_TURN_S", 0.4)
        group.kill(0)
        group.meet(1, 2, progress=7)
        wait_until(lambda: group.leaders() == {1: 1, 2: 1})
        assert len([text for text in group.said if "takes its place" in text]) == 1


def test_next_machine_is_lost_too(places):
    """Before it has formed a generation, or said anything. That the launcher of the first one has ended is not forgotten."""
    with places(3) as group:
        group.start(0, 1, 2)
        group.meet(0, 1, 2)
        group.kill(0)
        wait_until(lambda: group.leaders() == {1: 1, 2: 1})
        assert group.launchers[2].report(LauncherReport((2,), 1)).members == (0, 1, 2)
        group.kill(1)
        third = group.meet(2, progress=5)[2]
        assert (third.number, third.size) == (2, 1)


def test_rendezvous_moves_with_the_other_machines(places):
    """As one does that yields to another, so that its launcher has not ended."""
    with places(3) as group:
        group.start(0, 1, 2)
        group.meet(0, 1, 2)
        group.launchers[0]._role.end(Presence(1, 1))
        wait_until(lambda: group.leaders() == {0: 0, 1: 1, 2: 1})
        assert not group.launchers[2]._role._connection.is_closed
        assert {g.number for g in group.meet(1, 2, 0, progress=3).values()} == {2}


@pytest.fixture
def seen(monkeypatch):
    """Pairs of machines: the first has seen that the second holds a rendezvous. Those in `blind` see none."""
    look, seen = Leadership._look, SimpleNamespace(pairs=set(), blind=set())

    def noted_look(self, **how):
        index = self._machines.index
        presences = [] if index in seen.blind else look(self, **how)
        seen.pairs |= {(index, presence.machine) for presence in presences}
        return presences

    monkeypatch.setattr(Leadership, "_look", noted_look)
    return seen


def test_machine_that_waits_for_its_turn(places, monkeypatch, seen):
    """It does not follow one that has started again, and so knows less than it does."""
    monkeypatch.setattr(leadership, "_TURN_S", 1000.0)
    with places(3) as group:
        group.start(0, 1, 2)
        group.meet(0, 1, 2)
        group.leave(2)
        lost = group.launchers[2]._role
        group.kill(1, 0)
        seen.pairs.clear()
        group.start(0)
        wait_until(lambda: (2, 0) in seen.pairs)
        group.launchers[2].end()
        assert group.launchers[2]._role is lost


def test_minority_does_not_yield_to_one_that_knows_less(places, monkeypatch, seen):
    """Which yields instead, once it sees the other one."""
    monkeypatch.setattr(Rendezvous, "has_majority", False)
    with places(2) as group:
        group.start(0, 1)
        group.meet(0, 1)
        group.kill(0)
        assert group.meet(1, progress=4)[1].number == 2
        wait_until(lambda: group.leaders() == {1: 1})
        seen.blind.add(0)
        group.start(0)
        wait_until(lambda: (1, 0) in seen.pairs)
        assert group.leaders() == {0: 0, 1: 1}
        seen.blind.clear()
        wait_until(lambda: group.leaders() == {0: 1, 1: 1})


def test_another_group_at_the_address_of_a_lost_machine(places):
    """It has another secret, or turns the processes away. They look further."""
    with places(3) as group:
        group.start(0, 1, 2)
        group.meet(0, 1, 2)
        group.kill(0)
        group.meet(1, 2, progress=5)
        with listener.Listener(group.addresses[0], listener.Secret("of others"), 8, group.said.append) as others:
            is_over = threading.Event()

            def refuse():
                while not is_over.is_set():
                    others.accepted(0.05)

            thread = threading.Thread(target=refuse)
            thread.start()
            group.kill(1)
            assert group.meet(2, progress=6)[2].size == 1
            is_over.set()
            thread.join()
        assert others.refused


def test_processes_that_train_on_meet_again(places):
    """JAX's service was on the machine that is gone, so those that have lost nobody are asked to form a generation too."""
    with places(2) as group:
        group.start(0, 1)
        group.members[1] = Membership(group.addresses, 1)
        group.launchers[0].report(LauncherReport((), 0))
        assert group.meet(1)[1].size == 1
        reasons = queue.SimpleQueue()
        group.members[1].changed = reasons.put
        group.launchers.pop(0).end()
        assert reasons.get(timeout=DEADLINE_S) == "another machine coordinates the group"
        assert group.meet(1)[1].number == 2


def test_process_that_lost_only_its_connection(places):
    """It belongs to its generation as before, and what it waits for is not forgotten."""
    with places(2) as group:
        group.start(0, 1)
        group.meet(0, 1)
        rendezvous = group.launchers[0]._role
        wait = group.meeting(1)
        wait_until(lambda: rendezvous._members.connected[1].ready)
        before = rendezvous._members.connected[1]
        listener.cut(group.members[1]._contact._connection.socket)
        wait_until(
            lambda: (
                1 in rendezvous._members.connected
                and rendezvous._members.connected[1] is not before
                and rendezvous._members.connected[1].ready
            )
        )
        assert group.meet(0)[0].number == wait().number == 2
        assert group.launchers[0].report(LauncherReport((0,), 1)).gone is None


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has this limit")
def test_silent_machine_is_left_by_its_processes_first(places):
    """Also if they have sent something, after which a connection lasts longer. Otherwise another machine would give them up."""
    with places(2) as group:
        group.start(0, 1)
        group.meet(0, 1)
        process = group.members[1]._contact._connection.socket
        launcher = group.launchers[1]._role._connection.socket
        limit_ms = [each.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) for each in (process, launcher)]
        assert limit_ms == [10_000, 40_000]


def generation_of(connection):
    """Waits for the next generation of a process. Returns its number and its size, or None if the connection is ended before."""
    connection.socket.settimeout(DEADLINE_S)
    for message in connection.messages(meeting.TO_MEMBER):
        if isinstance(message, meeting.Generation):
            return message.number, message.size
    return None


class Alone:
    """A rendezvous on machine 1 of three, which knows of a generation of all three, with a clock of the test. A context manager."""

    def __init__(self, ended=frozenset(), generation=3, least=1):
        self.now_s, self.killed, self.said, self.visits = 100.0, [], [], []
        addresses = tuple(f"127.0.0.1:{port}" for port in free_ports(3))
        self.rendezvous = Rendezvous(
            least,
            dict(os.environ),
            lambda *told: self.killed.append(told),
            self.said.append,
            Machines(1, addresses),
            before=GroupStatus(generation, 5, (0, 1, 2)),
            ended=ended,
            clock=lambda: self.now_s,
        )
        self.report()
        self.rendezvous.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.rendezvous.end()
        for each in self.visits:
            each.close()

    def report(self):
        return self.rendezvous.report(LauncherReport((1,), 1))

    def visit(self, number, state):
        """Connects as a process would that waits for its generation. Returns its connection."""
        address = self.rendezvous.address
        connection = listener.visit(address, listener.Secret(os.environ[TOKEN]), {"member": number})
        connection.say(state)
        connection.say(meeting.Readiness(0, (5,), "127.0.0.1:1"))
        self.visits.append(connection)
        return connection


def test_minority_forms_no_generation(places):
    """The other machines may train without it. After the patience, the reason is known."""
    with Alone() as found:
        found.visit(1, meeting.MemberState(3, 1))
        wait_until(lambda: found.rendezvous._pending_s)
        found.now_s += 11.0
        wait_until(lambda: found.said)
        assert found.said == [
            "The machines of tasks 0, 2 do not answer, and may train without this one: waiting for them."
        ]
        assert not found.rendezvous.has_majority
        assert (found.report().gone, found.report().hopeless) == (None, "")
        found.now_s += 111.0
        assert found.report().hopeless == (
            "the machines that are left are no majority, so others may train without them, "
            "after 120 s without phalanx run on the machines of these tasks: 0, 2"
        )


def test_launchers_have_some_time_to_answer(places):
    """Until then nothing is said, and although all processes have come, they form no generation."""
    with Alone() as found:
        for number in range(3):
            found.visit(number, meeting.MemberState(3, number))
        wait_until(lambda: found.rendezvous._pending_s and not found.rendezvous._members.awaited)
        found.rendezvous.join(0.3)
        assert (found.said, found.rendezvous.generation) == ([], 3)
        found.now_s += 11.0
        wait_until(lambda: found.said)


def test_launcher_that_does_not_answer_does_not_vote(places):
    """Its machine may have been cut off, and its connection stays open for a while: another generation could form there."""
    with Alone() as found:
        launcher = listener.visit(
            found.rendezvous.address, listener.Secret(os.environ[TOKEN]), {"machine": 2, "generation": 3}
        )
        launcher.say(LauncherReport((2,), 1))
        found.visits.append(launcher)
        process, other = (found.visit(number, meeting.MemberState(3, number)) for number in (1, 2))
        wait_until(lambda: found.rendezvous._pending_s)
        found.now_s += 11.0
        wait_until(lambda: found.said)
        assert found.said[0].startswith("The machines of tasks 0, 2 do not answer")
        launcher.socket.settimeout(DEADLINE_S)
        assert any(isinstance(message, meeting.Ping) for message in launcher.messages((meeting.Ping,)))
        launcher.say(SignOfLife())
        assert generation_of(process) == generation_of(other) == (4, 2)


@pytest.mark.parametrize("ended", [{0}, {0, 2}, {2}])
def test_launchers_that_have_ended_do_not_vote(places, ended):
    """Nobody trains on their machines. Of two machines, the first one goes on."""
    with Alone(ended) as found:
        process = found.visit(1, meeting.MemberState(3, 1))
        found.now_s += 10.0
        if ended == {2}:
            wait_until(lambda: found.rendezvous._pending_s)
            found.now_s += 11.0
            wait_until(lambda: found.said)
            assert found.said[0].startswith("The machines of tasks 0 do not answer")
        else:
            assert generation_of(process) == (4, 1)
            assert found.rendezvous.has_majority


@pytest.mark.parametrize(("generation", "votes"), [(0, False), (1, False), (2, True), (3, True), (True, False)])
def test_launcher_that_has_started_again_does_not_vote(places, generation, votes):
    """The others may have gone on with the launcher before it, and then without it. If all are there, they have not."""
    with Alone() as found:
        process = found.visit(1, meeting.MemberState(3, 1))
        wait_until(lambda: found.rendezvous._pending_s)
        found.now_s += 11.0
        wait_until(lambda: found.said)

        def come(machine, generation):
            hello = {"machine": machine, "generation": generation}
            launcher = listener.visit(found.rendezvous.address, listener.Secret(os.environ[TOKEN]), hello)
            found.visits.append(launcher)
            launcher.say(LauncherReport((), 0))

        come(2, generation)
        if not votes:
            wait_until(lambda: len(found.said) == 2)
            assert found.said[1].startswith("The machines of tasks 0 do not answer")
            assert not found.rendezvous.has_majority
            come(0, 0)
        assert generation_of(process) == (4, 1)
        assert found.rendezvous.has_majority


def test_process_that_is_turned_away_looks_further(places):
    """A rendezvous with an older generation belongs to others, although it is at the first address."""
    with Alone(generation=1) as older, Alone({0, 2}) as newer:
        addresses = (older.rendezvous.address, newer.rendezvous.address)
        contact = Contact(addresses, 1)
        contact.ask(meeting.Readiness(0, (5,), "127.0.0.1:1"), meeting.MemberState(3, 1))
        listener.cut(contact._connection.socket)
        numbers = (each.number for each in contact.messages(DEADLINE_S) if isinstance(each, meeting.Generation))
        assert next(numbers) == 4
        contact.close()


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (meeting.MemberState(3, 1), (4, 1)),
        # Its last messages had not arrived when the other machine was lost: those to this launcher, or to this process.
        (meeting.MemberState(4, 1), (5, 1)),
        (meeting.MemberState(2, 1), (4, 1)),
        (meeting.MemberState(5, 1), None),
    ],
    ids=["present", "one more", "one less", "newer"],
)
def test_generation_that_a_process_knows(places, state, expected):
    """A rendezvous that has moved may have missed one. A process of a later one belongs to others."""
    with Alone({0, 2}) as found:
        assert generation_of(found.visit(1, state)) == expected


def test_process_that_knows_an_old_generation(places):
    """It may have missed one, but not two: the process of the last generation is still awaited."""
    with Alone({0, 2}) as found:
        found.visit(1, meeting.MemberState(1, 1))
        wait_until(lambda: 1 in found.rendezvous._members.connected and found.rendezvous._members.connected[1].ready)
        assert 1 in found.rendezvous._members.awaited


def test_process_that_does_not_come(places):
    """If its launcher says that it runs, it is killed after a while; until then nobody goes on without it."""
    with Alone({0, 2}) as found:
        assert found.report().gone is None
        found.now_s += 32.0
        found.rendezvous.join(0.5)
        assert not found.killed
        found.now_s += 2.0
        wait_until(lambda: found.killed)
        assert found.killed[0] == (1, "has not come to the machine that now coordinates the group")
        found.rendezvous.report(LauncherReport((), 0))
        wait_until(lambda: found.rendezvous.report(LauncherReport((), 0)).gone == (0, 1, 2))


def test_process_that_was_replaced_does_not_come(places):
    """The one in its place is not killed for it. While the other machines may train, its end is not the end of the training."""
    with Alone() as found:
        found.visit(1, meeting.MemberState(0, 0))
        wait_until(lambda: found.rendezvous._members.awaited == {0, 2})
        found.now_s += 14.0
        wait_until(lambda: not found.rendezvous._members.awaited)
        assert (found.killed, found.report().gone) == ([], None)
        found.now_s += 120.0
        assert found.report().hopeless.startswith("the machines that are left are no majority")


def test_minority_yields_to_the_others(places, monkeypatch):
    """A machine that had to believe that nobody is there gives way to those that know more, and its process joins them."""
    look = Leadership._look
    with places(3) as group:
        group.start(0, 1, 2)
        group.meet(0, 1, 2)
        group.kill(0)
        group.meet(1, 2, progress=4)
        with monkeypatch.context() as cable:
            cable.setattr(Leadership, "_look", lambda self, **how: look(self, **how) if self._machines.index else [])
            group.start(0)
            wait = group.meeting(0, -1)
            held = group.launchers[0]._role
            wait_until(lambda: 0 in held._members.connected and held._members.connected[0].ready)
            assert (group.launchers[0].is_here, held.generation) == (True, 0)
        wait_until(lambda: group.leaders() == {0: 1, 1: 1, 2: 1})
        leader = group.launchers[1]._role
        wait_until(lambda: 0 in leader._members.connected and leader._members.connected[0].ready)
        group.meet(1, 2, progress=5)
        third = wait()
        assert (third.number, third.rank, third.size, held.is_alive()) == (3, 2, 3, False)


def test_first_machine_does_not_answer(places, monkeypatch):
    """The error names its address; with another secret, other numbers, or a port that is taken, the launcher is refused at once."""
    with places(2) as group:
        monkeypatch.setenv("PHALANX_START_TIMEOUT_S", "0.3")
        message = rf"rendezvous at {group.addresses[0]}: machine 1 could not connect to it for 0.3 s: Connection"
        with pytest.raises(StartupError, match=message):
            group.start(1)
        group.start(0)
        message = (
            "it has --workers 1:2 on 2 machines, and this machine --workers 2:2 on 2 machines.\nHINT: the same --work"
        )
        with pytest.raises(StartupError, match=message):
            group.start(1, least=2)
        with monkeypatch.context() as other:
            other.setenv(TOKEN, new_token())
            with pytest.raises(StartupError, match="another secret"):
                group.start(1)
        held = group.launchers.pop(0)
        message = rf"the rendezvous at {group.addresses[0]}: this machine cannot listen there"
        with monkeypatch.context() as blind:
            blind.setattr(Leadership, "_look", lambda self, **_: [])
            with pytest.raises(StartupError, match=message):
                group.start(0)
            with pytest.raises(StartupError, match=r"could not connect to it for 0.3 s: it has come just now\."):
                group.start(1)
        held.end()
        monkeypatch.setenv("PHALANX_START_TIMEOUT_S", "soon")
        for machine in (0, 1):
            with pytest.raises(
                InvalidArgumentError, match="PHALANX_START_TIMEOUT_S='soon': must be a number of seconds"
            ):
                group.start(machine)


def test_machine_that_cannot_listen_gives_up(places, monkeypatch):
    """If nobody else takes over either, the reason is that of the machine."""
    with places(2) as group:
        monkeypatch.setenv("PHALANX_START_TIMEOUT_S", "1")
        group.start(0, 1)
        group.meet(0, 1)
        taken = listener.listen(group.addresses[1])
        group.kill(0)
        status = lambda: group.launchers[1].report(LauncherReport((1,), 1))  # noqa: E731
        wait_until(lambda: status().hopeless)
        assert (
            status().hopeless
            == f"the rendezvous at {group.addresses[1]}: this machine cannot listen there: Address already in use"
        )
        assert status().gone == ()
        taken.close()


def test_end_of_the_training_moves_nothing(places):
    """The others need no rendezvous after it."""
    with places(2) as group:
        group.start(0, 1)
        group.meet(0, 1)
        finished = LauncherReport((), 0, finished=(0,))
        group.launchers[0].report(finished)
        status = lambda: group.launchers[1].report(LauncherReport((1,), 1))  # noqa: E731
        wait_until(lambda: status().has_finished)
        group.kill(0)
        group.launchers[1].join(1.5)
        assert (group.launchers[1].is_here, status().hopeless) == (False, "")
