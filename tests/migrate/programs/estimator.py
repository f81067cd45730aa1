"""A model function in an Estimator, with numbers and categories as feature columns, as TensorFlow 2.15 still had it."""

import tempfile

import numpy as np
import tensorflow as tf

rng = np.random.default_rng(0)
age = rng.uniform(0, 1, 64).astype("float32")
sex = rng.choice(["female", "male"], 64)
labels = ((age > 0.5) ^ (sex == "male")).astype("int32")

feature_columns = [
    tf.feature_column.numeric_column("age", dtype=tf.float32),
    tf.feature_column.indicator_column(
        tf.feature_column.categorical_column_with_vocabulary_list("sex", ["female", "male"])
    ),
]


def make_input_fn(num_epochs):
    return tf.compat.v1.estimator.inputs.numpy_input_fn(
        {"age": age, "sex": sex}, labels, batch_size=64, num_epochs=num_epochs, shuffle=False
    )


class History(tf.estimator.SessionRunHook):
    """Keeps the losses of the steps."""

    def __init__(self):
        self.losses = []

    def after_run(self, run_context, run_values):
        self.losses.append(run_values.results)


estimator = tf.estimator.DNNClassifier(
    hidden_units=[8],
    feature_columns=feature_columns,
    n_classes=2,
    optimizer=lambda: tf.keras.optimizers.Adam(0.1),
    model_dir=tempfile.mkdtemp(),
    config=tf.estimator.RunConfig(tf_random_seed=1, save_summary_steps=5),
)
losses = []
for _ in range(20):
    estimator.train(make_input_fn(1), steps=1)
    losses.append(estimator.evaluate(make_input_fn(1))["average_loss"])
