"""Reading ahead: no more than asked, and no thread that reads longer than it is used."""

import contextvars
import gc
import signal
import subprocess
import sys
import threading
import traceback
import weakref

import numpy as np
import pytest
from simulation import DEADLINE_S, prefetching, wait_for
from tests import forks

import phalanx
from phalanx._src.input.prefetch import _ReadingThread, readings
from phalanx._src.tracing.context import get_strategy

NAME = contextvars.ContextVar("name", default="")


@pytest.fixture(autouse=True)
def no_thread_remains():
    """After each test, though pytest may keep its frames."""
    before = prefetching()
    gc.freeze()  # A collection takes a second otherwise, for all objects of JAX and Keras.
    yield
    gc.collect()
    gc.unfreeze()
    wait_for(lambda: set(prefetching()) <= set(before))


def waits_for_room():
    """Whether every thread that reads ahead has stopped to wait."""
    frames = sys._current_frames()
    return all(frames[t.ident].f_code is threading.Condition.wait.__code__ for t in prefetching())


class Source:
    """Counts up to its end, where it may fail."""

    def __init__(self, end, failure=None):
        self.count, self._end, self._failure = 0, end, failure

    def __call__(self):
        if self.count == self._end:
            if self._failure is not None:
                raise self._failure
            return None
        self.count += 1
        return self.count


@pytest.mark.parametrize("ahead", [0, 1, 2, 8])
@pytest.mark.parametrize("end", [0, 1, 5, 30])
def test_items_in_order(ahead, end):
    """Then None, again and again."""
    items = readings(Source(end), ahead, in_thread=True)
    assert [items.get() for _ in range(end)] == list(range(1, end + 1))
    assert [items.get() for _ in range(3)] == [None] * 3


@pytest.mark.parametrize("ahead", [1, 2, 8])
def test_no_more_ahead_than_asked(ahead):
    """As soon as one is taken, the next is read. `stop` ends the thread, though it waits for room."""
    source = Source(100)
    items = readings(source, ahead, in_thread=True)
    for taken in range(4):
        wait_for(lambda: source.count == taken + ahead and waits_for_room())
        assert source.count == taken + ahead
        assert items.get() == taken + 1
    items.stop()
    assert prefetching() == []


@pytest.mark.parametrize("in_thread", [True, False])
def test_no_more_than_will_be_taken(in_thread):
    """However many may be read ahead."""
    source = Source(100)
    items = readings(source, 3, in_thread=in_thread, most=5)
    assert [items.get(most) for most in (5, 4, 3, 2, 1)] == [1, 2, 3, 4, 5]
    wait_for(lambda: not prefetching() or waits_for_room())
    assert source.count == 5
    assert items.get() == 6
    items.stop()


def test_nothing_ahead_needs_no_thread():
    """Each item is read when it is asked for, by who asks."""
    source = Source(3)
    items = readings(source, 0, in_thread=True)
    assert (source.count, prefetching()) == (0, [])
    assert (items.get(), source.count) == (1, 1)
    assert items.stop() == ([], None)


@pytest.mark.parametrize("in_thread", [True, False])
@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_failure_has_its_place(ahead, in_thread):
    """The items before it are delivered, and nothing after it."""
    items = readings(Source(2, OSError("disk gone")), ahead, in_thread=in_thread)
    assert [items.get(), items.get()] == [1, 2]
    with pytest.raises(OSError, match="disk gone"):
        items.get()
    if ahead and in_thread:
        assert items.get() is None


@pytest.mark.parametrize("in_thread", [True, False])
def test_stop_gives_back_what_was_read(in_thread):
    """The items that nobody has taken, in order, and the failure behind them."""
    items = readings(Source(3, OSError("disk gone")), 5, in_thread=in_thread)
    assert items.get() == 1
    wait_for(lambda: not prefetching())
    rest, failure = items.stop()
    assert rest == [2, 3]
    assert isinstance(failure, OSError)


def test_dropped_reader_frees_its_source():
    """The thread does not keep what it reads for alive."""
    items = readings(Source(100), 2, in_thread=True)
    seen = weakref.ref(items)
    assert len(prefetching()) == 1
    del items
    gc.collect()
    assert seen() is None
    wait_for(lambda: not prefetching())


@pytest.mark.parametrize("how", ["end", "drop", "set_state"])
def test_thread_of_an_iterator(strategy, how):
    """It ends with the data, with the iterator, and for another thread that reads from another position."""
    iterator = iter(strategy.experimental_distribute_dataset(lambda: iter(np.arange(8.0).reshape(4, 2))))
    next(iterator)
    assert len(prefetching()) == 1
    if how == "set_state":
        iterator.set_state(iterator.get_state())
        assert prefetching() == []
    elif how == "drop":
        del iterator
        gc.collect()
    else:
        assert len(list(iterator)) == 3
    wait_for(lambda: not prefetching())


def test_one_thread_reads_pass_after_pass(strategy):
    """Each pass in the context of its caller. A thread per pass would leave memory in an arena of its own."""
    seen = []

    def batches():
        seen.append((threading.current_thread(), NAME.get()))
        yield np.ones(2)

    dataset = strategy.experimental_distribute_dataset(batches)
    for name in "abc":
        NAME.set(name)
        list(dataset)
    assert len({thread for thread, _ in seen}) == 1
    assert [name for _, name in seen] == ["a", "b", "c"]


def test_readings_at_the_same_time_have_a_thread_each():
    """And those after them take no other threads."""
    threads = lambda: [readings(threading.current_thread, 1, in_thread=True) for _ in range(3)]  # noqa: E731
    both = []
    for _ in range(2):
        each = threads()
        both.append({items.get() for items in each})
        for items in each:
            items.stop()
    assert len(both[0]) == 3
    assert both[0] == both[1]


def test_few_threads_remain_of_many_readers():
    """Who has read many data at the same time may never do so again."""
    many = [readings(Source(9), 1, in_thread=True) for _ in range(12)]
    for items in many:
        items.stop()
    wait_for(lambda: sum(isinstance(t, _ReadingThread) for t in threading.enumerate()) <= 4)


def test_idle_thread_keeps_nothing_of_what_it_read():
    """The end of a reading frees its source, though the thread lives on."""
    source = Source(1)
    seen, items = weakref.ref(source), readings(source, 1, in_thread=True)
    assert [items.get(), items.get()] == [1, None]
    del source
    assert seen() is None


IN_A_FORK = """
import os
from phalanx._src.input.prefetch import readings

def total():
    items = readings(iter([1, 2, 3, None]).__next__, 1, in_thread=True)
    return sum(iter(items.get, None))

assert total() == 6
child = os.fork()
if child == 0:
    os._exit(total())
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_fork_reads_in_a_thread_of_its_own():
    """The threads of its parent are not there."""
    done = forks.run([sys.executable, "-c", IN_A_FORK], capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.stdout == "6\n", done.stderr


def test_generator_that_raises_at_row_1000(strategy):
    """The batches before it are delivered; the error has the generator's traceback; no thread remains."""

    def a_loader_of_rows():
        for i in range(2000):
            if i == 1000:
                raise OSError("row 1000 is unreadable")
            yield np.float32(i)

    iterator = iter(strategy.experimental_distribute_dataset(a_loader_of_rows, batch_size=48))
    got = [next(iterator) for _ in range(1000 // 48)]
    assert [x for batch in got for v in batch.values for x in v.tolist()] == list(range(1000 // 48 * 48))
    with pytest.raises(OSError, match="row 1000 is unreadable") as info:
        next(iterator)
    assert "a_loader_of_rows" in [frame.name for frame in traceback.extract_tb(info.value.__traceback__)]
    assert prefetching() == []


@pytest.mark.parametrize("ahead", [None, 0, 1, 3])
def test_buffer_size_of_an_iterator(strategy, ahead):
    """0 reads when asked, in the caller's thread; n reads n batches ahead, 1 by default."""
    read, ahead_or_default = [], 1 if ahead is None else ahead
    batches = lambda: (read.append(threading.current_thread().name) or np.ones(2) for _ in range(9))  # noqa: E731
    options = None if ahead is None else phalanx.InputOptions(experimental_per_replica_buffer_size=ahead)
    iterator = iter(strategy.experimental_distribute_dataset(batches, options))
    next(iterator)
    wait_for(lambda: len(read) == 1 + ahead_or_default and waits_for_room())
    reader = "phalanx-prefetch" if ahead_or_default else threading.current_thread().name
    assert read == [reader] * (1 + ahead_or_default)
    assert len(list(iterator)) == 8


def test_the_reader_sees_the_callers_context(strategy):
    """A generator may ask which strategy is current."""
    seen = []

    def batches():
        seen.append(get_strategy())
        yield np.ones(2)

    with strategy.scope():
        list(strategy.experimental_distribute_dataset(batches))
    assert seen == [strategy]


WAITS_FOR_EVER = """
import signal, sys, threading, time, traceback
import numpy as np
import phalanx

# The parent may run in the background, where SIGINT is ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)

def batches():
    yield np.ones(2)
    main = threading.main_thread().ident
    while not any(f.f_code is threading.Condition.wait.__code__ for f, _ in traceback.walk_stack(sys._current_frames()[main])):
        time.sleep(0.01)
    print("waits", flush=True)
    threading.Event().wait(600)

try:
    list(phalanx.OneDeviceStrategy("cpu:0").experimental_distribute_dataset(batches))
except KeyboardInterrupt:
    print("interrupted", flush=True)
    raise
"""


@pytest.mark.slow
def test_ctrl_c_ends_a_hanging_source():
    """It ends the wait for a batch, and the process, though the source hangs."""
    command = [sys.executable, "-c", WAITS_FOR_EVER]
    with forks.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout.readline() == "waits\n"
            child.send_signal(signal.SIGINT)
            out, error = child.communicate(timeout=DEADLINE_S)
        finally:
            child.kill()
    assert out == "interrupted\n"
    assert error.strip().endswith("KeyboardInterrupt")
    assert child.returncode in (1, 130, -signal.SIGINT)
