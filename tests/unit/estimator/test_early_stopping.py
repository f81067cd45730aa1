"""Hooks that end a training early. Their steps are in tests/estimator/test_hooks.py."""

from one_weight import made, rows
from refusals import refusals, refused

import phalanx.estimator as estimator
from phalanx import summary
from phalanx.errors import InvalidArgumentError

HOOKS = estimator.experimental


test_arguments_that_are_refused = refusals(
    InvalidArgumentError,
    (lambda e: HOOKS.make_early_stopping_hook(3, print), ["estimator=3", "must be an Estimator"]),
    (lambda e: HOOKS.make_early_stopping_hook(e, 3), ["should_stop_fn=3", "not callable"]),
    (lambda e: HOOKS.make_early_stopping_hook(e, print, None), ["every_secs=None and", "exactly one"]),
    (lambda e: HOOKS.make_early_stopping_hook(e, print, 1, 1), ["every_secs=1 and", "exactly one"]),
    (lambda e: HOOKS.stop_if_higher_hook(3, "loss", 1), ["estimator=3", "must be an Estimator"]),
    (lambda e: HOOKS.stop_if_higher_hook(e, 3, 1), ["metric_name=3", "must be a str"]),
    (lambda e: HOOKS.stop_if_higher_hook(e, "loss", "a"), ["threshold='a'", "must be a number"]),
    (lambda e: HOOKS.stop_if_lower_hook(e, "loss", None), ["threshold=None", "must be a number"]),
    (lambda e: HOOKS.stop_if_lower_hook(e, "loss", 1, min_steps=-1), ["min_steps=-1", "0 or more"]),
    (lambda e: HOOKS.stop_if_lower_hook(e, "loss", 1, eval_dir=3), ["eval_dir=3", "must be a path"]),
    (lambda e: HOOKS.stop_if_no_increase_hook(e, "loss", 0), ["max_steps_without_increase=0", "positive"]),
    (lambda e: HOOKS.stop_if_no_decrease_hook(e, "loss", "a"), ["max_steps_without_decrease='a'", "positive"]),
    (lambda e: HOOKS.read_eval_metrics(3), ["eval_dir=3", "must be a path"]),
    call=lambda call: call(made("model")),
)


def test_function_of_the_user_ends_the_training(tmp_path, caplog):
    """It is asked every so many steps, from the first."""
    caplog.set_level("INFO", "phalanx")
    asked, model = [], made(tmp_path)
    hook = HOOKS.make_early_stopping_hook(model, lambda: bool(asked.append(1)) or len(asked) == 3, None, 2)
    assert model.train(rows(9), [hook]).get_variable_value("global_step") == 5
    assert "Early stopping at step 5." in caplog.messages


def test_metric_that_is_not_known(tmp_path):
    """Without an evaluation there is nothing to look at; with one, the metric must be there."""
    model = made(tmp_path)
    hook = HOOKS.stop_if_higher_hook(model, "nothing", 1, run_every_secs=None, run_every_steps=1)
    assert model.train(rows(1), [hook]).get_variable_value("global_step") == 1
    model.evaluate(rows(1))
    with refused(InvalidArgumentError, ["metric_name='nothing'", "the evaluations have ['loss']"]):
        model.train(rows(1), [hook])


def test_evaluations_of_another_folder(tmp_path):
    """`eval_dir` names it, and evaluations of early steps do not count."""
    writer = summary.create_file_writer(str(tmp_path / "other"))
    for step, value in ((10, 5.0), (20, 1.0)):
        with writer.as_default(step):
            summary.scalar("loss", value)
    writer.close()
    model = made(tmp_path / "model")
    options = {"eval_dir": str(tmp_path / "other"), "run_every_secs": None, "run_every_steps": 1}
    for min_steps, wanted in ((11, 3), (0, 4)):
        hook = HOOKS.stop_if_higher_hook(model, "loss", 4, min_steps=min_steps, **options)
        assert model.train(rows(3), [hook]).get_variable_value("global_step") == wanted
