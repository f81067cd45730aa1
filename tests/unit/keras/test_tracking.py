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


def rows(path):
    """Returns `{name: [(step, value)]}` of a CSV file."""
    found = {}
    with open(path) as file:
        for row in csv.DictReader(file):
            found.setdefault(row["name"], []).append((int(row["step"]), float(row["value"])))
    return found


def test_trackers_get_what_tensorboard_gets(strategy, tmp_path):
    """The same values and steps, under the same names after the part's name."""
    writer = summary.create_tracker_writer(summary.trackers.CSVTracker(tmp_path / "scalars.csv"))
    callbacks = [phalanx.keras.TensorBoard(tmp_path, update_freq=2), phalanx.keras.Tracking(writer, update_freq=2)]
    under(strategy, ACCURATE).fit(X, Y, **FIT, epochs=2, validation_data=(X, Y), callbacks=callbacks)
    writer.close()
    found = rows(tmp_path / "scalars.csv")
    expected = {f"{part}/{tag}": values for part in ("train", "validation") for tag, values in scalars(tmp_path / part)}
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert [s for s, _ in found[name]] == [s for s, _ in values]
        same([v for _, v in found[name]], [float(v) for _, v in values])


def scalars(folder):
    """Yields the tags of numbers in an event file, with steps and values."""
    for tag, values in written(folder).items():
        if tag not in ("keras", "graph"):
            yield tag, values


def test_speed_is_written_on_demand(strategy, tmp_path):
    """In steps per second, of a call that trains on two batches and of the epoch."""
    writer = summary.create_tracker_writer(summary.trackers.CSVTracker(tmp_path / "scalars.csv"))
    callback = phalanx.keras.Tracking(writer, "batch", write_steps_per_second=True)
    under(strategy, compiled(steps_per_execution=2)).fit(X, Y, **FIT, callbacks=[callback])
    found = rows(tmp_path / "scalars.csv")
    assert [s for s, _ in found["train/batch_steps_per_second"]] == [2, 4, 6, 7]
    ((step, speed),) = found["train/epoch_steps_per_second"]
    assert step == 0
    assert 0 < speed < max(v for _, v in found["train/batch_steps_per_second"]) * 7
    writer.close()


def test_results_of_evaluate_reach_trackers(strategy, tmp_path):
    """And the writer stays open."""
    model = under(strategy, ACCURATE)
    writer = summary.create_tracker_writer(summary.trackers.CSVTracker(tmp_path / "scalars.csv"))
    for _ in range(2):
        results = model.evaluate(X, Y, verbose=0, callbacks=[phalanx.keras.Tracking(writer)])
    values = rows(tmp_path / "scalars.csv")["validation/evaluation_loss_vs_iterations"]
    same([v for _, v in values], [results[0], results[0]])
    writer.close()


def test_rates_of_all_optimizers(strategy, tmp_path):
    """Of the optimizer inside one with a loss scale."""
    optimizer = lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.25))  # noqa: E731
    writer = summary.create_tracker_writer(summary.trackers.CSVTracker(tmp_path / "scalars.csv"))
    under(strategy, compiled(optimizer=optimizer)).fit(X, Y, **FIT, callbacks=[phalanx.keras.Tracking(writer)])
    writer.close()
    assert rows(tmp_path / "scalars.csv")["train/epoch_learning_rate"] == [(0, 0.25)]


def test_outputs_that_are_no_numbers(strategy, tmp_path):
    """A step of one's own may return an array. It is left out."""

    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(3)

        def call(self, x):
            return self.dense(x)

        def train_step(self, data):
            x, _ = data
            return {"size": phalanx.nn.compute_average_loss(self(x)[:, 0] * 0 + 1.0), "all": np.ones(3, np.float32)}

    with strategy.scope():
        model = Own()
        model.compile("sgd", "mse")
    writer = summary.create_tracker_writer(summary.trackers.CSVTracker(tmp_path / "scalars.csv"))
    model.fit(X[:96], Y[:96], **FIT, callbacks=[phalanx.keras.Tracking(writer, 3)])
    writer.close()
    assert not any("all" in name for name in rows(tmp_path / "scalars.csv"))
    assert [s for s, _ in rows(tmp_path / "scalars.csv")["train/batch_size"]] == [3, 6]


@pytest.mark.parametrize(("given", "message"), [(("logs",), "writer='logs'"), ((None, 0), "update_freq=0")])
def test_arguments_that_are_wrong(given, message):
    """They are named, with a hint."""
    with pytest.raises(InvalidArgumentError, match=f"{message}.*\nHINT"):
        phalanx.keras.Tracking(*given)
