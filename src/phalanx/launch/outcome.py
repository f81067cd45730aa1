# SPDX-License-Identifier: Apache-2.0
"""How a group of processes ended, and the report that says whose fault it was."""

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from phalanx.launch.output import KeptLine

_SHOWN_LINES = 20
_TRACEBACK = "Traceback (most recent call last):"
_CRASH = "Fatal Python error:"
_THREAD = re.compile(r"^(Current thread|Thread) .*\(most recent call (first|last)\)")
_CHAINS = ("During handling of the above exception", "The above exception was the direct cause")
_VERDICT = re.compile(r"^Phalanx: (?P<text>rank (?P<rank>\d+) \(.*)")
_REASONS = {
    -signal.SIGKILL: "from outside; by the kernel, where memory runs out",
    -signal.SIGABRT: "abort: a fatal error in native code",
    75: "it saw no progress",
    128 + signal.SIGTERM: "it was ended by SIGTERM",
}


@dataclass(frozen=True)
class Ending:
    """How one process ended.

    Args:
      name: what it is called.
      code: what it ended with; minus the number of a signal that killed it.
      after_s: when it ended, in seconds from the start of the group.
      is_told: whether it was told to end before it did.
      is_stopped: whether it stood still, by SIGSTOP, when it was told.
      last: what it printed last.
    """

    name: str
    code: int
    after_s: float
    is_told: bool = False
    is_stopped: bool = False
    last: tuple[KeptLine, ...] = ()

    @property
    def is_failure(self) -> bool:
        """Whether it failed by itself."""
        return bool(self.code) and not self.is_told

    @property
    def verdict(self) -> re.Match[str] | None:
        """What its watch has said of who keeps the cluster from going on."""
        return next((m for line in reversed(self.last) if (m := _VERDICT.match(line.text))), None)


@dataclass(frozen=True)
class Outcome:
    """How a group ended.

    Args:
      endings: of all its processes, by rank.
      signal: what ended the launcher, if a signal did.

    Example:
      >>> outcome = Outcome((Ending("worker 0", -15, 1.3, is_told=True), Ending("worker 1", -9, 1.2)))
      >>> outcome.exit_code, outcome.culprit.name
      (137, 'worker 1')
    """

    endings: tuple[Ending, ...]
    signal: int | None = None

    @property
    def first_failure(self) -> Ending | None:
        """The process that failed first."""
        return min((e for e in self.endings if e.is_failure), key=lambda e: e.after_s, default=None)

    @property
    def verdict(self) -> re.Match[str] | None:
        """What the watch of that one has said, of a process of this group."""
        verdict = self.first_failure and self.first_failure.verdict
        return verdict if verdict and int(verdict["rank"]) < len(self.endings) else None

    @property
    def culprit(self) -> Ending | None:
        """Whom the watch has named; else the process that failed first."""
        return self.endings[int(self.verdict["rank"])] if self.verdict else self.first_failure

    @property
    def exit_code(self) -> int:
        """What the launcher ends with: 0 if all did, else as a shell would say it of the first that failed."""
        if self.signal is not None:
            return 128 + self.signal
        if self.first_failure is None:
            return 0
        return self.first_failure.code if self.first_failure.code > 0 else 128 - self.first_failure.code


def report(outcome: Outcome) -> str:
    """Returns who is the culprit and how it ended, its last lines and stack, and how the others ended; empty after success."""
    culprit, verdict = outcome.culprit, outcome.verdict
    lines = [f"The cluster could not go on: {verdict['text']}"] if verdict else []
    if culprit:
        how = _became(culprit) if verdict else f"failed first: it {in_words(culprit.code)}"
        lines += [f"{culprit.name} {how}, {culprit.after_s:.1f} s after the start.", *_words_of(culprit)]
    if outcome.signal is not None:
        lines.append(f"The launcher was ended by {signal_name(outcome.signal)}.")
    if lines:
        lines += [f"  {e.name} {_became(e)}" for e in outcome.endings if e is not culprit]
    return "\n".join(lines)


def in_words(code: int) -> str:
    """Returns what an exit code says.

    Example:
      >>> in_words(3), in_words(-11)
      ('exited with code 3', 'was killed by SIGSEGV')
    """
    words = f"was killed by {signal_name(-code)}" if code < 0 else f"exited with code {code}"
    return f"{words} ({_REASONS[code]})" if code in _REASONS else words


def signal_name(number: int) -> str:
    """Returns the name of a signal."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def stack_of(lines: Sequence[KeptLine]) -> list[str]:
    """Returns the last Python stack among the lines, with those that caused it; empty where there is none."""
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


def _became(ending: Ending) -> str:
    stood = "stood still (SIGSTOP) and " if ending.is_stopped else ""
    # 143 is what a worker ends with whose `finally` blocks ran.
    code = -signal.SIGTERM if ending.code == 128 + signal.SIGTERM else ending.code
    if ending.is_told and code in (-signal.SIGTERM, -signal.SIGKILL):
        return f"{stood}was ended by the launcher ({signal_name(-code)})"
    return f"{stood}{in_words(ending.code)}" + (" after it was told to end" if ending.is_told else "")


def _start_of_stack(texts: list[str]) -> int | None:
    """Where the last stack begins: a crash's, an exception's, or the first of all threads'."""
    crashes = [i for i, text in enumerate(texts) if text.startswith(_CRASH)]
    raised = [i for i, text in enumerate(texts) if _TRACEBACK in text]
    threads = [i for i, text in enumerate(texts) if _THREAD.match(text)]
    if crashes:
        return crashes[-1]
    if raised and (not threads or raised[-1] > threads[-1]):
        return _start_of_chain(texts, raised)
    return threads[0] if threads else None


def _start_of_chain(texts: list[str], raised: list[int]) -> int:
    start = len(raised) - 1
    while start and any(text.startswith(_CHAINS) for text in texts[raised[start - 1] : raised[start]]):
        start -= 1
    return raised[start]
