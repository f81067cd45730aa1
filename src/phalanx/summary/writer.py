# SPDX-License-Identifier: Apache-2.0
"""Writers: queues whose threads write event files of TensorBoard, or call trackers of experiments."""

import atexit
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from typing_extensions import override

from phalanx._src import compat
from phalanx._src.runtime.bootstrap import is_this_chief
from phalanx._src.tracing.records import AbstractWriter, Record, defaults
from phalanx.errors import (
    ContextError,
    InvalidArgumentError,
    MissingDependencyError,
    PhalanxError,
    SummaryError,
    arguments,
    shown,
)
from phalanx.summary import events
from phalanx.summary.steps import Step, checked_step
from phalanx.summary.trackers import Tracker, Trackers

# The defaults of tf.summary.create_file_writer: two minutes, and ten events.
_CLOSE, _FLUSH_MILLIS, _MAX_QUEUE = None, 120_000, 10


class SummaryWriter(AbstractWriter):
    """Writes summaries. `create_file_writer` or `create_tracker_writer` creates it. May be used in any context.

    Source: tf.summary.SummaryWriter.

    Example:
      >>> import phalanx
      >>> with phalanx.summary.create_file_writer("out/logs").as_default(step=1):
      ...     phalanx.summary.scalar("loss", 0.5)
      True
    """

    @contextmanager
    def as_default(self, step: Step = None) -> Iterator["SummaryWriter"]:
        """Makes this the default writer of this thread inside the `with` block, and flushes it at the end.

        Args:
          step: the default step inside the block: see `summary.experimental.set_step`. Inside a compiled function it may also be
            a traced integer. None keeps the default step.

        Raises:
          InvalidArgumentError: `step` is not an integer.
        """
        step = checked_step(step)
        before = defaults.writer, defaults.step, defaults.is_own
        # A writer that is set inside a compiled function belongs to its program; others are read at each run.
        defaults.writer, defaults.is_own = self, compat.is_lifting()
        defaults.step = before[1] if step is None else step
        try:
            yield self
            if not defaults.is_own:
                self.flush()
        finally:
            defaults.writer, defaults.step, defaults.is_own = before

    def set_as_default(self, step: Step = None) -> None:
        """Makes this the default writer of this thread. Call it outside compiled functions.

        Args:
          step: new default step. See `summary.experimental.set_step`. None keeps the default step.

        Raises:
          ContextError: called in a function that is being traced.
          InvalidArgumentError: `step` is not an integer.
        """
        if compat.is_lifting():
            raise ContextError(
                "SummaryWriter.set_as_default was called in a function that is being traced",
                "it would set the default writer when the function is traced, not when it runs.",
                "with writer.as_default(): in the function, or set_as_default() before it is called",
            )
        step = checked_step(step)
        defaults.writer = self
        defaults.step = defaults.step if step is None else step

    def init(self) -> None:
        """Creates the file now, not with the first summary.

        Raises:
          SummaryError: the file cannot be written.
        """

    def flush(self) -> None:
        """Waits until everything that was recorded is in the file.

        Raises:
          SummaryError: the file cannot be written.
        """

    def close(self) -> None:
        """Writes all recorded summaries and closes the file. Later summaries raise an error.

        Raises:
          SummaryError: the file cannot be written.
        """

    @override
    def write(self, record: Record, step: Step) -> None:
        """Writes nothing."""


class _Sink(Protocol):
    """The destination of a writer's thread."""

    def write(self, record: Record, default_step: Step) -> None:
        """Writes a record."""

    def flush(self) -> None:
        """Writes buffered records."""

    def close(self) -> None:
        """Ends writing."""


class _QueueWriter(SummaryWriter):
    """Writes from a thread, so that a step need not wait until its values are computed and written.

    Args:
      place: destination, for error messages.
      hint: HINT of the error if writing fails.
      opening: opens the destination when the first summary arrives.
      max_queue: number of records that may wait for the thread.
      flush_millis: milliseconds after which the thread flushes.
    """

    def __init__(
        self, place: str, hint: str, opening: Callable[[], _Sink], max_queue: int, flush_millis: int = _FLUSH_MILLIS
    ) -> None:
        self._place, self._hint, self._opening, self._flush_s = place, hint, opening, flush_millis / 1000
        # Bounded: a training run that records faster than the disk writes waits, instead of filling the memory.
        self._items: queue.Queue[tuple[Record, Any] | threading.Event | None] = queue.Queue(max_queue)
        # Two threads may record their first summary at once, and one file must be created.
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._is_closed = False

    def __repr__(self) -> str:
        return f"SummaryWriter({self._place})"

    @override
    def init(self) -> None:
        with self._lock:
            self._require_open()
            # Only the chief writes, and only once it has something to write does it create the file and the thread.
            if self._thread is not None or not is_this_chief():
                return
            try:
                sink = self._opening()
            except PhalanxError:
                raise
            except Exception as e:
                raise self._lost(e) from e
            self._thread = threading.Thread(target=self._work, args=(sink,), name="phalanx-summary", daemon=True)
            self._thread.start()
            # So that the end of the process writes what is in the queue.
            atexit.register(self.close)

    @override
    def write(self, record: Record, step: Step) -> None:
        self.init()
        if self._thread is None:
            return
        self._raise_error()
        self._items.put((record, step))

    @override
    def flush(self) -> None:
        if self._thread is not None and not self._is_closed:
            # An event in the queue: it is reached once all records before it are written.
            done = threading.Event()
            self._items.put(done)
            done.wait()
        self._raise_error()

    @override
    def close(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            atexit.unregister(self.close)
            if self._thread is not None:
                self._items.put(_CLOSE)
                self._thread.join()
        self._raise_error()

    def _work(self, sink: _Sink) -> None:
        flushed = time.monotonic()
        while True:
            try:
                item = self._items.get(timeout=self._flush_s)
            except queue.Empty:
                item = threading.Event()
            # After an error the thread continues to empty the queue, so that no caller waits forever.
            try:
                if isinstance(item, tuple):
                    if self._error is None:
                        sink.write(*item)
                    if time.monotonic() - flushed < self._flush_s:
                        continue
                if item is _CLOSE:
                    sink.close()
                    return
                sink.flush()
                flushed = time.monotonic()
            except Exception as e:
                self._error = self._error or e
                if item is _CLOSE:
                    return
            finally:
                if isinstance(item, threading.Event):
                    item.set()

    def _require_open(self) -> None:
        if self._is_closed:
            raise InvalidArgumentError(
                f"a summary for {self!r}", "the writer was closed.", "phalanx.summary.create_file_writer(log_dir)"
            )

    def _raise_error(self) -> None:
        """Raises the thread's error, once."""
        # Once, so that `close` in a `finally` does not hide the first error behind the same one.
        error, self._error = self._error, None
        if isinstance(error, PhalanxError):
            raise error
        if error is not None:
            raise self._lost(error) from error

    def _lost(self, error: Exception) -> SummaryError:
        return SummaryError(f"summaries in {self._place}", f"they cannot be written: {error}", self._hint)


class _NoopWriter(SummaryWriter):
    """Writes nothing."""


def create_file_writer(
    logdir: str | os.PathLike[str],
    max_queue: int = _MAX_QUEUE,
    flush_millis: int = _FLUSH_MILLIS,
    filename_suffix: str = "",
) -> SummaryWriter:
    """Creates a writer of an event file that TensorBoard reads. May be called in any context.

    Only the chief of a cluster writes. The file is created with the first summary. A thread writes it.

    Args:
      logdir: the folder. It is created if it does not exist.
      max_queue: number of summaries that may wait for the thread. After that, a step waits.
      flush_millis: milliseconds after which the thread flushes the file.
      filename_suffix: end of the file's name.

    Raises:
      InvalidArgumentError: an argument has the wrong type, or a number is not positive.
      MissingDependencyError: tensorboardX is not installed.

    Source: tf.summary.create_file_writer.

    Example:
      >>> import phalanx
      >>> writer = phalanx.summary.create_file_writer("out/logs")
      >>> with writer.as_default():
      ...     for step in range(3):
      ...         _ = phalanx.summary.scalar("loss", 1 / (step + 1), step=step)
      >>> writer.close()
    """
    if not isinstance(filename_suffix, str):
        raise InvalidArgumentError(f"filename_suffix={shown(filename_suffix)}", "must be a str.", 'filename_suffix=""')
    log_dir = arguments.local_path("logdir", logdir)
    max_queue = arguments.integer("max_queue", max_queue)
    flush_millis = arguments.integer("flush_millis", flush_millis)
    # Checked here, on the user's thread: the file itself is opened later.
    if not events.is_installed("tensorboardX", "PIL"):
        raise MissingDependencyError(
            "phalanx.summary.create_file_writer(...)",
            "it needs the libraries tensorboardX and pillow, and one of them is not installed.",
            'pip install ".[tensorboard]" in a clone of Phalanx',
        )
    return _QueueWriter(
        repr(log_dir),
        "create_file_writer of a folder that can be written, with room on its disk",
        lambda: events.EventFile(log_dir, filename_suffix),
        max_queue,
        flush_millis,
    )


def create_tracker_writer(
    *trackers: Tracker, config: Mapping[str, Any] | None = None, max_queue: int = _MAX_QUEUE
) -> SummaryWriter:
    """Creates a writer that passes scalars to experiment trackers. May be called in any context.

    Only the chief of a cluster calls them: `start` with the first summary, `log` from a thread, and `finish` when the writer is
    closed or the process ends. Other kinds of summaries are ignored.

    Args:
      *trackers: one or more trackers.
      config: settings of the training run, such as hyperparameters. Passed to each tracker.
      max_queue: number of summaries that may wait for the thread. After that, a step waits.

    Raises:
      InvalidArgumentError: an argument has the wrong type, or there is no tracker.

    Source: Accelerator.log of Hugging Face Accelerate.

    Example:
      >>> import pathlib, phalanx, tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     path = pathlib.Path(folder, "scalars.csv")
      ...     writer = phalanx.summary.create_tracker_writer(phalanx.summary.trackers.CSVTracker(path))
      ...     with writer.as_default(step=1):
      ...         _ = phalanx.summary.scalar("loss", 0.5)
      ...     writer.close()
      ...     print(path.read_text().splitlines())
      ['step,name,value', '1,loss,0.5']
    """
    hint = 'create_tracker_writer(phalanx.summary.trackers.CSVTracker("scalars.csv"))'
    if not trackers:
        raise InvalidArgumentError("create_tracker_writer()", "it needs a tracker.", hint)
    for tracker in trackers:
        arguments.instance("tracker", tracker, Tracker, hint)  # type: ignore[type-abstract]
    if config is not None and not (isinstance(config, Mapping) and all(isinstance(key, str) for key in config)):
        raise InvalidArgumentError(
            f"config={shown(config)}", "must be a dict with names as keys, or None.", 'config={"learning_rate": 0.1}'
        )
    max_queue, config = arguments.integer("max_queue", max_queue), dict(config or {})
    names = ", ".join(tracker.name for tracker in trackers)
    hint = "create_tracker_writer of trackers whose start, log and finish raise no errors"
    return _QueueWriter(names, hint, lambda: Trackers(trackers, config), max_queue)


def create_noop_writer() -> SummaryWriter:
    """Creates a writer that writes nothing. May be called in any context.

    Source: tf.summary.create_noop_writer.

    Example:
      >>> import phalanx
      >>> with phalanx.summary.create_noop_writer().as_default(step=0):
      ...     phalanx.summary.scalar("loss", 0.5)
      True
    """
    return _NoopWriter()


def flush(writer: SummaryWriter | None = None) -> None:
    """Waits until everything that was recorded is in the file. Call it outside compiled functions.

    Args:
      writer: the writer. None for the default writer, if there is one.

    Raises:
      InvalidArgumentError: `writer` is not a writer.
      SummaryError: the file cannot be written.

    Source: tf.summary.flush.

    Example:
      >>> import phalanx
      >>> phalanx.summary.flush()
    """
    writer = defaults.writer if writer is None else writer  # type: ignore[assignment]
    if writer is None:
        return
    arguments.instance("writer", writer, SummaryWriter, "phalanx.summary.create_file_writer(log_dir)").flush()
