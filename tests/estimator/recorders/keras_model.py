"""Item 10: model_to_estimator of a small Keras model."""

import tempfile

import tensorflow as tf

from recorders import data
from recorders.plain import arrays, plain
from recorders.training import STEPS, Watch, attempt, configuration, predictions

ABOUT = [
    "model: Input(3, name='z'), Dense(4, relu, name='hidden'), Dense(units, name='output'), compiled with Adam(0.01).",
    "features 'z' of 'data', read as in the other cases; labels as named. weights: initial weights, by get_weights().",
]
CASES = {
    "classification": {
        "labels": "binary",
        "activation": "sigmoid",
        "compile": {"loss": "binary_crossentropy", "metrics": ["accuracy"]},
    },
    "regression": {"labels": "number", "activation": None, "compile": {"loss": "mse", "metrics": ["mae"]}},
    "three classes": {
        "labels": "three",
        "units": 3,
        "activation": "softmax",
        "compile": {"loss": "sparse_categorical_crossentropy", "metrics": ["accuracy"]},
    },
}


def model_of(case):
    """Returns the compiled model of a case."""
    tf.keras.utils.set_random_seed(5)
    model = tf.keras.Sequential(
        [
            tf.keras.layers.InputLayer(3, name="z"),
            tf.keras.layers.Dense(4, "relu", name="hidden"),
            tf.keras.layers.Dense(case.get("units", 1), case["activation"], name="output"),
        ]
    )
    model.compile(optimizer=tf.keras.optimizers.legacy.Adam(0.01), **case["compile"])
    return model


def record_case(case):
    """Returns a case with what the Estimator of its model does."""
    with tempfile.TemporaryDirectory() as folder:
        model = model_of(case)
        weights = [plain(weight) for weight in model.get_weights()]
        estimator = tf.keras.estimator.model_to_estimator(model, config=configuration(f"{folder}/model"))
        watch = Watch()
        estimator.train(data.input_fn(["z"], case["labels"], repeat=True), hooks=[watch], steps=STEPS)
        metrics = estimator.evaluate(data.input_fn(["z"], case["labels"]))
        return (
            case
            | {"weights": weights}
            | watch.record()
            | {
                "evaluate": arrays(metrics),
                "predict": predictions(estimator, data.first_rows(["z"])),
                "variable_names": estimator.get_variable_names(),
            }
        )


def rejected():
    """Returns what other models raise."""
    uncompiled = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(3,))])
    new_optimizer = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(3,))])
    new_optimizer.compile("adam", "mse")
    convert = tf.keras.estimator.model_to_estimator
    return {
        "a model that is not compiled": attempt(lambda: convert(uncompiled) and {}),
        "neither a model nor a path": attempt(lambda: convert() and {}),
        "a model and a path": attempt(lambda: convert(new_optimizer, "path") and {}),
        "a model compiled with 'adam'": attempt(lambda: convert(new_optimizer) and {}),
        "something that is not a model": attempt(lambda: convert(3) and {}),
    }


def record():
    """Returns item 10."""
    cases = {name: case | attempt(lambda: record_case(case)) for name, case in CASES.items()}
    return {"about": ABOUT, **cases, "rejected": rejected()}
