"""`model_to_estimator`, against the recorded answers of tensorflow-estimator 2.15."""

import keras
import numpy as np
import pytest
from one_weight import Fetch
from tests.estimator.recorded import RECORDED, array, batches

import phalanx.estimator as estimator

CASES = {name: case for name, case in RECORDED["keras"].items() if isinstance(case, dict) and "losses" in case}


def model_of(case):
    output = keras.layers.Dense(case.get("units", 1), case["activation"], name="output")
    model = keras.Sequential([keras.Input((3,), name="z"), keras.layers.Dense(4, "relu", name="hidden"), output])
    model.set_weights([np.array(weight, "float32") for weight in case["weights"]])
    model.compile(keras.optimizers.Adam(0.01), **case["compile"])
    return model


@pytest.mark.cover(["name"], {"three classes"})
@pytest.mark.parametrize("name", CASES)
def test_model_equals_tensorflow(name, tmp_path):
    """Losses of 20 steps from the weights of the model, final variables, metrics and predictions equal those of TensorFlow.

    Deliberate difference: metrics are means over rows. TensorFlow has means over batches, whatever their sizes, if the model
    has one output.
    """
    case = CASES[name]
    data = batches({"features": ["z"], "labels": case["labels"]})
    config = estimator.RunConfig(str(tmp_path), save_summary_steps=None, log_step_count_steps=None)
    model, hook = estimator.model_to_estimator(model_of(case), config=config), Fetch("loss")
    model.train(lambda: (data * 7)[:20], hooks=[hook])
    np.testing.assert_allclose(hook.results, case["losses"], rtol=2e-5)
    for key, value in case["final"].items():
        if not key.startswith(("training/", "global_step")):
            found = model.get_variable_value(key.removesuffix(":0"))
            np.testing.assert_allclose(found, value, rtol=2e-5, atol=1e-5, err_msg=key)
    results = model.evaluate(lambda: data)
    assert set(results) == set(case["evaluate"])
    singles = [model.evaluate(lambda i=i: data[i : i + 1]) for i in range(len(data))]
    for metric, entry in case["evaluate"].items():
        by_batch = [single[metric] for single in singles]
        by_row = np.average(by_batch, weights=[len(labels) for _, labels in data])
        is_by_row = case.get("units") == 3 and metric != "loss"
        np.testing.assert_allclose(by_row if is_by_row else np.mean(by_batch), array(entry), rtol=2e-5, err_msg=metric)
        np.testing.assert_allclose(results[metric], np.mean(by_batch) if metric == "loss" else by_row, rtol=2e-5)
    rows = list(model.predict(lambda: [{"z": data[0][0]["z"][:4]}]))
    np.testing.assert_allclose([row["output"] for row in rows], array(case["predict"]["output"]), rtol=2e-5, atol=1e-5)
