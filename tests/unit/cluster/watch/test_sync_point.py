"""Processes agree on a point between two steps: any order of messages and steps, and processes that end."""

import threading
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.draws import draws

from phalanx._src.cluster.watch.sync_point import SyncPoint

PROCESSES = 3
WHY = "rank {} received SIGTERM"


class Net:
    """Processes whose messages arrive when the test says so, in the order in which each was sent."""

    def __init__(self, count=PROCESSES):
        self.links = {(a, b): deque() for a in range(count) for b in range(count) if 0 in (a, b) and a != b}
        self.points = [
            SyncPoint(rank, set(range(count)) - {rank} if rank == 0 else {0}, self.sender(rank))
            for rank in range(count)
        ]
        self.passed, self.acted = [0] * count, [[] for _ in range(count)]

    def sender(self, rank):
        """What a process says to all to which it is connected."""

        def say(message):
            for (source, _), waiting in self.links.items():
                if source == rank:
                    waiting.append(message)

        return say

    def deliver(self, link):
        """Delivers the next message of a link, if there is one."""
        if self.links[link]:
            self.points[link[1]].hear(link[0], self.links[link].popleft())

    def step(self, rank):
        """Passes a point, if the process may, but no process is more than one step ahead of another: steps are collective."""
        if not self.points[rank]._is_held and self.passed[rank] <= min(self.passed):
            self.passed[rank] += 1
            reason = self.points[rank].is_reached()
            if reason:
                self.acted[rank].append((self.passed[rank], reason))

    def settle(self, steps=5):
        """Delivers everything, and lets all pass some points."""
        while any(self.links.values()):
            for link in self.links:
                self.deliver(link)
        for _ in range(steps):
            for rank in range(len(self.points)):
                self.step(rank)


LINKS = [(0, 1), (1, 0), (0, 2), (2, 0)]
ACTIONS = st.one_of(
    st.tuples(st.just("step"), st.integers(0, PROCESSES - 1)),
    st.tuples(st.just("deliver"), st.sampled_from(LINKS)),
    st.tuples(st.just("request"), st.integers(0, PROCESSES - 1)),
)


@draws(150, 5000)
@given(st.lists(ACTIONS, max_size=60))
def test_all_act_at_the_same_points(actions):
    """Whatever arrives when, all processes act at the same points and for the same reasons, and nobody stays held."""
    net, requests = Net(), 0
    for action, what in actions:
        if action == "request":
            requests += 1
            net.points[what].request(WHY.format(what))
        else:
            {"step": net.step, "deliver": net.deliver}[action](what)
    net.settle()
    assert not any(point._is_held for point in net.points)
    assert net.acted[0] == net.acted[1] == net.acted[2]
    assert bool(requests) == bool(net.acted[0])
    assert len(net.acted[0]) <= requests
    assert {point.first_reason is None for point in net.points} == {not requests}


@draws(150, 5000)
@given(
    st.lists(ACTIONS, max_size=60),
    st.sets(st.integers(0, PROCESSES - 1), min_size=1),
    st.integers(1, 4),
)
def test_those_who_ask_act_at_once(actions, asking, step):
    """If all ask after the same step, all act there. If some do, all act there, or after the next one if a process has passed it."""
    net = Net()

    def go_on(rank):
        if rank in asking and net.passed[rank] + 1 >= step and not net.acted[rank]:
            net.points[rank].ask(WHY.format(rank))
        net.step(rank)

    for action, what in actions:
        if action != "request":
            {"step": go_on, "deliver": net.deliver}[action](what)
    for _ in range(10):
        for rank in range(PROCESSES):
            go_on(rank)
        net.settle(steps=0)
    assert not any(point._is_held for point in net.points)
    assert net.acted[0] == net.acted[1] == net.acted[2]
    assert net.acted[0][0][0] in ({step} if len(asking) == PROCESSES else {step, step + 1})


def test_second_request_does_not_replace_the_first_point():
    """Rank 0 has acted and hears the next request while another process is still on its way to the first point."""
    net = Net(2)
    net.points[1].request(WHY.format(1))
    net.points[0].request(WHY.format(0))
    net.deliver((0, 1))
    net.deliver((1, 0))
    net.deliver((1, 0))
    net.step(0)
    net.points[1].request(WHY.format(1))
    net.settle()
    assert net.acted[0] == net.acted[1] == [(1, WHY.format(0)), (2, WHY.format(1))]


def test_no_point_is_passed_before_the_answer():
    """A process that is ahead is the reason for a later point, which the others reach."""
    net = Net()
    for rank in (0, 1, 2, 0):
        net.step(rank)
    net.points[2].request(WHY.format(2))
    net.deliver((2, 0))
    assert net.points[0]._is_held
    net.deliver((0, 1))
    net.deliver((0, 2))
    net.deliver((1, 0))
    assert net.points[0]._is_held
    net.deliver((2, 0))
    assert not net.points[0]._is_held
    assert net.points[1]._is_held
    net.settle()
    assert net.acted == [[(3, WHY.format(2))]] * PROCESSES


@pytest.mark.parametrize("lost", [1, 2])
def test_process_that_ends_holds_nobody(lost):
    """Rank 0 goes on with those that are left."""
    net = Net()
    net.points[0].request(WHY.format(0))
    rest = 3 - lost
    net.deliver((0, rest))
    net.deliver((rest, 0))
    assert net.points[0]._is_held
    net.points[0].lose(lost)
    net.deliver((0, rest))
    assert not net.points[0]._is_held
    assert [net.points[rank].is_reached() for rank in (0, rest)] == [WHY.format(0)] * 2


def test_held_process_waits_for_the_answer():
    """Its thread goes on when the answer comes, and acts at the point."""
    net, acted = Net(2), []
    net.points[0].request(WHY.format(0))
    net.deliver((0, 1))
    thread = threading.Thread(target=lambda: acted.append(net.points[1].is_reached()))
    thread.start()
    thread.join(timeout=0.2)
    assert thread.is_alive()
    net.deliver((1, 0))
    net.deliver((0, 1))
    thread.join()
    assert acted == [WHY.format(0)]


def test_without_rank_0_nobody_is_held():
    """The step that comes then reports the loss."""
    net = Net()
    net.points[0].request(WHY.format(0))
    net.deliver((0, 1))
    assert net.points[1]._is_held
    net.points[1].lose(0)
    assert not net.points[1]._is_held
