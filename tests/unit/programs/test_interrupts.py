"""Signals that arrive while something is held are handled when it is done; programs need no such protection."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from phalanx._src.programs.interrupts import Interrupts, deferred


@pytest.fixture(autouse=True)
def handlers():
    """Puts back what a test installs. SIGINT has Python's handler, also where these tests run in the background."""
    numbers = (signal.SIGINT, signal.SIGALRM, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
    before = {number: signal.getsignal(number) for number in numbers}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def interrupt(number=signal.SIGINT):
    os.kill(os.getpid(), number)


def hold(interrupts, done, times=1):
    with interrupts.held():
        for _ in range(times):
            interrupt()
            done.append("step")
    done.append("not reached")


def test_interrupt_comes_after_what_is_held():
    """Ctrl-C within a step is raised at its end, once."""
    done = []
    with Interrupts() as interrupts:
        with pytest.raises(KeyboardInterrupt):
            hold(interrupts, done)
        with interrupts.held():
            done.append("again")
    assert done == ["step", "again"]


def test_interrupt_between_two_steps():
    """Ctrl-C outside a step is raised at once, and the handler is put back."""
    with pytest.raises(KeyboardInterrupt), Interrupts():
        interrupt()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_second_interrupt_is_raised_at_once():
    """A user who presses Ctrl-C twice does not wait for the end of the step."""
    done = []
    with Interrupts(again_at_once=True) as interrupts, pytest.raises(KeyboardInterrupt):
        hold(interrupts, done, times=2)
    assert done == ["step"]


def test_ignored_interrupts_stay_ignored():
    """If SIGINT is ignored, nothing is changed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Interrupts() as interrupts, interrupts.held():
        interrupt()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


class Alarm(Exception):
    """What a handler of the user's raises."""


@pytest.mark.parametrize(
    "numbers", [[signal.SIGALRM], [signal.SIGTERM], [signal.SIGUSR1, signal.SIGUSR2]], ids=["alarm", "term", "two"]
)
def test_every_handler_of_the_user_is_deferred(numbers):
    """A time limit by SIGALRM, for example, is not lost and comes at the end. A second handler runs even if the first raises."""
    done = []

    def handle(number, _):
        done.append(number)
        raise Alarm

    def step():
        with deferred():
            for number in numbers:
                interrupt(number)
            done.append("step")

    for number in numbers:
        signal.signal(number, handle)
    with pytest.raises(Alarm):
        step()
    assert {signal.getsignal(number) for number in numbers} == {handle}
    assert done == ["step", *numbers]


def test_a_handler_that_is_installed_inside_stays():
    """What the user installs while a step runs is not overwritten at its end."""
    first, second = (lambda *_, name=name: name for name in ("first", "second"))
    signal.signal(signal.SIGUSR1, first)
    with deferred():
        signal.signal(signal.SIGUSR1, second)
    assert signal.getsignal(signal.SIGUSR1) is second


def test_other_threads_defer_nothing():
    """Python runs handlers in the main thread alone, and only there they can be replaced."""
    seen = []

    def work():
        with deferred():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]


IGNORED = """
import gc, os, signal, sys, time
class Stop(Exception):
    pass
def stop(number, frame):
    raise Stop("now")
class Holder:
    def __del__(self):
        os.kill(os.getpid(), number)
def collected(phase, info):
    if phase == "start":
        gc.callbacks.clear()
        os.kill(os.getpid(), number)
def in_a_destructor():
    Holder()
def in_a_callback():
    gc.callbacks.append(collected)
    gc.collect()
class Fails:
    def __del__(self):
        raise ValueError("mine")
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGALRM, stop)
for number in (signal.SIGINT, signal.SIGALRM):
    for arrives in (in_a_destructor, in_a_callback):
        try:
            arrives()
            for _ in range({rounds}):
                time.sleep(0.01)
            print("ignored")
        except (KeyboardInterrupt, Stop) as e:
            print("heard", *e.args, signal.getsignal(signal.SIGALRM) is stop)
Fails()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "expected"),
    [
        pytest.param(IGNORED.format(rounds=1), ["ignored"] * 4, id="python"),
        pytest.param(
            "import phalanx._src.programs.interrupts" + IGNORED.format(rounds=6000),
            ["heard True"] * 2 + ["heard now True"] * 2,
            id="phalanx",
        ),
    ],
)
def test_a_signal_that_python_ignores_is_heard(code, expected):
    """What a handler raises in a destructor or a callback of the collector: Python goes on, with Phalanx it arrives.

    An error that no signal handler raised is printed, as Python does.
    """
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert found.stdout.splitlines() == expected, found.stderr
    assert "ValueError: mine" in found.stderr
