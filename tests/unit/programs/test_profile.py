"""Profiles of some steps: which they are, and what the file of a process holds."""

import gzip
import json

import keras
import numpy as np
import pytest

import phalanx
from phalanx._src.cluster.watch.profiles import PROFILE, Span
from phalanx._src.programs import profile
from phalanx._src.runtime.observers import observers

pytestmark = pytest.mark.slow


@pytest.fixture
def profiled(tmp_path):
    def ask(first, last):
        profile.follow({PROFILE: str(Span(first, last, tmp_path))})
        return tmp_path / "rank_0.json.gz"

    yield ask
    for observer in of_profiles():
        observers.remove(observer)


def of_profiles():
    return [x for x in observers if isinstance(x, profile.Profile)]


def train(steps):
    """Trains for some steps, each with one epoch, whose programs JAX names in the profile."""
    strategy = phalanx.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    x = np.ones((4 * steps, 2), "float32")
    model.fit(x, x[:, :1], batch_size=4, verbose=0)


def test_some_steps_are_profiled(profiled):
    """The file is there as soon as the last of them has ended, and has their programs. Each process profiles once."""
    path = profiled(3, 5)
    train(4)
    assert not path.exists()
    train(4)
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert {"rank 0 /host:CPU"} == {e["args"]["name"] for e in events if e["name"] == "process_name"}
    profile.follow({PROFILE: str(Span(1, 2, path.parent))})
    assert len(of_profiles()) == 1


def test_training_that_ends_early(profiled):
    """What was profiled until then is written when the process ends. Without a request nothing watches the steps."""
    profile.follow({})
    assert not of_profiles()
    path = profiled(1, 100)
    train(3)
    (observer,) = of_profiles()
    observer.end()
    assert path.exists()
