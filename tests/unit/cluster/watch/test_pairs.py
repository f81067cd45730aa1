"""Connections at the ports of a process: those that a member claims stay, and the others end. Sockets and strangers are real."""

import socket
import subprocess
import sys
from contextlib import ExitStack

import pytest

from phalanx._src.cluster.connections.listener import listen
from phalanx._src.cluster.watch.pairs import Pairs, PairsAnswer, PairsQuestion

pytestmark = pytest.mark.slow

PEER = """
import socket, sys
peers = [socket.create_connection(("127.0.0.1", int(sys.argv[1]))) for _ in range(int(sys.argv[2]))]
print(*(peer.getsockname()[1] for peer in peers), flush=True)
for peer in peers:
    print(peer.recv(1) or "ended", flush=True)
"""


class Group:
    """Rank 0, whose port has connections of another process, and what it says to the others and to the user."""

    def __init__(self, stack, connections):
        self.said, self.told, self.now_s = [], [], 100.0
        self.server = stack.enter_context(listen("127.0.0.1:0"))
        self.port = self.server.getsockname()[1]
        self.process = stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-S", "-c", PEER, str(self.port), str(connections)], stdout=subprocess.PIPE, text=True
            )
        )
        stack.callback(self.process.kill)
        self.ends = [("127.0.0.1", int(word)) for word in self.process.stdout.readline().split()]
        self.accepted = [stack.enter_context(self.server.accept()[0]) for _ in range(connections)]
        say = lambda message, rank: self.said.append((message, rank))  # noqa: E731
        self.pairs = Pairs(0, 3, say, self.told.append, lambda: self.now_s)
        self.pairs.open("127.0.0.1", [self.port])

    def answer(self, rank, ends, reaches):
        self.pairs.hear(PairsAnswer(rank, 0, tuple(ends), reaches))

    def at(self, end):
        """This process's end of the connection that has this other end."""
        return next(each for each in self.accepted if each.getpeername() == end)


@pytest.fixture
def group():
    with ExitStack() as stack:
        yield lambda connections: Group(stack, connections)


def test_connection_that_nobody_claims_ends(group):
    """All ranks have been asked. The user learns where it came from, once a minute."""
    found = group(2)
    found.pairs.look()
    assert not found.said, "it may be on the way"
    found.pairs.look()
    (question, rank), *_ = found.said
    assert rank is None
    assert sorted(question.ends) == sorted(found.ends)
    mine, strange = found.ends
    found.answer(1, [mine], 1)
    assert not found.told
    found.answer(2, [], 0)
    (line,) = found.told
    assert "port of rank 0" in line
    assert "from 127.0.0.1" in line
    assert found.pairs.strangers[0].startswith("127.0.0.1")
    assert found.at(strange).recv(1) == b""
    found.at(mine).sendall(b"x")
    found.pairs.look()
    found.pairs.look()
    assert len(found.said) == 1, "it is known now"


def test_addresses_that_a_router_changes(group):
    """A member has connected, but under another address than it knows: nothing ends."""
    found = group(1)
    found.pairs.look()
    found.pairs.look()
    found.answer(1, [], 1)
    found.answer(2, [], 0)
    assert not found.told
    assert not found.pairs.strangers


def test_connections_of_a_rank_that_has_ended(group):
    """Nobody claims them any more, so nothing ends, whoever has answered, and nobody is asked again."""
    found = group(1)
    found.pairs.look()
    found.pairs.look()
    found.answer(1, [], 0)
    found.pairs.lose(2)
    found.pairs.look()
    found.pairs.look()
    found.pairs.confirm(60.0)
    assert not found.told
    assert found.pairs.strangers == []
    assert len(found.said) == 1


def test_confirmation_ends_in_time(group):
    """Although the others have not answered. They are not asked again."""
    found = group(1)
    found.pairs.look()
    found.pairs.look()
    times = iter([0.0, 0.0])
    found.pairs._clock = lambda: next(times, 1.0)
    found.pairs.confirm(0.01)
    assert len(found.said) == 1
    assert not found.told


def test_questions_go_through_rank_0(group):
    """It answers with what it has itself, and passes on what others ask and answer."""
    found = group(1)
    with socket.create_connection(("127.0.0.1", found.port)) as own:
        found.server.accept()[0].close()
        end, place = own.getsockname(), ("127.0.0.1", found.port)
        question = PairsQuestion(1, (end, ("127.0.0.1", 1)), (place,))
        found.pairs.hear(question)
        assert found.said[0] == (question, None)
        assert found.said[1] == (PairsAnswer(0, 1, (end,), 1), 1)
    answer = PairsAnswer(2, 1, (), 0)
    found.pairs.hear(answer)
    assert found.said[-1] == (answer, 1)


def test_each_of_three_is_asked(group):
    """Rank 1 has a connection with rank 0 only, which asks rank 2 for it: without its answer nothing ends."""
    found = group(1)
    said, told = [], []
    pairs = Pairs(1, 3, lambda *words: said.append(words), told.append)
    pairs.open("127.0.0.1", [found.port])
    pairs.look()
    pairs.look()
    assert said[0][0].asker == 1
    pairs.hear(PairsAnswer(0, 1, (), 0))
    assert not told
    pairs.hear(PairsAnswer(2, 1, tuple(found.ends), 1))
    assert not told
    assert pairs.strangers == []


def test_own_connection_is_counted_once(group):
    """Rank 0 sends a question to its asker too. If more had connected than have arrived, the stranger would stay."""
    found, said, told = group(1), [], []
    pairs = Pairs(1, 2, lambda *words: said.append(words), told.append)
    pairs.open("127.0.0.1", [found.port])
    with socket.create_connection(("127.0.0.1", found.port)), found.server.accept()[0]:
        pairs.look()
        pairs.look()
        pairs.hear(said[0][0])
        pairs.hear(PairsAnswer(0, 1, (), 0))
        assert len(told) == len(pairs.strangers) == 1


def test_confirmed_where_nothing_has_arrived():
    """A process without such a port asks nobody."""
    pairs = Pairs(1, 2, None, None)
    pairs.confirm(60.0)
    assert pairs.strangers == []
