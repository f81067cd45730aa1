"""`train_and_evaluate` on one machine, against the recorded answers of tensorflow-estimator 2.15."""

import pytest
from one_weight import saved
from tests.estimator import shared
from tests.estimator.recorded import RECORDED, batches, made

import phalanx.estimator as estimator
from phalanx.estimator import tf1

RUNS = {name: run for name, run in RECORDED["train_and_evaluate"].items() if isinstance(run, dict)}
CASE = RECORDED["dnn"]["two classes"]
DATA = batches(CASE)
COVER = (
    "with exporters",
    "name='x' and steps=1",
    "already trained for 20 steps",
)


class Steps(shared.Steps, estimator.SessionRunHook):
    library = tf1


class Exports(shared.Exports, estimator.Exporter):
    pass


def exporters(calls):
    """One exporter of each kind. All evaluations are good enough for the best, as in the recorded run."""
    receive = estimator.export.build_raw_serving_input_receiver_fn(DATA[0][0])
    better = lambda best_eval_result, current_eval_result: True  # noqa: E731
    return [
        Exports(calls, estimator.FinalExporter("final", receive)),
        Exports(calls, estimator.LatestExporter("latest", receive, exports_to_keep=2)),
        Exports(calls, estimator.BestExporter("best", receive, compare_fn=better, exports_to_keep=1)),
    ]


def run(folder, calls, before=0, with_exporters=True, batches=99, max_steps=20, every=5, **options):
    """Returns what one call of `train_and_evaluate` returns."""
    model = made(CASE, folder, save_checkpoints_steps=every)
    if before:
        model.train(lambda: DATA * 9, steps=before)
    train_spec = estimator.TrainSpec(lambda: (DATA * 9)[:batches], max_steps, hooks=[Steps(calls, "train")])
    options = {"throttle_secs": 0, "exporters": exporters(calls) if with_exporters else None, **options}
    eval_spec = estimator.EvalSpec(lambda: DATA, hooks=[Steps(calls, "evaluate")], **options)
    return estimator.train_and_evaluate(model, train_spec, eval_spec)


@pytest.mark.cover(("name",), COVER)
@pytest.mark.parametrize("name", RUNS)
def test_calls_equal_tensorflow(name, tmp_path):
    """Training, evaluations and exports follow one another as in TensorFlow, and leave as many checkpoints and exports.

    Deliberate difference: hooks end before the last checkpoint, and TensorFlow's after it, if the last step was not due.
    """
    wanted, calls = RUNS[name], []
    metrics, exports = run(tmp_path, calls, **shared.EVALUATIONS[name])
    ends = [call for call in wanted["calls"] if call[0] == "train ends"]
    assert [call for call in calls if call[0] == "train ends"] == ends
    assert [call for call in calls if call not in ends] == [call for call in wanted["calls"] if call not in ends]
    assert saved(tmp_path) == wanted["checkpoints"]
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
