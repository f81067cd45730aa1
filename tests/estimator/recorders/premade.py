"""Items 1, 2, 3 and 7: what the premade estimators do."""

import tempfile

import tensorflow as tf
from tensorflow_estimator.python.estimator.canned import linear, optimizers

from recorders.column_cases import bucketized, crossed, hashed, indicator, numeric, vocabulary
from recorders.columns import build
from recorders.plain import plain
from recorders.training import attempt, configuration, record_estimator

ABOUT = [
    "Each case: estimator is its class, arguments its constructor's arguments, columns as in recorded_columns.json.",
    "features and labels name entries of 'data', whose 'about' says how the rows are read.",
    "losses: the loss of each of 20 steps. initial and final: all variables before the first and after the last step,"
    " in float32, and global_step in int64.",
    "evaluate: what evaluate() returns. predict: the predictions of the first 4 rows, stacked by key.",
    "The seed of the random numbers is fixed, but initial is what a comparison must start from.",
]
DNN = {"feature_columns": [numeric("x"), numeric("z", shape=[3])], "hidden_units": [5, 3]}
LINEAR = {
    "feature_columns": [
        numeric("x"),
        bucketized("y", [-1.0, 0.0, 1.5]),
        vocabulary("s"),
        hashed("t", 4),
        crossed(["s", bucketized("y", [-1.0, 0.0, 1.5])], 5),
    ]
}
BOTH = {
    "linear_feature_columns": [vocabulary("s"), bucketized("y", [-1.0, 0.0, 1.5])],
    "dnn_feature_columns": [numeric("x"), indicator(vocabulary("s"))],
    "dnn_hidden_units": [3],
}
SIZES = ["small", "medium", "large"]


def case(kind, features, labels, arguments, about=None):
    """Returns the description of a case."""
    extras = {"about": about} if about else {}
    return {"estimator": kind, "features": features.split(), "labels": labels, "arguments": arguments} | extras


def dnn_cases():
    """Returns the cases of DNNClassifier."""
    return {
        "two classes": case("DNNClassifier", "x z", "binary", DNN),
        "three classes": case("DNNClassifier", "x z", "three", DNN | {"n_classes": 3}),
        "two classes with Adam": case("DNNClassifier", "x z", "binary", DNN | {"optimizer": "Adam"}),
        "three classes with Adam": case("DNNClassifier", "x z", "three", DNN | {"n_classes": 3, "optimizer": "Adam"}),
        "two classes with SGD": case("DNNClassifier", "x z", "binary", DNN | {"optimizer": "SGD"}),
        "two classes with RMSProp": case("DNNClassifier", "x z", "binary", DNN | {"optimizer": "RMSProp"}),
        "two words": case("DNNClassifier", "x z", "yes or no", DNN | {"label_vocabulary": ["no", "yes"]}),
        "three words": case("DNNClassifier", "x z", "sizes", DNN | {"n_classes": 3, "label_vocabulary": SIZES}),
        "two classes with weights": case("DNNClassifier", "x z w", "binary", DNN | {"weight_column": "w"}),
        "three classes with weights": case(
            "DNNClassifier", "x z w", "three", DNN | {"n_classes": 3, "weight_column": "w"}
        ),
        "two classes by sum": case("DNNClassifier", "x z", "binary", DNN | {"loss_reduction": "sum"}),
        "two classes with indicators": case(
            "DNNClassifier",
            "x s",
            "binary",
            {"feature_columns": [numeric("x"), indicator(vocabulary("s"))], "hidden_units": [3]},
        ),
    }


def linear_cases():
    """Returns the cases of LinearClassifier."""
    return {
        "two classes": case("LinearClassifier", "x y s t", "binary", LINEAR),
        "three classes": case("LinearClassifier", "x y s t", "three", LINEAR | {"n_classes": 3}),
        "two classes with weights": case("LinearClassifier", "x y s t w", "binary", LINEAR | {"weight_column": "w"}),
        "two classes of numbers": case(
            "LinearClassifier", "x z", "binary", {"feature_columns": DNN["feature_columns"]}
        ),
        "two classes with Adam": case("LinearClassifier", "x y s t", "binary", LINEAR | {"optimizer": "Adam"}),
        "two words": case("LinearClassifier", "x y s t", "yes or no", LINEAR | {"label_vocabulary": ["no", "yes"]}),
    }


def other_cases():
    """Returns the cases of the other premade estimators."""
    two = {"label_dimension": 2}
    return {
        "DNNRegressor": case("DNNRegressor", "x z", "number", DNN),
        "DNNRegressor with Adam": case("DNNRegressor", "x z", "number", DNN | {"optimizer": "Adam"}),
        "DNNRegressor of two numbers": case("DNNRegressor", "x z", "two numbers", DNN | two),
        "DNNRegressor with weights": case("DNNRegressor", "x z w", "number", DNN | {"weight_column": "w"}),
        "LinearRegressor": case("LinearRegressor", "x y s t", "number", LINEAR),
        "LinearRegressor of two numbers": case("LinearRegressor", "x y s t", "two numbers", LINEAR | two),
        "BaselineClassifier of two classes": case("BaselineClassifier", "x", "binary", {}),
        "BaselineClassifier of three classes": case("BaselineClassifier", "x", "three", {"n_classes": 3}),
        "BaselineRegressor": case("BaselineRegressor", "x", "number", {}),
        "BaselineRegressor of two numbers": case("BaselineRegressor", "x", "two numbers", two),
        "BaselineRegressor with weights": case("BaselineRegressor", "x w", "number", {"weight_column": "w"}),
        "DNNLinearCombinedClassifier of two classes": case("DNNLinearCombinedClassifier", "x y s", "binary", BOTH),
        "DNNLinearCombinedClassifier of three classes": case(
            "DNNLinearCombinedClassifier", "x y s", "three", BOTH | {"n_classes": 3}
        ),
        "DNNLinearCombinedRegressor": case("DNNLinearCombinedRegressor", "x y s", "number", BOTH),
        "DNNLinearCombinedRegressor, linear alone": case(
            "DNNLinearCombinedRegressor",
            "y s",
            "number",
            {"linear_feature_columns": BOTH["linear_feature_columns"]},
        ),
    }


def arguments_of(description, folder):
    """Returns the constructor's arguments with columns in place of their descriptions."""
    return {
        name: build(value, folder) if name.endswith("feature_columns") else value
        for name, value in description["arguments"].items()
    }


def construct(description, folder, **arguments):
    """Returns the estimator of a case."""
    settings = {"config": configuration(f"{folder}/model")} | arguments
    return getattr(tf.estimator, description["estimator"])(**arguments_of(description, folder), **settings)


def record_case(description):
    """Returns a case with what its estimator does."""
    with tempfile.TemporaryDirectory() as folder:
        estimator = construct(description, folder)
        return description | attempt(
            lambda: record_estimator(estimator, description["features"], description["labels"])
        )


def record_cases(cases):
    """Returns cases with what their estimators do."""
    return {"about": ABOUT, **{name: record_case(description) for name, description in cases.items()}}


def dnn():
    """Returns item 1."""
    return record_cases(dnn_cases())


def linear_classifier():
    """Returns item 2."""
    return record_cases(linear_cases())


def others():
    """Returns item 3."""
    return record_cases(other_cases())


def defaults():
    """Returns the optimizers that names and None stand for, and the default learning rate of linear estimators."""
    names = ["Adagrad", "Adam", "Ftrl", "RMSProp", "SGD", "adam", "Nadam"]
    return {
        "about": "optimizer_of_name: class and get_config of what an optimizer's name becomes, or the exception."
        " linear_learning_rate: Ftrl's default learning rate by the number of feature columns."
        " optimizer_of_object: what other objects become.",
        "optimizer_of_name": {
            name: attempt(lambda: described(optimizers.get_optimizer_instance_v2(name))) for name in names
        },
        "optimizer_of_object": {
            text: attempt(lambda: described(optimizers.get_optimizer_instance_v2(eval(text)))) for text in OBJECTS
        },
        "linear_learning_rate": {
            count: float(linear._get_default_optimizer_v2([None] * count).get_config()["learning_rate"])
            for count in (1, 4, 9, 25, 26, 36, 100)
        },
        "linear_optimizer": described(linear._get_default_optimizer_v2([None])),
    }


OBJECTS = [
    "None",
    "tf.keras.optimizers.Adam(0.01)",
    "tf.keras.optimizers.legacy.Adam(0.01)",
    "tf.compat.v1.train.AdamOptimizer(0.01)",
    "lambda: tf.keras.optimizers.legacy.SGD(0.5)",
    "3",
]


def described(optimizer):
    """Returns the class of an optimizer and its settings."""
    settings = optimizer.get_config() if hasattr(optimizer, "get_config") else {}
    return {"class": type(optimizer).__name__, "module": type(optimizer).__module__, "config": plain(settings)}
