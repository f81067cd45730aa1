"""Bounded staleness: the bound holds, nothing waits forever, and a bound of 0 makes rounds of all workers."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx._src.parameter_server.remote.plans import Push, Pusher
from phalanx._src.parameter_server.remote.staleness import Clock

BOUNDS = st.sampled_from([None, 0, 1, 2, 3, 7])


class Model:
    """Workers that pull, push, fail, rest and die in any order; versions are counted by hand.

    A worker is idle, computing, or has pushed and waits.
    """

    def __init__(self, bound, workers):
        self.clock, self.bound = Clock(bound), bound
        self.pushers = [Pusher(i, 0) for i in range(workers)]
        self.pulled, self.waiting, self.numbers = {}, {}, Counter()
        self.version, self.applied = 0, []
        self.clock.enter(self.pushers)

    def advance(self, worker):
        """The next thing that a worker does."""
        pusher = self.pushers[worker]
        if pusher in self.waiting:
            return
        if pusher not in self.pulled:
            self.pulled[pusher] = self.clock.pull(pusher)
            assert self.pulled[pusher] == self.version
            return
        push = Push(pusher, self.numbers[pusher], self.pulled.pop(pusher))
        self.numbers[pusher] += 1
        self.waiting[pusher] = push
        self.clock.push(push)
        self.settle()

    def fail(self, worker):
        """A step that raises."""
        if self.pulled.pop(self.pushers[worker], None) is not None:
            self.clock.release(self.pushers[worker])
            self.settle()

    def rest(self, worker):
        """A worker for which there is no step."""
        if self.pushers[worker] not in {**self.pulled, **self.waiting}:
            self.clock.leave(self.pushers[worker])
            self.settle()

    def die(self, worker):
        """Another worker takes its place."""
        old = self.pushers[worker]
        self.clock.forget(old)
        self.pulled.pop(old, None)
        self.waiting.pop(old, None)
        self.pushers[worker] = Pusher(worker, old.life + 1)
        self.clock.enter([self.pushers[worker]])
        self.settle()

    def settle(self):
        """Applies what can be, and checks it."""
        while chosen := self.clock.ready():
            for push in chosen:
                assert self.waiting.pop(push.pusher) is push
                staleness = self.version - push.pulled
                assert self.bound is None or staleness <= self.bound
                self.applied.append(staleness)
            self.version += 1
        assert self.clock.version == self.version
        assert self.clock.staleness == Counter(self.applied)


@given(BOUNDS, st.integers(1, 5), st.lists(st.tuples(st.sampled_from("aaaaafrd"), st.integers(0, 4)), max_size=150))
def test_the_bound_is_never_passed(bound, workers, actions):
    """Whatever workers do, and when nobody computes any more nothing is left waiting."""
    model = Model(bound, workers)
    do = {"a": model.advance, "f": model.fail, "r": model.rest, "d": model.die}
    for action, worker in actions:
        do[action](worker % workers)
    for worker in range(workers):
        if model.pushers[worker] in model.pulled:
            model.advance(worker)
    for worker in range(workers):
        model.rest(worker)
    assert not model.waiting


@given(BOUNDS, st.integers(1, 5), st.randoms())
def test_nothing_waits_forever(bound, workers, random):
    """While all workers go on, all their steps are applied."""
    model = Model(bound, workers)
    for _ in range(20):
        order = [w for w in range(workers) for _ in range(2)]
        random.shuffle(order)
        for worker in order:
            model.advance(worker)
    while len(model.applied) < 10 * workers:
        before = len(model.applied)
        for worker in range(workers):
            model.advance(worker)
            model.advance(worker)
        assert len(model.applied) > before


def pushed(clock, pusher, number=0):
    """What a worker pushes after it has pulled."""
    push = Push(pusher, number, clock.pull(pusher))
    clock.push(push)
    return push


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_a_bound_of_zero_makes_rounds(workers):
    """One step of each worker is one update, whoever is first."""
    clock = Clock(0)
    pushers = [Pusher(i, 0) for i in range(workers)]
    clock.enter(pushers)
    for number in range(3):
        for i in range(workers):
            assert clock.ready() == []
            pushed(clock, pushers[(i + number) % workers], number)
        assert {p.pusher for p in clock.ready()} == set(pushers)
        assert clock.version == number + 1
    assert clock.staleness == {0: 3 * workers}


def test_without_a_bound_nobody_waits():
    """Each push is an update of its own, in the order in which they came."""
    clock = Clock()
    slow, fast = Pusher(0, 0), Pusher(1, 0)
    clock.pull(slow)
    for number in range(3):
        assert [pushed(clock, fast, number)] == clock.ready()
    clock.push(Push(slow, 0, 0))
    assert [p.pusher for p in clock.ready()] == [slow]
    assert clock.staleness == {0: 3, 3: 1}


A, B = Pusher(0, 0), Pusher(1, 0)


def clock_of_two(bound):
    clock = Clock(bound)
    clock.enter([A, B])
    return clock


def test_who_has_pushed_is_not_waited_for():
    """With a bound of 1 or more: its next step will take newer values."""
    clock = clock_of_two(1)
    for number, pusher in enumerate([A, B, B, B, B]):
        assert [pushed(clock, pusher, number)] == clock.ready()


def test_who_leaves_is_not_waited_for():
    """Until it pulls again."""
    clock = clock_of_two(0)
    pushed(clock, A)
    assert clock.ready() == []
    clock.leave(B)
    assert [p.pusher for p in clock.ready()] == [A]
    clock.pull(B)
    pushed(clock, A, 1)
    assert clock.ready() == []


def test_what_a_lost_worker_has_pushed_does_not_count():
    """As long as it was not applied."""
    clock = clock_of_two(0)
    pushed(clock, A)
    clock.forget(A)
    pushed(clock, B)
    assert [p.pusher for p in clock.ready()] == [B]
