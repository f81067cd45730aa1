"""Hooks that profile, wait, and compute something at the end."""

import threading
import time

import jax
import pytest
from one_weight import made, refused, rows

import phalanx.estimator as estimator
from phalanx.errors import InvalidArgumentError
from phalanx.estimator.hooks import others


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: estimator.ProfilerHook(), ["every_secs=None and", "exactly one"]),
        (lambda: estimator.ProfilerHook(1, output_dir=3), ["output_dir=3", "must be a path"]),
        (lambda: estimator.ProfilerHook(1, show_dataflow=3), ["show_dataflow=3", "True or False"]),
        (lambda: estimator.ProfilerHook(1, show_memory=3), ["show_memory=3", "True or False"]),
        (lambda: estimator.GlobalStepWaiterHook("a"), ["wait_until_step='a'", "0 or more"]),
        (lambda: estimator.GlobalStepWaiterHook(-1), ["wait_until_step=-1", "0 or more"]),
        (lambda: estimator.FinalOpsHook("loss", 3), ["feed_dict=3", "no placeholders"]),
    ],
)
def test_arguments_that_are_refused(make, words):
    """Each has a typed error."""
    with refused(InvalidArgumentError, words):
        make()


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
    """The first step waits until the number of steps is there; another thread stands for the other process."""
    caplog.set_level("INFO", "phalanx")
    monkeypatch.setattr(others, "_POLL_S", 0.01)
    threads = []

    class Other(estimator.SessionRunHook):
        """Assigns the number of steps a little later."""

        def after_create_session(self, session, coord):
            def assign():
                time.sleep(0.1)
                session.graph.global_step.assign(5)

            threads.append(threading.Thread(target=assign))
            threads[0].start()

    model = made(tmp_path).train(rows(1), [Other(), estimator.GlobalStepWaiterHook(5)])
    threads[0].join(30)
    assert model.get_variable_value("global_step") == 6
    assert "Waiting for step 5." in caplog.messages


def test_values_at_the_end(tmp_path):
    """Before, there are none."""
    hook = estimator.FinalOpsHook({"loss": "loss", "weight": "weight"})
    assert hook.final_ops_values is None
    made(tmp_path).train(rows(2), [hook])
    assert {name: float(value) for name, value in hook.final_ops_values.items()} == {"loss": 0.625, "weight": 1.75}
    with refused(InvalidArgumentError, ["fetches='nothing'"]):
        made(tmp_path).train(rows(1), [estimator.FinalOpsHook("nothing")])
