"""Ready-made estimators and model functions against the recorded answers of tensorflow-estimator 2.15."""

import numpy as np
import pytest
from tests.estimator.recorded import RECORDED, Watch, array, batches, made

PREMADE = {
    f"{part}: {name}": case
    for part in ("dnn", "linear", "others")
    for name, case in RECORDED[part].items()
    if isinstance(case, dict) and "losses" in case
}


@pytest.mark.parametrize("name", PREMADE)
def test_premade_equals_tensorflow(name, tmp_path):
    """Losses of 20 steps, final variables, metrics and predictions of a ready-made estimator equal those of TensorFlow."""
    case, data = PREMADE[name], batches(PREMADE[name])
    model, watch = made(case, tmp_path), Watch(PREMADE[name])
    model.train(lambda: (data * 7)[:20], hooks=[watch])
    np.testing.assert_allclose(watch.losses, case["losses"], rtol=1e-5, atol=1e-6)
    names = set(model.get_variable_names())
    final = {name.removesuffix(":0"): value for name, value in case["final"].items()}
    trained = [name for name in final if not name.startswith("training/")]
    assert set(trained) <= names
    for name in trained:
        np.testing.assert_allclose(model.get_variable_value(name), final[name], rtol=1e-5, atol=2e-6, err_msg=name)
    found = model.evaluate(lambda: data)
    assert set(found) == set(case["evaluate"])
    for name, entry in case["evaluate"].items():
        np.testing.assert_allclose(found[name], array(entry), rtol=1e-5, atol=1e-6, err_msg=name)
    rows = list(model.predict(lambda: [{name: x[:4] for name, x in data[0][0].items()}]))
    assert set(rows[0]) == set(case["predict"])
    for name, entry in case["predict"].items():
        given = np.array([row[name] for row in rows])
        if entry["dtype"] == "string":
            assert [[x.decode() for x in row] for row in given] == entry["values"]
        else:
            np.testing.assert_allclose(given, array(entry), rtol=1e-5, atol=2e-6, err_msg=name)
