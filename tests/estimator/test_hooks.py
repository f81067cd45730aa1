"""The order of calls, and ready-made hooks, against the recorded answers of tensorflow-estimator 2.15."""

import re

import numpy as np
import pytest
from event_files import written
from tests.estimator.counting import counting, rows
from tests.estimator.recorded import RECORDED

import phalanx.estimator as estimator
from phalanx import summary
from phalanx.errors import InvalidArgumentError, NanLossDuringTrainingError

HOOKS = RECORDED["hooks"]
ORDER, READY, SAVERS, EARLY = HOOKS["order"], HOOKS["hooks"], HOOKS["savers"], HOOKS["early_stopping"]


class Calls(estimator.SessionRunHook):
    """Notes the calls of every method."""

    def __init__(self, calls, name="", stop_at=None):
        self.calls, self.name, self.stop_at = calls, name, stop_at

    def note(self, method, *sessions):
        """Notes one call."""
        steps = [int(session.run(estimator.get_global_step())) for session in sessions]
        self.calls.append([f"{self.name}{method}", *steps])

    def begin(self):
        """Notes the call."""
        self.note("begin")

    def after_create_session(self, session, coord):
        """Notes the call."""
        self.note("after_create_session", session)

    def before_run(self, run_context):
        """Notes the call, and asks for the number of steps."""
        self.note("before_run", run_context.session)
        return estimator.SessionRunArgs(estimator.get_global_step())

    def after_run(self, run_context, run_values):
        """Notes the call, and stops at a step."""
        self.note("after_run", run_context.session)
        if int(run_values.results) == self.stop_at:
            run_context.request_stop()

    def end(self, session):
        """Notes the call."""
        self.note("end", session)


class Listener(estimator.CheckpointSaverListener):
    """Notes the calls of every method."""

    def __init__(self, calls):
        self.calls = calls

    def begin(self):
        """Notes the call."""
        self.calls.append(["begin"])

    def before_save(self, session, global_step_value):
        """Notes the call."""
        self.calls.append(["before_save", global_step_value])

    def after_save(self, session, global_step_value):
        """Notes the call."""
        self.calls.append(["after_save", global_step_value])

    def end(self, session, global_step_value):
        """Notes the call."""
        self.calls.append(["end", global_step_value])


def saved(folder):
    """The steps of the checkpoints."""
    return sorted(int(path.stem.rpartition("-")[2]) for path in folder.glob("model.ckpt-*.safetensors"))


@pytest.mark.parametrize("name", [name for name in ORDER if name.startswith("train")])
def test_order_of_calls_in_a_training(name, tmp_path):
    """Hooks are called in the order of TensorFlow, with the numbers of steps that they see there."""
    calls, wanted = [], ORDER[name]
    stop_at = 2 if "stopped" in name else None
    own = {"two hooks": ("first ", "second "), "specification": ("argument ",)}
    names = next((names for key, names in own.items() if name.endswith(key)), ("",))
    params = {"training_hooks": [lambda: Calls(calls, "spec ")]} if name.endswith("specification") else {}
    steps = int(re.search(r"\d+", name)[0])
    model = counting(tmp_path, params)
    model.train(rows(), [Calls(calls, name, stop_at) for name in names], steps=steps)
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


LOGGING = {
    "LoggingTensorHook(['value'], every_n_iter=2)": (["value"], {"every_n_iter": 2}),
    "LoggingTensorHook({'a': 'value', 'b': 'steps'}, every_n_iter=2)": (
        {"a": "value", "b": "steps"},
        {"every_n_iter": 2},
    ),
    "LoggingTensorHook(['value'], every_n_iter=2, at_end=True)": (["value"], {"every_n_iter": 2, "at_end": True}),
    "LoggingTensorHook(['value'], at_end=True)": (["value"], {"at_end": True}),
    "LoggingTensorHook with a formatter": (
        ["value"],
        {"every_n_iter": 2, "formatter": lambda values: f"it is {values['value']}"},
    ),
}


def test_logged_lines_of_logging_hooks(tmp_path, caplog):
    """The lines of `LoggingTensorHook` are those of TensorFlow.

    Deliberate difference: the last line has the value of the last step, because nothing is computed after it.
    """
    caplog.set_level("INFO", "phalanx")
    for number, (name, (tensors, options)) in enumerate(LOGGING.items()):
        caplog.clear()
        counting(tmp_path / str(number)).train(rows(), [estimator.LoggingTensorHook(tensors, **options)], steps=5)
        found = [
            re.sub(r"[\d.]+ sec", "SECONDS sec", m) for m in caplog.messages if m.startswith(("value", "a =", "it"))
        ]
        wanted = list(READY[name]["logged"])
        if options.get("at_end"):
            wanted[-1] = wanted[-1].replace("6.0", "5.0")
        assert found == wanted, name


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("StopAtStepHook(num_steps=4) after 3 steps", {"num_steps": 4}),
        ("StopAtStepHook(last_step=5) after 3 steps", {"last_step": 5}),
        ("StopAtStepHook(last_step=2) after 3 steps", {"last_step": 2}),
    ],
)
def test_steps_at_which_a_training_stops(name, options, tmp_path):
    """`StopAtStepHook` stops where that of TensorFlow does: after one step, if the last one is past."""
    model = counting(tmp_path).train(rows(), steps=3)
    model.train(rows(), [estimator.StopAtStepHook(**options)])
    assert saved(tmp_path) == READY[name]["checkpoints"]


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
        assert {tag: [step for step, _ in values] for tag, values in found.items()} == {
            tag: [step for step, _ in values] for tag, values in wanted.items()
        }
        if folder == "values":
            assert [float(x) for _, x in found["hooked"]] == [x for _, x in wanted["hooked"]]


@pytest.fixture
def evaluations(tmp_path):
    """A folder with the losses of recorded evaluations."""
    writer = summary.create_file_writer(str(tmp_path / "eval"))
    for step, loss in EARLY["metrics"]["loss"].items():
        with writer.as_default(int(step)):
            summary.scalar("loss", loss)
    writer.close()
    return tmp_path


def test_early_stopping_equals_tensorflow(evaluations):
    """Each hook ends the training after the same number of steps, from the same evaluations."""
    found = estimator.experimental.read_eval_metrics(str(evaluations / "eval"))
    assert {str(step): metrics for step, metrics in found.items()} == EARLY["read_eval_metrics"]
    names = {name: getattr(estimator.experimental, name) for name in dir(estimator.experimental)}
    for code, entry in EARLY["hooks"].items():
        model = counting(evaluations)
        if not code.startswith("stop_if") or "exception" in entry:
            continue
        hook = eval(code.removesuffix(")") + ", run_every_secs=None, run_every_steps=1)", names | {"e": model})
        model.train(rows(), [hook], max_steps=20)
        assert model.get_variable_value("global_step") == entry["global_step"], code
        for path in evaluations.glob("model.ckpt*"):
            path.unlink()
        (evaluations / "checkpoint").unlink(missing_ok=True)


def test_fetch_that_is_not_known(tmp_path):
    """A name that the model function did not give is an error, as in TensorFlow."""
    with pytest.raises(InvalidArgumentError, match="fetches='nothing'.*\nHINT: estimator.identity"):
        counting(tmp_path).train(rows(), [estimator.LoggingTensorHook(["nothing"], 1)], steps=1)


def test_values_after_the_last_step(tmp_path):
    """`FinalOpsHook` fetches variables as they are at the end."""
    hook = estimator.FinalOpsHook({"step": "global_step", "weight": "weight"})
    assert hook.final_ops_values is None
    counting(tmp_path).train(rows(), [hook], steps=3)
    wanted = READY["FinalOpsHook"]["final_ops_values"]
    assert hook.final_ops_values["step"] == wanted["step"]
    np.testing.assert_equal(hook.final_ops_values["weight"], 4.0)
