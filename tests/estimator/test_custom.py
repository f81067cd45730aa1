"""Model functions on one device and on two replicas, against the recorded answers of tensorflow-estimator 2.15."""

import numpy as np
import pytest
from tests.estimator.recorded import RECORDED, Watch, array, batches, made

import phalanx.estimator as estimator
from phalanx.estimator import tf1

CUSTOM = {name: case for name, case in RECORDED["custom"].items() if isinstance(case, dict)}
OWN = [name for name, case in CUSTOM.items() if "optimizer" in case]
PREMADE = [name for name in CUSTOM if name not in OWN]
COVER = (
    "GradientDescentOptimizer, mean, 2 replicas",
    "AdamOptimizer, sum, 2 replicas",
)
REDUCTIONS = {"mean": tf1.losses.Reduction.SUM_BY_NONZERO_WEIGHTS, "sum": tf1.losses.Reduction.SUM}


def model_fn(features, labels, mode, params):
    hidden = tf1.layers.Dense(4, tf1.nn.relu, name="hidden")(features["z"])
    output = tf1.layers.Dense(1, name="output")(hidden)[:, 0]
    if mode == estimator.ModeKeys.PREDICT:
        return estimator.EstimatorSpec(mode, predictions={"output": output})
    loss = tf1.losses.mean_squared_error(labels, output, reduction=REDUCTIONS[params["loss"]])
    if mode == estimator.ModeKeys.EVAL:
        metrics = {"error": tf1.metrics.mean_absolute_error(labels, output)}
        return estimator.EstimatorSpec(mode, loss=loss, eval_metric_ops=metrics)
    optimizer = getattr(tf1.train, params["optimizer"])(0.01)
    return estimator.EstimatorSpec(mode, loss=loss, train_op=optimizer.minimize(loss, tf1.train.get_global_step()))


def options(case):
    strategy = tf1.distribute.MirroredStrategy(["cpu:0", "cpu:1"]) if case["replicas"] else None
    return {"train_distribute": strategy, "save_summary_steps": None, "log_step_count_steps": 5}


def own_model(case, folder):
    given = options(case)
    config = estimator.RunConfig(str(folder), **given, eval_distribute=given["train_distribute"])
    return estimator.Estimator(model_fn, config=config, params=case)


def trained(model, case, data):
    """Trains from the recorded values, and compares the losses and the variables. Returns the losses."""
    watch = Watch(case)
    model.train(lambda: (data * 8)[: 20 * (case["replicas"] or 1)], hooks=[watch])
    for name, value in case["final"].items():
        if name.removesuffix(":0") in model.get_variable_names():
            found = model.get_variable_value(name.removesuffix(":0"))
            np.testing.assert_allclose(found, value, rtol=1e-5, atol=1e-5, err_msg=name)
    return watch.results


@pytest.mark.cover(("name",), COVER)
@pytest.mark.parametrize("name", OWN)
def test_model_function_equals_tensorflow(name, tmp_path, caplog):
    """Losses, variables, log, metrics and predictions equal: means are averaged over replicas, and sums are added up.

    Deliberate difference: TensorFlow logs the number of steps before a step, and Phalanx that after it.
    """
    caplog.set_level("INFO", "phalanx")
    case = CUSTOM[name]
    data = batches({"features": ["z"], "labels": "number"}, case["batch"])
    model = own_model(case, tmp_path)
    np.testing.assert_allclose(trained(model, case, data), case["losses"], rtol=1e-5)
    logged = [m.partition(" (")[0] for m in caplog.messages if m.startswith("loss")]
    assert [text.partition("step")[2] for text in logged] == [f" = {step}" for step in (1, 6, 11, 16)]
    found = model.evaluate(lambda: data[:4])
    for metric, entry in case["evaluate"].items():
        np.testing.assert_allclose(found[metric], array(entry), rtol=1e-5, err_msg=metric)
    rows = list(model.predict(lambda: [{"z": data[0][0]["z"][:4]}]))
    np.testing.assert_allclose([row["output"] for row in rows], array(case["predict"]["output"]), rtol=1e-5, atol=1e-6)


@pytest.mark.cover(("name",), ["DNNClassifier by sum, 2 replicas"])
@pytest.mark.parametrize("name", PREMADE)
def test_ready_made_model_on_two_replicas(name, tmp_path):
    """Variables and metrics equal those of TensorFlow, and so do losses by sum.

    Deliberate difference: TensorFlow reports the sum of the replicas' mean losses, and Phalanx their mean, which it minimizes.
    """
    case = CUSTOM[name]
    data = batches(case, case["batch"])
    model = made(case, tmp_path, **options(case))
    losses = np.multiply(trained(model, case, data), 1 if "by sum" in name else case["replicas"])
    np.testing.assert_allclose(losses, case["losses"], rtol=1e-5)
    found = model.evaluate(lambda: data)
    for metric, entry in case["evaluate"].items():
        np.testing.assert_allclose(found[metric], array(entry), rtol=1e-5, atol=1e-6, err_msg=metric)


@pytest.mark.cover(["loss"], {"mean"})
@pytest.mark.parametrize("loss", ["mean", "sum"])
def test_evaluation_of_rows_that_do_not_fill_the_replicas(loss, tmp_path):
    """Every batch counts once in the loss, and every row in the metrics, as NumPy computes them."""
    data = batches({"features": ["z"], "labels": "number"}, 4)
    model = own_model({"replicas": 2, "loss": loss, "optimizer": "AdamOptimizer"}, tmp_path)
    model.train(lambda: data[:2])
    found = model.evaluate(lambda: data)
    output = np.array([row["output"] for row in model.predict(lambda: data)])
    labels = np.concatenate([labels for _, labels in data])
    expected = np.square(output - labels).mean() * (1 if loss == "mean" else 4)
    np.testing.assert_allclose(found["loss"], expected, rtol=1e-5)
    np.testing.assert_allclose(found["error"], np.abs(output - labels).mean(), rtol=1e-5)
