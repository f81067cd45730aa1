"""Summaries of scheduled steps: workers compute them, and the coordinator writes them."""

import contextlib
import os

import jax.numpy as jnp
import keras
import numpy as np
import pytest

from phalanx import summary
from phalanx.errors import InvalidArgumentError
from phalanx.summary.events import scalars_in

STEPS = 24


@pytest.fixture
def writer(tmp_path):
    """A writer of event files in `tmp_path`."""
    with contextlib.closing(summary.create_file_writer(tmp_path)) as writer:
        yield writer


def test_each_step_is_written_once(coordinator, tmp_path):
    """Values of all kinds, whichever worker has computed them, also after a worker has died. The return value is as without them."""
    flag, rows = tmp_path / "died", np.random.default_rng(0).normal(size=(STEPS, 5)).astype("float32")

    def dataset():
        for i in range(STEPS):
            if i == 3 and not flag.exists():
                flag.touch()
                os._exit(1)
            yield np.float32(i)

    def step(number, x, iterator):
        summary.scalar("sum", jnp.sum(x), step=number)
        summary.scalar("batch", next(iterator), step=number)
        summary.histogram("x", x, step=number)
        summary.text("note", "scheduled", step=number)
        return {"mean": jnp.mean(x)}

    iterator = iter(coordinator.create_per_worker_dataset(dataset))
    with contextlib.closing(summary.create_file_writer(tmp_path / "logs")) as writer, writer.as_default():
        values = [coordinator.schedule(step, args=(np.int32(i), x, iterator)) for i, x in enumerate(rows)]
        np.testing.assert_allclose([v["mean"] for v in coordinator.fetch(values)], rows.mean(1), rtol=1e-5)
        coordinator.join()
    assert flag.exists()
    (path,) = (tmp_path / "logs").iterdir()
    found = scalars_in(str(path))
    assert list(found) == list(range(STEPS))
    np.testing.assert_allclose([of["sum"] for of in found.values()], rows.sum(1), rtol=1e-5, atol=1e-6)
    data = path.read_bytes()
    assert data.count(b"histograms") == data.count(b"scheduled") == STEPS
    assert data.count(b"scalars") == 2 * STEPS


def test_default_step_of_a_writer(strategy, coordinator, writer, tmp_path):
    """An integer is the one at the time of the call of schedule. A variable has the value that the step reads on its server."""
    with strategy.scope():
        count = keras.Variable(10, dtype="int32", trainable=False)

    def step():
        summary.scalar("x", 3.0)
        count.assign_add(1)

    for i in (5, 7, count, count, count):
        with writer.as_default(step=i):
            coordinator.schedule(step)
            coordinator.join()
    writer.flush()
    assert scalars_in(f"{tmp_path}/events*") == {i: {"x": 3.0} for i in (5, 7, 12, 13, 14)}


def test_steps_that_do_not_record(coordinator, writer, tmp_path):
    """A condition decides at each call of schedule, or workers compute it. A step without summaries has one program either way."""
    traced = []

    def records(i):
        traced.append("records")
        summary.scalar("x", 1.0, step=i)

    def records_nothing():
        traced.append("nothing")

    def decides(i):
        with summary.record_if(i % 2 == 0):
            summary.scalar("y", i * 2.0, step=i)

    assert not coordinator.schedule(decides, args=(np.int32(0),)).fetch(), "there is no writer"
    with writer.as_default():
        for i in range(6):
            with summary.record_if(i % 3 == 0):
                coordinator.schedule(records, args=(np.int32(i),))
                coordinator.schedule(records_nothing)
            coordinator.schedule(decides, args=(np.int32(i),))
        coordinator.join()
    expected = {0: {"x": 1.0, "y": 0.0}, 2: {"y": 4.0}, 3: {"x": 1.0}, 4: {"y": 8.0}}
    assert scalars_in(f"{tmp_path}/events*") == expected
    assert traced == ["records", "nothing", "records"]


def test_a_writer_that_was_closed(coordinator, tmp_path):
    """Its error is the step's. Afterwards the coordinator goes on."""
    writer = summary.create_file_writer(tmp_path)
    with writer.as_default():
        writer.close()
        coordinator.schedule(lambda: summary.scalar("x", 1.0, step=1))
        with pytest.raises(InvalidArgumentError, match="the writer was closed"):
            coordinator.join()
    assert coordinator.fetch(coordinator.schedule(lambda: jnp.float32(2))) == 2


def test_layers_of_fit(strategy, writer, tmp_path):
    """A layer that records does so in the scheduled steps of `fit`."""

    class Recording(keras.layers.Layer):
        def call(self, inputs):
            summary.scalar("mean", keras.ops.mean(inputs))
            return inputs

    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), Recording(), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    with writer.as_default(step=4):
        model.fit(np.full((8, 3), 2.0, "float32"), np.zeros((8, 1), "float32"), batch_size=4, verbose=0)
    assert scalars_in(f"{tmp_path}/events*") == {4: {"mean": 2.0}}
