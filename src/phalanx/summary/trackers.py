# SPDX-License-Identifier: Apache-2.0
"""Experiment trackers, which receive scalars from `phalanx.summary.create_tracker_writer`."""

import csv
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TextIO

from typing_extensions import override

from phalanx._src.cluster.untrusted import new_file, open_to_append
from phalanx._src.tracing.records import Record
from phalanx.errors import SummaryError, arguments
from phalanx.errors.names import suggest_names
from phalanx.summary.events import computed
from phalanx.summary.steps import Step

__all__ = ["CSVTracker", "Tracker"]


class Tracker(ABC):
    """Receives the scalars of a training run. Subclass it for other libraries. May be created in any context.

    Only the chief of a cluster calls the methods. `log` is called from a thread.

    Attributes:
      name: the tracker's name, for messages.

    Source: GeneralTracker of Hugging Face Accelerate.

    Example:
      >>> import phalanx
      >>> class Printer(phalanx.summary.trackers.Tracker):
      ...     name = "printer"
      ...     def start(self, config): print(config)
      ...     def log(self, values, step): print(step, values)
      >>> writer = phalanx.summary.create_tracker_writer(Printer(), config={"batch_size": 8})
      >>> with writer.as_default(step=1):
      ...     _ = phalanx.summary.scalar("loss", 0.5)
      {'batch_size': 8}
      1 {'loss': 0.5}
      >>> writer.close()
    """

    name = "tracker"

    @abstractmethod
    def start(self, config: Mapping[str, Any]) -> None:
        """Starts a run, before the first `log`.

        Args:
          config: settings of the training run. Empty if unknown.
        """

    @abstractmethod
    def log(self, values: Mapping[str, float], step: int) -> None:
        """Receives values.

        Args:
          values: the values, by name.
          step: the training step, or the epoch of values of epochs.
        """

    def finish(self) -> None:  # noqa: B027  (A tracker may have nothing to end.)
        """Ends the run, after the last `log`."""


class Trackers:
    """Passes the records of a writer's thread to trackers.

    Args:
      trackers: the trackers. They are started.
      config: settings of the training run.
    """

    def __init__(self, trackers: Sequence[Tracker], config: Mapping[str, Any]) -> None:
        self._trackers = trackers
        with ExitStack() as started:
            for tracker in trackers:
                tracker.start(config)
                # If the second tracker cannot start, the first one must not be left running.
                started.callback(tracker.finish)
            self._started = started.pop_all()

    def write(self, record: Record, default_step: Step) -> None:
        """Waits until a scalar is computed, and gives it to the trackers."""
        # Images and histograms have no common form among the libraries.
        for value, step in computed(record, default_step) if record.kind == "scalar" else ():
            for tracker in self._trackers:
                tracker.log({record.tag: float(value)}, step)

    def flush(self) -> None:
        """Does nothing, because trackers receive each value at once."""

    def close(self) -> None:
        """Finishes all trackers."""
        self._started.close()


class CSVTracker(Tracker):
    """Writes a line with step, name and value per scalar. Needs no other library. May be created in any context.

    Appends to an existing file. Writes the config, if any, next to it, with the suffix ".config.json".

    Args:
      path: the file. Its folder is created.

    Raises:
      InvalidArgumentError: `path` is not a path.

    Source: keras.callbacks.CSVLogger.

    Example:
      >>> import phalanx
      >>> tracker = phalanx.summary.trackers.CSVTracker("logs/scalars.csv")
    """

    name = "csv"

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = arguments.local_path("path", path)
        self._file: TextIO | None = None

    @override
    def start(self, config: Mapping[str, Any]) -> None:
        """Opens the file.

        Raises:
          SummaryError: it cannot be written, or is a link, a device or a pipe.
        """
        try:
            os.makedirs(os.path.dirname(self._path) or ".", exist_ok=True)
            if config:
                with new_file(Path(f"{self._path}.config.json")) as opened:
                    opened.write(json.dumps(dict(config), default=str, indent=2).encode())
            self._file = open_to_append(Path(self._path))
        except OSError as e:
            hint = 'CSVTracker("logs/scalars.csv"), a path that this user may write to'
            raise SummaryError(f"CSVTracker({self._path!r})", f"the file cannot be written: {e}.", hint) from e
        if not self._file.tell():
            self._write("step", "name", "value")

    @override
    def log(self, values: Mapping[str, float], step: int) -> None:
        """Writes a line per value."""
        for name, value in values.items():
            self._write(step, name, value)

    @override
    def finish(self) -> None:
        """Closes the file."""
        assert self._file is not None
        self._file.close()

    def _write(self, *row: object) -> None:
        csv.writer(self._file, lineterminator="\n").writerow(row)  # type: ignore[arg-type]


suggest_names(__name__)
