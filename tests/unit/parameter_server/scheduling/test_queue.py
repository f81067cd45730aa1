"""The queue of closures: with real threads, against sequential models; every wait has a deadline."""

import collections
import operator
import random
import signal
import threading
import time
import traceback
from concurrent.futures import Future
from contextlib import suppress

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from tests.draws import MANY

from phalanx._src.parameter_server.scheduling.queue import CAPACITY, Closure, ClosureQueue, PendingValue
from phalanx.errors import CancelledError, InvalidArgumentError

DEADLINE_S = 300.0
A_WHILE_S = 0.05
BY_ANOTHER = "a scheduled step: it was cancelled because another step failed first: StepError: 1\nHINT: call coordinator.schedule"
BY_STOP = "the coordinator was stopped, which cancels all unfinished steps.\nHINT: call coordinator.join"
Point = collections.namedtuple("Point", "x y")


class StepError(Exception):
    """What a step raises."""


class Call:
    def __init__(self, function, *args):
        self._future = Future()
        threading.Thread(target=self._run, args=(function, args), daemon=True).start()

    def _run(self, function, args):
        try:
            self._future.set_result(function(*args))
        except BaseException as e:
            self._future.set_exception(e)

    def end(self):
        """Returns or raises what the function did; at the deadline it fails."""
        return self._future.result(DEADLINE_S)

    def error(self):
        return self._future.exception(DEADLINE_S)

    def is_waiting(self):
        """Whether it has not come back after a while."""
        time.sleep(A_WHILE_S)
        return not self._future.done()


def put(queue, *works):
    closures = [Closure(work) for work in works]
    for closure in closures:
        Call(queue.put, closure).end()
    return closures


def get(queue):
    return Call(queue.get).end()


def value(closure):
    return Call(closure.outcome.get).end()


def failed():
    """A queue whose first of three closures has failed while the second was in flight, and is: that one, and the third."""
    queue = ClosureQueue()
    closures = put(queue, 1, 2, 3)
    get(queue), get(queue)
    queue.fail(closures[0], StepError(1))
    return queue, *closures[1:]


CALLS = {
    "schedule": lambda queue: queue.put(Closure("late")),
    "join": ClosureQueue.join,
    "done": ClosureQueue.done,
}


def test_a_value_is_no_number():
    """Where it is used as one, it says how to get it."""
    outcome = PendingValue()
    uses = (
        *(float, int, bool, np.asarray, jnp.asarray, jnp.sum, range, operator.neg, "{:.2f}".format),
        *(lambda value: np.add(value, 1), lambda value: value + 1, lambda value: 1 / value, lambda value: value > 1),
        lambda value: value["loss"],
    )
    for use in uses * 2:
        with pytest.raises(
            InvalidArgumentError, match=r"a RemoteValue was used as .* a number: .*\nHINT: .*value.fetch\(\)"
        ):
            use(outcome)
        outcome.settle(3.0)
    assert "PendingValue" in f"{outcome}"


def test_values_reach_all_who_wait():
    """`get` returns what the step did, to all who wait; `fetch` the same structure of NumPy arrays and numbers."""
    outcome = PendingValue()
    values = {"a": (jnp.arange(3), [Point(1.5, None)]), "b": jnp.ones((), "bfloat16"), "c": "text"}
    waiting = [Call(outcome.get) for _ in range(3)]
    assert all(call.is_waiting() for call in waiting)
    outcome.settle(values)
    assert all(call.end() is values for call in waiting)
    fetched = Call(outcome.fetch).end()
    assert type(fetched["a"][0]) is np.ndarray
    assert fetched["a"][0].tolist() == [0, 1, 2]
    assert fetched["a"][1] == [Point(1.5, None)]
    assert type(fetched["a"][1][0].x) is np.float64
    assert (fetched["b"].dtype, fetched["b"].shape) == (jnp.bfloat16, ())
    assert isinstance(fetched["b"], np.generic)
    assert fetched["c"] == "text"


def test_error_of_step_is_raised_each_time():
    """The step's own, with its own traceback, however often it is asked for."""

    def step():
        raise StepError("no")

    queue = ClosureQueue()
    [closure] = put(queue, step)
    try:
        get(queue).work()
    except StepError as e:
        error = e
    queue.fail(closure, error)
    depths = []
    for ask in (closure.outcome.get, closure.outcome.fetch, closure.outcome.get):
        with pytest.raises(StepError, match="no") as raised:
            ask()
        assert raised.value is error
        frames = traceback.extract_tb(error.__traceback__)
        assert frames[-1].name == "step"
        depths.append(len(frames))
    assert depths[0] == depths[2]


def test_put_waits_for_room():
    """Who puts waits for room, and hears of it whoever else waits; who puts back does not wait."""
    queue = ClosureQueue(capacity=2)
    put(queue, 1, 2)
    assert Call(queue.join).is_waiting()
    third = Call(queue.put, Closure(3))
    assert third.is_waiting()
    first = get(queue)
    third.end()
    queue.put_back(first)
    fourth = Call(queue.put, Closure(4))
    assert fourth.is_waiting()
    assert [get(queue).work] == [1]
    assert fourth.is_waiting()
    assert [get(queue).work] == [2]
    fourth.end()


def test_capacity_must_be_positive():
    """The default is that of tf.distribute."""
    assert CAPACITY == 262144
    with pytest.raises(InvalidArgumentError, match=r"capacity=0: must be at least 1.\nHINT: capacity=262144"):
        ClosureQueue(capacity=0)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("end", ["finish", "put_back", "fail"])
def test_first_error_cancels_what_is_queued(name, end):
    """It cancels what is queued, and waits for what is in flight; then one call raises it, and the queue is as new."""
    queue, running, queued = failed()
    with pytest.raises(CancelledError, match=BY_ANOTHER) as cancelled:
        value(queued)
    assert cancelled.value.__cause__.args == (1,)
    assert not queue.done()
    waiting = None if name == "done" else Call(CALLS[name], queue)
    assert waiting is None or waiting.is_waiting()
    getattr(queue, end)(running, *{"finish": ["late"], "put_back": [], "fail": [StepError("second")]}[end])
    with pytest.raises(StepError, match="^1$"):
        (waiting or Call(CALLS[name], queue)).end()
    with pytest.raises(
        StepError if end == "fail" else CancelledError, match="^second$" if end == "fail" else BY_ANOTHER
    ):
        value(running)
    Call(queue.join).end()
    assert queue.done()
    [closure] = put(queue, "new")
    assert get(queue) is closure
    queue.finish(closure, 7)
    Call(queue.join).end()
    assert value(closure) == 7


def test_one_of_many_raises():
    """Those who waited for room go on, and those in `join` come back, but for one."""
    queue = ClosureQueue(capacity=1)
    put(queue, 1)
    first = get(queue)
    put(queue, 2)
    producers = [Call(queue.put, Closure(i)) for i in range(4)]
    joins = [Call(queue.join) for _ in range(3)]
    assert all(call.is_waiting() for call in producers + joins)
    queue.fail(first, StepError(1))
    consumer = Call(consume, queue)
    errors = [call.error() for call in producers + joins]
    assert sorted(map(repr, errors)) == ["None"] * 6 + ["StepError(1)"]
    Call(queue.join).end()
    queue.stop()
    assert consumer.end() == 4 - sum(call.error() is not None for call in producers)


def consume(queue):
    """A worker whose steps return None; returns how many it has run."""
    count = 0
    while (closure := queue.get()) is not None:
        queue.finish(closure, None)
        count += 1
    return count


def test_stop_ends_every_wait():
    """Nobody waits any more, neither for the queue nor for a value; what comes late is thrown away."""
    queue = ClosureQueue(capacity=1)
    late = []
    for i in range(3):
        late += put(queue, i)
        get(queue)
    [queued] = put(queue, 3)
    stuck = [Call(queue.put, Closure(4)), Call(queue.join), *[Call(c.outcome.get) for c in (*late, queued)]]
    idle = ClosureQueue()
    consumers = [Call(idle.get) for _ in range(4)]
    assert all(call.is_waiting() for call in stuck + consumers)
    for stopped in (queue, idle, idle):
        stopped.stop()
    assert [call.end() for call in [*consumers, Call(idle.get)]] == [None] * 5
    for call in stuck:
        with pytest.raises(CancelledError, match=BY_STOP):
            call.end()
    assert get(queue) is None
    assert not queue.done()
    queue.finish(late[0], "late")
    queue.fail(late[1], StepError("late"))
    queue.put_back(late[2])
    assert queue.done()
    for closure in late:
        with pytest.raises(CancelledError, match=f"a scheduled step: {BY_STOP}"):
            value(closure)


@pytest.mark.parametrize("name", CALLS)
def test_calls_after_stop_are_refused(name):
    """An error that nobody has heard of is raised once; then each call says that the coordinator was stopped, or what is in flight."""
    asked = {"schedule": r"coordinator.schedule\(...\): ", "join": r"coordinator.join\(\): "}
    queue, running, _ = failed()
    queue.stop()
    with pytest.raises(StepError, match="^1$"):
        Call(CALLS[name], queue).end()
    if name == "done":
        assert not queue.done()
        queue.put_back(running)
    else:
        for _ in range(2):
            with pytest.raises(CancelledError, match=asked[name] + BY_STOP):
                Call(CALLS[name], queue).end()
        queue.finish(running, None)
    assert queue.done()


@pytest.fixture
def interrupted():
    """A function that calls another one in the main thread, which soon gets the signal of Ctrl-C."""
    main = threading.main_thread().ident
    assert threading.get_ident() == main
    # A process that was started in the background ignores the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupted(function):
        threading.Timer(0.02, signal.pthread_kill, (main, signal.SIGINT)).start()
        function()

    yield interrupted
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("wait", ["join", "put", "get"])
def test_keyboard_interrupt_ends_only_the_wait(interrupted, wait):
    """Ctrl-C ends the wait, and nothing else."""
    queue = ClosureQueue(capacity=1)
    for _ in range(10):
        [closure] = put(queue, 1)
        waits = {"join": queue.join, "put": lambda: queue.put(Closure(2)), "get": closure.outcome.get}[wait]
        with pytest.raises(KeyboardInterrupt):
            interrupted(waits)
        assert get(queue) is closure
        queue.finish(closure, 3)
        Call(queue.join).end()
        assert value(closure) == 3


class Resting:
    """A consumer that notes when it is told to rest, and when it is woken."""

    def __init__(self, capacity=CAPACITY, *, wakes=True):
        self.queue = ClosureQueue(capacity, wake=(lambda: self.notes.append("wake")) if wakes else None)
        self.notes, self.rested = [], threading.Event()

    def _rest(self):
        self.notes.append("rest")
        self.rested.set()

    def get(self):
        return self.queue.get(self._rest)

    def waits(self, how, closure):
        """Waits for a closure in a thread of its own."""
        queue = self.queue
        waits = {"join": queue.join, "get": closure.outcome.get, "done": queue.done, "put": lambda: put(queue, 0)}
        return Call(waits[how])


@pytest.mark.parametrize("how", ["join", "get", "done", "put"])
def test_consumers_rest_while_somebody_waits(how):
    """An idle consumer is told to rest as soon as somebody waits for another one's closure, and woken before the next."""
    consumer = Resting(1 if how == "put" else CAPACITY)
    queue = consumer.queue
    [closure] = put(queue, "in flight")
    assert queue.get() is closure
    if how == "put":
        # It has failed, and another one is in flight still: who puts waits for that one.
        [other] = put(queue, "another")
        assert queue.get() is other
        queue.fail(other, StepError(1))
    idle = Call(consumer.get)
    assert idle.is_waiting()
    assert consumer.notes == []
    waiting = consumer.waits(how, closure)
    assert consumer.rested.wait(DEADLINE_S)
    assert set(consumer.notes) == {"rest"}
    queue.finish(closure, None)
    if how == "put":
        assert isinstance(waiting.error(), StepError)
    else:
        waiting.end()
    consumer.notes.clear()
    [following] = put(queue, "next")
    assert idle.end() is following
    assert consumer.notes == ["wake"]
    queue.finish(following, None)


@pytest.mark.parametrize("how", ["join", "get", "done"])
def test_no_thread_wakes_up_to_rest_without_wake(how):
    """A caller that waits does not wake the consumers, of which there may be thousands, if they need not rest."""
    consumer = Resting(wakes=False)
    [closure] = put(consumer.queue, "in flight")
    assert get(consumer.queue) is closure
    idle = Call(consumer.get)
    assert idle.is_waiting()
    waiting = consumer.waits(how, closure)
    assert idle.is_waiting()
    consumer.queue.finish(closure, None)
    waiting.end()
    assert consumer.notes == []
    consumer.queue.stop()
    assert idle.end() is None


def test_nobody_rests_while_nobody_waits():
    """What was waited for before does not count once the next closure is queued."""
    consumer = Resting()
    [first] = put(consumer.queue, "first")
    consumer.queue.finish(consumer.get(), 1)
    consumer.queue.join()
    assert first.outcome.get() == 1
    idle = Call(consumer.get)
    assert idle.is_waiting()
    assert consumer.notes == []
    consumer.queue.stop()
    assert idle.end() is None


class QueueMachine(RuleBasedStateMachine):
    """All calls that need not wait, in any order, against lists and a dict."""

    capacity = 3

    def __init__(self):
        super().__init__()
        self.queue = ClosureQueue(self.capacity)
        self.waiting, self.running, self.fates = [], [], {}
        self.error, self.is_stopped = None, False

    def raises(self, function, *, when_stopped):
        """Calls it; returns whether it raised what it had to raise."""
        expected, self.error = self.error, None
        error = Call(function, self.queue).error()
        assert error is expected or (self.is_stopped and when_stopped and isinstance(error, CancelledError))
        return error is not None

    def ends(self, index):
        return self.running.pop(index % len(self.running))

    def must_wait(self):
        """Whether the first error waits for what is in flight."""
        return self.error is not None and self.running and not self.is_stopped

    @precondition(
        lambda self: not self.must_wait() and (self.is_stopped or self.error or len(self.waiting) < self.capacity)
    )
    @rule()
    def put(self):
        closure = Closure(1 + len(self.fates))
        if not self.raises(lambda queue: queue.put(closure), when_stopped=True):
            assert not self.is_stopped
            self.waiting.append(closure)
            self.fates[closure] = None

    @precondition(lambda self: self.waiting or self.is_stopped)
    @rule()
    def get(self):
        closure = get(self.queue)
        assert closure is (None if self.is_stopped else self.waiting.pop(0))
        if closure is not None:
            self.running.append(closure)

    @precondition(lambda self: self.running)
    @rule(index=st.integers(0, 99))
    def finish(self, index):
        """Its value counts unless there is an error."""
        closure = self.ends(index)
        self.queue.finish(closure, closure.work)
        self.fates[closure] = self.fates[closure] or (CancelledError if self.error else closure.work)

    @precondition(lambda self: self.running)
    @rule(index=st.integers(0, 99))
    def fail(self, index):
        """The first takes with it all that wait."""
        closure, error = self.ends(index), StepError()
        self.queue.fail(closure, error)
        if not self.is_stopped:
            self.fates[closure] = StepError
            self.error = self.error or error
            self.fates |= dict.fromkeys(self.waiting, CancelledError)
            self.waiting = []

    @precondition(lambda self: self.running)
    @rule(index=st.integers(0, 99))
    def put_back(self, index):
        """It waits again, as the first, unless there is an error."""
        closure = self.ends(index)
        self.queue.put_back(closure)
        if self.error or self.is_stopped:
            self.fates[closure] = CancelledError
        else:
            self.waiting.insert(0, closure)

    @precondition(
        lambda self: not self.must_wait() and (self.is_stopped or self.error or not self.waiting + self.running)
    )
    @rule()
    def join(self):
        assert self.raises(ClosureQueue.join, when_stopped=True) or not self.is_stopped

    @rule()
    def done(self):
        if self.must_wait() or (self.error is None and not self.is_stopped):
            assert Call(self.queue.done).end() == (not self.waiting + self.running)
        elif not self.raises(ClosureQueue.done, when_stopped=False):
            assert Call(self.queue.done).end() == (not self.running)

    @precondition(lambda self: len(self.fates) > 5)
    @rule()
    def stop(self):
        self.queue.stop()
        self.fates |= {closure: fate or CancelledError for closure, fate in self.fates.items()}
        self.waiting, self.is_stopped = [], True

    def teardown(self):
        """Each closure has the fate that it had to have; those that had none are cancelled at last, and not before."""
        known = {closure: fate for closure, fate in self.fates.items() if fate is not None}
        assert {closure: fate_of(closure) for closure in known} == known
        self.queue.stop()
        assert {fate_of(closure) for closure in {*self.fates} - {*known}} <= {CancelledError}


def fate_of(closure):
    """Its value, or the class of its error."""
    error = Call(closure.outcome.get).error()
    return value(closure) if error is None else type(error)


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(max_examples=600 if MANY else 20, stateful_step_count=40, deadline=None)


class Cluster:
    """Producers and consumers; what becomes of each number is known beforehand."""

    def __init__(self, seed, *, producers, consumers, capacity, failures):
        self.queue, self.producers = ClosureQueue(capacity), producers
        chance = random.Random(seed)
        self.losses = [chance.choice([0, 0, 0, 0, 1, 2]) for _ in range(400)]
        self.fails = [chance.random() < failures for _ in self.losses]
        self.runs = [0] * len(self.losses)
        self.closures, self.raised = {}, []
        self._lock = threading.Lock()
        self.consumers = [Call(self._consume, chance.random()) for _ in range(consumers)]

    def _consume(self, seed):
        chance = random.Random(seed)
        while (closure := self.queue.get()) is not None:
            number = closure.work
            if chance.random() < 0.1:
                time.sleep(chance.random() / 1000)
            with self._lock:
                self.runs[number] += 1
                is_lost = self.runs[number] <= self.losses[number]
            if is_lost:
                self.queue.put_back(closure)
            elif self.fails[number]:
                self.queue.fail(closure, StepError(number))
            else:
                self.queue.finish(closure, number * number)

    def _produce(self, numbers):
        for number in numbers:
            closure = Closure(number)
            while self._raises(self.queue.put, closure):
                pass
            self.closures[number] = closure

    def _raises(self, function, *args):
        try:
            function(*args)
        except StepError as e:
            with self._lock:
                self.raised.append(e.args[0])
            return True
        return False

    def schedule(self, numbers):
        """Puts them from several threads, and joins until no error is raised."""
        for call in [Call(self._produce, numbers[i :: self.producers]) for i in range(self.producers)]:
            call.end()
        while Call(self._raises, self.queue.join).end():
            pass
        assert self.queue.done()

    def cancelled(self):
        return [n for n, c in self.closures.items() if isinstance(Call(c.outcome.get).error(), CancelledError)]


@pytest.mark.cover(["seed"], {0})
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    ("producers", "consumers", "capacity", "failures"),
    [(1, 1, 8, 0.03), (4, 1, 2, 0.03), (1, 4, 8, 0.03), (4, 8, 1, 0.03), (8, 3, 1000, 0.03), (3, 5, 4, 0.0)],
)
def test_every_step_runs(seed, producers, consumers, capacity, failures):
    """What was cancelled is scheduled again; in the end each number has the value or error that it has without a queue."""
    cluster = Cluster(seed, producers=producers, consumers=consumers, capacity=capacity, failures=failures)
    numbers = list(range(len(cluster.runs)))
    while numbers:
        cluster.schedule(numbers)
        numbers = cluster.cancelled()
        assert failures or not numbers
    cluster.queue.stop()
    assert [consumer.end() for consumer in cluster.consumers] == [None] * consumers
    for number, closure in cluster.closures.items():
        error = Call(closure.outcome.get).error()
        assert (error.args == (number,)) if cluster.fails[number] else (error is None and value(closure) == number**2)
        # Once, and once more for each worker that was lost with it.
        least = cluster.losses[number] + 1
        assert cluster.runs[number] >= least if failures else cluster.runs[number] == least
    numbers = {number for number, fails in enumerate(cluster.fails) if fails}
    assert len(set(cluster.raised)) == len(cluster.raised)
    assert bool(cluster.raised) == bool(failures)
    # With one consumer nothing is in flight beside a failure, so that none is the second.
    assert {*cluster.raised} == numbers if consumers == 1 else {*cluster.raised} <= numbers


@pytest.mark.parametrize("seed", range(10))
def test_stop_at_any_time(seed):
    """Everybody comes back, and each closure that was queued has an outcome."""
    cluster = Cluster(seed, producers=3, consumers=3, capacity=2, failures=0.01)
    main = Call(cluster.schedule, list(range(len(cluster.runs))))
    time.sleep(random.Random(seed).random() / 20)
    cluster.queue.stop()
    for call in cluster.consumers:
        call.end()
    with suppress(CancelledError):
        main.end()
    for number, closure in cluster.closures.items():
        with suppress(CancelledError, StepError):
            assert value(closure) == number * number
