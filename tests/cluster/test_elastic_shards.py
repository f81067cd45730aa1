"""Elastic groups whose layout shards variables: whoever is lost, the others have all shards, and no process has a whole variable."""

import functools
import os
import re
import signal

import numpy as np
import pytest
from launching import RUN, run, script
from sharded_training import compiled, train
from test_elastic import FIT, JOB, Disturbed, again_if_a_message_is_lost, kill_member, run_script
from tests.waiting import DEADLINE_S, wait_until

import phalanx

pytestmark = pytest.mark.slow
# 48 steps last for one and a half minutes, unless the test ends the pauses.
SHARDED = {**JOB, "epochs": 12, "pause_growth": 3, "widths": None, "module": "tests.cluster.sharded_training"}


@functools.cache
def expected(how, epochs):
    """The weights that one device gets from the same batches."""
    with phalanx.OneDeviceStrategy("cpu:0").scope():
        model = compiled(how)
    train(how, model, epochs, [])
    return model.get_weights()


def require_equal(job, how, epochs):
    """Compares the weights at the end with those of one device."""
    for x, y in zip(job.result()[:-1], expected(how, epochs), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


def parts_of(job):
    """The largest parts of a variable that a process has had, by what they were and the size of the group."""
    found = {}
    for line in re.findall(r"parts (\{.*\})", job.output):
        for (what, count), part in ((key.rsplit(" of ", 1), part) for key, part in eval(line).items()):
            found[what, int(count)] = max(found.get((what, int(count)), 0.0), part)
    return found


CASES = {
    "the chief": ("even", "kill", (0,), {}),
    "the second in a loop": ("loop", "kill", (1,), {}),
    "the last in a loop": ("loop", "kill", (2,), {}),
    "one after the other in fit": ("fit", "kill", (2, 0, 1), {}),
    "one is told to leave": ("loop", "term", (1,), {}),
    "the chief, with Optax": ("optax", "kill", (0,), {}),
    "two devices each": ("fit", "kill", (0,), {"options": ("--devices-per-worker", "2")}),
}


@pytest.mark.cover(["case"], {"the chief"})
@pytest.mark.parametrize("case", CASES)
@again_if_a_message_is_lost
def test_others_have_the_shards_of_a_lost_process(case):
    """They go on from the copy of its neighbour, another process takes the place, and the weights are those of one device."""
    how, kind, places, options = CASES[case]
    options = SHARDED | options
    with Disturbed(how, "2:3", **options) as job:
        for place in places:
            victim = next(pid for pid, done in job.wait_until_complete().items() if done.worker == place)
            job.lose([victim], kind)
        job.wait_until_complete()
        job.hurry()
        assert job.wait(DEADLINE_S) == 0, job.output
        require_equal(job, how, options["epochs"])
        parts = parts_of(job)
        # Before it joins, a process that is late has no values. Alone it would have whole ones.
        assert set(parts) <= {(what, count) for what in ("arrays", "copies") for count in (2, 3)}, parts
        assert parts["arrays", 3] == pytest.approx(1 / 3)
        assert parts["copies", 3] == pytest.approx(2 / 3)
        assert parts["arrays", 2] == pytest.approx(1 / 2)


@pytest.mark.exhaustive(
    "test_others_have_the_shards_of_a_lost_process, and tests/unit/elastic/test_resharding.py for the choice"
)
@again_if_a_message_is_lost
def test_two_neighbours_are_lost():
    """Nobody has their shards: one line says so, and the group continues from its last checkpoint."""
    with Disturbed("backup", "1:3", options=("--max-restarts", "1"), **SHARDED) as job:
        by_place = {done.worker: pid for pid, done in job.wait_until_complete().items()}
        for place in (1, 2):
            os.kill(by_place[place], signal.SIGKILL)
        wait_until(lambda: "The group starts again: 1 of 1." in job.output)
        job.wait_until_complete()
        job.hurry()
        assert job.wait(DEADLINE_S) == 0, job.output
        assert (
            "StateLostError: a training run whose layout shards variables over its processes: two processes next to"
            in job.output
        )
        assert "It can only continue from its last checkpoint." in job.output
        require_equal(job, "backup", SHARDED["epochs"])


REFUSED = """
import phalanx, keras, numpy as np
strategy = phalanx.MultiWorkerMirroredStrategy(OPTIONS)
with strategy.scope():
    model = keras.Sequential([keras.Input((9,)), keras.layers.Dense(8, name="dense")], name="model")
    model.compile("sgd", "mse")
model.fit(np.ones((12, 9)), np.ones((12, 8)), batch_size=12, verbose=0)
print("trained", flush=True)
"""
BAD = {
    'model_axis=("model", 2), layout={".*kernel": ("model",)}': (
        "2:3",
        "model_axis=('model', 2) in an elastic group of 2 to 3 workers: with 3 workers, their 3 devices cannot be divided into",
    ),
    'layout={"model/dense/kernel": ("replica",)}': (
        "2:3",
        "the rule for variable 'model/dense/kernel' (9, 8) of a layout in an elastic group of 2 to 3 workers: with 2 workers, the 2",
    ),
    'layout={"model/dense/kernel": (None, "replica")}': ("1:2", ""),
}


@pytest.mark.cover(["options"], {'model_axis=("model", 2), layout={".*kernel": ("model",)}'})
@pytest.mark.parametrize("options", BAD)
def test_layout_that_fewer_processes_cannot_keep(tmp_path, options):
    """It is refused before the first step, and not when a process is lost."""
    workers, message = BAD[options]
    code, out, errors = run(*RUN, workers, script(tmp_path, REFUSED.replace("OPTIONS", options)), folder=tmp_path)
    assert (code == 0) == (not message), out + errors
    assert message in out + errors
    assert out.count("trained") == (0 if message else 2)


@pytest.mark.exhaustive("test_others_have_the_shards_of_a_lost_process, and test_elastic.py for whole variables")
@again_if_a_message_is_lost
def test_callbacks_of_a_training_with_shards(tmp_path):
    """Each batch and epoch is reported once, although a loss in a validation goes back to a copy within the epoch."""
    source = FIT.replace(
        "MultiWorkerMirroredStrategy(", "MultiWorkerMirroredStrategy(layout=phalanx.fully_sharded(min_size=1)"
    )
    source = re.sub(r"    keras.callbacks.ModelCheckpoint.*\n", "", source)
    source = source.replace(
        "    def on_epoch_begin",
        "    def on_test_batch_end(self, batch, logs=None):\n        pace()\n    def on_epoch_begin",
    )

    def kill_both(process):
        for number in (0, 1):
            kill_member(tmp_path, number, process)

    code, output = run_script(tmp_path, source, disturb=kill_both)
    assert code == 0, output
    found = [eval(line) for line in re.findall(r"(\{\"heard.*\})", output)]
    assert len(found) == 2, output
    for each in found:
        heard = [tuple(event) for event in each["heard"]]
        assert len(set(zip(heard, np.cumsum([kind == "begin" for kind, _ in heard]), strict=True))) == len(heard)
        assert each["epochs"] == len(each["losses"]) == 20
    assert found[0]["losses"] == found[1]["losses"]
    assert found[0]["same"] == found[1]["same"]
