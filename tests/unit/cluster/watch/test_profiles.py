"""The steps that are profiled, and the time line of all processes."""

import gzip
import json
import os
from pathlib import Path

import pytest

from phalanx._src.cluster.watch.profiles import CLOCK, MERGED, PROFILE, Span, clear, merge, write
from phalanx.errors import InvalidArgumentError


def test_span_from_the_command_line():
    """Two numbers; it reaches the processes in a variable."""
    span = Span.parse("100:110", Path("/logs/with:colon"))
    assert (span.first, span.last) == (100, 110)
    assert Span.of({PROFILE: str(span)}) == span
    assert Span.of({}) is None


@pytest.mark.parametrize("steps", ["100", "110:100", "5:5", "a:b", ":", "-1:4"])
def test_bad_spans_are_refused(steps):
    with pytest.raises(InvalidArgumentError, match=r"must be two numbers of steps(.|\n)*HINT: --profile 100:110"):
        Span.parse(steps, Path())


def trace_of(folder, pid, clock):
    """A trace as JAX writes it, whose clock event has this time in microseconds."""
    events = [
        {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": "/host:CPU"}},
        {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid}},
        {"ph": "X", "pid": pid, "tid": 1, "ts": clock, "dur": 1.0, "name": CLOCK},
        {"ph": "X", "pid": pid, "tid": 1, "ts": clock + 500.0, "dur": 20.0, "name": "step"},
        {},
    ]
    path = folder / f"{pid}.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    return path


def test_processes_stand_on_one_time_line(tmp_path):
    """Each has its rank in its name; their clocks are aligned by the event that each has recorded at a known time."""
    folder = tmp_path / "profile"
    clear(folder)
    write(trace_of(tmp_path, 701, 100.0), 0, 1_000.0, folder)
    write(trace_of(tmp_path, 701, 9_000.0), 1, 1_000.002, folder)
    path = merge(folder)
    assert path == folder / MERGED
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    steps = {event["pid"] // 1_000_000: event["ts"] for event in events if event["name"] == "step"}
    assert steps == pytest.approx({0: 500.0, 1: 2_500.0}, abs=1.0)
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == [
        "rank 0 /host:CPU",
        "rank 1 /host:CPU",
    ]
    clear(folder)
    assert list(folder.iterdir()) == []
    assert merge(folder) is None


@pytest.mark.parametrize(
    "text", ["5", "5:", "::", "a:b:c", "5:5:c", "7:5:c", "-1:4:c", f"1:{'9' * 5000}:c", "1:2:", "1:\u00b2:c", "\x1b[2J"]
)
def test_bad_spans_of_the_environment_are_refused(text):
    with pytest.raises(
        InvalidArgumentError, match=rf"(?s)^{PROFILE}=.*two numbers of steps and a folder.*HINT: {PROFILE}=1"
    ) as e:
        Span.of({PROFILE: text})
    assert len(str(e.value)) < 300
    assert "\x1b" not in str(e.value)


def test_profiles_of_other_users_are_skipped(tmp_path, monkeypatch):
    """So are files that contain no profile, and nothing is written through links."""
    write(trace_of(tmp_path, 701, 100.0), 0, 1_000.0, tmp_path)
    (tmp_path / "rank_1.json.gz").write_bytes(b"no profile")
    (tmp_path / "rank_2.json.gz").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "rank_3.json.gz")
    assert merge(tmp_path) == tmp_path / MERGED
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert merge(tmp_path) is None
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "rank_4.json.gz").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="It is a link"):
        write(trace_of(tmp_path, 701, 100.0), 4, 1_000.0, tmp_path)
    assert (tmp_path / "victim").read_text() == "mine"


def test_folder_that_cannot_be_written_is_refused_before_the_run(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "full" / MERGED).mkdir(parents=True)
    for name in ("file", "file/folder", "x" * 300, "full"):
        with pytest.raises(InvalidArgumentError, match=r"profiles cannot be written there: .*\nHINT: --profile-folder"):
            clear(tmp_path / name)
