"""Metrics of one's own, stateful and plain, in `fit` and in a loop."""

import numpy as np
import tensorflow as tf

NUM_CLASSES = 3
rng = np.random.default_rng(0)
x = rng.normal(size=(60, 5)).astype("float32")
y = np.argmax(x[:, :NUM_CLASSES], axis=1).astype("int32")


class MacroRecall(tf.keras.metrics.Metric):
    """The mean over classes of the fraction of rows that were found."""

    def __init__(self, num_classes, name="macro_recall", **kwargs):
        super().__init__(name=name, **kwargs)
        self.num_classes = num_classes
        self.hits = self.add_weight(name="hits", shape=(num_classes,), initializer="zeros")
        self.rows = self.add_weight(name="rows", shape=(num_classes,), initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        labels = tf.one_hot(tf.cast(tf.reshape(y_true, [-1]), tf.int32), self.num_classes)
        found = tf.one_hot(tf.argmax(y_pred, axis=-1), self.num_classes)
        self.hits.assign_add(tf.reduce_sum(labels * found, axis=0))
        self.rows.assign_add(tf.reduce_sum(labels, axis=0))

    def result(self):
        return tf.reduce_mean(tf.math.divide_no_nan(self.hits, self.rows))

    def reset_state(self):
        for variable in self.variables:
            variable.assign(tf.zeros_like(variable))


def mean_margin(y_true, y_pred):
    best = tf.math.top_k(y_pred, k=2)[0]
    return tf.reduce_mean(best[:, 0] - best[:, 1], axis=-1)


model = tf.keras.Sequential([tf.keras.layers.Input((5,)), tf.keras.layers.Dense(NUM_CLASSES)])
model.set_weights([rng.normal(0, 0.5, w.shape) for w in model.get_weights()])
model.compile(
    optimizer=tf.keras.optimizers.Adagrad(0.3),
    loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=[MacroRecall(NUM_CLASSES), mean_margin, tf.keras.metrics.SparseTopKCategoricalAccuracy(k=2)],
)
history = model.fit(x, y, batch_size=60, epochs=10, shuffle=False, verbose=0).history
losses = history["loss"] + [a + b for a, b in zip(history["macro_recall"], history["mean_margin"])]

recall = MacroRecall(NUM_CLASSES)
recall.update_state(y, model.predict(x, verbose=0))
assert 0.0 <= float(recall.result()) <= 1.0
recall.reset_state()
assert recall.result().numpy() == 0.0
