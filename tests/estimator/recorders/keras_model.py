"""Item 10: model_to_estimator of a small Keras model."""

import tempfile

import tensorflow as tf

from recorders.plain import attempt, described, plain
from recorders.training import configuration, record_estimator


def model_of(case):
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
    with tempfile.TemporaryDirectory() as folder:
        model = model_of(case)
        weights = [plain(weight) for weight in model.get_weights()]
        estimator = tf.keras.estimator.model_to_estimator(model, config=configuration(f"{folder}/model"))
        return case | {"weights": weights} | record_estimator(estimator, ["z"], case["labels"])


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


def record(records):
    names = ("labels", "activation", "units", "compile")
    cases = {name: described(case, *names) for name, case in records.items() if "labels" in case}
    answers = {name: case | attempt(lambda: record_case(case)) for name, case in cases.items()}
    return {**answers, "rejected": rejected()}
