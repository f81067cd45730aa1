"""A dataset per input pipeline, a loop over it in Python, and metrics for training and test, as the quickstart has them."""

import numpy as np
import tensorflow as tf
from tensorflow.keras import Model
from tensorflow.keras.layers import Conv2D, Dense, Flatten

strategy = tf.distribute.get_strategy()
rng = np.random.default_rng(0)
x_train = rng.random((40, 6, 6)).astype("float64")
y_train = rng.integers(0, 3, 40)
x_train = x_train[..., tf.newaxis].astype("float32")


def dataset_fn(input_context):
    batch_size = input_context.get_per_replica_batch_size(10)
    d = tf.data.Dataset.from_tensor_slices((x_train, y_train))
    d = d.shard(input_context.num_input_pipelines, input_context.input_pipeline_id)
    return d.batch(batch_size, drop_remainder=True).prefetch(2)


class MyModel(Model):
    def __init__(self):
        super().__init__()
        self.conv1 = Conv2D(4, 3, activation="relu")
        self.flatten = Flatten()
        self.d1 = Dense(3)

    def call(self, x):
        return self.d1(self.flatten(self.conv1(x)))


model = MyModel()
model(x_train[:1])
model.set_weights([rng.normal(0, 0.3, w.shape) for w in model.get_weights()])
loss_object = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
optimizer = tf.keras.optimizers.Adam()
train_loss = tf.keras.metrics.Mean(name="train_loss")
train_accuracy = tf.keras.metrics.SparseCategoricalAccuracy(name="train_accuracy")


@tf.function
def train_step(images, labels):
    with tf.GradientTape() as tape:
        # training=True is only needed if there are layers with different behavior.
        predictions = model(images, training=True)
        loss = loss_object(labels, predictions)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    train_loss(loss)
    train_accuracy(labels, predictions)
    return loss


losses = []
dist_dataset = strategy.distribute_datasets_from_function(dataset_fn)
for epoch in range(5):
    train_loss.reset_state()
    train_accuracy.reset_state()
    for images, labels in dist_dataset:
        losses.append(float(train_step(images, labels)))
    print(f"Epoch {epoch + 1}, Loss: {train_loss.result():0.2f}, Accuracy: {train_accuracy.result() * 100:0.2f}")
