"""Items 1, 2, 3 and 7: what the premade estimators do."""

import tempfile

import tensorflow as tf
from tensorflow_estimator.python.estimator.canned import linear, optimizers

from recorders.columns import build
from recorders.plain import attempt, described, plain
from recorders.training import configuration, record_estimator

DESCRIPTION = ("estimator", "features", "labels", "arguments")


def construct(description, folder, **options):
    arguments = {
        name: build(value, folder) if name.endswith("feature_columns") else value
        for name, value in description["arguments"].items()
    }
    return getattr(tf.estimator, description["estimator"])(
        **arguments, **{"config": configuration(f"{folder}/model"), **options}
    )


def record_case(description):
    with tempfile.TemporaryDirectory() as folder:
        read = description["features"], description["labels"]
        estimator = construct(description, folder)
        return description | attempt(lambda: record_estimator(estimator, *read))


def record(cases):
    return {name: record_case(described(case, *DESCRIPTION)) for name, case in cases.items() if name != "about"}


def defaults(record):
    """Returns the optimizers that names and None stand for, and the default learning rate of linear estimators."""
    return {
        "optimizer_of_name": {
            name: attempt(lambda: settings_of(optimizers.get_optimizer_instance_v2(name)))
            for name in record["optimizer_of_name"]
        },
        "optimizer_of_object": {
            text: attempt(lambda: settings_of(optimizers.get_optimizer_instance_v2(eval(text))))
            for text in record["optimizer_of_object"]
        },
        "linear_learning_rate": {
            count: float(linear._get_default_optimizer_v2([None] * count).get_config()["learning_rate"])
            for count in map(int, record["linear_learning_rate"])
        },
        "linear_optimizer": settings_of(linear._get_default_optimizer_v2([None])),
    }


def settings_of(optimizer):
    settings = optimizer.get_config() if hasattr(optimizer, "get_config") else {}
    return {"class": type(optimizer).__name__, "module": type(optimizer).__module__, "config": plain(settings)}
