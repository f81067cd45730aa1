"""`make gpu` on CPUs: its report has every part, whatever becomes of one."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from benchmarks.gpu import BENCHMARKS, CONTRACT, run_module
from benchmarks.gpu_report import Part

ROOT = Path(__file__).parents[2]
DEADLINE_S = 300


def environment_with(**variables):
    """The environment of this process without its devices, but with these variables."""
    removed = ("NPROC", "XLA_FLAGS", "PHALANX_TEST_DEVICES", "JAX_PLATFORMS")
    inherited = {k: v for k, v in os.environ.items() if k not in removed}
    return inherited | {"PYTHONPATH": "src", "JAX_PLATFORMS": "cpu", "PHALANX_CPU_DEVICES": "1"} | variables


def start(out, **variables):
    """Starts the quick form."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--quick", "--out", str(out)]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, cwd=ROOT, env=environment_with(**variables), stdout=pipe, stderr=subprocess.STDOUT, text=True
    )


def parts_of(out):
    """Returns the parts of a report by name."""
    return {part["name"]: part for part in json.loads(out.with_suffix(".json").read_text())["parts"]}


@pytest.mark.exhaustive("test_interrupted_run_keeps_its_report")
def test_report_has_every_part(tmp_path):
    """On one CPU device: facts of the machine, rows that ran and rows that do not fit, and a table per benchmark."""
    out = tmp_path / "report.md"
    process = start(out)
    output, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, output
    parts, text = parts_of(out), out.read_text()
    assert list(parts) == ["machine", *(f"contract {c}" for c in CONTRACT), *(f"benchmark {b}" for b in BENCHMARKS)]
    assert {part["result"] for part in parts.values()} == {"passed", "left out"}
    assert "**JAX found no GPU.**" in text
    assert "| versions | jax | 0." in text
    assert "| mirrored_x1 | 1 | 0 | 0 |  |" in text
    assert "| mirrored_x2 | 0 | 0 | 1 | needs 2 devices; the devices are cpu:0 |" in text
    for name in BENCHMARKS:
        table = parts[f"benchmark {name}"]["table"]
        assert table["title"] in text
        assert "ratio" in table["columns"]
        assert table["rows"]
    assert text.endswith("## Errors\n\nNone.\n")


def test_report_of_jax_without_devices(tmp_path):
    """If JAX does not start, its error is in the report, and no other part runs."""
    out = tmp_path / "report.md"
    process = start(out, JAX_PLATFORMS="nonsense")
    output, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1, output
    assert {part["result"] for part in parts_of(out).values()} == {"failed", "not run"}
    assert "nonsense" in out.read_text().partition("## Errors")[2]


def test_interrupted_run_keeps_its_report(tmp_path):
    """SIGTERM in the second part leaves a report of the first, and no process."""
    out = tmp_path / "report.md"
    process = start(out)
    line = process.stdout.readline()
    assert line == "machine: passed\n"
    time.sleep(1)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1
    parts = list(parts_of(out).values())
    assert [(part["result"], part["why"]) for part in parts[:3]] == [
        ("passed", ""),
        ("failed", "interrupted"),
        ("not run", ""),
    ]


@pytest.mark.parametrize(
    ("code", "why", "log"),
    [
        ("import time; time.sleep(100)", "did not end within 1 s", "most recent call first"),
        ("import os; os.abort()", "ended by SIGABRT", "most recent call first"),
        ("1 / 0", "exit status 1", "ZeroDivisionError"),
        ("1", "", "loop"),
    ],
)
def test_end_of_a_part_is_named(tmp_path, code, why, log):
    """A part that hangs, crashes or fails ends with the reason and its stacks."""
    command, environment = ["timeit", "-n", "1", "-r", "1", code], os.environ | {"PYTHONFAULTHANDLER": "1"}
    deadline_s = 1 if "sleep" in code else DEADLINE_S
    assert run_module(command, environment, tmp_path / "log", deadline_s) == why
    assert log in (tmp_path / "log").read_text()


def test_test_that_ended_its_process_is_named():
    """A test that began and has no outcome is the one that ran when the process ended."""
    part = Part("contract", result="failed", why="ended by SIGSEGV", log="Fatal Python error")
    part.add_outcomes(
        [
            {"test": "a", "outcome": "started"},
            {"test": "a", "outcome": "passed", "row": "mirrored_x1", "text": ""},
            {"test": "b", "outcome": "started"},
        ]
    )
    assert (part.count("passed"), part.count("failed")) == (1, 1)
    assert part.errors() == [("b", "was running; ended by SIGSEGV"), ("contract: log", "Fatal Python error")]


def test_processes_of_benchmarks_see_their_gpus():
    """A process for one replica sees one of two GPUs, and no row has more replicas than there are GPUs."""
    code = (
        "from benchmarks import devices; print(devices.environment(1), devices.fitting((1, 2, 4)), devices.at_most(4))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment_with(PHALANX_TEST_DEVICES="gpu:0,gpu:1"),
        capture_output=True,
        text=True,
        check=True,
    )
    visible = {"JAX_CUDA_VISIBLE_DEVICES": "0", "JAX_ROCM_VISIBLE_DEVICES": "0"}
    variables = visible | {"PHALANX_TEST_DEVICES": "gpu:0", "KERAS_BACKEND": "jax"}
    assert done.stdout == f"{variables} [1, 2] 2\n"


@pytest.mark.exhaustive("test_end_of_a_part_is_named")
def test_row_that_fails_does_not_end_its_benchmark(tmp_path):
    """The errors of all rows are in the file of the benchmark, and the exit status tells."""
    variables = {"PHALANX_BENCHMARK_RESULTS": str(tmp_path), "PHALANX_BENCHMARK_ROWS": "2", "JAX_PLATFORMS": "nonsense"}
    command = [sys.executable, "-m", "benchmarks", "host", "--quick"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment_with(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 1, done.stdout
    content = json.loads((tmp_path / "host.json").read_text())
    assert content["rows"] == []
    assert ["'count': 10," in f or "'count': 100," in f for f in content["failures"]] == [True, True]
    assert all("nonsense" in failure for failure in content["failures"])
