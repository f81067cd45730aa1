# SPDX-License-Identifier: Apache-2.0
"""The processes that a benchmark has started."""

import os
from pathlib import Path


def descendants(ancestor: int | None = None) -> set[int]:
    """Returns all processes that descend from a process, or from this one."""
    ancestor = os.getpid() if ancestor is None else ancestor
    found = {ancestor}
    stats = {int(p.name): _stat(int(p.name)) for p in Path("/proc").iterdir() if p.name.isdigit()}
    while more := {p for p, stat in stats.items() if stat and int(stat[1]) in found} - found:
        found |= more
    return found - {ancestor}


def is_alive(pid: int) -> bool:
    """Whether a process runs, or is stopped; not whether one that has ended waits for its parent."""
    stat = _stat(pid)
    return bool(stat) and stat[0] != "Z"


def _stat(pid: int) -> list[str]:
    """Returns state, parent and the like of a process; nothing where it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
