"""Which steps record the summaries of a model function."""

import numpy as np
from event_files import written
from one_weight import made, model_fn, rows

from phalanx import summary


def summing_fn(features, labels, mode):
    spec = model_fn(features, labels, mode)
    summary.scalar("mine", spec.loss)
    return spec


def test_summaries_from_the_first_step_of_each_call(tmp_path):
    """Every third step, counted from the first of a call, has the loss of that step."""
    model = made(tmp_path, summing_fn, save_summary_steps=3)
    model.train(rows(5))
    model.train(rows(2))
    found = written(tmp_path)
    assert [step for step, _ in found["mine"]] == [step for step, _ in found["loss"]] == [1, 4, 6]
    np.testing.assert_allclose([x for _, x in found["mine"]], [x for _, x in found["loss"]], rtol=1e-6)
    np.testing.assert_allclose(found["mine"][0][1], 2.5)


def test_no_summaries_of_the_model_function(tmp_path):
    """Neither without an interval, nor in an evaluation."""
    for steps in (0, None):
        model = made(tmp_path / str(steps), summing_fn, save_summary_steps=steps).train(rows(2))
        assert not list((tmp_path / str(steps)).glob("events*"))
    model.evaluate(rows(1))
    assert set(written(tmp_path / "None/eval")) == {"loss", "checkpoint_path"}
