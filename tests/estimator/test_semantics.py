"""Steps, calls one after the other, and wrong arguments, against the recorded answers of tensorflow-estimator 2.15."""

import contextlib
import types

import jax.numpy as jnp
import numpy as np
import pytest
from tests.estimator import shared
from tests.estimator.counting import model_fn, rows, unlabelled
from tests.estimator.recorded import RECORDED, array

import phalanx.estimator as estimator
from phalanx import feature_column
from phalanx.errors import InputError, PhalanxError

SEQUENCES, ERRORS = RECORDED["semantics"]["sequences"], RECORDED["semantics"]["errors"]
EMPTY = {"e.train(rows(0), hooks, steps=2)", "e.evaluate(rows(0))"}
"""Deliberate difference: no data is an error, because TensorFlow's checkpoint and metrics of nothing help nobody."""

STRICTER = {
    "new(folder).train(rows(), steps=1.5)": "half a step",
    "new(folder, params=3)": "parameters by name",
    "Spec('other')": "a mode that does not exist",
    "Spec(MODES.PREDICT, predictions='text')": "TensorFlow raises an error too",
    "tf.estimator.FinalExporter(None, rows())": "a folder needs a name",
    "tf.estimator.DNNClassifier(hidden_units=[2], feature_columns=[], optimizer='unknown')": "no features",
    "tf.estimator.DNNClassifier(hidden_units=[2], feature_columns=[])": "no features",
    "tf.estimator.DNNClassifier(hidden_units=[2], feature_columns=[tf.feature_column.numeric_column('x')],"
    " label_vocabulary=['a'])": "two classes have two names",
    "tf.estimator.DNNLinearCombinedClassifier(dnn_feature_columns=[tf.feature_column.numeric_column('x')])": "no units",
}
"""Deliberate differences: what TensorFlow takes at first, and Phalanx refuses at once."""

MILDER = {
    "new(folder).train(lambda: ({'x': tf.constant([1.0])},), steps=1)": "features without labels",
    "tf.estimator.RunConfig(log_step_count_steps=0)": "None says the same",
}
"""Deliberate differences: what Phalanx understands."""

OTHER = {"Spec(MODES.EVAL, loss=tf.constant([1.0]))._asdict()['loss'].shape.as_list()"}
"""A specification of Phalanx is no named tuple; see tests/unit/estimator/loop/test_spec.py."""


class Count(shared.Count, estimator.SessionRunHook):
    pass


def new(folder, function=model_fn, **arguments):
    """An Estimator as in the recorder."""
    return estimator.Estimator(function, config=estimator.RunConfig(f"{folder}/model"), **arguments)


NAMES = {
    "MODES": estimator.ModeKeys,
    "Spec": estimator.EstimatorSpec,
    "tf": types.SimpleNamespace(
        constant=lambda x: jnp.asarray(x, "float32"),
        no_op=lambda: lambda: None,
        estimator=estimator,
        feature_column=feature_column,
    ),
    **{function.__name__: function for function in (model_fn, new, rows, unlabelled)},
}


def plain(value, folder):
    """What the recorder makes of a result."""
    if isinstance(value, estimator.Estimator):
        return "self"
    if isinstance(value, dict):
        return {name: plain(item, folder) for name, item in value.items()}
    if isinstance(value, list):
        return [plain(item, folder) for item in value]
    return value.replace(str(folder), "FOLDER") if isinstance(value, str) else value


def compare(found, expected):
    """Compares a result with the recorded one."""
    if isinstance(expected, dict) and "values" in expected:
        np.testing.assert_allclose(found, array(expected), rtol=1e-6)
    elif isinstance(expected, dict):
        assert set(found) == set(expected)
        for name in expected:
            compare(found[name], expected[name])
    elif isinstance(expected, list):
        for item, wanted in zip(found, expected, strict=True):
            compare(item, wanted)
    elif isinstance(expected, float):
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    else:
        assert found == expected


@pytest.mark.parametrize("name", SEQUENCES)
def test_calls_one_after_the_other(name, tmp_path):
    """Results, the number of steps made and the number of steps in the checkpoint equal those of TensorFlow."""
    e = new(tmp_path)
    for entry in SEQUENCES[name]:
        hook, call = Count(), lambda code=entry["call"], hook=None: eval(code, NAMES | {"e": e, "hooks": [hook]})
        if entry["call"] in EMPTY:
            with pytest.raises(InputError, match="the dataset is empty"):
                call(hook=hook)
            continue
        if "exception" in entry:
            with pytest.raises(PhalanxError, match="\nHINT: "):
                call(hook=hook)
        else:
            found = plain(call(hook=hook), tmp_path)
            if entry["call"] == "e.get_variable_names()":
                # Deliberate difference: every optimizer of Keras counts its iterations.
                assert found.pop(found.index("sgd/iteration"))
            compare(found, entry["returned"])
        assert hook.steps == entry["steps_made"], entry
        step = e.get_variable_value("global_step") if e.latest_checkpoint() else None
        assert step == entry["global_step"], entry


@pytest.mark.parametrize("entry", [e for e in ERRORS if e["code"] not in OTHER], ids=lambda entry: entry["code"])
def test_wrong_arguments_are_typed_errors(entry, tmp_path):
    """What is an error in TensorFlow is one here, with a hint; what works there works here."""
    is_error = ("exception" in entry or entry["code"] in STRICTER) and entry["code"] not in MILDER
    with pytest.raises(PhalanxError, match="\nHINT: ") if is_error else contextlib.nullcontext():
        eval(entry["code"], NAMES | {"folder": tmp_path})


def test_differences_are_in_the_record():
    codes = {entry["code"] for entry in ERRORS}
    assert set(STRICTER) | set(MILDER) | OTHER <= codes
    assert {entry["call"] for entries in SEQUENCES.values() for entry in entries} >= EMPTY
