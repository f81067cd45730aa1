"""What is heard of the end of this process: real signals, a function, and the handlers that were there before."""

import os
import queue
import signal
import subprocess
import sys
import threading

import pytest

from phalanx._src.cluster.processes import notices
from phalanx._src.cluster.processes.notices import Notices
from phalanx.errors import ContextError
from phalanx.errors.deferred import failures

DEADLINE_S = 120.0


@pytest.fixture
def told():
    return queue.Queue()


@pytest.fixture
def listen(monkeypatch, told):
    """Makes notices, which are closed with the test. They ask their function more often than once per second."""
    monkeypatch.setattr(notices, "_POLL_S", 0.02)
    made = []

    def make(ask=None):
        made.append(Notices("f()", told.put, ask))
        return made[-1]

    yield make
    for each in reversed(made):
        each.close()


def terminate():
    """Sends SIGTERM to this process, and gives Python a bytecode to handle it."""
    os.kill(os.getpid(), signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_each_sigterm_is_told(listen, told):
    """SIGTERM does not end the process, and the handler from before comes back."""
    before = signal.getsignal(signal.SIGTERM)
    heard = listen()
    for _ in range(2):
        terminate()
        assert told.get(timeout=DEADLINE_S) == "received SIGTERM"
    heard.close()
    heard.close()
    assert signal.getsignal(signal.SIGTERM) == before
    assert not heard.is_alive()


def test_function_is_asked_until_it_answers(listen, told):
    """Its first answer is told, and no other."""
    answers = [None, None, "is preempted"]
    listen(lambda: answers.pop(0))
    assert told.get(timeout=DEADLINE_S) == "is preempted"
    terminate()
    assert told.get(timeout=DEADLINE_S) == "received SIGTERM"
    assert not answers


def test_error_of_the_function_is_raised_at_the_next_step(listen, told):
    """The thread goes on hearing SIGTERM."""
    heard = listen(lambda: {}["no such machine"])
    while not failures:
        assert heard.is_alive()
    assert str(failures.pop()) == "'no such machine'"
    terminate()
    assert told.get(timeout=DEADLINE_S) == "received SIGTERM"


def test_two_hear_the_same_signal(listen, told):
    """A second object does not make the first one deaf."""
    both = [listen(), listen()]
    terminate()
    assert [told.get(timeout=DEADLINE_S) for _ in both] == ["received SIGTERM"] * 2


def test_handler_that_came_later_stays(listen):
    """`close` does not remove the handler of somebody else."""
    heard = listen()
    try:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        heard.close()
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, heard._before)


def test_other_threads_are_refused(told):
    """Python handles signals in the main thread only."""
    caught = []

    def create():
        try:
            Notices("Handler()", told.put)
        except ContextError as e:
            caught.append(str(e))

    thread = threading.Thread(target=create, name="mine")
    thread.start()
    thread.join()
    assert caught[0].startswith("Handler() in the thread 'mine': it handles SIGTERM")
    assert "HINT: create it in the main thread" in caught[0]


def test_signals_in_a_row_do_not_lock():
    """The handler takes no lock, so that a signal inside a handler is harmless."""
    code = """
import os, signal, threading
from phalanx._src.cluster.processes.notices import Notices
heard = []
notices = Notices("f()", heard.append)
for _ in range(2000):
    os.kill(os.getpid(), signal.SIGTERM)
notices.close()
print(len(heard) > 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.stdout == "True\n", done.stderr


def test_process_that_ends_keeps_its_code():
    """Whatever comes after: in a `finally` block, in a handler of `atexit`, and after Python has removed its handlers."""
    code = """
import atexit, os, signal, sys
from phalanx._src.cluster.processes.notices import Notices

class Last:
    def __del__(self, kill=os.kill, pid=os.getpid(), signal=signal.SIGTERM):
        kill(pid, signal)

last = Last()
notices = Notices("f()", print)
atexit.register(os.kill, os.getpid(), signal.SIGTERM)
notices.close(is_ending=True)
try:
    sys.exit(42)
finally:
    os.kill(os.getpid(), signal.SIGTERM)
    notices.close()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (42, "", "")
