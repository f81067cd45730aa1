"""The report of all benchmarks: one page from what their runs have written."""

import json
import re

import pytest
from benchmarks import page, report

NUMBERS = {
    "date": "2026-01-02",
    "machine": {"cores": "2"},
    "failures": [],
    "measurements": [{"ratio": 2.0}, {"ratio": 0.5}, {"note": "no ratio"}],
    "columns": ["model", "target"],
    "rows": [["a|b", "met (>= 1)"], ["c", "MISSED (>= 1)"], ["d", "no target"]],
}


def result(name, **changes):
    return NUMBERS | {"title": f"Speed of {name}", "command": f"python -m benchmarks {name}"} | changes


@pytest.fixture
def results(tmp_path, monkeypatch):
    """A folder for the results of benchmarks."""
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    return tmp_path


def test_last_full_run_counts(results, monkeypatch):
    """A quick run, or one of a single case, does not replace a full one. A benchmark that did not run again keeps its result."""
    runs = {"step": [], "fit": ["--quick"], "scale": ["--case", "LSTM"], "kills": ["--rounds", "9"]}
    for name, options in runs.items():
        monkeypatch.setattr("sys.argv", ["benchmarks", "step", "fit", *options])
        report.Report(name, f"New {name}", ("ratio",)).add([1.5], ratio=1.5)
    (results / "old.json").write_text(json.dumps({"name": "of an earlier version"}))
    found = page.merged({name: result(name) for name in ("fit", "step", "scale")}, results)
    assert {name: each["title"] for name, each in found.items()} == {
        "fit": "Speed of fit",
        "kills": "New kills",
        "scale": "Speed of scale",
        "step": "New step",
    }
    assert found["kills"]["command"] == "python -m benchmarks kills --rounds 9"
    assert found["step"]["rows"] == [["1.500"]]
    facts = {"os", "machine", "cores", "processor", "python", "phalanx", "jax", "jaxlib", "keras", "numpy"}
    assert set(found["step"]["machine"]) == facts


def test_page_has_all_tables():
    """With what was missed, and how each was measured."""
    text = page.written(
        {"sharded_kills": result("sharded_kills", failures=["E"]), "step": result("step")}, ["bench_ranks"]
    )
    assert "| [`step`](#step) | 1 | 1 | 2026-01-02 | `python -m benchmarks step` |" in text
    assert set(re.findall(r"\]\(#(.*?)\)", text)) == {
        title.lower().replace(" ", "-")
        for title in re.findall(r"(?m)^## (.*)$", text)
        if title not in ("Summary", "Where to go next")
    }
    assert text.count("| a\\|b | met (>= 1) |") == 2
    assert text.count("Rows that failed: 1.") == 1
    assert "](images/bench_ranks.svg)" in text


def test_points_of_the_pictures():
    """The median of each row that compares Phalanx with another library, and the times of the first process."""
    columns = ["processes", "meet s", "rank 0 CPU s", "agree s", "death known s"]
    scale = result("scale", columns=columns, rows=[["8", "0.1", "0.2", "0.3", "0.4"], ["64", "1", "2", "3", "4"]])
    workers = result("multi_worker", measurements=[{"ratios": {"loop": 0.9, "fit": 0.8}}])
    fit = result("fit", measurements=[{"ratio": 1.5}, {"ratio": 0.7, "first_step": True}])
    found = {"step": result("step"), "scale": scale, "kills": result("kills"), "multi_worker": workers, "fit": fit}
    assert page.ratios_of(found) == [("fit", 1.5), ("multi_worker", 0.9), ("step", 2.0), ("step", 0.5)]
    assert page.times_of_ranks(found)["agree s"] == [(8, 0.3), (64, 3.0)]
    assert (page.ratios_of({}), page.times_of_ranks({})) == ([], {})
