"""`Tracking` gives a writer what `TensorBoard` writes."""

import csv

import keras
import numpy as np
import pytest
from event_files import written
from twins import FIT, X, Y, compiled, same, under

import phalanx
from phalanx import summary
from phalanx.errors import InvalidArgumentError

pytestmark = pytest.mark.slow

ACCURATE = compiled(metrics=["accuracy"], optimizer=lambda: keras.optimizers.Adam(0.05))


@pytest.fixture
def tracked(tmp_path):
    """A writer of a CSV file, and what is in the file: `{name: [(step, value)]}`."""
    path = tmp_path / "scalars.csv"
    writer = summary.create_tracker_writer(summary.trackers.CSVTracker(path))

    def rows():
        found = {}
        for row in csv.DictReader(path.read_text().splitlines()):
            found.setdefault(row["name"], []).append((int(row["step"]), float(row["value"])))
        return found

    yield writer, rows
    writer.close()


def test_trackers_get_what_tensorboard_gets(strategy, tmp_path, tracked):
    """The same values and steps, under the same names after the part's name."""
    writer, rows = tracked
    callbacks = [phalanx.keras.TensorBoard(tmp_path, update_freq=2), phalanx.keras.Tracking(writer, update_freq=2)]
    under(strategy, ACCURATE).fit(X, Y, **FIT, epochs=2, validation_data=(X, Y), callbacks=callbacks)
    writer.close()
    found, parts = rows(), {part: written(tmp_path / part).items() for part in ("train", "validation")}
    expected = {
        f"{part}/{tag}": values for part in parts for tag, values in parts[part] if tag not in ("keras", "graph")
    }
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert [s for s, _ in found[name]] == [s for s, _ in values]
        same([v for _, v in found[name]], [float(v) for _, v in values])


def test_speed_is_written_on_demand(strategy, tracked):
    """In steps per second, of a call that trains on two batches and of the epoch. The rate is that of the optimizer inside."""
    writer, rows = tracked
    optimizer = lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.25))  # noqa: E731
    callback = phalanx.keras.Tracking(writer, "batch", write_steps_per_second=True)
    under(strategy, compiled(optimizer=optimizer, steps_per_execution=2)).fit(X, Y, **FIT, callbacks=[callback])
    found = rows()
    assert [s for s, _ in found["train/batch_steps_per_second"]] == [2, 4, 6, 7]
    ((step, speed),) = found["train/epoch_steps_per_second"]
    assert step == 0
    assert 0 < speed < max(v for _, v in found["train/batch_steps_per_second"]) * 7
    assert found["train/epoch_learning_rate"] == [(0, 0.25)]


def test_results_of_evaluate_reach_trackers(strategy, tracked):
    """And the writer stays open."""
    writer, rows = tracked
    model = under(strategy, ACCURATE)
    for _ in range(2):
        results = model.evaluate(X, Y, verbose=0, callbacks=[phalanx.keras.Tracking(writer)])
    same([v for _, v in rows()["validation/evaluation_loss_vs_iterations"]], [results[0], results[0]])


def test_outputs_that_are_no_numbers(strategy, tracked):
    """A step of one's own may return an array. It is left out."""
    writer, rows = tracked

    class Own(keras.Sequential):
        def train_step(self, data):
            x, _ = data
            return {"size": phalanx.nn.compute_average_loss(self(x)[:, 0] * 0 + 1.0), "all": np.ones(3, np.float32)}

    with strategy.scope():
        model = Own([keras.Input((5,)), keras.layers.Dense(3)])
        model.compile("sgd", "mse")
    model.fit(X[:96], Y[:96], **FIT, callbacks=[phalanx.keras.Tracking(writer, 3)])
    writer.close()
    assert not any("all" in name for name in rows())
    assert [s for s, _ in rows()["train/batch_size"]] == [3, 6]


@pytest.mark.parametrize(("given", "message"), [(("logs",), "writer='logs'"), ((None, 0), "update_freq=0")])
def test_arguments_that_are_wrong(given, message):
    with pytest.raises(InvalidArgumentError, match=f"{message}.*\nHINT"):
        phalanx.keras.Tracking(*given)
