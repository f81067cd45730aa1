# SPDX-License-Identifier: Apache-2.0
"""Forwards the output of all processes of the launcher, and waits for output and signals."""

import signal
import time
from collections.abc import Iterable, Sequence
from typing import final

from phalanx._src.launch.output import Sink, Stream, wait
from phalanx._src.launch.signals import Signals
from phalanx.errors import PhalanxError

# Output and signals end a wait at once. What only time brings, such as the next start of an evaluator, may be this late.
TICK_S, LONGEST_WAIT_S = 0.05, 1.0


@final
class OutputError(PhalanxError):
    """The output of processes that have run cannot be written."""


@final
class Relay:
    """The streams of all processes, and where their lines go.

    Args:
      signals: the signals that this process receives.
      sink: receives the output of the processes.
    """

    def __init__(self, signals: Signals, sink: Sink) -> None:
        self.signals, self.sink = signals, sink
        self._streams: list[Stream] = []

    @property
    def is_interrupted(self) -> bool:
        """Whether a signal asked this process to end, or the output can no longer be written."""
        return self.signals.first is not None or self.sink.error is not None

    def add(self, streams: Iterable[Stream]) -> None:
        """Forwards these streams too, until they end."""
        # Each restart adds streams, so those that have ended must go.
        self._streams = [*(stream for stream in self._streams if stream.is_open), *streams]

    def pass_output(self, timeout_s: float) -> list[Stream]:
        """Waits for output or a signal, and forwards the output. Returns the streams that had some."""
        # If the reader of the output is slow, the workers wait, as they would without a launcher.
        streams = [] if self.sink.is_full else [stream for stream in self._streams if stream.is_open]
        ready = self._ready(streams, timeout_s)
        readable = [stream for stream in streams if stream.fileno in ready]
        for stream in readable:
            self.sink.put(stream.read())
        self.sink.write()
        return readable

    def flush(self, patience_s: float) -> None:
        """Writes what has been read. After a signal, waits for a slow reader no longer than `patience_s` seconds."""
        started_s = time.monotonic()
        while not self.sink.is_empty and not self.is_too_late(started_s, patience_s):
            self._ready([], TICK_S)
            self.sink.write()

    def is_too_late(self, started_s: float, patience_s: float) -> bool:
        """Whether a signal has arrived and `patience_s` seconds have passed since `started_s`."""
        return self.signals.first is not None and time.monotonic() - started_s > patience_s

    def ending_signal(self) -> int | None:
        """Returns the signal that ends the launcher, or None. It is SIGPIPE if nobody reads the output any more.

        Raises:
          OutputError: the output could not be written for another reason.
        """
        error, number = self.sink.error, self.signals.first
        if isinstance(error, BrokenPipeError):
            return number or signal.SIGPIPE
        if error is not None:
            raise OutputError("the output of the workers", f"cannot be written: {error}. They have been ended.")
        return number

    def _ready(self, streams: Sequence[Stream], timeout_s: float) -> set[int]:
        readers = [self.signals.fileno, *(stream.fileno for stream in streams)]
        ready = wait(readers, [] if self.sink.is_empty else [self.sink.fd], timeout_s=timeout_s)
        if self.signals.fileno in ready:
            self.signals.clear()
        return ready
