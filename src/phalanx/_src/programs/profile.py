# SPDX-License-Identifier: Apache-2.0
"""Profiles some training steps of this process, if `phalanx run --profile` asks for it."""

import atexit
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import final

import jax
from typing_extensions import override

from phalanx._src.cluster.watch.profiles import CLOCK, Span, write
from phalanx._src.programs.program import Call
from phalanx._src.runtime.notes import note
from phalanx._src.runtime.observers import Observer, observers


@final
class Profile(Observer):
    """Counts the training steps, and profiles some of them.

    Args:
      span: which steps.
    """

    def __init__(self, span: Span) -> None:
        self._span, self._steps, self._rank = span, 0, 0
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._clock_s = 0.0

    @override
    def before_program(self, call: Call) -> None:
        """Begins or ends the profile before a program runs."""
        if not call.program.trains:
            return
        if self._folder is None and self._span.first <= self._steps < self._span.last:
            # Not in the constructor, because a process knows its rank only once it has a strategy.
            self._rank = call.program.strategy.topology.worker_index
            self._begin()
        elif self._folder is not None and self._steps >= self._span.last:
            self.end()
        self._steps += call.program.num_steps or 1

    def _begin(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        # The script may end before the last of these steps.
        atexit.register(self.end)
        jax.profiler.start_trace(self._folder.name, create_perfetto_trace=True)
        # Ties the time line of the trace to a clock that all processes share, so that their profiles can be merged.
        with jax.profiler.TraceAnnotation(CLOCK):
            self._clock_s = time.time()

    def end(self) -> None:
        """Ends the profile, and writes it."""
        if self._folder is None:
            return
        for device in jax.local_devices():  # A device runs this after the steps that were called before.
            (jax.device_put(1.0, device) + 1).block_until_ready()
        stop: Callable[[], None] = jax.profiler.stop_trace
        stop()
        (trace,) = Path(self._folder.name).rglob("perfetto_trace.json.gz")
        try:
            write(trace, self._rank, self._clock_s, self._span.folder)
        except OSError as e:  # The training run is worth more than its profile.
            note(f"the profile cannot be written to {self._span.folder}: {e}")
        self._folder.cleanup()
        self._folder = None
        atexit.unregister(self.end)


def follow(environment: Mapping[str, str]) -> None:
    """Profiles steps of this process, if the environment asks for it. Further calls do nothing."""
    span = Span.of(environment)
    if span is not None and not any(isinstance(x, Profile) for x in observers):
        observers.add(Profile(span))
