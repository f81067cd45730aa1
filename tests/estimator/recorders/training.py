"""Trains, evaluates and predicts with an estimator, and records all that can be seen of it."""

import itertools

import numpy as np
import tensorflow as tf

from recorders import data
from recorders.plain import array, arrays, plain

STEPS = 20
tf1 = tf.compat.v1


class Watch(tf.estimator.SessionRunHook):
    """Records every variable before the first and after the last step, and the loss of each step."""

    def begin(self):
        self.variables = {variable.name: variable for variable in tf1.global_variables()}
        self.fetched = {"loss": tf1.get_collection(tf1.GraphKeys.LOSSES)[-1], "step": tf1.train.get_global_step()}
        self.losses = []

    def after_create_session(self, session, coord):
        self.initial = session.run(self.variables)

    def before_run(self, context):
        return tf.estimator.SessionRunArgs(self.fetched)

    def after_run(self, context, values):
        self.losses.append(values.results["loss"])

    def end(self, session):
        self.final = session.run(self.variables)

    def record(self):
        return {"losses": plain(self.losses), "initial": plain(self.initial), "final": plain(self.final)}


def configuration(folder, **arguments):
    return tf.estimator.RunConfig(folder, tf_random_seed=3, **arguments)


def record_estimator(estimator, names, label, batch=data.BATCH):
    """Returns what an estimator does in 20 steps, in one evaluation and in one prediction."""
    watch = Watch()
    estimator.train(data.input_fn(names, label, batch, repeat=True), hooks=[watch], steps=STEPS)
    metrics = estimator.evaluate(data.input_fn(names, label, batch))
    return watch.record() | {
        "evaluate": arrays(metrics),
        "predict": predictions(estimator, data.first_rows(names)),
        "variable_names": estimator.get_variable_names(),
    }


def predictions(estimator, input_fn):
    """Returns the predictions of four rows, stacked by key."""
    rows = list(itertools.islice(estimator.predict(input_fn), 4))
    return {key: array(np.stack([row[key] for row in rows])) for key in rows[0]}
