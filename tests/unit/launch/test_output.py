"""Streams cut into lines, and a sink with a slow reader."""

import os
import re
import struct
import sys
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx._src.launch.output import Lines, Sink, Stream, kept_lines, wait

CHUNKS = st.lists(st.binary(max_size=5) | st.sampled_from([b"\r", b"\n", b"\r\n", b"a\r", b"\nb"]), max_size=20)


@given(CHUNKS)
def test_lines_do_not_depend_on_chunks(chunks):
    """Whatever arrives together, the lines are those of the whole."""
    lines = Lines()
    found = [line for chunk in chunks for line in lines.feed(chunk)] + lines.rest()
    *whole, rest = re.split(rb"\r\n|\r|\n", b"".join(chunks))
    assert found == whole + ([rest] if rest else [])


def test_lines_come_at_once():
    """A line is passed on when its end arrives, not with the next one."""
    lines = Lines()
    assert lines.feed(b"one\ntw") == [b"one"]
    assert lines.feed(b"o\r") == []
    assert lines.feed(b"three\n") == [b"two", b"three"]


def test_line_without_end():
    """A line of megabytes comes in pieces, and is not kept in memory."""
    lines, found = Lines(), []
    for _ in range(100):
        found += lines.feed(b"x" * (1 << 16))
    assert len(found) == 6
    assert b"".join(found + lines.rest()) == b"x" * 100 * (1 << 16)


def stream(data, kept, **options):
    """A stream in which these bytes have arrived, and no more will."""
    reader, writer = os.pipe()
    os.write(writer, data)
    os.close(writer)
    return Stream(open(reader, "rb", buffering=0), "[worker 0] ", kept, **{"is_error": False, **options})


def test_stream_gives_whole_lines_first():
    """Whole lines first, with their prefix; at the end the rest, and the pipe is closed."""
    one = stream(b"a\nb", kept := kept_lines(), is_error=True)
    assert (one.read(), one.is_open) == (b"[worker 0] a\n", True)
    assert (one.read(), one.is_open) == (b"[worker 0] b\n", False)
    assert [(line.text, line.is_error) for line in kept] == [("a", True), ("b", True)]


@pytest.mark.parametrize("before", ["", "50%|###   |", "the end\n", "a\n\nb\n"])
def test_report_without_an_empty_line(before):
    """A report of a watch begins with the end of a line. It ends that of a progress bar, and is nothing otherwise."""
    one = stream(f"{before}\nPhalanx: rank 1 has ended\n".encode(), kept_lines(), is_error=True)
    lines = [*before.splitlines(), "Phalanx: rank 1 has ended"]
    assert one.read().decode() == "".join(f"[worker 0] {line}\n" for line in lines)
    one.close()


def test_kept_lines_are_few_and_short():
    """Of what a worker prints little is kept, whatever it prints: the last lines, and the beginning of each."""
    kept = kept_lines()
    one = stream(b"\xc3\xa4" * 5000 + b"\n" + b"\n".join(b"%d" % i for i in range(199)) + b"\n", kept)
    one.read()
    assert len(kept) == 200
    assert kept[0].text == "ä" * 1000
    assert kept[-1].text == "198"
    one.close()
    assert isinstance(kept, deque)
    assert kept.maxlen == 200


def test_sink_does_not_wait():
    """What the reader does not take stays in the sink, which says when it has enough."""
    reader, writer = os.pipe()
    sink, data = Sink(writer), os.urandom(2 << 20)
    sink.put(data)
    sink.write()
    assert sink.is_full
    assert not sink.is_empty
    arrived = bytearray()
    while not sink.is_empty:
        arrived += os.read(reader, 1 << 16)
        sink.write()
    assert not sink.is_full
    os.close(writer)
    while rest := os.read(reader, 1 << 16):
        arrived += rest
    os.close(reader)
    assert arrived == data


def test_sink_without_reader():
    reader, writer = os.pipe()
    os.close(reader)
    sink = Sink(writer)
    sink.put(b"x")
    sink.write()
    assert isinstance(sink.error, BrokenPipeError)
    sink.put(b"y")
    assert sink.is_empty
    os.close(writer)


def test_sink_that_does_not_block():
    """A file descriptor that others have made non-blocking loses nothing."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    sink = Sink(writer)
    sink.put(b"x" * (1 << 17))
    sink.write()
    left = len(os.read(reader, 1 << 20))
    sink.write()
    os.close(writer)
    while rest := os.read(reader, 1 << 20):
        left += len(rest)
    os.close(reader)
    assert (left, sink.is_empty, sink.error) == (1 << 17, True, None)


@pytest.mark.parametrize("data", [b"", b"x"])
def test_wait_returns_what_is_ready(data):
    (ready, writer), (idle, other) = os.pipe(), os.pipe()
    os.write(writer, data)
    os.close(writer)
    assert wait([ready, idle], [other], timeout_s=5) == {ready, other}
    assert wait([idle], [], timeout_s=0) == set()
    for fd in (ready, idle, other):
        os.close(fd)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has event counters")
def test_sink_keeps_what_is_not_taken_yet():
    """A descriptor that is ready for less than what waits: an event counter whose room is 1."""
    counter = os.eventfd(0, os.EFD_NONBLOCK)
    try:
        os.eventfd_write(counter, 2**64 - 3)
        sink = Sink(counter)
        sink.put(struct.pack("Q", 5))
        sink.write()
        assert (sink.is_empty, sink.error) == (False, None)
        os.eventfd_read(counter)
        sink.write()
        assert (sink.is_empty, sink.error) == (True, None)
        assert os.eventfd_read(counter) == 5
    finally:
        os.close(counter)
