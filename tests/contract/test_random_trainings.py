"""Trainings drawn at random, as `drawn_trainings` says: `fit`, `evaluate`, `predict` and a custom loop on 1 to 5 replicas."""

import hypothesis
from drawn_trainings import KERAS_WARNS, assert_law, trainings
from tests.draws import draws

import phalanx

pytestmark = KERAS_WARNS


def in_this_process(drawn):
    strategy = phalanx.MirroredStrategy([f"cpu:{i}" for i in range(drawn["replicas"])])
    return lambda train: train(strategy, drawn)


@draws(4, 250)
@hypothesis.given(trainings("fit"))
def test_fit_is_that_of_one_device(drawn):
    """History, scores, predictions and weights."""
    assert_law(drawn, in_this_process(drawn))


@draws(5, 250)
@hypothesis.given(trainings("loop"))
def test_a_loop_is_that_of_one_device(drawn):
    """Losses, outputs, metrics and weights; and what each replica computes of its rows."""
    assert_law(drawn, in_this_process(drawn))
