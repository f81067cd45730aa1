"""Signals that arrive while something is held are handled when it is done; programs need no such protection."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from phalanx.programs.interrupts import Interrupts, deferred


def test_interrupt_comes_after_what_is_held():
    """Ctrl-C within a step is raised at its end, once."""
    done = []
    with Interrupts() as interrupts:
        with pytest.raises(KeyboardInterrupt):
            hold_while_it_comes(interrupts, done)
        with interrupts.held():
            done.append("again")
    assert done == ["step", "again"]


def hold_while_it_comes(interrupts, done):
    """A step in which Ctrl-C comes."""
    with interrupts.held():
        os.kill(os.getpid(), signal.SIGINT)
        done.append("step")
    done.append("not reached")


def test_interrupt_between_two_steps():
    """Ctrl-C outside a step is raised at once, and the handler is put back."""
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), Interrupts():
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_second_interrupt_is_raised_at_once():
    """A user who presses Ctrl-C twice does not wait for the end of the step."""
    done = []
    with Interrupts(again_at_once=True) as interrupts, pytest.raises(KeyboardInterrupt):
        hold_while_it_comes_twice(interrupts, done)
    assert done == ["first"]


def hold_while_it_comes_twice(interrupts, done):
    """A step in which Ctrl-C comes twice."""
    with interrupts.held():
        os.kill(os.getpid(), signal.SIGINT)
        done.append("first")
        os.kill(os.getpid(), signal.SIGINT)
        done.append("second")


def test_ignored_interrupts_stay_ignored():
    """If SIGINT is ignored, nothing is changed."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Interrupts() as interrupts, interrupts.held():
            os.kill(os.getpid(), signal.SIGINT)
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


class Alarm(Exception):
    """What a handler of the user's raises."""


@pytest.mark.parametrize("number", [signal.SIGALRM, signal.SIGTERM, signal.SIGUSR1])
def test_every_handler_of_the_user_is_deferred(number):
    """A time limit by SIGALRM, for example, is not lost and comes at the end."""
    done = []

    def handle(*_):
        done.append("handled")
        raise Alarm

    before = signal.signal(number, handle)
    try:
        with pytest.raises(Alarm):
            defer_while_they_come([number], done)
        assert signal.getsignal(number) is handle
    finally:
        signal.signal(number, before)
    assert done == ["step", "handled"]


def defer_while_they_come(numbers, done):
    """A step in which some signals come."""
    with deferred():
        for number in numbers:
            os.kill(os.getpid(), number)
        done.append("step")


def test_two_signals_are_both_handled():
    """The second handler runs even if the first one raises."""
    handled = []

    def handle(number, _):
        handled.append(number)
        raise Alarm

    numbers = (signal.SIGUSR1, signal.SIGUSR2)
    before = [signal.signal(number, handle) for number in numbers]
    try:
        with pytest.raises(Alarm):
            defer_while_they_come(numbers, [])
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
    assert handled == list(numbers)


def test_a_handler_that_is_installed_inside_stays():
    """What the user installs while a step runs is not overwritten at its end."""
    before = signal.getsignal(signal.SIGUSR1)
    own = lambda *_: None  # noqa: E731
    first = lambda *_: None  # noqa: E731
    signal.signal(signal.SIGUSR1, first)
    try:
        with deferred():
            signal.signal(signal.SIGUSR1, own)
        assert signal.getsignal(signal.SIGUSR1) is own
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_other_threads_defer_nothing():
    """Python runs handlers in the main thread alone, and only there they can be replaced."""
    seen = []

    def work():
        with deferred():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGINT)]


IGNORED = """
import gc, os, signal, sys, time
{importing}
class Stop(Exception):
    pass
def stop(number, frame):
    raise Stop("now")
class Holder:
    def __del__(self):
        os.kill(os.getpid(), {number})
def collected(phase, info):
    if phase == "start":
        gc.callbacks.clear()
        os.kill(os.getpid(), {number})
signal.signal(signal.SIGALRM, stop)
try:
    {inside}
    time.sleep(0.5)
    print("ignored")
except (KeyboardInterrupt, Stop) as e:
    print("heard", *e.args, signal.getsignal(signal.SIGALRM) is stop)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGALRM])
@pytest.mark.parametrize("inside", ["holder = Holder(); del holder", "gc.callbacks.append(collected); gc.collect()"])
def test_a_signal_that_python_ignores_is_heard(inside, number):
    """What a handler raises in a destructor or a callback of the collector: Python goes on, with Phalanx it arrives."""
    arrived = "heard True" if number == signal.SIGINT else "heard now True"
    for importing, expected in (("", "ignored"), ("import phalanx.programs.interrupts", arrived)):
        code = IGNORED.format(importing=importing, inside=inside, number=int(number))
        found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
        assert found.stdout.strip() == expected, found.stderr


@pytest.mark.slow
def test_other_errors_of_destructors_are_shown():
    """An error that no signal handler raised is printed, as Python does."""
    code = "import phalanx.programs.interrupts\nclass A:\n    def __del__(self):\n        raise ValueError('mine')\na = A()\ndel a"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert "ValueError: mine" in found.stderr
