"""The line that says how far scheduled steps are."""

import io
import threading

import pytest

from phalanx.coordinator.progress import Status, shown

DEADLINE_S = 30.0


class Terminal(io.StringIO):
    """Says that it is a terminal, and when something was written."""

    def __init__(self):
        super().__init__()
        self.has_line = threading.Event()

    def isatty(self):
        """It is one."""
        return True

    def flush(self):
        """Here at the end of each line."""
        self.has_line.set()


def status(**changed):
    """Two workers, one of which is lost."""
    given = {"workers": 2, "alive": 1, "queued": 5, "in_flight": 3, "done": 20, "again": 0, "updates": 8}
    return Status(**{**given, "staleness": {0: 6, 1: 1, 5: 1}, **changed})


def test_line_shows_mean_and_maximal_staleness():
    """Staleness is that of all updates: 6 of 0, one of 1 and one of 5."""
    expected = "7 steps/s | workers 1/2 | queued 5, in flight 3 | staleness mean 0.75, max 5"
    assert status().line(7.2) == expected
    assert "staleness mean 0.00, max 0" in status(staleness={}).line(0)


def test_shown_on_a_terminal():
    """While the wait lasts; nothing is left of it afterwards."""
    terminal = Terminal()
    with shown(status, 20, terminal, every_s=0.001):
        assert terminal.has_line.wait(DEADLINE_S)
    first, *_, last = terminal.getvalue().split("\r\x1b[K")[1:]
    assert status().line(0).startswith(first)
    assert first.startswith("0 steps/s | workers 1/2 | queued 5")
    assert last == ""


class Log(Terminal):
    """A file, or a pipe."""

    def isatty(self):
        """It is none."""
        return False


def test_lines_in_a_log():
    """Without a terminal each line is a line of its own, with nothing else in it."""
    log = Log()
    with shown(status, 20, log, every_s=0.001):
        assert log.has_line.wait(DEADLINE_S)
    assert set(log.getvalue().splitlines()) == {status().line(0)}
    assert log.getvalue().endswith("\n")


def test_no_line_in_a_log_for_a_short_wait():
    """A line comes after 30 s, and a wait that ends before has none."""
    log = Log()
    with shown(pytest.fail, 0, log):
        pass
    assert log.getvalue() == ""


def test_a_server_that_is_lost():
    """What the status raises is not for the line to tell: the wait goes on."""
    terminal = Terminal()

    def lost():
        raise ConnectionError

    with shown(lost, 0, terminal, every_s=0.001):
        assert terminal.has_line.wait(DEADLINE_S)
    assert terminal.getvalue() == "\r\x1b[K"
