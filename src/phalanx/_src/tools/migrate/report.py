# SPDX-License-Identifier: Apache-2.0
"""What a migration has found in a file, line by line."""

from collections import Counter
from dataclasses import dataclass, field
from typing import final

CHANGED, LOOK, STAYS, UNREADABLE = "changed", "look", "stays", "unreadable"
_SHOWN_NAMES = 3


@final
@dataclass(frozen=True, order=True)
class Finding:
    """Something that was changed, that stays in TensorFlow, or that a person must look at.

    Attributes:
      line: the line in the original file.
      kind: `changed`, `look`, `stays` or `unreadable`.
      text: what it is, and what to write. The name, if it stays.
      place: where it stands. Empty for the line.
    """

    line: int
    kind: str
    text: str
    place: str = ""

    @property
    def where(self) -> str:
        """The place, or else the line."""
        return self.place or f"line {self.line}"


@final
@dataclass
class Report:
    """The findings in one file.

    Attributes:
      path: the file.
      findings: what was found.
    """

    path: str
    findings: list[Finding] = field(default_factory=list)

    def add(self, line: int, kind: str, text: str) -> None:
        """Adds a finding."""
        self.findings.append(Finding(line, kind, text))

    @property
    def exit_code(self) -> int:
        """0 if all is migrated or stays in TensorFlow, 1 if a person must look at a line, and 2 if the file cannot be read."""
        kinds = {finding.kind for finding in self.findings}
        return 2 if UNREADABLE in kinds else int(LOOK in kinds)

    def lines(self) -> list[str]:
        """Returns the report as lines of text. Equal changes are one line."""
        if not self.findings:
            return [f"{self.path}: nothing to change"]
        changes = Counter(finding.text for finding in self.findings if finding.kind == CHANGED)
        looks = sorted(set(finding for finding in self.findings if finding.kind in {LOOK, UNREADABLE}))
        lines = [f"  {text}" + (f"  ({times} times)" if times > 1 else "") for text, times in sorted(changes.items())]
        lines += [f"  {finding.where}: {finding.text}" for finding in looks]
        lines += self._staying()
        changed = sum(changes.values())
        summary = f"{changed} change{'s' * (changed != 1)}, {len(looks)} line{'s' * (len(looks) != 1)} to look at"
        return [f"{self.path}: {summary}", *lines]

    def _staying(self) -> list[str]:
        """Returns a line about the names that need TensorFlow and stay, such as `tf.data`. Nothing if there are none."""
        first_uses: dict[str, str] = {}
        for finding in sorted(self.findings):
            if finding.kind == STAYS:
                first_uses.setdefault(finding.text, finding.where)
        if not first_uses:
            return []
        count = len(first_uses)
        shown = [f"{name} ({where})" for name, where in [*first_uses.items()][:_SHOWN_NAMES]]
        more = [f"{count - _SHOWN_NAMES} more"] if count > _SHOWN_NAMES else []
        return [
            f"  {count} name{'s' * (count != 1)} of TensorFlow stay{'s' * (count == 1)}: {', '.join(shown + more)}. "
            "HINT: pip install tensorflow-cpu, or pass arrays: "
            "strategy.experimental_distribute_dataset((x, y), batch_size=...)"
        ]
