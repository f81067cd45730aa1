"""The law of `fit` for its options: two replicas train like plain Keras on one device with each of them."""

import functools

import keras
import numpy as np
import pytest
from keras import layers, ops
from strategy_table import mirrored

import phalanx

CLASSES, EPOCHS = 3, 3
RANDOM = np.random.RandomState(3)
# Seven batches of 16, the last one of seven rows; the first 96 rows divide.
X = RANDOM.normal(size=(103, 5)).astype("float32")
Y = X[:, :CLASSES].argmax(1).astype("int32")
SIZES = X.sum(1, keepdims=True)
DIVIDES = 96
FIT = {"batch_size": 16, "shuffle": False, "verbose": 0}


class Twins:
    """The same model under two replicas and in the hands of plain Keras."""

    def __init__(self, make):
        keras.utils.set_random_seed(1)
        self.theirs = make()
        keras.utils.set_random_seed(1)
        self.strategy = mirrored(2)()
        with self.strategy.scope():
            self.ours = make()

    def each(self, do):
        """Does the same to both."""
        return do(self.ours), do(self.theirs)

    def fit(self, *args, callbacks=list, tolerance=None, **kwargs):
        """Fits both, compares the histories, and returns that of ours; `callbacks` makes new ones."""

        def fit(model):
            keras.utils.set_random_seed(2)
            return model.fit(*(args or (X, Y)), callbacks=callbacks(), **FIT | {"epochs": EPOCHS} | kwargs).history

        ours, theirs = self.each(fit)
        assert list(ours) == list(theirs)
        for name, values in theirs.items():
            close(ours[name], values, name, **tolerance or {})
        return ours

    def compare(self, **tolerance):
        """Compares weights and the state of the optimizers."""
        ours, theirs = self.each(lambda m: [*m.variables, *m.optimizer.variables])
        for a, b in zip(ours, theirs, strict=True):
            close(a.numpy(), b.numpy(), b.path, **tolerance)


def close(ours, theirs, what, rtol=1e-4, atol=1e-6):
    """Equal but for the order of float32 sums; atol is for weights that are almost zero."""
    np.testing.assert_allclose(ours, theirs, rtol=rtol, atol=atol, err_msg=what)


def crossentropy():
    """The loss of `mlp`."""
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def mlp(**kwargs):
    """A small model; the arguments are those of its hidden layer."""
    hidden = layers.Dense(6, **{"activation": "tanh"} | kwargs)
    return keras.Sequential([layers.Input((5,)), hidden, layers.Dense(CLASSES, dtype="float32")])


def momentum(rate=0.1, **kwargs):
    """The usual optimizer of these tests."""
    return keras.optimizers.SGD(rate, momentum=0.9, **kwargs)


def compiled(model=mlp, optimizer=momentum, **kwargs):
    """Returns what makes a model and compiles it."""

    def make():
        made = model()
        made.compile(optimizer(), **{"loss": crossentropy(), "metrics": ["accuracy"]} | kwargs)
        return made

    return make


def test_mixed_bfloat16_equals_keras():
    """Equal up to the precision of bfloat16, 2**-8."""
    twins = Twins(compiled(functools.partial(mlp, dtype="mixed_bfloat16")))
    twins.fit(tolerance={"rtol": 2**-8})
    twins.compare(atol=2**-8)


HALF = {"rtol": 2**-10, "atol": 2**-10}
"""The precision of float16."""


def scaled(scale, **kwargs):
    """Scales losses so that gradients do not vanish in float16."""
    return lambda: keras.optimizers.LossScaleOptimizer(momentum(), initial_scale=scale, **kwargs)


def test_mixed_float16_grows_scale_as_keras():
    """Equal up to the precision of float16; the scale grows at the same steps."""
    half = functools.partial(mlp, dtype="mixed_float16")
    twins = Twins(compiled(half, scaled(1024.0, dynamic_growth_steps=5), steps_per_execution=4))
    twins.fit(tolerance=HALF)
    twins.compare(**HALF)
    ours, theirs = twins.each(lambda m: float(m.optimizer.dynamic_scale))
    assert ours == theirs > 1024


@pytest.mark.parametrize("k", [1, 4])
def test_overflow_skips_the_step_on_all_replicas(k):
    """Rows of one replica overflow: no replica steps, and the scale is halved."""
    rows = X[:64].copy()
    rows[16:24] *= 3e3
    half = functools.partial(mlp, dtype="mixed_float16", activation=None)
    twins = Twins(compiled(half, scaled(1024.0), steps_per_execution=k))
    twins.fit(rows, Y[:64], epochs=2, tolerance=HALF)
    twins.compare(**HALF)
    assert twins.each(lambda m: float(m.optimizer.dynamic_scale)) == (256, 256)
    assert twins.each(lambda m: int(m.optimizer.inner_optimizer.iterations)) == (6, 6)
    for variable in twins.ours.variables:
        first, second = twins.strategy.experimental_local_results(variable)
        np.testing.assert_array_equal(first, second)


@functools.cache
def not_clipped():
    """Returns the first loss of plain Keras without clipping."""
    keras.utils.set_random_seed(1)
    return compiled()().fit(X, Y, **FIT).history["loss"][0]


@pytest.mark.parametrize("how", [{"clipnorm": 0.02}, {"clipvalue": 0.01}, {"global_clipnorm": 0.05}])
def test_clipping_applies_to_global_gradients(how):
    """The gradients of the global batch are clipped, not those of a replica."""
    twins = Twins(compiled(optimizer=functools.partial(momentum, **how)))
    history = twins.fit()
    twins.compare()
    assert history["loss"][0] > not_clipped() + 0.05


@pytest.mark.parametrize(("frequency", "k"), [(5, 1), (5, 4), (None, 4)])
def test_ema_of_weights_equals_keras(frequency, k):
    """Averages of weights, which overwrite them every few steps or at the end."""
    optimizer = functools.partial(momentum, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=frequency)
    twins = Twins(compiled(optimizer=optimizer, steps_per_execution=k))
    twins.fit()
    twins.compare()


SCHEDULES = {
    "exponential": lambda: keras.optimizers.schedules.ExponentialDecay(0.2, 4, 0.7),
    "warm_cosine": lambda: keras.optimizers.schedules.CosineDecay(0.0, 15, warmup_target=0.2, warmup_steps=5),
}


@pytest.mark.parametrize(("name", "k"), [("exponential", 1), ("warm_cosine", 4)])
def test_schedules_set_rate_of_each_step(name, k):
    """The learning rate of each step."""
    twins = Twins(compiled(optimizer=lambda: momentum(SCHEDULES[name]()), steps_per_execution=k))
    twins.fit()
    twins.compare()


def test_reduce_lr_on_plateau():
    """A callback that sees a plateau lowers the learning rate."""
    plateau = lambda: [keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=10.0)]  # noqa: E731
    twins = Twins(compiled(steps_per_execution=4))
    history = twins.fit(callbacks=plateau)
    twins.compare()
    np.testing.assert_allclose(history["learning_rate"], [0.1, 0.1, 0.05])


def test_learning_rate_scheduler():
    """A callback sets the learning rate of each epoch."""
    twins = Twins(compiled())
    history = twins.fit(callbacks=lambda: [keras.callbacks.LearningRateScheduler(lambda epoch: 0.2 / (epoch + 1))])
    twins.compare()
    np.testing.assert_allclose(history["learning_rate"], [0.2, 0.1, 0.2 / 3], rtol=1e-6)


def test_learning_rate_replaced():
    """Between two calls of `fit`."""
    twins = Twins(compiled())
    for rate in (0.3, 0.01):
        twins.fit(epochs=1)
        twins.each(lambda m, rate=rate: setattr(m.optimizer, "learning_rate", rate))
    twins.fit(epochs=1)
    twins.compare()


def test_replaced_schedule_takes_effect():
    """By another schedule; plain Keras has to be told to compile again."""
    twins = Twins(compiled(optimizer=lambda: momentum(SCHEDULES["exponential"]())))
    twins.fit(epochs=1)
    twins.each(lambda m: setattr(m.optimizer, "learning_rate", SCHEDULES["warm_cosine"]()))
    twins.theirs.train_function = None
    twins.fit(epochs=2)
    twins.compare()


def test_frozen_layer_stays_until_thawed():
    """Frozen and compiled again, a layer stays as it is; thawed, it trains."""
    twins = Twins(compiled())
    twins.fit(epochs=1)
    for trainable in (False, True):
        before = twins.ours.layers[0].get_weights()[0]

        def change(model, trainable=trainable):
            model.layers[0].trainable = trainable
            model.compile(momentum(), crossentropy())

        twins.each(change)
        twins.fit(epochs=1)
        twins.compare()
        assert np.array_equal(twins.ours.layers[0].get_weights()[0], before) is not trainable


def test_jit_compile_false():
    """The replicas are compiled all the same."""
    twins = Twins(compiled(jit_compile=False))
    twins.fit(X[:13], Y[:13], batch_size=8, epochs=1)
    twins.compare()


def test_run_eagerly_equals_keras():
    """One short batch, for it is slow."""
    twins = Twins(compiled(run_eagerly=True))
    twins.fit(X[:5], Y[:5], batch_size=8, epochs=1)
    twins.compare()


REGULARIZERS = {
    "l1_and_l2": lambda: {"kernel_regularizer": keras.regularizers.L1(0.01), "bias_regularizer": "l2"},
    "orthogonal": lambda: {"kernel_regularizer": keras.regularizers.OrthogonalRegularizer(0.05)},
}


@pytest.mark.parametrize("name", REGULARIZERS)
def test_regularizers_of_weights(name):
    """Counted once, not once for each replica."""
    twins = Twins(compiled(lambda: mlp(**REGULARIZERS[name]())))
    twins.fit()
    twins.compare()


def test_activity_regularizer_means_over_global_batch():
    """A mean over the global batch, where batches divide."""
    twins = Twins(compiled(lambda: mlp(activity_regularizer=keras.regularizers.L1L2(0.02, 0.05))))
    twins.fit(X[:DIVIDES], Y[:DIVIDES])
    twins.compare()


class Small(layers.Layer):
    """Wants small inputs, and has a penalty on a weight of its own."""

    def build(self, shape):
        """Makes the weight."""
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones", name="scale")

    def call(self, x):
        """Scales its inputs."""
        self.add_loss(0.1 * ops.mean(ops.square(x * self.scale)))
        self.add_loss(0.01 * ops.sum(ops.square(self.scale)))
        return x * self.scale


def with_losses():
    """A model with losses of its own."""
    return keras.Sequential([layers.Input((5,)), layers.Dense(6), Small(), layers.Dense(CLASSES)])


def test_add_loss_equals_keras():
    """Means over rows and penalties on weights, where batches divide."""
    twins = Twins(compiled(with_losses))
    twins.fit(X[:DIVIDES], Y[:DIVIDES])
    twins.compare()


def test_add_loss_alone():
    """Without targets."""
    twins = Twins(compiled(with_losses, loss=None, metrics=None))
    twins.fit(X[:DIVIDES])
    twins.compare()


def two_outputs(names):
    """Two outputs, by name or in order."""
    x = layers.Input((5,), name="rows")
    h = layers.Dense(6, activation="tanh")(x)
    outputs = {"kind": layers.Dense(CLASSES, name="kind")(h), "size": layers.Dense(1, name="size")(h)}
    return keras.Model({"rows": x}, outputs if names else list(outputs.values()))


def test_outputs_by_name():
    """Inputs and outputs in dicts, with weights of losses."""
    how = {"loss": {"kind": crossentropy(), "size": "mse"}, "loss_weights": {"kind": 0.7, "size": 0.2}}
    metrics = {"kind": ["accuracy"], "size": ["mae"]}
    twins = Twins(compiled(lambda: two_outputs(True), metrics=metrics, **how))
    twins.fit({"rows": X}, {"kind": Y, "size": SIZES})
    twins.compare()


@pytest.mark.parametrize(("loss", "sizes"), [("mse", SIZES), (None, SIZES), (None, None)])
def test_outputs_in_order(loss, sizes):
    """Losses in a list, one of which may be None, and so may its targets."""
    made = [crossentropy(), loss]
    twins = Twins(compiled(lambda: two_outputs(False), loss=made, loss_weights=[0.7, 0.2], metrics=None))
    twins.fit({"rows": X}, [Y, sizes])
    twins.compare()


def test_custom_loop_between_two_fits():
    """A loop with a tape over the same rows is one epoch of `fit`."""
    twins = Twins(compiled())
    model, optimizer = twins.ours, twins.ours.optimizer
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

    def step(batch):
        x, y = batch
        with phalanx.GradientTape() as tape:
            loss = phalanx.nn.compute_average_loss(loss_of(y, model(x, training=True)))
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    twins.fit(epochs=1)
    for batch in twins.strategy.experimental_distribute_dataset((X, Y), batch_size=16):
        twins.strategy.run(step, args=(batch,))
    twins.theirs.fit(X, Y, **FIT)
    twins.fit(epochs=1)
    twins.compare()


def rows_dropped(seed):
    """Returns the weights after one step whose gradient is the mean of what Dropout leaves of one row a replica."""
    keras.utils.set_random_seed(seed)
    with mirrored(2)().scope():
        kernel = layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        model = keras.Sequential([layers.Input((64,)), layers.Dropout(0.5), kernel])
        model.compile(keras.optimizers.SGD(1.0), lambda y_true, y_pred: -y_pred)
    model.fit(np.ones((2, 64)), np.ones((2, 1)), batch_size=2, verbose=0)
    return model.get_weights()[0][:, 0]


def test_dropout_differs_per_replica_and_repeats():
    """Replicas drop different units, the same ones again from the same seed."""
    weights = rows_dropped(1)
    # 0 or 2 where both replicas drop or keep a unit, 1 where one of them does.
    assert set(weights) == {0, 1, 2}
    np.testing.assert_array_equal(rows_dropped(1), weights)
    assert (rows_dropped(2) != weights).any()


class AlwaysFlips(layers.Layer):
    """Flips images at random in prediction too."""

    def __init__(self):
        super().__init__()
        self.flip = layers.RandomFlip("horizontal")

    def call(self, images):
        """Flips half of the images."""
        return self.flip(images, training=True)


def flipped(seed):
    """Returns which of 64 images are flipped, the first 32 of them by the first replica."""
    keras.utils.set_random_seed(seed)
    with mirrored(2)().scope():
        model = keras.Sequential([layers.Input((1, 2, 1)), AlwaysFlips()])
    images = np.tile(np.array([0.0, 1.0], "float32").reshape(1, 1, 2, 1), (64, 1, 1, 1))
    return model.predict(images, batch_size=64, verbose=0)[:, 0, 0, 0] == 1


def test_augmentation_differs_per_replica_and_repeats():
    """Replicas flip different images, the same ones again from the same seed."""
    flips = flipped(1)
    assert (flips[:32] != flips[32:]).any()
    np.testing.assert_array_equal(flipped(1), flips)
    assert (flipped(2) != flips).any()


def test_random_layers_in_fit():
    """A training with random layers repeats to the bit."""

    def weights(seed):
        keras.utils.set_random_seed(seed)
        with mirrored(2)().scope():
            inner = [layers.GaussianNoise(0.1), layers.Dense(6, activation="tanh"), layers.Dropout(0.3)]
            model = compiled(lambda: keras.Sequential([layers.Input((5,)), *inner, layers.Dense(CLASSES)]))()
        model.fit(X, Y, **FIT, epochs=2)
        return model.get_weights()[0]

    first = weights(1)
    np.testing.assert_array_equal(weights(1), first)
    assert (weights(2) != first).any()


OPTIMIZERS = {
    "SGD": {"learning_rate": 0.1, "momentum": 0.9, "nesterov": True},
    "RMSprop": {"learning_rate": 0.01, "momentum": 0.5, "centered": True},
    "Adam": {"learning_rate": 0.01, "amsgrad": True},
    "AdamW": {"learning_rate": 0.01, "weight_decay": 0.1},
    "Adadelta": {"learning_rate": 1.0},
    "Adagrad": {"learning_rate": 0.1},
    "Adamax": {"learning_rate": 0.01},
    "Adafactor": {"learning_rate": 0.05},
    "Nadam": {"learning_rate": 0.01},
    "Ftrl": {"learning_rate": 0.1},
    "ScheduleFreeAdamW": {"learning_rate": 0.01, "warmup_steps": 3},
    "Lion": {"learning_rate": 0.005},
    "Lamb": {"learning_rate": 0.02},
    "Muon": {"learning_rate": 0.01},
}


# Those that a newer Keras adds are tested too.
NAMES = [
    name
    for name, kind in vars(keras.optimizers).items()
    if isinstance(kind, type)
    and issubclass(kind, keras.optimizers.Optimizer)
    and name not in ("Optimizer", "LossScaleOptimizer", "MultiOptimizer")
]


@pytest.mark.cover(["name"], {"SGD", "Adam", "Adafactor", "ScheduleFreeAdamW", "Lion", "Muon"})
@pytest.mark.parametrize("name", NAMES)
def test_optimizers_equal_keras_with_their_state(name):
    """Every optimizer of Keras, with its state."""
    twins = Twins(compiled(optimizer=lambda: getattr(keras.optimizers, name)(**OPTIMIZERS.get(name, {}))))
    twins.fit(epochs=1)
    twins.compare()


def test_several_optimizers_train_one_model():
    """One for kernels and one for biases."""

    def several():
        chosen = {"kernel": keras.optimizers.Adam(0.01), "bias": momentum()}
        return keras.optimizers.MultiOptimizer(lambda variable: chosen[variable.name])

    twins = Twins(compiled(optimizer=several))
    twins.fit(epochs=1)
    twins.compare()
