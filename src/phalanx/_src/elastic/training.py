# SPDX-License-Identifier: Apache-2.0
"""One training run of a process whose group may change: it keeps copies, leaves and enters groups, and continues."""

import gc
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, final

import numpy as np

from phalanx._src import compat
from phalanx._src.checkpoint import folder_lock, text
from phalanx._src.cluster.processes.notices import Notices
from phalanx._src.cluster.watch import membership, watch
from phalanx._src.elastic.copies import Copier, Copy, Holding, fingerprint, present, put_shares, variables_to_move
from phalanx._src.elastic.reported import ReportedProgress
from phalanx._src.elastic.resharding import (
    Offer,
    choose,
    divisions_of_notes,
    move_pieces,
    notes_of_divisions,
    offer_of,
    places_here,
    values_of,
)
from phalanx._src.elastic.schedule import CopySchedule
from phalanx._src.mesh.topology import Topology
from phalanx._src.programs.identity import IdentityMap
from phalanx._src.programs.interrupts import handler_of
from phalanx._src.programs.program import forget_all
from phalanx._src.programs.values import put_values
from phalanx._src.runtime import bootstrap, coordination
from phalanx._src.strategies.base import Strategy
from phalanx._src.strategies.multi_worker import MultiWorkerMirroredStrategy
from phalanx._src.typed_jax import shape_dtype
from phalanx.errors import PeerLostError, StartupError, StateLostError

_ATTEMPTS = 10
_NOTHING = Copy(-1, [0, 0], {}, IdentityMap())
"""What a process offers that has no variables."""
_COLLECT_AFTER = 3
"""Steps of a new group after which what is left of the last one is collected."""


class GroupChange(Exception):  # noqa: N818  (It is not an error.)
    """Raised between two steps on all processes, to form another group."""


class Progress(Protocol):
    """The progress of a training run, apart from the variables."""

    @property
    def is_agreed(self) -> bool:
        """Whether all processes must ask for the state at the same time."""

    @property
    def stage(self) -> list[int]:
        """The epoch, and what is done in it besides steps: a list that grows while the number of steps stays."""

    def get_position(self, *, undone: bool) -> dict[str, Any]:
        """Returns the position. With `undone`, that before the present step."""

    def set_position(self, position: dict[str, Any]) -> None:
        """Goes to a position."""

    def move(self, topology: Topology) -> None:
        """Continues with the devices of another group. `set_position` follows."""


def training_of(strategy: Strategy, progress: Progress) -> "Training | None":
    """Returns the training that begins now. None if the group of this process never changes."""
    if membership.own() is None or not isinstance(strategy, MultiWorkerMirroredStrategy):
        return None
    return Training(strategy, progress)


@final
class Training:
    """One call of `fit` or of `steps` in an elastic group.

    Args:
      strategy: the strategy.
      progress: the progress of the training run.

    Attributes:
      step: number of steps that it has made.
      source: rank of the process from which the others have taken the position.
      has_changed: whether this process is in a new group, which the caller has not taken note of yet.
    """

    def __init__(self, strategy: MultiWorkerMirroredStrategy, progress: Progress) -> None:
        member = membership.own()
        assert member is not None
        self._member, self._strategy, self._progress = member, strategy, progress
        self._copier = Copier()
        # The last copy. While other processes make theirs, the one before it too.
        self._copies: list[Copy] = []
        # What this process had when it left its last group, until it has what the next group has.
        self._brought: list[Copy] = []
        self._schedule = CopySchedule(strategy.elastic.copy_every)
        self._reported = ReportedProgress()
        self.step, self.source, self.has_changed = 0, 0, True
        # The number of steps that the watchdog knew when the present step began. None between two steps.
        self._steps_before: int | None = None
        self._steps_to_collect = 0
        self._call, current_call = member.begin()
        self.is_over = current_call > self._call and member.is_late
        """Whether the others have finished this training before this process joined them."""

    @property
    def told(self) -> list[int]:
        """The epoch, the number of its steps, and the number of callbacks at its end, reported to the user's code."""
        return self._reported.told

    @property
    def is_behind(self) -> bool:
        """Whether this process had reported less to the user's code than the source when they met. `catch_up` ends it."""
        return self._reported.is_behind

    @property
    def _is_inside(self) -> bool:
        return self._steps_before is not None

    def enter(self, make_variables: Callable[[], object]) -> None:
        """Joins the others, if this process has started later than they.

        Args:
          make_variables: makes or traces a step alone, so that this process has all variables that it takes over from the others.
        """
        if self._member.is_late:
            self._member.is_trying = True
            try:
                make_variables()
            finally:
                self._member.is_trying = False
            self._change([_NOTHING])

    @contextmanager
    def leaving_when_told(self) -> Iterator[None]:
        """Returns a context in which SIGTERM makes this process leave the group between two steps, so that no step fails.

        A handler of the user stays. Threads other than the main one cannot handle signals.
        """
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main or not bootstrap.ends_by(handler_of(signal.SIGTERM)):
            yield
            return
        notices = Notices("training in an elastic group", self._note)
        try:
            yield
        finally:
            notices.close()

    def _note(self, notice: str) -> None:
        self._member.is_leaving = True
        if watchdog := watch.own():
            watchdog.change_point.request(f"rank {watchdog.rank} {notice}")

    @contextmanager
    def between_steps(self) -> Iterator[None]:
        """Returns a context for the user's code between two steps, in which the loss of a process must raise no error."""
        self._member.is_between_steps = True
        try:
            yield
        finally:
            self._member.is_between_steps = False

    def finish(self) -> None:
        """Waits for the other processes at the end, so that none of them continues with a group that another one has to leave.

        Raises:
          PeerLostError: one of them was lost.
        """
        self._strategy.topology.exchange(np.zeros(1))
        self._member.finish()

    def keep(self) -> None:
        """Copies the variables, so that the steps so far cannot be lost."""
        began_s = time.perf_counter()
        position = self._progress.get_position(undone=self._is_inside)
        topology = self._strategy.topology
        if not self._copies:
            variables = [
                (compat.layout_path(v), shape_dtype(kind.shape, kind.dtype)) for v, kind in variables_to_move()
            ]
            topology.require_layout(variables, membership.sizes())
        copy = self._copier.copy(self.step, self._progress.stage, position, topology)
        if copy is not None:
            self._copies.append(copy)
            if topology.divides_over_workers:
                # Whoever gets beyond this point knows that all others have their copies, and that no process needs the one before.
                topology.exchange(np.zeros(1, np.int32))
            self._copies = [copy]
        self._schedule.end_copy(self.step, time.perf_counter() - began_s, is_made=copy is not None)

    def begin_steps(self, end: int) -> bool:
        """Records that one or more steps begin. Call it when their batches have been read.

        Args:
          end: number of steps of the epoch when they are done.

        Returns:
          Whether these steps have not been reported to the user's code yet.

        Raises:
          GroupChange: all processes meet here to form another group.
        """
        watchdog = watch.own()
        assert watchdog is not None
        self._steps_before = watchdog.steps
        topology, is_agreed = self._strategy.topology, self._progress.is_agreed
        if reason := watchdog.change_point.is_reached():
            if topology.divides_over_workers:
                # Of this moment, together with the process that leaves.
                self.keep()
            raise GroupChange(reason)
        self._schedule.agree(self.step, topology.exchange, is_agreed=is_agreed)
        # All processes send their shards at the same time.
        is_agreed = is_agreed or topology.divides_over_workers
        if self._schedule.is_due(self.step, topology.exchange, is_agreed=is_agreed, has_missed=self._copier.has_missed):
            self.keep()
        self._schedule.begin_steps()
        return self._reported.begin_steps(self._progress.stage[0], end)

    def end_steps(self, count: int = 1) -> None:
        """Records that the steps have ended, and that they are reported to the user's code now.

        Raises:
          PeerLostError: a process was lost in the steps, and the user's code has caught that error.
        """
        self._strategy.topology.require_peers()
        self._steps_before = None
        self._reported.end_steps()
        self.step += count
        if self._steps_to_collect:
            self._steps_to_collect -= 1
            if not self._steps_to_collect:
                # The devices of the last group end with the last object that refers to them, and exceptions make cycles.
                gc.collect()
        self._schedule.end_steps(count)

    def survive(self, cause: BaseException) -> None:
        """Leaves the group and continues in the next one, with the newest variables that one of its processes has.

        Args:
          cause: a `GroupChange` or the loss of a process.

        Raises:
          PeerLostError: no process can continue, because this process has no variables left.
          InputError: the data cannot be read again from an earlier position, or not by another number of processes.
          SystemExit: this process was told to end.
        """
        if self._member.is_leaving:
            bootstrap.leave()
            self._member.close()
            folder_lock.leave_all(after_save=True)
            raise SystemExit(128 + signal.SIGTERM)
        copies = self._copies_to_offer(cause)
        if not copies:
            raise cause
        self._change(copies)

    def _copies_to_offer(self, cause: BaseException) -> list[Copy]:
        """Returns the states from which this process can continue: its present variables, or else the last copies."""
        if self._brought:
            return self._brought
        topology = self._strategy.topology
        if topology.divides_over_workers:
            # The present shards of a lost process are lost with it.
            return self._copies
        watchdog, are_here = watch.own(), isinstance(cause, GroupChange)
        # If the watchdog has counted no step since, no program has consumed the variables: they are those before the step.
        is_whole = are_here or not self._is_inside or watchdog is None or watchdog.steps == self._steps_before
        if not is_whole or (self._progress.is_agreed and not are_here):
            return self._copies
        try:
            position = self._progress.get_position(undone=self._is_inside)
        except PeerLostError:  # All processes ended the step, but one of them has died since.
            return self._copies
        # A failed validation has lost its metrics. It resets them before it restarts.
        is_lenient, stage = self._progress.stage[1] > 0, self._progress.stage
        copy = self._copier.copy(self.step, stage, position, topology, is_lenient=is_lenient)
        return self._copies if copy is None else [copy]

    def _change(self, copies: list[Copy]) -> None:
        self._brought, uncopied = copies, present(copies)
        for attempt in range(_ATTEMPTS):
            try:
                self._try_to_change(copies, uncopied)
            except (StartupError, PeerLostError):
                # Another process has died while the group was formed.
                if attempt + 1 == _ATTEMPTS:
                    raise
            else:
                return

    def _try_to_change(self, copies: list[Copy], uncopied: "IdentityMap[Holding]") -> None:
        bootstrap.leave()
        # Another process may be the chief of the next generation, while this one is cut off.
        folder_lock.leave_all(after_save=False)
        # A compiled program keeps the devices of the last group alive.
        forget_all()
        generation = self._member.meet(call=self._call, progress=copies[-1].progress)
        if generation is None:
            self._end(copies[-1].completed(uncopied))
            return
        bootstrap.enter(generation, self._strategy.stall_timeout_s)
        self._strategy.move(0)
        variables = variables_to_move()
        kinds = [kind for _, kind in variables]
        with bootstrap.without_lines_of_gloo():
            with self._strategy.topology.dispatching(is_step=False):
                # Not a collective, because that would need a program to trace.
                offers = text.packed([fingerprint(kinds), [offer_of(copy).notes() for copy in copies]])
                answers = [text.unpacked(answer) for answer in coordination.share_each(offers, "offers")]
            choice = choose([[Offer.of_notes(notes) for notes in of_process] for _, of_process in answers])
            if choice is None:
                # Otherwise one that has not read all offers yet would see no more than that another one has failed, and would try again.
                coordination.share_each(b"read", "offers are read")
                raise _copies_are_lost() from None
            self._strategy.move(choice.source)
            topology = self._strategy.topology
            chosen = next((copy.completed(uncopied) for copy in copies if offer_of(copy).key == choice.key), None)
            packed_state = None
            if chosen is not None and topology.worker_index == choice.source:
                state = [chosen.step, self.told, chosen.position, notes_of_divisions(chosen), self._schedule.every]
                packed_state = text.packed(state)
            with topology.dispatching(is_step=False):
                shared_state = coordination.share(packed_state)
            step, theirs, position, notes, every = text.unpacked(shared_state)
            divisions = divisions_of_notes(notes)
            pieces = {} if chosen is None else {kind: holding.pieces for kind, holding in chosen.holdings()}
            places = places_here(topology, variables)
            parts = move_pieces(pieces, divisions, places, choice.senders, topology.broadcast)
        values = values_of(variables, parts, places, copies[-1].completed(uncopied))
        is_alike = len({fingerprint_there for fingerprint_there, _ in answers}) == 1
        # Otherwise the next program broadcasts those that it uses.
        put_values([pair for pair in values if not callable(pair[1])], topology if is_alike else None)
        put_values([pair for pair in values if callable(pair[1])], topology)
        for variable, kind in variables:
            compat.move_layout(variable, topology.sharding_of_new(compat.layout_path(variable), kind.shape))
        put_shares(chosen or copies[-1], topology)
        if not topology.is_chief:
            folder_lock.leave_all(after_save=True)
        self._progress.move(topology)
        self._progress.set_position(position)
        self._copies, self._brought = copies if chosen is None else [chosen], []
        self.step = step
        self._reported.meet(theirs)
        self._schedule.continue_at(step, every)
        self.source, self._steps_before, self.has_changed = choice.source, None, True
        # Not after the first step, because the others wait for it.
        self._steps_to_collect = _COLLECT_AFTER

    def _end(self, copy: Copy) -> None:
        """Ends the training of this process, because the others have finished it."""
        self._strategy.move(0)
        whole = [(v, holding.value) for v, holding in copy.values.items() if holding.is_whole]
        put_values(whole)
        for variable, holding in copy.values.items():
            if not holding.is_whole:
                compat.hollow(variable)
        put_shares(copy, self._strategy.topology)
        self.is_over = True

    def begin_epoch(self, epoch: int) -> bool:
        """Records that an epoch begins. Returns whether it has not been reported to the user's code yet."""
        return self._reported.begin_epoch(epoch)

    def end_callbacks(self, count: int) -> None:
        """Records that so many callbacks were called at the end of the present epoch."""
        self._reported.end_callbacks(count)

    def catch_up(self) -> None:
        """Records that the user's code of this process is as far as that of the source. Call it in a new group, before the first step."""
        self._reported.catch_up()
        self.has_changed = False


def _copies_are_lost() -> StateLostError:
    return StateLostError(
        "a training run whose layout shards variables over its processes",
        "two processes next to each other were lost before the next copy, and with them both copies of some shards. "
        "It can only continue from its last checkpoint.",
        "phalanx run --workers 2:4 --max-restarts 3, and a BackupAndRestore or CheckpointManager",
    )
