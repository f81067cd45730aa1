# SPDX-License-Identifier: Apache-2.0
"""The steps of a cluster to profile, and one time line of the profiles of all processes. Uses the standard library only."""

import contextlib
import gzip
import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from phalanx._src.cluster.untrusted import new_file, open_data
from phalanx.errors import InvalidArgumentError, arguments, shown

PROFILE = "PHALANX_PROFILE"
"""The environment variable with which `phalanx run --profile` asks the processes for profiles: FIRST:LAST:FOLDER."""

CLOCK = "phalanx clock"
"""The event that each process records when it begins a profile, at a time that it writes down."""

MERGED = "profile.json.gz"
_PROCESS = 1_000_000


@dataclass(frozen=True)
class Span:
    """The steps to profile.

    Args:
      first: number of steps before the profile begins.
      last: number of steps before it ends.
      folder: folder for the files.
    """

    first: int
    last: int
    folder: Path

    @classmethod
    def parse(cls, steps: str, folder: Path) -> Self:
        """Returns the span that `FIRST:LAST` names.

        Raises:
          InvalidArgumentError: these are not two numbers, or the second is not larger.
        """
        if (span := cls._of(steps, folder)) is None:
            raise InvalidArgumentError(
                f"--profile {steps:.80}",
                "must be two numbers of steps, the second larger than the first.",
                "--profile 100:110",
            )
        return span

    @classmethod
    def _of(cls, steps: str, folder: Path) -> Self | None:
        first, _, last = steps.partition(":")
        is_span = arguments.is_number(first) and arguments.is_number(last) and int(first) < int(last)
        return cls(int(first), int(last), folder) if is_span else None

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Self | None:
        """Returns the span that the environment asks for. None if it asks for none.

        Raises:
          InvalidArgumentError: it asks for something else.
        """
        text = environment.get(PROFILE)
        if not text:
            return None
        *steps, folder = text.split(":", 2)
        if not folder or (span := cls._of(":".join(steps), Path(folder))) is None:
            raise InvalidArgumentError(
                f"{PROFILE}={shown(text, 80)}",
                "must be two numbers of steps and a folder.",
                f"{PROFILE}=100:110:profile",
            )
        return span

    def __str__(self) -> str:
        return f"{self.first}:{self.last}:{self.folder}"


def write(trace: Path, rank: int, clock_s: float, folder: Path) -> None:
    """Writes the profile of one process, with the time of day in place of its own.

    Args:
      trace: the file that JAX has written for Perfetto.
      rank: rank of the process.
      clock_s: when it recorded `CLOCK`, in seconds since 1970.
      folder: folder for the file.
    """
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    # Times of events are in microseconds.
    shift = 1e6 * clock_s - next(e["ts"] for e in events if e.get("name") == CLOCK)
    # JAX's list ends with an empty event.
    placed = [_of_rank(event, rank, shift) for event in events if event]
    _save({"displayTimeUnit": "ms", "traceEvents": placed}, folder / f"rank_{rank}.json.gz")


def merge(folder: Path) -> Path | None:
    """Joins the profiles of all processes into one file, which begins at the time 0. None if there are no profiles."""
    files = sorted(folder.glob("rank_*.json.gz"))
    events = [event for file in files for event in _events_in(file)]
    if not events:
        return None
    start = min(event["ts"] for event in events if "ts" in event)
    moved = [{**event, "ts": event["ts"] - start} if "ts" in event else event for event in events]
    _save({"displayTimeUnit": "ms", "traceEvents": moved}, folder / MERGED)
    return folder / MERGED


def _events_in(file: Path) -> list[dict[str, Any]]:
    """Returns the events of the profile of a process. None of a file that another user has put there: it may expand to any size."""
    no_profile = (EOFError, LookupError, OSError, TypeError, ValueError, zlib.error)
    with contextlib.suppress(*no_profile), open_data(file) as opened:
        if os.fstat(opened.fileno()).st_uid == os.geteuid():
            events: list[dict[str, Any]] = json.loads(gzip.decompress(opened.readall()))["traceEvents"]
            return events
    return []


def clear(folder: Path) -> None:
    """Makes the folder, and removes the profiles of an earlier run from it.

    Raises:
      InvalidArgumentError: this user may not write there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file in [*folder.glob("rank_*.json.gz"), folder / MERGED]:
            file.unlink(missing_ok=True)
    except OSError as e:
        hint = "--profile-folder profile, a folder that this user may write to"
        raise InvalidArgumentError(f"--profile-folder {folder}", f"profiles cannot be written there: {e}.", hint) from e


def _of_rank(event: dict[str, Any], rank: int, shift: float) -> dict[str, Any]:
    moved = {**event, "pid": rank * _PROCESS + event.get("pid", 0) % _PROCESS}
    if "ts" in event:
        moved["ts"] = event["ts"] + shift
    if event.get("name") == "process_name":
        moved["args"] = {"name": f"rank {rank} {event['args']['name']}"}
    elif event.get("name") == "process_sort_index":
        moved["args"] = {"sort_index": moved["pid"]}
    return moved


def _save(trace: dict[str, Any], path: Path) -> None:
    with new_file(path) as opened:
        opened.write(gzip.compress(json.dumps(trace).encode(), mtime=0))
