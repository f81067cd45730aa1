"""A small network learns from a large one: frozen layers, temperatures and Kullback-Leibler divergence."""

import numpy as np
import tensorflow as tf

TEMPERATURE, ALPHA = 3.0, 0.4
rng = np.random.default_rng(0)
x = rng.normal(size=(20, 16, 6)).astype("float32")
y = rng.integers(0, 3, (20, 16))


def network(width, name):
    inputs = tf.keras.Input(shape=(6,))
    h = tf.keras.layers.Dense(width, activation=tf.keras.activations.swish, name=f"{name}_hidden")(inputs)
    h = tf.keras.layers.Concatenate()([h, inputs])
    outputs = tf.keras.layers.Dense(3, kernel_regularizer=tf.keras.regularizers.L2(0.01), name=f"{name}_logits")(h)
    model = tf.keras.Model(inputs=inputs, outputs=outputs, name=name)
    model.set_weights([rng.normal(0, 0.5, w.shape) for w in model.get_weights()])
    return model


teacher, student = network(24, "teacher"), network(4, "student")
teacher.trainable = False
student_loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
distillation_loss = tf.keras.losses.KLDivergence()
optimizer = tf.keras.optimizers.SGD(learning_rate=0.2, momentum=0.9)
accuracy = tf.keras.metrics.SparseCategoricalAccuracy()


@tf.function
def train_step(x, y):
    teacher_predictions = teacher(x, training=False)
    with tf.GradientTape() as tape:
        student_predictions = student(x, training=True)
        soft = distillation_loss(
            tf.nn.softmax(teacher_predictions / TEMPERATURE, axis=1),
            tf.nn.softmax(student_predictions / TEMPERATURE, axis=1),
        )
        loss = ALPHA * student_loss(y, student_predictions) + (1 - ALPHA) * soft * TEMPERATURE**2
        loss += tf.add_n(student.losses)
    trainable_vars = student.trainable_variables
    optimizer.apply_gradients(zip(tape.gradient(loss, trainable_vars), trainable_vars))
    accuracy.update_state(y, student_predictions)
    return loss


assert len(teacher.trainable_variables) == 0
losses = []
for step in range(20):
    loss = train_step(tf.constant(x[step]), tf.constant(y[step]))
    losses.append(loss.numpy().item())
print(f"accuracy {accuracy.result().numpy():.2f}")
