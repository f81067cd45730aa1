"""Profiles of some steps: which they are, and what the file of a process holds."""

import gzip
import json

import keras
import numpy as np
import pytest

import phalanx
from phalanx._src.cluster.watch.profiles import PROFILE, Span
from phalanx._src.programs import profile
from phalanx._src.programs.before_steps import watchers

pytestmark = pytest.mark.slow


@pytest.fixture
def profiled(tmp_path, monkeypatch):
    def ask(first, last):
        monkeypatch.setattr(profile, "_followed", [])
        profile.follow({PROFILE: str(Span(first, last, tmp_path))})
        return tmp_path / "rank_0.json.gz"

    before = list(watchers)
    yield ask
    watchers[:] = before


def train(steps):
    """Trains for some steps, each with one epoch, whose programs JAX names in the profile."""
    strategy = phalanx.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    x = np.ones((4 * steps, 2), "float32")
    model.fit(x, x[:, :1], batch_size=4, verbose=0)


def test_some_steps_are_profiled(profiled):
    """The file is there as soon as the last of them has ended, and has their programs."""
    path = profiled(3, 5)
    train(4)
    assert not path.exists()
    train(4)
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert {"rank 0 /host:CPU"} == {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert profile.Profile not in {type(getattr(w, "__self__", None)) for w in watchers}


def test_training_that_ends_early(profiled):
    """What was profiled until then is written when the process ends. Without a request nothing watches the steps."""
    before = list(watchers)
    profile.follow({})
    assert watchers == before
    path = profiled(1, 100)
    train(3)
    (own,) = [w.__self__ for w in watchers if isinstance(getattr(w, "__self__", None), profile.Profile)]
    own.end()
    assert path.exists()
