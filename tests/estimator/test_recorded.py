"""Ready-made estimators against the recorded answers of tensorflow-estimator 2.15."""

import numpy as np
import pytest
from tests.estimator.recorded import RECORDED, Watch, array, batches, made

PREMADE = {
    f"{part}: {name}": case
    for part in ("dnn", "linear", "others")
    for name, case in RECORDED[part].items()
    if isinstance(case, dict) and "losses" in case
}
# Of each kind of model one case.
COVER = (
    "dnn: three classes with weights",
    "linear: two words",
    "others: BaselineClassifier of three classes",
    "others: DNNLinearCombinedRegressor, linear alone",
)


@pytest.mark.cover(("name",), COVER)
@pytest.mark.parametrize("name", PREMADE)
def test_premade_equals_tensorflow(name, tmp_path):
    """Losses of 20 steps, final variables, metrics and predictions of a ready-made estimator equal those of TensorFlow.

    Deliberate difference: the RMSprop of Keras 3 adds epsilon inside the root, and that of TensorFlow's Keras outside.
    """
    case, data = PREMADE[name], batches(PREMADE[name])
    near = {"rtol": 1e-2, "atol": 2e-3} if "RMSProp" in name else {"rtol": 1e-5, "atol": 2e-6}
    model, watch = made(case, tmp_path), Watch(case)
    model.train(lambda: (data * 7)[:20], hooks=[watch])
    np.testing.assert_allclose(watch.results, case["losses"], **near)
    for variable, value in case["final"].items():
        if not variable.startswith("training/"):
            final = model.get_variable_value(variable.removesuffix(":0"))
            np.testing.assert_allclose(final, value, err_msg=variable, **near)
    found = model.evaluate(lambda: data)
    assert set(found) == set(case["evaluate"])
    for metric, entry in case["evaluate"].items():
        np.testing.assert_allclose(found[metric], array(entry), err_msg=metric, **near)
    rows = list(model.predict(lambda: [{name: x[:4] for name, x in data[0][0].items()}]))
    assert set(rows[0]) == set(case["predict"])
    for key, entry in case["predict"].items():
        given = np.array([row[key] for row in rows])
        if entry["dtype"] == "string":
            assert [[x.decode() for x in row] for row in given] == entry["values"]
        else:
            np.testing.assert_allclose(given, array(entry), err_msg=key, **near)
