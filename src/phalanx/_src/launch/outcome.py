# SPDX-License-Identifier: Apache-2.0
"""Describes how a group of processes ended, and reports which process was the cause."""

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from phalanx._src.launch.output import KeptLine

_SHOWN_LINES = 20
_TRACEBACK = "Traceback (most recent call last):"
_CRASH = "Fatal Python error:"
_THREAD = re.compile(r"^(Current thread|Thread) .*\(most recent call (first|last)\)")
_CHAINS = ("During handling of the above exception", "The above exception was the direct cause")
_VERDICT = r"(?P<text>rank (?P<rank>\d+) \(.*)"
_VERDICTS = (re.compile(f"^Phalanx: {_VERDICT}"), re.compile(rf"^phalanx\.errors\.PeerLostError: {_VERDICT}"))
"""Those of the watchdog; else what a process raises that learns of a failure between two steps, and may end before the one that has failed."""
TOO_FEW = 76
"""The exit code of a launcher whose group has ended before its end, although none of its own processes is to blame."""

_SAVED, _STALLED = 42, 75
_REASONS = {
    -signal.SIGKILL: "probably out of memory, or kill -9",
    -signal.SIGABRT: "abort: a fatal error in native code",
    _SAVED: "it was asked to exit, and saved first",
    _STALLED: "it saw no progress",
    128 + signal.SIGTERM: "it was ended by SIGTERM",
}


@dataclass(frozen=True)
class Ending:
    """The end of one process.

    Args:
      name: name of the process in reports.
      code: exit code, or minus the number of the signal that killed it.
      after_s: time of the end, in seconds from the start of the group.
      is_told: whether the launcher had told it to end.
      is_stopped: whether it was stopped by SIGSTOP when it was asked to end.
      is_survived: whether the others continued without it.
      rank: its rank among the processes that trained together last. None if it was not one of them.
      last: its last lines of output.
    """

    name: str
    code: int
    after_s: float
    is_told: bool = False
    is_stopped: bool = False
    is_survived: bool = False
    rank: int | None = None
    last: tuple[KeptLine, ...] = ()

    @property
    def is_failure(self) -> bool:
        """Whether it failed without being asked to end, and the others could not continue."""
        return bool(self.code) and not self.is_told and not self.is_survived

    @property
    def verdict(self) -> re.Match[str] | None:
        """The message of its watch that names the process that keeps the cluster from continuing."""
        matches = (verdict.match(line.text) for verdict in _VERDICTS for line in reversed(self.last))
        return next(filter(None, matches), None)


@dataclass(frozen=True)
class Outcome:
    """The end of a group of processes.

    Args:
      endings: the endings of the processes of this launcher that train.
      signal: the signal that ended the launcher, or None.
      evaluator: the last ending of the evaluator, if there is one.
      unfinished: why the training has ended before its end, if that was not the failure of one of the processes.

    Example:
      >>> outcome = Outcome((Ending("worker 0", -15, 1.3, is_told=True), Ending("worker 1", -9, 1.2)))
      >>> outcome.exit_code, outcome.culprit.name
      (137, 'worker 1')
    """

    endings: tuple[Ending, ...]
    signal: int | None = None
    evaluator: Ending | None = None
    unfinished: str = ""

    @property
    def is_success(self) -> bool:
        """Whether all processes that train have come to their end."""
        return self.culprit is None and not self.unfinished

    @property
    def first_failure(self) -> Ending | None:
        """The process that failed first."""
        return min((e for e in self.endings if e.is_failure), key=lambda e: e.after_s, default=None)

    @property
    def verdict(self) -> re.Match[str] | None:
        """The watchdog message of the process that failed first, if it names a process of this group."""
        verdict = self.first_failure and self.first_failure.verdict
        return verdict if verdict and self._ending_of(verdict) else None

    @property
    def culprit(self) -> Ending | None:
        """The process that the watchdog named, or else the process that failed first."""
        return self._ending_of(self.verdict) if self.verdict else self.first_failure

    def _ending_of(self, verdict: re.Match[str]) -> Ending | None:
        # In an elastic group on several machines, the rank may be that of a process of another launcher.
        return next((e for e in self.endings if e.rank == int(verdict["rank"])), None)

    @property
    def exit_code(self) -> int:
        """The exit code of the launcher: 0 if all processes succeeded, otherwise that of the culprit, as in a shell.

        If the culprit has not failed by itself, that of the first failure counts; if none has failed, but the training is not at its
        end, `TOO_FEW`; that of the evaluator, only if the training has succeeded.
        """
        if self.signal is not None:
            return 128 + self.signal
        # On a busy machine, one that was killed may end after another one that misses it. But what ends a stalled process after
        # the others have given up, such as JAX's abort, is not why.
        first, culprit = self.first_failure, self.culprit
        if first and culprit and first.code == _STALLED and culprit.after_s > first.after_s:
            culprit = first
        candidates = (culprit, first, None if self.unfinished else self.failed_evaluator)
        if (failure := next((e for e in candidates if e and e.is_failure), None)) is None:
            return TOO_FEW if self.unfinished else 0
        return failure.code if failure.code > 0 else 128 - failure.code

    @property
    def failed_evaluator(self) -> Ending | None:
        """The evaluator, if it has failed for good."""
        return self.evaluator if self.evaluator and self.evaluator.is_failure else None


def report(outcome: Outcome) -> str:
    """Returns a report on the culprit, its last lines and stack, and the ends of the others; empty after success."""
    culprit, verdict = outcome.culprit, outcome.verdict
    if culprit and culprit.code == _SAVED and not verdict:
        saved = f"{culprit.name} {in_words(_SAVED)}, {culprit.after_s:.1f} s after the start. The next start continues from there."
        return "\n".join([saved, *(f"  {e.name} {became(e)}" for e in outcome.endings if e is not culprit)])
    lines = [f"The cluster could not continue: {verdict['text']}"] if verdict else []
    if culprit:
        how = became(culprit) if verdict else f"failed first: it {in_words(culprit.code)}"
        lines += [f"{culprit.name} {how}, {culprit.after_s:.1f} s after the start.", *_words_of(culprit)]
    if outcome.unfinished and not culprit:
        lines.append(f"Training stopped early: {outcome.unfinished}.")
    if outcome.signal is not None:
        lines.append(f"The launcher was ended by {signal_name(outcome.signal)}.")
    if lines:
        lines += [f"  {e.name} {became(e)}" for e in outcome.endings if e is not culprit]
    return "\n".join(lines)


def in_words(code: int) -> str:
    """Returns an exit code in words.

    Example:
      >>> in_words(3), in_words(-11)
      ('exited with code 3', 'was killed by SIGSEGV')
    """
    words = f"was killed by {signal_name(-code)}" if code < 0 else f"exited with code {code}"
    return f"{words} ({_REASONS[code]})" if code in _REASONS else words


def became(ending: Ending) -> str:
    """Returns how a process ended, and whether the launcher had told it to."""
    stood = "was stopped (SIGSTOP) and " if ending.is_stopped else ""
    # A worker whose `finally` blocks ran after SIGTERM exits with 143.
    code = -signal.SIGTERM if ending.code == 128 + signal.SIGTERM else ending.code
    if ending.is_told and code in (-signal.SIGTERM, -signal.SIGKILL):
        return f"{stood}was ended by the launcher ({signal_name(-code)})"
    survived = "; the others continued" if ending.is_survived else ""
    return f"{stood}{in_words(ending.code)}" + (" after it was asked to exit" if ending.is_told else "") + survived


def signal_name(number: int) -> str:
    """Returns the name of a signal."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def stack_of(lines: Sequence[KeptLine]) -> list[str]:
    """Returns the lines of the last Python stack and of its causes; empty if there is none."""
    # Python writes stacks on the error stream. Lines of the other stream may stand between those of a stack.
    for is_error in (True, False):
        texts = [line.text for line in lines if line.is_error is is_error]
        if (start := _start_of_stack(texts)) is not None:
            return texts[start:]
    return []


def _words_of(ending: Ending) -> list[str]:
    stack = stack_of(ending.last)
    before = takewhile(lambda line: not stack or line.text != stack[0], ending.last)
    last = [line.text for line in before][-_SHOWN_LINES:]
    return [
        *_quoted("Its last lines" + (" before its stack:" if stack else ":"), last),
        *_quoted("Its stack:", stack),
        *(["It printed nothing."] if not ending.last else []),
    ]


def _quoted(title: str, lines: list[str]) -> list[str]:
    return [title, *(f"  | {line}" for line in lines)] if lines else []


def _start_of_stack(texts: list[str]) -> int | None:
    """Returns the index of the line where the last stack begins: of a crash, of an exception, or of the first thread."""
    crashes = [i for i, text in enumerate(texts) if text.startswith(_CRASH)]
    raised = [i for i, text in enumerate(texts) if _TRACEBACK in text]
    threads = [i for i, text in enumerate(texts) if _THREAD.match(text)]
    if crashes:
        return crashes[-1]
    # If the stacks of all threads follow an exception, the process survived it, and the watchdog ended it later.
    if raised and (not threads or raised[-1] > threads[-1]):
        return _start_of_chain(texts, raised)
    return threads[0] if threads else None


def _start_of_chain(texts: list[str], raised: list[int]) -> int:
    start = len(raised) - 1
    while start and any(text.startswith(_CHAINS) for text in texts[raised[start - 1] : raised[start]]):
        start -= 1
    return raised[start]
