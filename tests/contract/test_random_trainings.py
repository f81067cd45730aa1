"""Trainings drawn at random, as `drawn_trainings` says: `fit`, `evaluate`, `predict` and a custom loop on 1 to 5 replicas."""

import hypothesis
import pytest
from drawn_trainings import assert_law, trainings
from tests.draws import draws

import phalanx

# Keras's IoU metrics count in integers, and say so if the rows have weights.
pytestmark = [
    pytest.mark.filterwarnings("ignore:You are passing weight as `float`"),
    pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64"),
]


def in_this_process(drawn):
    strategy = phalanx.MirroredStrategy([f"cpu:{i}" for i in range(drawn["replicas"])])
    return lambda train: train(strategy, drawn)


@draws(10, 150)
@hypothesis.given(trainings("fit"))
def test_fit_is_that_of_one_device(drawn):
    """History, scores, predictions and weights."""
    assert_law(drawn, in_this_process(drawn))


@draws(14, 150)
@hypothesis.given(trainings("loop"))
def test_a_loop_is_that_of_one_device(drawn):
    """Losses, outputs, metrics and weights; and what each replica computes of its rows."""
    assert_law(drawn, in_this_process(drawn))
