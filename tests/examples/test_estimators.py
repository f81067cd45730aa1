"""`examples/estimator_*.py`, run as a user runs them."""

import importlib.util
import re

import pytest

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("sklearn"), reason="scikit-learn is not installed")


@pytest.mark.exhaustive("tests/guide/test_estimator_guide.py")
def test_irises_on_one_device_and_two(run_example):
    """The classifier finds the species of the three flowers, and two devices print the same as one."""
    one, two = (run_example("estimator_iris.py", "--devices", devices) for devices in (1, 2))
    (accuracy,) = re.findall(r"step 600: accuracy ([\d.]+)", one)
    assert float(accuracy) > 0.9
    assert re.findall(r"^(\w+) \(", one, re.MULTILINE) == ["setosa", "versicolor", "virginica"]
    assert re.findall(r"^\w+ \(", two, re.MULTILINE) == re.findall(r"^\w+ \(", one, re.MULTILINE)


@pytest.mark.exhaustive("tests/guide/test_estimator_guide.py")
def test_custom_head_finds_the_quantile(run_example):
    """About nine tenths of the labels are below the prediction."""
    (share,) = re.findall(r"([\d.]+) of the labels", run_example("estimator_custom_head.py"))
    assert 0.86 < float(share) < 0.94


@pytest.mark.exhaustive("tests/cluster/test_train_and_evaluate.py")
def test_evaluator_follows_two_workers(run_example, tmp_path):
    """Both workers train to the end, and the evaluator prints the accuracy of the last step."""
    launcher = ("run", "--workers", "2", "--evaluator")
    printed = run_example("estimator_cluster.py", "--steps", 200, "--out", tmp_path / "model", launcher=launcher)
    assert {"worker 0: trained to step 200", "worker 1: trained to step 200"} <= {
        line.partition("] ")[2] for line in printed.splitlines()
    }
    (accuracy,) = re.findall(r"evaluator 0: step 200, accuracy ([\d.]+)", printed)
    assert float(accuracy) > 0.85
