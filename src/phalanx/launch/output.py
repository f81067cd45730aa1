# SPDX-License-Identifier: Apache-2.0
"""What the workers print: cut into whole lines, kept for the report, and passed on without waiting for the reader."""

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
    """Cuts a stream of bytes into lines. A lone carriage return ends one too: progress bars write nothing else.

    Example:
      >>> lines = Lines()
      >>> lines.feed(b"one\\ntw"), lines.feed(b"o\\r\\nthree"), lines.rest()
      ([b'one'], [b'two'], [b'three'])
    """

    def __init__(self) -> None:
        self._begun = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Returns the lines that `data` completes; one of more than a mebibyte comes in pieces."""
        ends = b"\n" in data or b"\r" in data or self._begun.endswith(b"\r")
        self._begun += data
        if not ends and len(self._begun) < _LONGEST_LINE_BYTES:
            return []
        # A carriage return at the end may be half of a line's end.
        half = b"\r" if self._begun.endswith(b"\r") else b""
        text = bytes(self._begun).removesuffix(half).replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, rest = text.split(b"\n")
        self._begun = bytearray(rest + half)
        if len(rest) >= _LONGEST_LINE_BYTES:
            lines += self.rest()
        return lines

    def rest(self) -> list[bytes]:
        """Returns the last line, if it has no end."""
        rest, self._begun = bytes(self._begun), bytearray()
        return [rest.removesuffix(b"\r")] if rest else []


@dataclass(frozen=True)
class KeptLine:
    """A line that a worker has printed, and where."""

    text: str
    is_error: bool


@final
class Stream:
    """One of the two streams of one worker.

    Args:
      pipe: where its output arrives.
      prefix: what stands before each line.
      kept: takes its last lines.
      is_error: whether it is the stream of errors.
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
        """Whether more may come."""
        return not self._pipe.closed

    def read(self) -> bytes:
        """Returns what has arrived, as whole lines with their prefix. Closes the pipe at its end."""
        data = os.read(self.fileno, _CHUNK_BYTES)
        return self._pass(self._lines.feed(data)) if data else self.close()

    def close(self) -> bytes:
        """Closes the pipe, and returns the line that has no end."""
        self._pipe.close()
        return self._pass(self._lines.rest())

    def _pass(self, lines: list[bytes]) -> bytes:
        for line in lines[-_KEPT_LINES:]:
            # A byte of UTF-8 text is at least a quarter of a character.
            text = line[: 4 * _KEPT_LINE_CHARS].decode(errors="replace")[:_KEPT_LINE_CHARS]
            self._kept.append(KeptLine(text, self._is_error))
        return b"".join(b"%b%b\n" % (self._prefix, line) for line in lines)


def kept_lines() -> deque[KeptLine]:
    """Returns room for the last lines of one worker."""
    return deque(maxlen=_KEPT_LINES)


@final
class Sink:
    """Bytes on their way to a file descriptor whose reader may be slow, or gone.

    Args:
      fd: where they go.
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
        """Whether the workers should wait."""
        return len(self._waiting) >= _FULL_BYTES

    def put(self, data: bytes) -> None:
        """Takes bytes; forgets them if nobody can read them any more."""
        if self.error is None:
            self._waiting += data

    def write(self) -> None:
        """Writes what can be written without waiting."""
        try:
            while self._waiting and wait((), (self.fd,), timeout_s=0):
                # A pipe that is ready takes so much at once.
                written = os.write(self.fd, self._waiting[: select.PIPE_BUF])
                del self._waiting[:written]
        except BlockingIOError:
            return
        except OSError as error:
            self.error = error
            self._waiting.clear()


def wait(readers: Iterable[int], writers: Iterable[int], *, timeout_s: float) -> set[int]:
    """Returns those of the file descriptors that are ready, after `timeout_s` seconds none of them maybe."""
    poll = select.poll()
    for fd in readers:
        poll.register(fd, select.POLLIN)
    for fd in writers:
        poll.register(fd, select.POLLOUT)
    return {fd for fd, _ in poll.poll(max(0.0, timeout_s) * 1000)}
