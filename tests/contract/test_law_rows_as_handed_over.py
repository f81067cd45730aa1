"""Every row that a step sees is the row that was handed over, whoever writes to its memory afterwards."""

import itertools

import hypothesis
from handed_over import cases, rows_seen
from hypothesis import strategies as st
from tests.draws import draws

import phalanx


@draws(40, 300)
@hypothesis.given(cases(), st.integers(1, 3))
def test_rows_are_those_that_were_handed_over(case, replicas):
    """Also while later batches are read, and while the caller writes; a batch does not change as long as it lives."""
    if case["kind"] == "function":
        case["sizes"] = case["sizes"][:1] * (len(case["sizes"]) * replicas)
    strategy = phalanx.MirroredStrategy([f"cpu:{i}" for i in range(replicas)])
    seen = list(itertools.chain.from_iterable(rows_seen(strategy, **case)))
    assert (sorted(seen) if "shuffled" in case["kind"] else seen) == list(range(sum(case["sizes"])))
