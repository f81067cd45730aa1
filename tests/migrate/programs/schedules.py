"""Learning rates that change: built-in schedules, one of one's own with a warmup, and weight decay."""

import numpy as np
import tensorflow as tf

rng = np.random.default_rng(0)
x = rng.normal(size=(40, 6)).astype("float32")
y = np.tanh(x @ rng.normal(size=(6, 1))).astype("float32")


class Warmup(tf.keras.optimizers.schedules.LearningRateSchedule):
    """Grows linearly, then falls with the square root of the step."""

    def __init__(self, peak, warmup_steps=4):
        super().__init__()
        self.peak = tf.cast(peak, tf.float32)
        self.warmup_steps = warmup_steps

    def __call__(self, step):
        step = tf.cast(step, tf.float32) + 1.0
        falling = tf.math.rsqrt(step)
        rising = step * (self.warmup_steps**-1.5)
        return self.peak * tf.math.minimum(falling, rising)


def make_model():
    model = tf.keras.Sequential([tf.keras.Input((6,)), tf.keras.layers.Dense(5, "tanh"), tf.keras.layers.Dense(1)])
    weights = np.random.default_rng(1)
    model.set_weights([weights.normal(0, 0.5, w.shape) for w in model.get_weights()])
    return model


schedules = tf.keras.optimizers.schedules
optimizers = [
    tf.keras.optimizers.Adam(Warmup(0.2), beta_1=0.9, beta_2=0.98, epsilon=1e-9),
    tf.keras.optimizers.SGD(schedules.PiecewiseConstantDecay([2, 4], [0.2, 0.1, 0.05]), momentum=0.5, nesterov=True),
    tf.keras.optimizers.RMSprop(schedules.CosineDecay(0.05, decay_steps=8, alpha=0.1)),
    tf.keras.optimizers.AdamW(schedules.PolynomialDecay(0.1, 5, end_learning_rate=0.01, power=2.0), weight_decay=0.01),
]
losses = []
for optimizer in optimizers:
    model = make_model()
    model.compile(optimizer=optimizer, loss="mse")
    history = model.fit(x, y, batch_size=40, epochs=5, shuffle=False, verbose=0)
    losses += history.history["loss"]
