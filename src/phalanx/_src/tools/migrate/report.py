# SPDX-License-Identifier: Apache-2.0
"""What a migration has found in a file, line by line."""

from collections import Counter
from dataclasses import dataclass, field
from typing import final

CHANGED, LOOK, UNREADABLE = "changed", "look", "unreadable"


@final
@dataclass(frozen=True, order=True)
class Finding:
    """Something that was changed, or that a person must look at.

    Attributes:
      line: the line in the original file.
      kind: `changed`, `look` or `unreadable`.
      text: what it is, and what to write.
      place: where it stands. Empty for the line.
    """

    line: int
    kind: str
    text: str
    place: str = ""


@final
@dataclass
class Report:
    """The findings in one file.

    Attributes:
      path: the file.
      findings: what was found.
      in_tensorflow: how many names need TensorFlow and stay, mostly those of tf.data.
    """

    path: str
    findings: list[Finding] = field(default_factory=list)
    in_tensorflow: int = 0

    def add(self, line: int, kind: str, text: str) -> None:
        """Adds a finding."""
        self.findings.append(Finding(line, kind, text))

    @property
    def exit_code(self) -> int:
        """0 if all is migrated, 1 if a person must look at a line, and 2 if the file cannot be read."""
        kinds = {finding.kind for finding in self.findings}
        return 2 if UNREADABLE in kinds else int(LOOK in kinds)

    def lines(self) -> list[str]:
        """Returns the report as lines of text. Equal changes are one line."""
        if not self.findings and not self.in_tensorflow:
            return [f"{self.path}: nothing to change"]
        changes = Counter(finding.text for finding in self.findings if finding.kind == CHANGED)
        looks = sorted(set(finding for finding in self.findings if finding.kind != CHANGED))
        lines = [f"  {text}" + (f"  ({times} times)" if times > 1 else "") for text, times in sorted(changes.items())]
        lines += [f"  {finding.place or f'line {finding.line}'}: {finding.text}" for finding in looks]
        if self.in_tensorflow:
            names = f"{self.in_tensorflow} name{'s' * (self.in_tensorflow != 1)}"
            lines.append(
                f"  TensorFlow stays for {names}, as in tf.data. HINT: pip install tensorflow-cpu, or pass arrays: "
                "strategy.experimental_distribute_dataset((x, y), batch_size=...)"
            )
        changed = sum(changes.values())
        summary = f"{changed} change{'s' * (changed != 1)}, {len(looks)} line{'s' * (len(looks) != 1)} to look at"
        return [f"{self.path}: {summary}", *lines]
