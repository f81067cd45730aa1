"""The order of calls, and ready-made hooks, against the recorded answers of tensorflow-estimator 2.15."""

import re
import shutil

import pytest
from event_files import written
from one_weight import saved
from tests.estimator import shared
from tests.estimator.counting import counting, rows
from tests.estimator.recorded import RECORDED

import phalanx.estimator as estimator
from phalanx import summary
from phalanx.errors import NanLossDuringTrainingError
from phalanx.estimator import tf1

HOOKS = RECORDED["hooks"]
ORDER, READY, SAVERS, EARLY = HOOKS["order"], HOOKS["hooks"], HOOKS["savers"], HOOKS["early_stopping"]


class Calls(shared.Calls, estimator.SessionRunHook):
    library = tf1


class Listener(shared.Saved, estimator.CheckpointSaverListener):
    pass


@pytest.mark.parametrize(
    ("name", "hooks", "of_specification", "stop_at"),
    [
        ("train of 3 steps", [""], [], None),
        ("train of 5 steps, stopped after 2", [""], [], 2),
        ("train of 1 step with two hooks", ["first ", "second "], [], None),
        ("train of 1 step with a hook of the specification", ["argument "], ["spec "], None),
    ],
)
def test_order_of_calls_in_a_training(name, hooks, of_specification, stop_at, tmp_path):
    """Hooks are called in the order of TensorFlow, with the numbers of steps that they see there."""
    calls, wanted = [], ORDER[name]
    params = {"training_hooks": [lambda name=name: Calls(calls, name) for name in of_specification]}
    model = counting(tmp_path, params)
    model.train(rows(), [Calls(calls, name, stop_at) for name in hooks], steps=int(re.search(r"\d+", name)[0]))
    assert calls == wanted["calls"]
    assert saved(tmp_path) == wanted["checkpoints"]
    assert model.get_variable_value("global_step") == wanted["global_step"]


def test_order_of_calls_elsewhere(tmp_path):
    """An evaluation and a prediction call hooks in the order of TensorFlow, once more at the end of the data."""
    model = counting(tmp_path).train(rows(), steps=2)
    found = {name: [] for name in ORDER if not name.startswith("train")}
    model.evaluate(rows(2), hooks=[Calls(found["evaluate of 2 batches"])])
    model.evaluate(rows(9), steps=2, hooks=[Calls(found["evaluate with steps=2"])])
    list(model.predict(rows(2), hooks=[Calls(found["predict of 2 batches"])]))
    assert found == {name: ORDER[name]["calls"] for name in found}


@pytest.mark.parametrize(
    ("name", "steps", "before", "every"),
    [
        ("10 steps, save_checkpoints_steps=4", 10, 0, 4),
        ("10 steps, save_checkpoints_steps=5", 10, 0, 5),
        ("10 steps after 3, save_checkpoints_steps=4", 10, 3, 4),
    ],
)
def test_calls_around_checkpoints(name, steps, before, every, tmp_path):
    """Checkpoints are saved at the steps of TensorFlow, and listeners are called around each."""
    calls, model = [], counting(tmp_path, save_checkpoints_steps=every)
    if before:
        model.train(rows(), steps=before)
    model.train(rows(), steps=steps, saving_listeners=[Listener(calls)])
    assert calls == SAVERS[name]["calls"]
    assert saved(tmp_path) == SAVERS[name]["checkpoints"]


def test_logged_lines_of_logging_hooks(tmp_path, caplog):
    """The lines of `LoggingTensorHook` are those of TensorFlow.

    Deliberate difference: the last line has the value of the last step, because nothing is computed after it.
    """
    caplog.set_level("INFO", "phalanx")
    formatted = {"every_n_iter": 2, "formatter": lambda values: f"it is {values['value']}"}
    for number, (name, entry) in enumerate(READY.items()):
        if name.startswith("LoggingTensorHook") and "exception" not in entry:
            is_code = name.endswith(")")
            hook = eval(f"estimator.{name}") if is_code else estimator.LoggingTensorHook(["value"], **formatted)
            caplog.clear()
            counting(tmp_path / str(number)).train(rows(), [hook], steps=5)
            lines = [m for m in caplog.messages if m.startswith(("value", "a =", "it"))]
            wanted = list(entry["logged"])
            if "at_end" in name:
                wanted[-1] = wanted[-1].replace("6.0", "5.0")
            assert [re.sub(r"[\d.]+ sec", "SECONDS sec", line) for line in lines] == wanted, name


@pytest.mark.parametrize("options", [{"num_steps": 4}, {"last_step": 5}, {"last_step": 2}])
def test_steps_at_which_a_training_stops(options, tmp_path):
    """`StopAtStepHook` stops where that of TensorFlow does: after one step, if the last one is past."""
    model = counting(tmp_path).train(rows(), steps=3)
    model.train(rows(), [estimator.StopAtStepHook(**options)])
    ((option, value),) = options.items()
    assert saved(tmp_path) == READY[f"StopAtStepHook({option}={value}) after 3 steps"]["checkpoints"]


def test_loss_that_is_not_a_number(tmp_path):
    """The training ends with an error, and only the first checkpoint is left, as in TensorFlow."""
    with pytest.raises(NanLossDuringTrainingError, match="is NaN.\nHINT: a smaller learning rate"):
        counting(tmp_path, {"nan_at": 2}).train(rows(), steps=5)
    assert saved(tmp_path) == READY["the estimator's own NanTensorHook, loss nan at step 2"]["checkpoints"]


def test_summaries_of_ready_made_hooks(tmp_path):
    """`StepCounterHook` and `SummarySaverHook` write at the steps of TensorFlow."""
    hooks = [
        estimator.StepCounterHook(2, output_dir=str(tmp_path / "speed")),
        estimator.SummarySaverHook(2, output_dir=str(tmp_path / "values"), summary_op={"hooked": "steps"}),
    ]
    counting(tmp_path / "model").train(rows(), hooks, steps=5)
    for folder, name in (("speed", "StepCounterHook(every_n_steps=2)"), ("values", "SummarySaverHook(save_steps=2)")):
        wanted = {}
        for event in READY[f"{name} over 5 steps"]["events"]:
            for value in event.get("values", []):
                wanted.setdefault(value["tag"], []).append((event["step"], value.get("value")))
        found = written(tmp_path / folder)
        steps = lambda tags: {tag: [step for step, _ in values] for tag, values in tags.items()}  # noqa: E731
        assert steps(found) == steps(wanted)
        if folder == "values":
            assert [float(x) for _, x in found["hooked"]] == [x for _, x in wanted["hooked"]]


def test_early_stopping_equals_tensorflow(tmp_path):
    """Each hook ends the training after the same number of steps, from the same evaluations."""
    writer = summary.create_file_writer(str(tmp_path / "eval"))
    for step, loss in EARLY["metrics"]["loss"].items():
        with writer.as_default(int(step)):
            summary.scalar("loss", loss)
    writer.close()
    found = estimator.experimental.read_eval_metrics(str(tmp_path / "eval"))
    assert {str(step): metrics for step, metrics in found.items()} == EARLY["read_eval_metrics"]
    for number, (code, entry) in enumerate(EARLY["hooks"].items()):
        if code.startswith("stop_if") and "exception" not in entry:
            folder = shutil.copytree(tmp_path / "eval", tmp_path / str(number) / "eval").parent
            model = counting(folder)
            code = f"{code[:-1]}, run_every_secs=None, run_every_steps=1)"
            hook = eval(f"estimator.experimental.{code}", {"estimator": estimator, "e": model})
            model.train(rows(), [hook], max_steps=20)
            assert model.get_variable_value("global_step") == entry["global_step"], code
