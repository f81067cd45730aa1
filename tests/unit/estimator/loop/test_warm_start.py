"""First values of variables from another checkpoint."""

import keras
import numpy as np
import pytest
from one_weight import WEIGHT_AFTER, made, model_fn, rows
from refusals import refusals, refused

import phalanx.estimator as estimator
from phalanx.errors import CheckpointError, CheckpointMismatchError, InvalidArgumentError
from phalanx.train import load_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return made(tmp_path_factory.mktemp("model")).train(rows(2)).model_dir


def larger_fn(features, labels, mode):
    """The model with another variable, of another shape."""
    keras.Variable(5.0, name="new")
    keras.Variable("zeros", shape=(3,), name="wide")
    return model_fn(features, labels, mode)


def begun(tmp_path, settings, fn=larger_fn):
    """The values of a warm-started model before its first step."""
    made(tmp_path, fn, warm_start_from=settings, save_checkpoints_steps=1).train(rows(1))
    reader = load_checkpoint(tmp_path / "model.ckpt-0")
    assert reader.get_tensor("global_step") == 0
    return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}


def test_folder_gives_all_trainable_variables(folder, tmp_path):
    """The number of steps begins with 0, and a training that goes on keeps its own values."""
    found = begun(tmp_path, folder, model_fn)
    np.testing.assert_allclose(found["weight"], WEIGHT_AFTER[2], rtol=1e-6)
    again = made(tmp_path, warm_start_from=folder).train(rows(1))
    np.testing.assert_allclose(again.get_variable_value("weight"), 1.9375, rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"vars_to_warm_start": "weight"}, {"weight": 1.75, "new": 5}),
        ({"vars_to_warm_start": ["weight"]}, {"weight": 1.75, "new": 5}),
        ({"vars_to_warm_start": "nothing"}, {"weight": 1, "new": 5}),
        ({"vars_to_warm_start": "new", "var_name_to_prev_var_name": {"new": "weight"}}, {"weight": 1, "new": 1.75}),
    ],
)
def test_variables_that_are_asked_for(options, wanted, folder, tmp_path):
    """By a regular expression, by a list, and by other names."""
    found = begun(tmp_path, estimator.WarmStartSettings(folder, **options))
    np.testing.assert_allclose([found[name] for name in wanted], list(wanted.values()), rtol=1e-6)


def test_variables_that_do_not_fit(folder, tmp_path):
    """The error names the variable, and what the checkpoint has. A checkpoint that does not exist is missed, too."""
    renamed = {"vars_to_warm_start": "wide", "var_name_to_prev_var_name": {"wide": "weight"}}
    for options, words in (
        ({}, ["a warm start of 'new'", "is not there", "'weight'", "vars_to_warm_start"]),
        (renamed, ["a warm start of 'wide'", "has the shape []", "the shape [3]"]),
    ):
        with refused(CheckpointMismatchError, words):
            made(tmp_path, larger_fn, warm_start_from=estimator.WarmStartSettings(folder, **options)).train(rows())
    with refused(CheckpointError, ["nowhere", "no such file"]):
        made(tmp_path, warm_start_from="/nowhere/model").train(rows())


test_settings_that_are_refused = refusals(
    InvalidArgumentError,
    ((3,), ["ckpt_to_initialize_from=3", "must be a path"]),
    (("a", "("), ["vars_to_warm_start='('", "not a regular expression"]),
    (("a", 3), ["vars_to_warm_start=3", "not a regular expression"]),
    (("a", None), ["vars_to_warm_start=None", "not a regular expression"]),
    (("a", ["b", 3]), ["vars_to_warm_start=3", "not a regular expression"]),
    (("a", ".*", {"b": 3}), ["var_name_to_vocab_info={'b': 3}", "are not mapped"]),
    (("a", ".*", None, 3), ["var_name_to_prev_var_name=3", "a dict from names to names"]),
    call=lambda arguments: estimator.WarmStartSettings(*arguments),
)
