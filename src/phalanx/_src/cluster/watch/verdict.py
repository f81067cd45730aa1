# SPDX-License-Identifier: Apache-2.0
"""Judges from the reports of all processes of a cluster whether it can continue: which has died, is silent, or makes no progress for too long.

Uses the standard library only.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import final

from phalanx._src.cluster.connections.messages import SignOfLife
from phalanx._src.cluster.watch.agreement import READ, Signature, call_of
from phalanx._src.cluster.watch.messages import MemberMessage
from phalanx.errors import listed

SIGTERM = "was ended by SIGTERM"
"""Describes the end of a process that received SIGTERM."""

_SILENCE_S = 30.0
_LEFT_S = 3.0
_TOLD_S = 0.5
_KNOWN_S = 5.0
_SAME_STEPS = "call fit, evaluate, predict, run and reduce on all workers, with as many batches on each"
_SAME_READS = "call model.save, get_weights and variable.numpy() on all workers, not on the chief alone: a read of a sharded variable needs them all"

_LONG_CALL = "a call in C keeps all its threads from running; if that call is only slow, a longer stall_timeout_s"


@dataclass
class Member:
    """The known state of one process of the cluster.

    Args:
      name: its rank and address.
      heard_s: time of its last message, or of its last sign of life.
      moved_s: time at which its state last changed.
      turn: number of collective operations (those that need all processes) that it has begun.
      step: number of these operations that were steps.
      is_inside: whether its last collective operation is still running.
      has_left: whether its program has finished.
      is_told: whether it left because of SIGTERM.
      signature: signature of the program that it is about to run for the first time. None unless it waits for agreement.
      end: how it failed. Empty if it has not failed.
      has_lost_step: whether a step has failed in it, and it waits for the reason.
      is_gone: whether its connection is closed.

    Attributes:
      told_s: time of its last message that was more than a sign of life. What it has done since is unknown.
    """

    name: str
    heard_s: float
    moved_s: float
    turn: int = 0
    step: int = 0
    is_inside: bool = False
    has_left: bool = False
    is_told: bool = False
    signature: Signature | None = None
    end: str = ""
    has_lost_step: bool = False
    is_gone: bool = False
    told_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.told_s = self.heard_s

    def hear(self, message: MemberMessage, now_s: float) -> None:
        """Updates the state from a message of the process."""
        self.heard_s = now_s
        if not isinstance(message, SignOfLife):
            self.told_s = now_s
        for name, value in vars(message).items():
            if value != getattr(self, name):
                setattr(self, name, value)
                self.moved_s = now_s

    def is_waiting(self, turn: int, now_s: float) -> bool:
        """Returns whether it has been in this turn, or a later one, for so long that it must be waiting for others."""
        return self.is_inside and self.turn >= turn and now_s - self.moved_s > _KNOWN_S

    def is_cut_off(self) -> None:
        """Records that the connection to the process is closed."""
        self.is_gone = True
        if not self.has_left:
            self.end = self.end or "exited without an error message (killed or crashed)"


@final
class Members:
    """The processes of a group, as far as this process knows them.

    Args:
      addresses: addresses of all ranks.
      rank: rank of this process.
      connected: ranks of the processes that it is connected with.
      stall_s: time that no process may make progress while one of them waits, in seconds.
      now_s: current time.

    Attributes:
      by_rank: the processes: this one, and those that it is connected with.
    """

    def __init__(
        self, addresses: Sequence[str], rank: int, connected: Iterable[int], stall_s: float, now_s: float
    ) -> None:
        self.rank, self._stall_s, self._connected = rank, stall_s, list(connected)
        self.by_rank = {r: Member(f"rank {r} ({addresses[r]})", now_s, now_s) for r in (rank, *self._connected)}

    @property
    def own(self) -> Member:
        """This process."""
        return self.by_rank[self.rank]

    @property
    def others_have_left(self) -> bool:
        """Whether the programs of all processes to which this one is connected have ended."""
        return all(self.by_rank[rank].has_left or self.by_rank[rank].end for rank in self._connected)

    def judge(self, now_s: float, *, may_lose: bool) -> "Verdict | None":
        """Returns the reason why the group cannot continue, or None.

        Args:
          now_s: current time.
          may_lose: whether the group may continue without some processes.
        """
        connected = [self.by_rank[rank] for rank in self._connected]
        verdict = judge_presence(connected, now_s, self._stall_s, self.own)
        # Rank 0 alone judges progress, so that all ranks report the same. When it has left, each other rank judges for itself: it
        # knows of rank 0 and of itself.
        if verdict is None and (self.rank == 0 or self.by_rank[0].is_gone):
            known = list(self.by_rank.values())
            verdict = judge_failure(known) if may_lose else None
            verdict = verdict or judge_progress(known, now_s, self._stall_s)
        return verdict


@dataclass(frozen=True)
class Verdict:
    """The reason why a cluster cannot continue.

    Args:
      text: the process that is the cause, and what happened to it.
      is_loss: whether a process has died, so that the programs of the others fail by themselves.
      hint: what to check. Empty if the text suffices.
      still: names of the processes that take no further step, so that the others could continue without them.
    """

    text: str
    is_loss: bool = False
    hint: str = ""
    still: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.text}." + (f"\nHINT: {self.hint}" if self.hint else "")


def silence_s(stall_s: float) -> float:
    """Returns how long a process may be silent, in seconds, if it may make no progress for `stall_s` seconds."""
    return min(_SILENCE_S, stall_s)


def judge_presence(
    members: Iterable[Member], now_s: float, stall_s: float, own: Member | None = None
) -> Verdict | None:
    """Returns a verdict on a process that has died or gone silent, or that only shows that it is alive while others wait; otherwise None.

    Args:
      members: processes of the cluster.
      now_s: current time.
      stall_s: time that a process may report nothing while another one waits, in seconds. If it is shorter than the default time without a
        sign of life, it applies there too.
      own: this process. Its finished steps are finished elsewhere too, which the others report only once per second.
    """
    quiet_s, known = silence_s(stall_s), list(members)
    waits = any(m.is_inside and now_s - m.moved_s > stall_s for m in (*known, *([own] if own else [])))
    for member in known:
        if member.end:
            return Verdict(f"{member.name} {member.end}", is_loss=True)
        if not member.has_left and now_s - member.heard_s > quiet_s:
            step = max(member.step, own.step - own.is_inside if own else 0)
            silence = f"has been silent for {quiet_s:g} s, since step {step}"
            text = f"{member.name} {silence}: the process, its machine or the network is stuck"
            return Verdict(text, still=(member.name,))
        # Its last sign of life may be from just before it was stopped: whether it still lives shows before its silence is over.
        is_alive = not member.has_left and now_s - member.heard_s < quiet_s / 2
        if waits and is_alive and now_s - member.told_s > stall_s:
            text = f"{member.name} is alive, but has reported nothing for {stall_s:g} s, since step {member.step}, while others wait"
            return Verdict(text, hint=_LONG_CALL, still=(member.name,))
    return None


def judge_failure(members: Sequence[Member]) -> Verdict | None:
    """Returns a verdict on a process that has ended its program, if a step has failed since. It may have ended with an error."""
    left = [m for m in members if m.has_left]
    if not left or not any(m.has_lost_step for m in members):
        return None
    text = f"{left[0].name} finished its program after step {left[0].step}, while the others continue"
    return Verdict(text, is_loss=True, still=tuple(m.name for m in left))


def judge_progress(members: Sequence[Member], now_s: float, stall_s: float) -> Verdict | None:
    """Returns a verdict on a process that makes no progress while others wait, or None if there is none.

    Args:
      members: all processes of the cluster.
      now_s: current time.
      stall_s: time that no process may make progress while one of them waits, in seconds.

    Example:
      >>> first, second = Member("rank 0", 9, 1, turn=8, step=8, is_inside=True), Member("rank 1", 9, 0, turn=7, step=7)
      >>> judge_progress([first, second], 9, stall_s=60)
      >>> judge_progress([first, second], 9, stall_s=5).text
      'rank 1 is stuck after step 7; rank 0 has been waiting in step 8 for 8 s'
    """
    moved_s = max(m.moved_s for m in members)
    still_s = now_s - moved_s
    first = max(members, key=lambda m: (m.turn, m.is_inside))
    behind = [m for m in members if m.turn < first.turn]
    waited, same, not_alone = (
        f"in step {first.step} for {still_s:.0f} s",
        _SAME_STEPS,
        "no sys.exit() on one worker alone; ",
    )
    if first.signature is not None and READ in first.signature:
        waited, same, not_alone = f"for {still_s:.0f} s in {call_of(first.signature)}", _SAME_READS, ""
    waited = f"{first.name} has been waiting {waited}"
    if (terminated_members := [m for m in behind if m.is_told]) and first.is_inside and still_s > min(_TOLD_S, stall_s):
        # When it ends, the collective fails on the others, and their handlers and `finally` blocks run.
        return Verdict(f"{terminated_members[0].name} {SIGTERM} after step {terminated_members[0].step}", is_loss=True)
    if (left := [m for m in behind if m.has_left]) and still_s > min(_LEFT_S, stall_s):
        text = f"{left[0].name} finished its program after step {left[0].step}; {waited}"
        return Verdict(text, hint=not_alone + same, still=tuple(m.name for m in left))
    # The progress of a silent process since its last message is unknown, so it must be reported as silent.
    known_s = min([now_s, *(m.told_s for m in members if not m.has_left)])
    if known_s - moved_s <= stall_s:
        return None
    if behind:
        names, verb = tuple(m.name for m in behind), "is" if len(behind) == 1 else "are"
        text = f"{listed(names)} {verb} stuck after step {behind[0].step}; {waited}"
        return Verdict(text, hint=same, still=names)
    if inside := [m.name for m in members if m.is_inside]:
        peers = "the others have" if len(inside) < len(members) else "none is missing"
        return Verdict(
            f"{listed(inside)} {'has' if len(inside) == 1 else 'have'} not finished step {first.step} for {still_s:.0f} s, although {peers}",
            hint=f"{_SAME_STEPS}; or a longer stall_timeout_s",
        )
    return None
