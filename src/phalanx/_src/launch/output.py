# SPDX-License-Identifier: Apache-2.0
"""Splits the output of workers into lines, keeps the last ones for reports, and forwards all without blocking."""

import os
import select
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import IO, final

_CHUNK_BYTES = 1 << 16
_LONGEST_LINE_BYTES = 1 << 20
_FULL_BYTES = 1 << 20
_KEPT_LINES = 200
_KEPT_LINE_CHARS = 1000


@final
class Lines:
    """Splits a stream of bytes into lines. A lone carriage return ends a line too, because progress bars write no newline.

    Example:
      >>> lines = Lines()
      >>> lines.feed(b"one\\ntw"), lines.feed(b"o\\r\\nthree"), lines.rest()
      ([b'one'], [b'two'], [b'three'])
    """

    def __init__(self) -> None:
        self._begun = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Returns the lines that `data` completes. Lines of more than 1 MiB are returned in pieces."""
        ends = b"\n" in data or b"\r" in data or self._begun.endswith(b"\r")
        self._begun += data
        # A line that arrives in many pieces must not be copied and split with each of them.
        if not ends and len(self._begun) < _LONGEST_LINE_BYTES:
            return []
        # A carriage return at the end may be the first half of `\r\n`.
        half = b"\r" if self._begun.endswith(b"\r") else b""
        text = bytes(self._begun).removesuffix(half).replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, rest = text.split(b"\n")
        self._begun = bytearray(rest + half)
        if len(rest) >= _LONGEST_LINE_BYTES:
            lines += self.rest()
        return lines

    def rest(self) -> list[bytes]:
        """Returns the last line if it is unterminated, in a list."""
        rest, self._begun = bytes(self._begun), bytearray()
        return [rest.removesuffix(b"\r")] if rest else []


@dataclass(frozen=True)
class KeptLine:
    """A line that a worker printed, and whether it was on the error stream."""

    text: str
    is_error: bool


@final
class Stream:
    """The output or error stream of a worker.

    Args:
      pipe: pipe from which the output is read.
      prefix: text to put before each line.
      kept: queue that receives the last lines.
      is_error: whether this is the error stream.
    """

    def __init__(self, pipe: IO[bytes], prefix: str, kept: deque[KeptLine], *, is_error: bool) -> None:
        self._pipe, self._prefix, self._kept, self._is_error = pipe, prefix.encode(), kept, is_error
        self._lines = Lines()

    @property
    def fileno(self) -> int:
        """The file descriptor to wait for."""
        return self._pipe.fileno()

    @property
    def is_open(self) -> bool:
        """Whether more output may arrive."""
        return not self._pipe.closed

    def read(self) -> bytes:
        """Returns the complete lines that have arrived, with their prefix. Closes the pipe at the end of the stream."""
        data = os.read(self.fileno, _CHUNK_BYTES)
        return self._pass(self._lines.feed(data)) if data else self.close()

    def close(self) -> bytes:
        """Closes the pipe and returns the last line if it is unterminated."""
        self._pipe.close()
        return self._pass(self._lines.rest())

    def _pass(self, lines: list[bytes]) -> bytes:
        # A report begins with a newline, to end the line of a progress bar. It is an empty line if there is none.
        if self._is_error:
            pairs = zip(lines, [*lines[1:], b""], strict=False)
            lines = [line for line, after in pairs if line or not after.startswith(b"Phalanx: ")]
        # The queue would drop the lines before, so they need not be decoded.
        for line in lines[-_KEPT_LINES:]:
            # A character takes at most four bytes in UTF-8.
            text = line[: 4 * _KEPT_LINE_CHARS].decode(errors="replace")[:_KEPT_LINE_CHARS]
            self._kept.append(KeptLine(text, self._is_error))
        return b"".join(b"%b%b\n" % (self._prefix, line) for line in lines)


def kept_lines() -> deque[KeptLine]:
    """Returns an empty queue for the last lines of one worker."""
    return deque(maxlen=_KEPT_LINES)


@final
class Sink:
    """A buffer in front of a file descriptor whose reader may be slow or gone.

    Args:
      fd: file descriptor to write to.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.error: OSError | None = None
        self._waiting = bytearray()

    @property
    def is_empty(self) -> bool:
        """Whether everything has been written."""
        return not self._waiting

    @property
    def is_full(self) -> bool:
        """Whether the buffer is full, so that the workers should wait."""
        return len(self._waiting) >= _FULL_BYTES

    def put(self, data: bytes) -> None:
        """Adds bytes to the buffer. Drops them if writing has failed before."""
        if self.error is None:
            self._waiting += data

    def write(self) -> None:
        """Writes as much as possible without blocking."""
        try:
            while self._waiting and wait((), (self.fd,), timeout_s=0):
                # A pipe that is ready accepts PIPE_BUF bytes without blocking.
                written = os.write(self.fd, self._waiting[: select.PIPE_BUF])
                del self._waiting[:written]
        except BlockingIOError:  # Another process has made the descriptor non-blocking.
            return
        except OSError as error:
            self.error = error
            self._waiting.clear()


def open_standard_streams() -> None:
    """Opens /dev/null in place of a standard stream that this process was started without: the next file would get its number."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def wait(readers: Iterable[int], writers: Iterable[int], *, timeout_s: float) -> set[int]:
    """Returns the file descriptors that are ready. The set may be empty after `timeout_s` seconds."""
    # Not `select`, which takes no descriptors above 1023.
    poll = select.poll()
    for fd in readers:
        poll.register(fd, select.POLLIN)
    for fd in writers:
        poll.register(fd, select.POLLOUT)
    return {fd for fd, _ in poll.poll(max(0.0, timeout_s) * 1000)}
