"""Trackers get the scalars of compiled steps, from a thread of the writer."""

import json
import threading

import jax.numpy as jnp
import numpy as np
import pytest

import phalanx
from phalanx import summary
from phalanx.errors import InvalidArgumentError, SummaryError
from phalanx.summary import trackers


class Listed(trackers.Tracker):
    """Keeps what it gets."""

    def __init__(self, name="listed", failing=()):
        self.name, self._failing, self.calls = name, failing, []

    def start(self, config):
        self._note("start", config)

    def log(self, values, step):
        self._note("log", values, step, threading.current_thread().name)

    def finish(self):
        self._note("finish")

    def _note(self, kind, *what):
        if kind in self._failing:
            raise OSError(f"{kind} of {self.name}")
        self.calls.append((kind, *what))


def test_scalars_of_a_compiled_step_reach_all_trackers():
    """Once each, with step and config, from the thread; values of other kinds are left out."""
    both = [Listed(), Listed("second")]
    writer = summary.create_tracker_writer(*both, config={"rate": 0.5})
    strategy = phalanx.MirroredStrategy(["cpu:0", "cpu:1"])
    values = strategy.experimental_distribute_values_from_function(lambda c: jnp.float32(c.replica_id_in_sync_group))

    def step(x):
        summary.scalar("mean", x)
        summary.histogram("all", x)

    for number in range(2):
        with writer.as_default(step=number):
            strategy.run(step, args=(values,))
    writer.close()
    logged = [("log", {"mean": 0.5}, number, "phalanx-summary") for number in range(2)]
    for tracker in both:
        assert tracker.calls == [("start", {"rate": 0.5}), *logged, ("finish",)]


def test_steps_of_a_loop_reach_trackers():
    """`run_steps` stacks its values; a traced condition chooses among them."""
    tracker = Listed()
    strategy = phalanx.MirroredStrategy(["cpu:0", "cpu:1"])
    data = iter(strategy.experimental_distribute_dataset([np.full((4,), i, np.float32) for i in range(4)]))

    def step(x):
        with summary.record_if(x[0] != 1):
            summary.scalar("x", x[0])

    writer = summary.create_tracker_writer(tracker)
    with writer.as_default(step=10):
        strategy.run_steps(step, data, steps=4)
    writer.close()
    assert [(values["x"], step) for _, values, step, _ in tracker.calls[1:-1]] == [(0.0, 10), (2.0, 12), (3.0, 13)]


def test_writer_without_scalars_starts_nothing():
    """A tracker is started with the first summary."""
    tracker = Listed()
    writer = summary.create_tracker_writer(tracker)
    writer.flush()
    writer.close()
    assert tracker.calls == []


@pytest.mark.parametrize(("failing", "calls"), [("start", ["start", "finish"]), ("log", ["start", "log", "finish"])])
def test_errors_of_trackers_are_raised(failing, calls):
    """With the names of the trackers. Those that were started are finished."""
    good, bad = Listed("good"), Listed("bad", failing=[failing])
    writer = summary.create_tracker_writer(good, bad)
    with pytest.raises(SummaryError, match=f"summaries in good, bad: .* {failing} of bad\nHINT"), writer.as_default():
        summary.scalar("x", 1.0, step=0)
    writer.close()
    assert [kind for kind, *_ in good.calls] == calls


def test_finish_that_fails_lets_others_finish():
    """All are finished, and `close` raises the error."""
    good, bad = Listed("good"), Listed("bad", failing=["finish"])
    writer = summary.create_tracker_writer(good, bad)
    with writer.as_default():
        summary.scalar("x", 1.0, step=0)
    with pytest.raises(SummaryError, match="finish of bad"):
        writer.close()
    assert good.calls[-1] == ("finish",)


def test_csv_file_is_continued(tmp_path):
    """With one header, and the config beside it."""
    path = tmp_path / "deep" / "scalars.csv"
    for step in (1, 2):
        writer = summary.create_tracker_writer(trackers.CSVTracker(path), config={"rate": 0.5, "path": tmp_path})
        with writer.as_default(step=step):
            summary.scalar('a, "b"', 0.25)
        writer.close()
    assert path.read_text() == 'step,name,value\n1,"a, ""b""",0.25\n2,"a, ""b""",0.25\n'
    config = json.loads((tmp_path / "deep" / "scalars.csv.config.json").read_text())
    assert config == {"rate": 0.5, "path": str(tmp_path)}


@pytest.mark.parametrize("name", ["scalars.csv", "scalars.csv.config.json"])
def test_csv_file_is_not_written_through_links(tmp_path, name):
    """Others may write to the folder."""
    (tmp_path / "victim").write_text("mine")
    (tmp_path / name).symlink_to(tmp_path / "victim")
    writer = summary.create_tracker_writer(trackers.CSVTracker(tmp_path / "scalars.csv"), config={"rate": 0.5})

    def log():
        with writer.as_default():
            summary.scalar("x", 1.0, step=0)
        writer.close()

    with pytest.raises(SummaryError, match=r"(?s)CSVTracker\(.*the file cannot be written: .*HINT: CSVTracker"):
        log()
    assert (tmp_path / "victim").read_text() == "mine"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: summary.create_tracker_writer(), "it needs a tracker"),
        (lambda: summary.create_tracker_writer("mlflow"), "tracker='mlflow'"),
        (lambda: summary.create_tracker_writer(Listed(), config=3), "config=3"),
        (lambda: summary.create_tracker_writer(Listed(), config={3: 4}), "config="),
        (lambda: summary.create_tracker_writer(Listed(), max_queue=0), "max_queue=0"),
        (lambda: trackers.CSVTracker(3), "path=3"),
    ],
)
def test_arguments_that_are_wrong(call, message):
    with pytest.raises(InvalidArgumentError, match=f"(?s){message}.*HINT"):
        call()
