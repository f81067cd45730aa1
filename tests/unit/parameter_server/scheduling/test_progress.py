"""The line that says how far scheduled steps are."""

import io
import threading

import pytest

from phalanx._src.parameter_server.scheduling.progress import Status, shown

DEADLINE_S = 120.0


class Output(io.StringIO):
    """A terminal, or a file; it knows when a line was written."""

    def __init__(self, *, is_terminal):
        super().__init__()
        self.has_line, self.isatty = threading.Event(), lambda: is_terminal

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
    terminal = Output(is_terminal=True)
    with shown(status, 20, terminal, every_s=0.001):
        assert terminal.has_line.wait(DEADLINE_S)
    first, *_, last = terminal.getvalue().split("\r\x1b[K")[1:]
    assert status().line(0).startswith(first)
    assert first.startswith("0 steps/s | workers 1/2 | queued 5")
    assert last == ""


def test_lines_in_a_log():
    """Without a terminal each line is a line of its own, with nothing else in it."""
    log = Output(is_terminal=False)
    with shown(status, 20, log, every_s=0.001):
        assert log.has_line.wait(DEADLINE_S)
    assert set(log.getvalue().splitlines()) == {status().line(0)}
    assert log.getvalue().endswith("\n")


def test_no_line_in_a_log_for_a_short_wait():
    """A line comes after 30 s, and a wait that ends before has none."""
    log = Output(is_terminal=False)
    with shown(pytest.fail, 0, log):
        pass
    assert log.getvalue() == ""


def test_a_server_that_is_lost():
    """What the status raises is not for the line to tell: the wait goes on."""
    terminal = Output(is_terminal=True)

    def lost():
        raise ConnectionError

    with shown(lost, 0, terminal, every_s=0.001):
        assert terminal.has_line.wait(DEADLINE_S)
    assert terminal.getvalue() == "\r\x1b[K"
