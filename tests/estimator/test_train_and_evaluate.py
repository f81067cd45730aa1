"""`train_and_evaluate` on one machine, against the recorded answers of tensorflow-estimator 2.15."""

import pytest
from tests.estimator.recorded import RECORDED, batches, made

import phalanx.estimator as estimator

RUNS = {name: run for name, run in RECORDED["train_and_evaluate"].items() if isinstance(run, dict)}
CASE = RECORDED["dnn"]["two classes"]
DATA = batches(CASE)
OPTIONS = {
    "with exporters": {},
    "without exporters": {"with_exporters": False},
    "an input of 12 batches": {"batches": 12},
    "an input of 12 batches and no max_steps": {"batches": 12, "max_steps": None},
    "throttle_secs=600": {"throttle_secs": 600},
    "name='x' and steps=1": {"with_exporters": False, "name": "x", "steps": 1},
    "already trained for 20 steps": {"before": 20},
    "already trained for 7 steps": {"before": 7},
    "checkpoints every 6 steps": {"with_exporters": False, "every": 6},
    "start_delay_secs=100": {"with_exporters": False, "start_delay_secs": 100},
}
COVER = (
    "with exporters",
    "an input of 12 batches",
    "throttle_secs=600",
    "name='x' and steps=1",
    "already trained for 20 steps",
    "start_delay_secs=100",
)


class Steps(estimator.SessionRunHook):
    """Notes the number of steps at the begin and at the end."""

    def __init__(self, calls, name):
        self.calls, self.name = calls, name

    def after_create_session(self, session, coord):
        """Notes the begin."""
        self.calls.append([f"{self.name} begins", int(session.run("global_step"))])

    def end(self, session):
        """Notes the end."""
        self.calls.append([f"{self.name} ends", int(session.run("global_step"))])


class Noting(estimator.Exporter):
    """Notes the calls of export, and hands them to another exporter."""

    def __init__(self, calls, exporter):
        self.calls, self.exporter = calls, exporter

    @property
    def name(self):
        """The name of the other exporter."""
        return self.exporter.name

    def export(self, estimator, export_path, checkpoint_path, eval_result, is_the_final_export):
        """Exports, and notes what was returned."""
        result = self.exporter.export(estimator, export_path, checkpoint_path, eval_result, is_the_final_export)
        step = int(checkpoint_path.rpartition("-")[2])
        self.calls.append([f"export {self.name}", step, is_the_final_export, "a folder" if result else result])
        return result


def exporters(calls):
    """One exporter of each kind. All evaluations are good enough for the best, as in the recorded run."""
    receive = estimator.export.build_raw_serving_input_receiver_fn(DATA[0][0])
    better = lambda best_eval_result, current_eval_result: True  # noqa: E731
    return [
        Noting(calls, estimator.FinalExporter("final", receive)),
        Noting(calls, estimator.LatestExporter("latest", receive, exports_to_keep=2)),
        Noting(calls, estimator.BestExporter("best", receive, compare_fn=better, exports_to_keep=1)),
    ]


@pytest.mark.cover(("name",), COVER)
@pytest.mark.parametrize("name", RUNS)
def test_calls_equal_tensorflow(name, tmp_path):
    """Training, evaluations and exports follow one another as in TensorFlow, and leave as many checkpoints and exports.

    Deliberate difference: hooks end before the last checkpoint, and TensorFlow's after it, if the last step was not due.
    """
    options, wanted, calls = dict(OPTIONS[name]), RUNS[name], []
    model = made(CASE, tmp_path, save_checkpoints_steps=options.pop("every", 5))
    if before := options.pop("before", 0):
        model.train(lambda: DATA * 9, steps=before)
    with_exporters, max_steps = options.pop("with_exporters", True), options.pop("max_steps", 20)
    count = options.pop("batches", 99)
    result = estimator.train_and_evaluate(
        model,
        estimator.TrainSpec(lambda: (DATA * 9)[:count], max_steps, hooks=[Steps(calls, "train")]),
        estimator.EvalSpec(
            lambda: DATA,
            hooks=[Steps(calls, "evaluate")],
            exporters=exporters(calls) if with_exporters else None,
            **{"throttle_secs": 0, **options},
        ),
    )
    ends = [call for call in wanted["calls"] if call[0] == "train ends"]
    assert [call for call in calls if call[0] == "train ends"] == ends
    assert [call for call in calls if call not in ends] == [call for call in wanted["calls"] if call not in ends]
    steps = {int(path.stem.rpartition("-")[2]) for path in tmp_path.glob("model.ckpt-*.safetensors")}
    assert steps == set(wanted["checkpoints"])
    metrics, exports = result
    if wanted["returned"][0] is None:
        # Deliberate difference: no exports are an empty list.
        assert (metrics, exports) == (None, [])
        return
    assert set(metrics) == set(wanted["returned"][0])
    assert metrics["global_step"] == wanted["returned"][0]["global_step"]
    assert [bool(path) for path in exports] == [bool(path) for path in wanted["returned"][1]]
    for kind in ("final", "latest", "best"):
        kept = [file for file in wanted["files"] if file.startswith(f"export/{kind}/") and file.endswith(".pb")]
        assert len(list((tmp_path / "export" / kind).glob("*/signature.json"))) == len(kept)
