"""Hooks that profile, wait, and compute something at the end."""

import types

import jax
import pytest
from one_weight import made, rows
from refusals import refusals, refused

import phalanx.estimator as estimator
from phalanx.errors import InvalidArgumentError
from phalanx.estimator.hooks import others

test_arguments_that_are_refused = refusals(
    InvalidArgumentError,
    (lambda: estimator.ProfilerHook(), ["every_secs=None and", "exactly one"]),
    (lambda: estimator.ProfilerHook(1, output_dir=3), ["output_dir=3", "must be a path"]),
    (lambda: estimator.ProfilerHook(1, show_dataflow=3), ["show_dataflow=3", "True or False"]),
    (lambda: estimator.ProfilerHook(1, show_memory=3), ["show_memory=3", "True or False"]),
    (lambda: estimator.GlobalStepWaiterHook("a"), ["wait_until_step='a'", "0 or more"]),
    (lambda: estimator.GlobalStepWaiterHook(-1), ["wait_until_step=-1", "0 or more"]),
    (lambda: estimator.FinalOpsHook("loss", 3), ["feed_dict=3", "no placeholders"]),
)


@pytest.mark.slow
def test_profiles_of_single_steps(tmp_path, caplog):
    """Every second step has a profile of its own, but not the first, which compiles."""
    caplog.set_level("INFO", "phalanx")
    made(tmp_path / "model").train(rows(3), [estimator.ProfilerHook(save_steps=2, output_dir=str(tmp_path / "logs"))])
    assert [m for m in caplog.messages if m.startswith("Profiled step")] == [
        f"Profiled step 2 into {tmp_path / 'logs' / 'plugins/profile'}."
    ]
    assert list((tmp_path / "logs/plugins/profile").glob("*/*.xplane.pb"))
    # It waited for step 4 when the data ended.
    with jax.profiler.trace(str(tmp_path)):
        pass


def test_step_that_fails_ends_its_profile(tmp_path):
    """An error in a profiled step leaves no profile on, so that another can start."""

    def failing():
        yield from rows(2)()
        raise OSError("the disk is gone")

    hook = estimator.ProfilerHook(save_steps=2, output_dir=str(tmp_path / "logs"))
    with pytest.raises(OSError, match="the disk is gone"):
        made(tmp_path / "model").train(failing, [hook])
    with jax.profiler.trace(str(tmp_path)):
        pass


def test_waiting_for_another_process(tmp_path, monkeypatch, caplog):
    """The first step waits until the number of steps is there, which here comes with the third look. It is told once."""
    caplog.set_level("INFO", "phalanx")
    steps, waits = [], []

    class Other(estimator.SessionRunHook):
        def after_create_session(self, session, coord):
            steps.append(session.graph.global_step)

    def sleep(seconds):
        waits.append(seconds)
        if len(waits) == 3:
            steps[0].assign(5)

    monkeypatch.setattr(others, "time", types.SimpleNamespace(monotonic=lambda: 100.0, sleep=sleep))
    model = made(tmp_path).train(rows(1), [Other(), estimator.GlobalStepWaiterHook(5)])
    assert model.get_variable_value("global_step") == 6
    assert len(waits) == 3
    assert caplog.messages.count("Waiting for step 5.") == 1


def test_values_at_the_end(tmp_path):
    hook = estimator.FinalOpsHook({"loss": "loss", "weight": "weight", "step": "global_step"})
    assert hook.final_ops_values is None
    made(tmp_path).train(rows(2), [hook])
    assert hook.final_ops_values == {"loss": 0.625, "weight": 1.75, "step": 2}
    with refused(InvalidArgumentError, ["fetches='nothing'"]):
        made(tmp_path).train(rows(1), [estimator.FinalOpsHook("nothing")])
