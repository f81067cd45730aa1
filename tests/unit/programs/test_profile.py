"""Profiles of some steps: which they are, and what the file of a process holds."""

import gzip
import json

import jax
import keras
import numpy as np
import pytest

import phalanx
from phalanx._src.cluster.watch.profiles import PROFILE, Span
from phalanx._src.programs import profile
from phalanx._src.runtime.observers import Observer, observers

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


def train(steps, model=None):
    """Trains for some steps, whose programs JAX names in the profile, and returns the model."""
    strategy = phalanx.MirroredStrategy(["cpu:0", "cpu:1"])
    if model is None:
        with strategy.scope():
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
    x = np.ones((4 * steps, 2), "float32")
    model.fit(x, x[:, :1], batch_size=4, verbose=0)
    return model


def test_profile_that_cannot_be_written(profiled, caplog):
    """The training run goes on, and nothing is written through a link of another user."""
    path = profiled(0, 1)
    path.symlink_to(path.with_name("victim"))
    with caplog.at_level("INFO", "phalanx"):
        train(2)
    assert f"the profile cannot be written to {path.parent}: " in caplog.text
    assert not path.exists()


def test_some_steps_are_profiled(profiled):
    """The file is there as soon as the last of them has ended, and has their programs. Each process profiles once."""
    path = profiled(3, 5)
    model = train(4)
    assert not path.exists()
    train(4, model)
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


class TrainingSteps(Observer):
    """Counts the programs that train, and the steps whose ends the replicas report."""

    def __init__(self):
        self.programs = self.ends = 0

    def before_program(self, call):
        self.programs += call.program.trains


class TrainingStepsOfReplicas(TrainingSteps):
    def after_replica_step(self, replica):
        self.ends += 1


def state_in_arguments(strategy):
    """A step that takes and returns its state, and an evaluation. No variables."""
    state = strategy.replicate({"w": np.ones((3, 1), "float32"), "count": 0}).value

    def step(state, x):
        return (x @ state["w"]).sum(), phalanx.Mirrored({"w": state["w"] * 0.5, "count": state["count"] + 1})

    evaluate = lambda state, x: (x @ state["w"]).sum()  # noqa: E731
    return lambda x: (strategy.run(step, args=(state, x)), strategy.run(evaluate, args=(state, x)))


def gradients_in_results(strategy):
    """The state is updated outside the replicas."""
    weights = strategy.replicate(np.ones((3, 1), "float32")).value
    gradient = lambda w, x: x.sum(axis=0)[:, None] * w  # noqa: E731
    return lambda x: strategy.run(gradient, args=(weights, x))


def state_in_variables(strategy):
    """A step that assigns trainable variables, and an evaluation that assigns a metric."""
    with strategy.scope():
        weights = phalanx.Variable(np.ones((3, 1), "float32"), aggregation="only_first_replica")
        metric = keras.metrics.Mean()

    def step(x):
        weights.assign(weights.value * 0.5)
        return x.sum()

    def evaluate(x):
        metric.update_state(x @ weights.value)

    function = phalanx.function(lambda x: strategy.run(step, args=(x,)))
    return lambda x: (function(x), strategy.run(evaluate, args=(x,)))


def state_in_an_optimizer(strategy):
    """The evaluation returns as many numbers as it takes weights."""
    with strategy.scope():
        weights = keras.Variable(np.ones((3, 1), "float32"))
        optimizer = keras.optimizers.SGD(0.1)

    def step(x):
        optimizer.apply([weights.value], [weights])
        return x.sum()

    evaluate = lambda x, w: (x @ (weights.value + w), w * 2)  # noqa: E731
    return lambda x: (
        strategy.run(step, args=(x,)),
        strategy.run(evaluate, args=(x, np.ones((3, 1), "float32"))),
    )


@pytest.mark.cover(["train", "num_replicas"], {(state_in_arguments, 2), (state_in_variables, 2)})
@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("train", [state_in_arguments, gradients_in_results, state_in_variables, state_in_an_optimizer])
def test_what_is_a_training_step(train, num_replicas):
    """With and without an optimizer, and whether or not the parts of a step are observed. Evaluations are none."""
    for seen, num_ends in ((TrainingSteps(), 0), (TrainingStepsOfReplicas(), 3 * num_replicas)):
        strategy = phalanx.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)])
        with observers.including(seen):
            call = train(strategy)
            for batch in strategy.experimental_distribute_dataset(np.ones((12, 3), "float32"), batch_size=4):
                call(batch)
            jax.effects_barrier()
        assert (seen.programs, seen.ends) == (3, num_ends)
