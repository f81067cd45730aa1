"""Hooks that stop, log and watch. Their steps are in tests/estimator/test_hooks.py."""

import keras
import numpy as np
from event_files import written
from one_weight import made, model_fn, rows
from refusals import refusals, refused

import phalanx.estimator as estimator
from phalanx import summary
from phalanx.errors import InvalidArgumentError, NanLossDuringTrainingError

test_arguments_that_are_refused = refusals(
    InvalidArgumentError,
    (lambda: estimator.StopAtStepHook(), ["StopAtStepHook(num_steps=None", "exactly one"]),
    (lambda: estimator.StopAtStepHook(1, 1), ["StopAtStepHook(num_steps=1", "exactly one"]),
    (lambda: estimator.StopAtStepHook(0), ["num_steps=0", "positive"]),
    (lambda: estimator.StopAtStepHook(last_step="a"), ["last_step='a'", "positive"]),
    (lambda: estimator.StepCounterHook(None), ["every_secs=None and every_steps=None", "exactly one"]),
    (lambda: estimator.StepCounterHook(output_dir=3), ["output_dir=3", "must be a path"]),
    (lambda: estimator.LoggingTensorHook(["loss"]), ["every_secs=None and every_steps=None", "exactly one"]),
    (lambda: estimator.LoggingTensorHook(["loss"], 1, 1), ["every_secs=1 and every_steps=1", "exactly one"]),
    (lambda: estimator.LoggingTensorHook("loss", 1), ["tensors='loss'", "a dict or a list"]),
    (lambda: estimator.LoggingTensorHook(["loss"], 1, formatter=3), ["formatter=3", "not callable"]),
    (lambda: estimator.NanTensorHook("loss", 3), ["fail_on_nan_loss=3", "True or False"]),
)


def nan_fn(features, labels, mode):
    """A loss that is NaN from the second step on."""
    spec = model_fn(features, labels, mode)
    bad = keras.ops.where(estimator.get_global_step().value > 0, np.nan, 0.0)
    return estimator.EstimatorSpec(mode, loss=spec.loss + bad, train_op=spec.train_op)


def test_loss_that_is_not_a_number(tmp_path):
    """It is an error, also in the last step."""
    for steps in (2, 3):
        with refused(NanLossDuringTrainingError, ["the loss of a training step", "is NaN", "fail_on_nan_loss=False"]):
            made(tmp_path / str(steps), nan_fn).train(rows(steps))


def test_loss_that_stops_an_evaluation(tmp_path, caplog):
    """The hook of the user only stops: the Estimator has no such hook there."""
    model = made(tmp_path, nan_fn)
    model.train(rows(1))
    model.evaluate(rows(9), hooks=[estimator.NanTensorHook("loss", fail_on_nan_loss=False)])
    assert "The loss is NaN" in caplog.text


def test_names_of_logged_arrays(tmp_path, caplog):
    """A list keeps its order; a variable has its path, and an array its place. With 0 seconds, each step has a line."""
    caplog.set_level("INFO", "phalanx")

    def fn(features, labels, mode):
        spec, weight = model_fn(features, labels, mode), keras.Variable(2.0, name="scale", trainable=False)
        hook = estimator.LoggingTensorHook([weight, features["x"], "loss"], every_n_iter=5)
        return estimator.EstimatorSpec(mode, loss=spec.loss, train_op=spec.train_op, training_hooks=[hook])

    made(tmp_path, fn).train(rows(3), [estimator.LoggingTensorHook({"l": "loss"}, every_n_secs=0)])
    assert "scale = 2.0, array 1 = [1. 2.], loss = 2.5" in caplog.messages
    assert len([message for message in caplog.messages if message.startswith("l = ")]) == 3


def test_speed_in_the_log_and_in_a_file(tmp_path, caplog):
    """Of two trainings, the first step of each, which compiles, is not measured."""
    caplog.set_level("INFO", "phalanx")
    writer = summary.create_file_writer(str(tmp_path / "speed"))
    hook, model = estimator.StepCounterHook(1, summary_writer=writer), made(tmp_path / "model")
    for _ in range(2):
        model.train(rows(2), [hook])
    writer.close()
    assert [step for step, _ in written(tmp_path / "speed")["global_step/sec"]] == [2, 4]
    assert len([message for message in caplog.messages if message.startswith("global_step/sec")]) == 2


def test_number_of_steps_of_this_call(tmp_path):
    """`num_steps` counts from the beginning of a call, as often as the hook is used."""
    hook, model = estimator.StopAtStepHook(2), made(tmp_path)
    found = [int(model.train(rows(9), [hook]).get_variable_value("global_step")) for _ in range(2)]
    assert found == [2, 4]
