# SPDX-License-Identifier: Apache-2.0
"""A group of processes that goes on when some of them die, and in which others take their places."""

import os
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import final

from typing_extensions import override

from phalanx.cluster.spec import Task
from phalanx.launch.evaluator import Patience
from phalanx.launch.group import Group
from phalanx.launch.outcome import Ending, in_words
from phalanx.launch.outpost import Outpost
from phalanx.launch.plan import ALONE, JOB, Machines, ProcessSpec
from phalanx.launch.processes import WorkerProcess
from phalanx.launch.relay import Relay
from phalanx.launch.rendezvous import Rendezvous
from phalanx.launch.standing import AbstractRendezvous, Report, Standing, environment_of


@dataclass
class _Place:
    """A place in the group, which one process takes after the other.

    Args:
      spec: how to start a process.
      process: the process that took it last.
      failures: how many processes have failed here one after the other, while the training made no step.
      due_s: time at which the next one starts. None if none is to start.
      is_lost: whether the last process was lost while the others trained.
    """

    spec: ProcessSpec
    process: WorkerProcess
    failures: int = 0
    due_s: float | None = None
    is_lost: bool = False


@final
class ElasticGroup(Group):
    """Processes that train together, of which some may be lost.

    Args:
      specs: the processes to start.
      least: number of processes without which the group cannot go on.
      relay: forwards their output.
      patience: when to start a process in the place of one that has failed, and how often without a step in between.
      say: receives reports.
      machines: the machines on which the group has such processes.
      beside: see `Group`.

    Raises:
      StartupError: the first of these machines cannot be reached, or cannot listen at its address.
    """

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        least: int,
        relay: Relay,
        *,
        patience: Patience,
        say: Callable[[str], None],
        machines: Machines = ALONE,
        beside: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(specs, relay, beside)
        self._patience, self._tell_user = patience, say
        self._places: list[_Place] = []
        self._is_ending = False
        self._standing, self._has_finished = Standing(), False
        self._compiled = tempfile.TemporaryDirectory(prefix="phalanx-compiled-", ignore_cleanup_errors=True)
        environment = specs[0].environment
        self._rendezvous: AbstractRendezvous = (
            Outpost(environment, self._kill, machines)
            if machines.index
            else Rendezvous(least, environment, self._kill, say, machines)
        )
        self._first = machines.index * len(specs)

    @property
    @override
    def is_alive(self) -> bool:
        is_due = any(place.due_s is not None for place in self._places)
        return super().is_alive or is_due or (not self._first and self._standing.is_needed)

    @property
    @override
    def has_failed(self) -> bool:
        """Whether nobody is left who trains: the training has ended, or is lost, or has too few processes for good."""
        if not self._standing.has_begun and super().has_failed:
            return True
        if self._standing.gone is not None:
            # Those whose connections are closed may still be on the way out.
            return not any(p.process.is_alive and p.spec.task.index in self._standing.gone for p in self._places)
        return self._standing.is_hopeless

    @override
    def start(self) -> None:
        self._rendezvous.start()
        self._specs = [self._elastic(spec) for spec in self._specs]
        super().start()
        self._places = [_Place(spec, process) for spec, process in zip(self._specs, self._workers, strict=True)]

    @override
    def end(self, grace_s: float, word_s: float = 0.0) -> None:
        self._is_ending = True
        super().end(grace_s, word_s)
        self._rendezvous.end()
        self._compiled.cleanup()

    def _elastic(self, spec: ProcessSpec) -> ProcessSpec:
        """Returns a process with its number among those of all machines, which finds the rendezvous."""
        number = self._first + spec.task.index
        environment = environment_of(self._rendezvous.address, number, spec.environment)
        return replace(spec, task=Task(JOB, number), environment={**self._cache(), **environment})

    def _cache(self) -> dict[str, str]:
        """Returns the environment in which a group of a size that has been there before does not compile its programs again."""
        return {
            "JAX_COMPILATION_CACHE_DIR": self._compiled.name,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }

    @override
    def endings(self) -> tuple[Ending, ...]:
        """Returns how the processes ended, without those that were lost before a training that has succeeded ended."""
        has_succeeded = self._standing.has_finished
        counts = [place for place in self._places if not (place.is_lost and has_succeeded)]
        return tuple(place.process.ending() for place in counts)

    @override
    def _turn(self, timeout_s: float) -> None:
        if not self._is_ending:
            self._tend()
            due = [place.due_s for place in self._places if place.due_s is not None]
            timeout_s = max(0.0, min([timeout_s, *(due_s - time.monotonic() for due_s in due)]))
        super()._turn(timeout_s)

    def _tend(self) -> None:
        """Looks which processes have failed, and starts others in their places when it is time."""
        for index, place in enumerate(self._places):
            if place.due_s is None and not place.is_lost and not place.process.is_alive:
                if not place.process.has_failed:
                    self._has_finished = True
                elif self._standing.has_begun and not self._standing.has_finished:
                    self._plan_start(place)
            if place.due_s is not None and time.monotonic() >= place.due_s and not self._standing.has_finished:
                place.due_s, place.is_lost = None, False
                place.process = self._workers[index] = self._started(place.spec)
        steps = self._standing.steps
        running = tuple(place.spec.task.index for place in self._places if place.process.is_alive)
        hopeful = sum(place.due_s is not None or place.process.is_alive for place in self._places)
        self._standing = self._rendezvous.report(Report(running, hopeful, self._has_finished))
        if self._standing.steps > steps:
            for place in self._places:
                place.failures = 0

    def _plan_start(self, place: _Place) -> None:
        how = f"{place.spec.name} {in_words(place.process.ending().code)}"
        place.is_lost = True
        if place.failures == self._patience.max_restarts:
            return
        place.failures += 1
        pause_s = self._patience.pause_s(place.failures)
        place.due_s = time.monotonic() + pause_s
        self._tell_user(f"{how}. It starts again in {pause_s:g} s.")
        if place.failures == self._patience.max_restarts:
            self._tell_user(
                f"This was its last start: it has failed {place.failures} times, and no step was made since."
            )

    def _kill(self, number: int, why: str) -> None:
        for place in self._places:
            if place.spec.task.index == number and place.process.is_alive:
                self._tell_user(f"{place.spec.name} is ended: {why}.")
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(place.process.pid, signal.SIGKILL)
