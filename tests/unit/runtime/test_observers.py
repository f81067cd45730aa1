"""Observers hear of the events whose methods they override, and of no others."""

from phalanx._src.runtime.observers import Observer, Observers


class Steps(Observer):
    def __init__(self):
        self.calls = []

    def before_step(self, arguments):
        self.calls.append(arguments)


class Replicas(Observer):
    def after_replica_step(self, replica):
        """The end alone is of interest."""


def test_observers_are_sorted_by_event():
    """So an event that nobody observes costs no call."""
    observers, steps, replicas = Observers(), Steps(), Replicas()
    observers.add(steps)
    observers.add(replicas)
    assert observers.of_steps == (steps,)
    assert observers.of_replicas == (replicas,)
    assert observers.of_programs == observers.of_waits == ()
    observers.remove(steps)
    assert [*observers] == [replicas]
    assert observers.of_steps == ()


def test_observer_may_leave_during_an_event():
    """The others still hear of this event, and later events skip it."""
    observers, last = Observers(), Steps()

    class Once(Observer):
        def before_step(self, arguments):
            observers.remove(self)

    with observers.including(Once()), observers.including(last):
        for step in ("first", "second"):
            for observer in observers.of_steps:
                observer.before_step(step)
        assert observers.of_steps == (last,)
    assert last.calls == ["first", "second"]
    assert [*observers] == []
