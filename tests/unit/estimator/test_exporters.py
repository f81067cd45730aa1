"""Exporters: what `train_and_evaluate` does with a model after an evaluation."""

import shutil

import pytest
from one_weight import X, made, rows
from refusals import refusals

import phalanx.estimator as estimator
from phalanx.errors import InvalidArgumentError

RECEIVE = estimator.export.build_raw_serving_input_receiver_fn(X)


test_arguments_that_are_refused = refusals(
    InvalidArgumentError,
    (lambda: estimator.LatestExporter("", RECEIVE), ["name=''", "not empty"]),
    (lambda: estimator.FinalExporter(None, RECEIVE), ["name=None", "must be a str"]),
    (lambda: estimator.LatestExporter("a", 3), ["serving_input_receiver_fn=3", "not callable"]),
    (lambda: estimator.BestExporter(), ["serving_input_receiver_fn=None", "not callable"]),
    (lambda: estimator.LatestExporter("a", RECEIVE, exports_to_keep=0), ["exports_to_keep=0", "positive"]),
    (lambda: estimator.BestExporter("a", RECEIVE, compare_fn=3), ["compare_fn=3", "best_eval_result and"]),
    (lambda: estimator.BestExporter("a", RECEIVE, compare_fn=int), ["compare_fn=", "best_eval_result and"]),
    (lambda: estimator.BestExporter("a", RECEIVE, compare_fn=lambda a, b: True), ["compare_fn=", "def compare_fn"]),
    (lambda: estimator.BestExporter("a", RECEIVE, 3), ["event_file_pattern=3", "must be a path"]),
)


@pytest.fixture
def model(tmp_path):
    return made(tmp_path).train(rows(1))


def exported(exporter, model, loss, is_final=False):
    """Whether an exporter exports after an evaluation with this loss."""
    folder = f"{model.model_dir}/export/{exporter.name}"
    return bool(exporter.export(model, folder, model.latest_checkpoint(), {"loss": loss}, is_final))


def test_old_exports_are_deleted(model, tmp_path):
    """`exports_to_keep` are left, the newest."""
    exporter = estimator.LatestExporter("latest", RECEIVE, exports_to_keep=2)
    folder = tmp_path / "export/latest"
    (folder / ("9" * 200)).mkdir(parents=True)  # No number of an export.
    made_paths = [exporter.export(model, str(folder), model.latest_checkpoint(), {}, False) for _ in range(4)]
    assert sorted(str(path) for path in folder.iterdir() if len(path.name) < 200) == sorted(made_paths)[-2:]


def test_evaluations_that_are_exported(model):
    """The last one; the first and each with a smaller loss; or those that a function of the user prefers."""
    final, best = estimator.FinalExporter("final", RECEIVE), estimator.BestExporter("best", RECEIVE)
    assert [exported(final, model, 1.0, is_final) for is_final in (False, True)] == [False, True]
    assert [exported(best, model, loss) for loss in (3.0, 3.0, 2.0, 2.5, 1.0)] == [True, False, True, False, True]
    greatest = estimator.BestExporter(
        serving_input_receiver_fn=RECEIVE,
        compare_fn=lambda best_eval_result, current_eval_result: current_eval_result["loss"] > best_eval_result["loss"],
    )
    assert greatest.name == "best_exporter"
    assert [exported(greatest, model, loss) for loss in (3.0, 2.0, 4.0)] == [True, False, True]


def test_best_exporter_reads_earlier_evaluations(model, tmp_path):
    """A program that starts again knows the best loss, from the event files, if there is an export."""
    assert model.evaluate(rows())["loss"] == pytest.approx(0.625)
    assert exported(estimator.BestExporter("best", RECEIVE), model, 0.625)
    assert not exported(estimator.BestExporter("best", RECEIVE), model, 0.7)
    assert exported(estimator.BestExporter("best", RECEIVE), model, 0.6)
    assert exported(estimator.BestExporter("best", RECEIVE, event_file_pattern=None), model, 0.7)
    shutil.rmtree(tmp_path / "export")
    assert exported(estimator.BestExporter("best", RECEIVE), model, 0.7)
