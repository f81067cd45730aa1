"""Trainings drawn at random in two processes, which live for all of them."""

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
from drawn_trainings import KERAS_WARNS, assert_law, trainings
from tests.draws import draws

from phalanx.errors import InputError

pytestmark = KERAS_WARNS


@draws(2, 60)
@hypothesis.given(st.sampled_from(["fit", "loop"]).flatmap(lambda way: trainings(way, st.sampled_from([2, 4]))))
def test_any_training_in_two_processes(cluster_of, drawn):
    """With one replica or two each: both give what one device gives, and what each replica gives on its rows."""
    cluster = cluster_of(2, drawn["replicas"] // 2)

    def call(train):
        first, second = cluster.call("train_drawn", way=train.__name__, drawn=drawn)
        if isinstance(first, str):
            raise InputError(first)
        if train.__name__ == "loop":
            first["alone"] = second["alone"] = first["alone"] | second["alone"]
        jax.tree.map(np.testing.assert_array_equal, first, second)
        return first

    assert_law(drawn, call)
