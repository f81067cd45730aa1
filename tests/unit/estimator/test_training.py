"""`train_and_evaluate`: its arguments, and the evaluator."""

import json

import pytest
from one_weight import made, rows
from refusals import refusals

import phalanx.estimator as estimator
from phalanx.errors import InvalidArgumentError
from phalanx.estimator import training


class Named(estimator.Exporter):
    """Notes its calls."""

    name = None

    def __init__(self, name):
        self.name, self.calls = name, []

    def export(self, estimator, export_path, checkpoint_path, eval_result, is_the_final_export):
        self.calls.append((export_path, checkpoint_path, int(eval_result["global_step"]), is_the_final_export))
        return len(self.calls)


TRAIN, EVAL = estimator.TrainSpec(rows(9), 3), estimator.EvalSpec(rows(2))


test_arguments_that_are_refused = refusals(
    InvalidArgumentError,
    (lambda e: estimator.TrainSpec(None), ["input_fn=None", "not callable"]),
    (lambda e: estimator.TrainSpec(rows(), 0), ["max_steps=0", "positive"]),
    (lambda e: estimator.TrainSpec(rows(), hooks=[3]), ["hooks=[3]", "not a SessionRunHook"]),
    (lambda e: estimator.TrainSpec(rows(), saving_listeners=3), ["a saving listener=3", "CheckpointSaverListener"]),
    (lambda e: estimator.EvalSpec(3), ["input_fn=3", "not callable"]),
    (lambda e: estimator.EvalSpec(rows(), 0), ["steps=0", "positive"]),
    (lambda e: estimator.EvalSpec(rows(), name=3), ["name=3", "must be a str"]),
    (lambda e: estimator.EvalSpec(rows(), hooks=3), ["hooks=3", "not a SessionRunHook"]),
    (lambda e: estimator.EvalSpec(rows(), exporters=3), ["exporters=3", "3 is not an exporter"]),
    (lambda e: estimator.EvalSpec(rows(), exporters=[Named("a"), 3]), ["exporters=", "3 is not an exporter"]),
    (
        lambda e: estimator.EvalSpec(rows(), exporters=[Named("a"), Named("a")]),
        ["exporters of the names ['a', 'a']", "their names must differ"],
    ),
    (lambda e: estimator.EvalSpec(rows(), throttle_secs=-1), ["throttle_secs=-1", "more than 0"]),
    (lambda e: estimator.EvalSpec(rows(), throttle_secs=None), ["throttle_secs=None", "a number of seconds"]),
    (lambda e: estimator.EvalSpec(rows(), start_delay_secs="a"), ["start_delay_secs='a'", "more than 0"]),
    (lambda e: estimator.train_and_evaluate(3, TRAIN, EVAL), ["estimator=3", "must be an Estimator"]),
    (lambda e: estimator.train_and_evaluate(e, 3, EVAL), ["train_spec=3", "must be a TrainSpec"]),
    (lambda e: estimator.train_and_evaluate(e, TRAIN, 3), ["eval_spec=3", "must be an EvalSpec"]),
    call=lambda call: call(made("model")),
)


def test_error_of_an_exporter_reaches_the_caller(tmp_path):
    class Fails(Named):
        def export(self, *args, **kwargs):
            raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        estimator.train_and_evaluate(made(tmp_path), TRAIN, estimator.EvalSpec(rows(), exporters=Fails("a")))


def test_listeners_of_the_training_are_called(tmp_path):
    """Those of `TrainSpec` too; they see the checkpoint before it is evaluated."""
    calls = []

    class Listener(estimator.CheckpointSaverListener):
        def after_save(self, session, global_step_value):
            calls.append(global_step_value)

    exporter = Named("one")
    spec = estimator.TrainSpec(rows(9), 3, saving_listeners=[Listener()])
    model = made(tmp_path, save_checkpoints_steps=2)
    metrics, results = estimator.train_and_evaluate(
        model, spec, estimator.EvalSpec(rows(2), throttle_secs=0, exporters=exporter)
    )
    assert calls == [0, 2, 3]
    assert exporter.calls == [
        (f"{tmp_path}/export/one", f"{tmp_path}/model.ckpt-{step}", step, step == 3) for step in (2, 3)
    ]
    assert (metrics["global_step"], results) == (3, [2])


@pytest.mark.parametrize(("max_steps", "has_ended"), [(3, False), (99, True)])
def test_evaluator_ends_with_the_training(max_steps, has_ended, monkeypatch, tmp_path):
    """If the latest checkpoint has `max_steps`, or the training says that it has ended, its evaluation is the last one."""
    config = {"cluster": {"chief": ["localhost:1"]}, "task": {"type": "evaluator", "index": 0}}
    model, exporter = made(tmp_path).train(rows(9), steps=3), Named("a")
    with monkeypatch.context() as patch:
        patch.setenv("TF_CONFIG", json.dumps(config))
        patch.setattr(training, "_POLL_S", 0.01)
        if has_ended:
            patch.setattr(training.cluster_training, "has_ended", lambda: True)
        spec = estimator.EvalSpec(rows(2), exporters=exporter, start_delay_secs=0, throttle_secs=0)
        assert estimator.train_and_evaluate(model, estimator.TrainSpec(rows(9), max_steps), spec) is None
    assert [call[2:] for call in exporter.calls] == [(3, True)]
