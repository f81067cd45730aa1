"""Ready-made models: their arguments, and what they do with features."""

import functools
import inspect
import re

import keras
import numpy as np
import pytest
from refusals import refusals

import phalanx.estimator as estimator
from phalanx import feature_column
from phalanx.errors import InputError, InvalidArgumentError
from phalanx.estimator import tf1
from phalanx.estimator.models.premade import HeadEstimator, creator_of

X = feature_column.numeric_column("x")
WORD = feature_column.categorical_column_with_vocabulary_list("s", ["a", "b"])
LABELS = np.array([0, 1])
DATA = [({"x": np.array([1, 2], "float32")}, LABELS)]
X_MODEL = functools.partial(estimator.LinearClassifier, [X])


test_arguments_that_are_refused = refusals(
    InvalidArgumentError,
    (lambda: estimator.LinearClassifier([]), ["feature_columns with []", "a list of columns, not empty"]),
    (lambda: estimator.LinearClassifier(3), ["feature_columns=3", "a list of columns"]),
    (lambda: estimator.LinearClassifier([3]), ["feature_columns with 3", "a list of columns"]),
    (lambda: estimator.LinearClassifier([X], n_classes=1), ["n_classes=1", "2 or more"]),
    (lambda: estimator.LinearClassifier([X], n_classes="a"), ["n_classes='a'", "2 or more"]),
    (lambda: estimator.DNNClassifier(3, [X]), ["hidden_units=3", "a list of numbers"]),
    (lambda: estimator.DNNClassifier([0], [X]), ["hidden_units=[0]", "a list of numbers"]),
    (lambda: estimator.DNNClassifier([2], [X], dropout=2), ["dropout=2", "from 0 to less than 1"]),
    (lambda: estimator.DNNClassifier([2], [X], dropout="a"), ["dropout='a'", "from 0 to less than 1"]),
    (lambda: estimator.DNNClassifier([2], [X], activation_fn="no"), ["activation_fn='no'", "no such activation"]),
    (lambda: estimator.DNNClassifier([2], [X], activation_fn=3), ["activation_fn=3", "no such activation"]),
    (lambda: estimator.DNNClassifier([2], [X], batch_norm=3), ["batch_norm=3", "True or False"]),
    (lambda: estimator.DNNEstimator(3, [2], [X]), ["head=3", "must be a head"]),
    (lambda: estimator.LinearEstimator(3, [X]), ["head=3", "must be a head"]),
    (lambda: estimator.BaselineEstimator(None), ["head=None", "must be a head"]),
    (lambda: estimator.DNNLinearCombinedClassifier(), ["linear_feature_columns=None", "no features"]),
    (lambda: estimator.DNNLinearCombinedClassifier(dnn_feature_columns=[X]), ["hidden_units=None", "a list"]),
)


test_optimizers_that_are_refused = refusals(
    InvalidArgumentError,
    ("unknown", ["optimizer='unknown'", "must be a Keras optimizer"]),
    (3, ["optimizer=3", "must be a Keras optimizer"]),
    (lambda: 3, ["optimizer=", "must be a Keras optimizer"]),
    call=lambda optimizer: creator_of(optimizer)(),
)


def test_optimizers_of_all_kinds():
    """Names, optimizers of Keras, which are copied, functions, and optimizers of TensorFlow 1."""
    assert isinstance(creator_of("RMSProp")(), keras.optimizers.RMSprop)
    assert float(creator_of("Adam", 0.5)().learning_rate) == 0.5
    given = keras.optimizers.SGD(0.25, momentum=0.5)
    copy = creator_of(given)()
    assert copy is not given
    assert (float(copy.learning_rate), copy.momentum) == (0.25, 0.5)
    assert isinstance(creator_of(keras.optimizers.Ftrl)(), keras.optimizers.Ftrl)
    assert isinstance(creator_of(tf1.train.AdamOptimizer(0.5))(), keras.optimizers.Adam)
    assert isinstance(creator_of(lambda: tf1.train.AdamOptimizer(0.5))(), keras.optimizers.Adam)


def trained(case):
    """Trains a model with a batch."""
    case[0](model_dir="model").train(lambda: [case[1]])


test_data_that_does_not_fit = refusals(
    InputError,
    ((X_MODEL, (np.ones(2, "float32"), LABELS)), ["features=", "must be a dict"]),
    ((X_MODEL, DATA[0][0]), ["labels=None in mode 'train'", "a loss needs labels"]),
    ((estimator.BaselineClassifier, ({}, LABELS)), ["features={}", "the number of rows is unknown"]),
    call=trained,
)
test_columns_that_do_not_fit = refusals(
    InvalidArgumentError,
    ((functools.partial(X_MODEL, sparse_combiner="other"), DATA[0]), ["sparse_combiner='other'", "must be"]),
    (
        (functools.partial(estimator.DNNClassifier, [2], [WORD]), ({"s": np.array(["a", "b"])}, LABELS)),
        ["is not dense", "indicator_column"],
    ),
    ((X_MODEL, ({"y": np.ones(2)}, LABELS)), ["the feature 'x' of a column", "the features are ['y']"]),
    call=trained,
)


def test_dropout_and_normalization_in_training_alone(tmp_path):
    """Two evaluations are equal, and the moving averages are part of the checkpoint."""
    model = estimator.DNNClassifier(
        [3], X, str(tmp_path), optimizer="SGD", activation_fn=keras.ops.tanh, dropout=0.5, batch_norm=True
    )
    model.train(lambda: DATA * 2)
    assert model.evaluate(lambda: DATA)["loss"] == model.evaluate(lambda: DATA)["loss"]
    assert any("batchnorm_0/moving_mean" in name for name in model.get_variable_names())


@pytest.mark.parametrize("rate", [0.1, keras.optimizers.schedules.ExponentialDecay(0.1, 10, 1.0)])
def test_optimizer_of_keras_trains(tmp_path, rate):
    """An optimizer with a number, or a schedule, as its learning rate trains like the same one from a function."""
    x = np.float32([[1], [2], [3], [4]])
    found = []
    for name, optimizer in (("one", keras.optimizers.SGD(rate)), ("two", lambda: keras.optimizers.SGD(rate))):
        model = estimator.LinearRegressor([X], tmp_path / name, optimizer=optimizer)
        model.train(lambda: [({"x": x}, 2 * x)] * 20)
        found.append(model.get_variable_value("linear/linear_model/x/weights"))
    np.testing.assert_array_equal(*found)


def test_families_describe_arguments_alike():
    """Each class shows all of its arguments, and an argument of several classes has one name, default and description."""
    described = {}
    for name in estimator.__all__:
        kind = getattr(estimator, name)
        if not (inspect.isclass(kind) and issubclass(kind, HeadEstimator)):
            continue
        args = inspect.cleandoc(kind.__doc__).partition("Args:\n")[2].partition("\n\n")[0]
        texts = dict(re.findall(r"^  (\w+): (.*)$", args, re.M))
        parameters = inspect.signature(kind).parameters
        assert list(texts) == list(parameters), name
        for argument, text in texts.items():
            family = "" if argument != "optimizer" else name.removesuffix("Classifier").removesuffix("Regressor")
            family = family.removesuffix("Estimator")
            described.setdefault((argument, family), set()).add((text, parameters[argument].default))
    assert len(described) > 20
    assert {key: texts for key, texts in described.items() if len(texts) > 1} == {}
