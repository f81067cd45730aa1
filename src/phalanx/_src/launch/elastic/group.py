# SPDX-License-Identifier: Apache-2.0
"""A group of processes that continues when some of them die, and replaces them."""

import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import final

from typing_extensions import override

from phalanx._src.cluster.spec import Task
from phalanx._src.launch.elastic.leadership import Leadership
from phalanx._src.launch.elastic.messages import NO_MAJORITY, GroupStatus, LauncherReport, environment_of
from phalanx._src.launch.evaluator import Patience
from phalanx._src.launch.group import Group, Start
from phalanx._src.launch.outcome import Ending, in_words
from phalanx._src.launch.plan import ALONE, JOB, Machines, ProcessSpec
from phalanx._src.launch.processes import AbstractWorkerProcess, WorkerProcess
from phalanx._src.launch.relay import Relay


@dataclass
class _Place:
    """A place in the group, which one process takes after the other.

    Args:
      spec: how to start a process.
      process: the process that took it last.
      failures: how many processes have failed here one after the other, while training ran no step.
      due_s: time at which the next one starts. None if none is to start.
      is_lost: whether the last process was lost while the others trained.
    """

    spec: ProcessSpec
    process: AbstractWorkerProcess
    failures: int = 0
    due_s: float | None = None
    is_lost: bool = False


@final
class ElasticGroup(Group):
    """Processes that train together, of which some may be lost.

    Args:
      specs: the processes to start.
      least: number of processes without which the group cannot continue.
      relay: forwards their output.
      patience: when to start a process in the place of one that has failed, and how often without a step in between.
      say: receives reports.
      machines: the machines on which the group has such processes.
      beside: see `Group`.
      start: see `Group`.

    Raises:
      StartupError: see `Leadership`.
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
        start: Start = WorkerProcess,
    ) -> None:
        super().__init__(specs, relay, beside, start)
        self._patience, self._tell_user = patience, say
        self._places: list[_Place] = []
        self._is_ending = False
        self._standing, self._steps = GroupStatus(), -1
        # Each machine has the same number of processes (`Machines.share`), so their numbers follow from its index.
        self._first, self._least, self._most = machines.index * len(specs), least, machines.count * len(specs)
        self._rendezvous = Leadership(
            least,
            specs[0].environment,
            self._kill,
            say,
            machines,
            share=len(specs),
            is_interrupted=lambda: relay.is_interrupted,
        )
        # All count as running before they are started, so that the first generation waits for them.
        self._report = LauncherReport(tuple(range(self._first, self._first + len(specs))), len(specs))
        # Last: nobody would remove the folder of a group that could not be made, because its first machine is gone.
        self._compiled = tempfile.TemporaryDirectory(prefix="phalanx-compiled-", ignore_cleanup_errors=True)

    @property
    @override
    def is_alive(self) -> bool:
        is_due = any(place.due_s is not None for place in self._places)
        # This launcher may hold the rendezvous of processes that still run on other machines.
        return super().is_alive or is_due or (self._rendezvous.is_here and self._standing.is_needed)

    @property
    def leader(self) -> int:
        """Index of the machine that holds the rendezvous."""
        return self._rendezvous.machine

    @property
    def is_cut_off(self) -> bool:
        """Whether it has ended because other machines, which do not answer, may train without this one."""
        return self._standing.hopeless.startswith(NO_MAJORITY)

    @property
    @override
    def has_failed(self) -> bool:
        """Whether nobody is left who trains: the training has ended, or is lost, or has too few processes for good."""
        # A failure before the first generation is an error of the script, which would come again at each start.
        if not self._standing.members and super().has_failed:
            return True
        return self._standing.gone is not None or bool(self._standing.hopeless)

    @override
    def start(self) -> None:
        self._rendezvous.start()
        self._specs = [self._elastic(spec) for spec in self._specs]
        super().start()
        self._places = [_Place(spec, process) for spec, process in zip(self._specs, self._workers, strict=True)]
        self._tend()

    @override
    def end(self, grace_s: float, word_s: float = 0.0) -> None:
        self._is_ending = True
        # If the group has no hope, the reason is known, and JAX may abort the workers while they wait for others.
        super().end(grace_s, 0.0 if self._standing.hopeless else word_s)
        # After the processes, which would report its end as an error while they wait for a generation.
        self._rendezvous.end()
        self._compiled.cleanup()

    def _elastic(self, spec: ProcessSpec) -> ProcessSpec:
        """Returns a process with its number among those of all machines, which finds the rendezvous."""
        number = self._first + spec.task.index
        environment = environment_of(self._rendezvous.addresses, number, self._least, self._most, spec.environment)
        return replace(spec, task=Task(JOB, number), environment={**self._cache(), **environment})

    def _cache(self) -> dict[str, str]:
        """Returns the environment in which a group of a size that has been there before does not compile its programs again."""
        return {
            "JAX_COMPILATION_CACHE_DIR": self._compiled.name,
            # By default, JAX stores only programs whose compilation takes 1 s or more.
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }

    @property
    @override
    def unfinished(self) -> str:
        if self._standing.has_finished or not self.has_failed:
            return ""
        return self._standing.hopeless or "all workers of the last generation have ended"

    @override
    def endings(self) -> tuple[Ending, ...]:
        """Returns how the processes ended, with their ranks in the last generation."""
        ranks = {number: rank for rank, number in enumerate(self._standing.members)}
        fatal = self._fatal()
        return tuple(
            replace(
                place.process.ending(),
                is_survived=place.is_lost and place not in fatal,
                rank=ranks.get(place.spec.task.index),
            )
            for place in self._places
        )

    def _fatal(self) -> list[_Place]:
        """Returns the places whose loss has ended the training."""
        if self._standing.has_finished:
            return []
        lost = [place for place in self._places if place.is_lost]
        if self._standing.gone is not None:
            return [place for place in lost if place.spec.task.index in self._standing.gone]
        return sorted(lost, key=lambda place: place.process.ending().after_s)[-1:]

    @override
    def _turn(self, timeout_s: float) -> None:
        due = [place.due_s for place in self._places if place.due_s is not None]
        super()._turn(max(0.0, min([timeout_s, *(due_s - time.monotonic() for due_s in due)])))
        if not self._is_ending:
            self._tend()

    def _tend(self) -> None:
        """Looks which processes have failed, and starts others in their places when it is time."""
        # A process that has failed just now may have been in a generation.
        self._standing = self._rendezvous.report(self._report)
        if self._standing.steps > self._steps:
            self._steps = self._standing.steps
            for place in self._places:
                place.failures = 0
        # One look at each process: who has ended before it, and how, belong together. The next turn sees who ends after it.
        ended = {index for index, place in enumerate(self._places) if not place.process.is_alive}
        for index, place in enumerate(self._places):
            if index in ended and place.due_s is None and not place.is_lost:
                is_lost = place.process.has_failed or place.spec.task.index in self._standing.dropped
                if is_lost and self._standing.members and not self._standing.has_finished:
                    self._plan_start(place)
            if place.due_s is not None and time.monotonic() >= place.due_s and not self._standing.has_finished:
                place.due_s, place.is_lost = None, False
                place.process = self._workers[index] = self._started(place.spec)
                self._tell_user(f"{place.spec.name} starts again.")
                ended.remove(index)
            if self._standing.has_finished and place.process.pid is None:
                # On another machine, which has no place for it yet.
                place.process.tell(signal.SIGTERM)
        running = tuple(place.spec.task.index for index, place in enumerate(self._places) if index not in ended)
        awaited = sum(self._places[index].due_s is not None for index in ended)
        finished = tuple(
            place.spec.task.index
            for index, place in enumerate(self._places)
            if index in ended and place.due_s is None and not place.is_lost and not place.process.has_failed
        )
        self._report = LauncherReport(running, len(running) + awaited, finished)
        self._standing = self._rendezvous.report(self._report)

    def _plan_start(self, place: _Place) -> None:
        place.is_lost = True
        code = place.process.ending().code
        how = f"{place.spec.name} {in_words(code)}{'' if code else ' in the midst of the training'}."
        if place.failures == self._patience.max_restarts:
            times = place.failures + 1
            self._tell_user(f"{how} It has failed {times} times without a step of the group, so it is not replaced.")
            return
        self._tell_user(how)
        place.failures += 1
        place.due_s = time.monotonic() + self._patience.pause_s(place.failures)

    def _kill(self, number: int, why: str) -> None:
        for place in self._places:
            if place.spec.task.index == number and place.process.is_alive:
                self._tell_user(f"Ending {place.spec.name}: {why}.")
                place.process.kill()
