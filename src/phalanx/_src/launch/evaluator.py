# SPDX-License-Identifier: Apache-2.0
"""Starts the evaluator alongside the workers, starts it again if it fails, and waits for it after the training."""

import math
import secrets
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self, final

from phalanx._src.cluster.processes.training import ENDED, note_end
from phalanx._src.launch.group import Group
from phalanx._src.launch.outcome import Ending, became, in_words, signal_name
from phalanx._src.launch.plan import EVALUATOR, ProcessSpec
from phalanx._src.launch.relay import LONGEST_WAIT_S, Relay
from phalanx.errors import StartupError

# The exit code of a POSIX shell for a command that was found and cannot be run (POSIX.1-2017, XCU 2.8.2).
_CANNOT_START = 126


@dataclass(frozen=True)
class Patience:
    """The limits of the evaluator.

    Args:
      grace_s: time in seconds that it has to finish after the training has succeeded.
      max_restarts: how often to start it again after a failure.
      first_pause_s: time in seconds before the first of these starts. Each later pause is twice as long.
      longest_pause_s: limit of the pauses, in seconds.

    Example:
      >>> [Patience().pause_s(restart) for restart in (1, 2, 3, 10)]
      [1.0, 2.0, 4.0, 30.0]
    """

    grace_s: float = 600.0
    max_restarts: int = 10
    first_pause_s: float = 1.0
    longest_pause_s: float = 30.0

    def pause_s(self, restart: int) -> float:
        """Returns the pause before a restart, which counts from 1."""
        return min(self.longest_pause_s, math.ldexp(self.first_pause_s, restart - 1))


@final
class EvaluatorProcess:
    """A context manager for the evaluator of a launch, if it has one. The evaluator outlives groups of workers that fail.

    Args:
      relay: forwards the output.
      grace_s: time in seconds that the process has to end after SIGTERM.
      patience: its limits.
      say: receives the reports.
    """

    def __init__(self, relay: Relay, grace_s: float, patience: Patience, say: Callable[[str], None]) -> None:
        self._relay, self._grace_s, self._patience, self._say = relay, grace_s, patience, say
        # Other users may write into this folder too, and must not guess the name.
        self._ended = Path(tempfile.gettempdir(), f"phalanx-{secrets.token_hex(16)}.ended")
        self._spec: ProcessSpec | None = None
        self._group: Group | None = None
        self._due_s: float | None = 0.0
        self._restarts = 0
        self.ending: Ending | None = None
        """How the process ended last. None while it runs."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self._ended.unlink(missing_ok=True)

    def split_off(self, specs: Sequence[ProcessSpec]) -> list[ProcessSpec]:
        """Returns the processes that train. Keeps the evaluator, if there is one, for its next start."""
        self._spec = next((spec for spec in specs if spec.task == EVALUATOR), None)
        return [spec for spec in specs if spec.task != EVALUATOR]

    def tend(self) -> None:
        """Starts the process if it is time, and looks whether it has failed. After a signal, tells it to end."""
        if self._group is None:
            if self._is_due and not self._relay.is_interrupted:
                self._start()
        elif self._relay.is_interrupted:
            self._group.tell()
        elif self._group.has_failed:
            # What the process has started must not run at the same time as its successor.
            self._group.end(0.0)
            (ending,) = self._group.endings()
            self._group = None
            self._plan_restart(ending)

    def finish(self, *, is_success: bool) -> None:
        """Tells the process that the training has ended, waits for it after a success, and ends it."""
        if self._spec is None:
            return
        # Before the wait, because a program that follows the training ends by this file.
        note_end(self._ended, "succeeded" if is_success else "failed")
        if is_success and self._is_busy:
            self._wait(self._spec.name)
        self._end()

    @property
    def _is_due(self) -> bool:
        return self._spec is not None and self._due_s is not None and time.monotonic() >= self._due_s

    @property
    def _is_busy(self) -> bool:
        """Whether it is running, or will be started again."""
        if self._group is None:
            return self._due_s is not None
        return self._group.is_alive or self._group.has_failed

    def _start(self) -> None:
        assert self._spec
        self.ending = self._due_s = None
        restart_variables = {"PHALANX_RESTART": str(self._restarts), ENDED: str(self._ended)}
        spec = replace(self._spec, environment={**self._spec.environment, **restart_variables})
        group = Group([spec], self._relay)
        try:
            group.start()
        except StartupError as error:
            group.end(0.0)
            self._say(str(error))
            self._plan_restart(Ending(spec.name, _CANNOT_START, 0.0))
        else:
            self._group = group

    def _plan_restart(self, ending: Ending) -> None:
        self.ending, limit = ending, self._patience.max_restarts
        how = f"{ending.name} {in_words(ending.code)}"
        if self._restarts == limit:
            self._say(f"{how}. It does not start again after {limit} restarts.")
            return
        self._restarts += 1
        pause_s = self._patience.pause_s(self._restarts)
        self._due_s = time.monotonic() + pause_s
        self._say(f"{how}. It alone restarts in {pause_s:g} s: {self._restarts} of {limit}.")

    def _wait(self, name: str) -> None:
        self._say(f"The workers have ended. {name} has {self._patience.grace_s:g} s to finish.")
        deadline_s = time.monotonic() + self._patience.grace_s
        while self._is_busy and not self._relay.is_interrupted and (left_s := deadline_s - time.monotonic()) > 0:
            self._relay.pass_output(min(left_s, LONGEST_WAIT_S))
            self.tend()
        if (number := self._relay.signals.first) is not None:
            self._say(f"The launcher was ended by {signal_name(number)}.")
        elif self._is_busy:
            self._say(f"{name} has not finished after {self._patience.grace_s:g} s.")

    def _end(self) -> None:
        if self._group is None:
            return
        self._group.end(self._grace_s)
        (self.ending,) = self._group.endings()
        self._group = None
        if self.ending.is_told:
            self._say(f"{self.ending.name} {became(self.ending)}.")
