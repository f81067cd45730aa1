"""The law of `fit` for its options: two replicas train like plain Keras on one device with each of them."""

import functools

import keras
import numpy as np
import pytest
from keras import layers, ops
from keras_twins import (
    EVALUATE,
    EVEN,
    FIT,
    KIND,
    X,
    agree,
    agreeing,
    compiled,
    crossentropy,
    history,
    made,
    same,
    state_of,
)
from strategy_table import on

import phalanx

pytestmark = on("mirrored_x2")

HALF = {"rtol": 2**-10, "atol": 2**-10}
"""The precision of float16."""


def mlp(**kwargs):
    """A small model; the arguments are those of its hidden layer."""
    hidden = layers.Dense(6, **{"activation": "tanh"} | kwargs)
    return keras.Sequential([layers.Input((3,)), hidden, layers.Dense(3, dtype="float32")])


def momentum(learning_rate=0.1, **kwargs):
    return keras.optimizers.SGD(learning_rate, momentum=0.9, **kwargs)


def of_kinds(model=mlp, optimizer=momentum, **kwargs):
    return compiled(model, optimizer, **{"loss": crossentropy(), "metrics": ["accuracy"]} | kwargs)


def fit(*args, **kwargs):
    """Returns an act: three epochs of three batches, which the replicas share unevenly."""
    return history(*(args or (X, KIND)), **{"epochs": 3} | kwargs)


@pytest.mark.exhaustive("test_mixed_float16_grows_scale_as_keras")
def test_mixed_bfloat16_equals_keras(strategy):
    """Equal up to the precision of bfloat16, 2**-8."""
    make = of_kinds(functools.partial(mlp, dtype="mixed_bfloat16"))
    models = agree(strategy, make, fit(), state=False, compiles=True, rtol=2**-8)
    same(*map(state_of, models), atol=2**-8)


def scaled(**kwargs):
    """Scales losses so that gradients do not vanish in float16."""
    return lambda: keras.optimizers.LossScaleOptimizer(momentum(), initial_scale=1024.0, **kwargs)


def test_mixed_float16_grows_scale_as_keras(strategy):
    """Equal up to the precision of float16; the scale grows at the same steps."""
    make = of_kinds(functools.partial(mlp, dtype="mixed_float16"), scaled(dynamic_growth_steps=5))
    ours, theirs = agree(strategy, make, fit(), k=2, compiles=True, **HALF)
    assert float(ours.optimizer.dynamic_scale) == float(theirs.optimizer.dynamic_scale) > 1024


@pytest.mark.cover(["k"], {2})
@pytest.mark.parametrize("k", [1, 2])
def test_overflow_skips_the_step_on_all_replicas(strategy, k):
    """Rows of one replica overflow: no replica steps, and the scale is halved."""
    rows = X[:16].copy()
    rows[8:12] *= 3e4
    make = of_kinds(functools.partial(mlp, dtype="mixed_float16", activation=None), scaled())
    models = agree(strategy, make, fit(rows, KIND[:16], epochs=2, batch_size=8), k=k, compiles=True, **HALF)
    for model in models:
        assert float(model.optimizer.dynamic_scale) == 256
        assert int(model.optimizer.inner_optimizer.iterations) == 2
    for variable in models[0].variables:
        first, second = strategy.experimental_local_results(variable)
        np.testing.assert_array_equal(first, second)


@functools.cache
def not_clipped():
    """Returns the last loss of plain Keras without clipping."""
    model = made(of_kinds())
    model.jit_compile = True
    return fit()(model)["loss"][-1]


@pytest.mark.cover(["how"], [{"global_clipnorm": 0.05}])
@pytest.mark.parametrize("how", [{"clipnorm": 0.02}, {"clipvalue": 0.01}, {"global_clipnorm": 0.05}])
def test_clipping_applies_to_global_gradients(strategy, how):
    """The gradients of the global batch are clipped, not those of a replica."""
    ours, _ = agree(strategy, of_kinds(optimizer=functools.partial(momentum, **how)), fit(), compiles=True)
    assert ours.history.history["loss"][-1] > not_clipped() + 0.05


EXPONENTIAL = keras.optimizers.schedules.ExponentialDecay(0.2, 4, 0.7)
WARM_COSINE = keras.optimizers.schedules.CosineDecay(0.0, 15, warmup_target=0.2, warmup_steps=5)
EMA = {"use_ema": True, "ema_momentum": 0.8, "ema_overwrite_frequency": 5}
OPTIONS = {
    "averages": (EMA, 1),
    "averages_in_groups": (EMA, 2),
    "averages_at_the_end": (EMA | {"ema_overwrite_frequency": None}, 2),
    "accumulation": ({"gradient_accumulation_steps": 2}, 2),
    "accumulation_clipped": ({"gradient_accumulation_steps": 2, "clipnorm": 0.05}, 1),
    "decay": ({"weight_decay": 0.1}, 1),
    "exponential": ({"learning_rate": EXPONENTIAL}, 1),
    "warm_cosine": ({"learning_rate": WARM_COSINE}, 2),
}


# A test of learning rates has schedules.
@pytest.mark.cover(["how", "k"], [(EMA, 2)])
@pytest.mark.parametrize(("how", "k"), OPTIONS.values(), ids=OPTIONS)
def test_options_of_optimizers(strategy, how, k):
    agree(strategy, of_kinds(optimizer=functools.partial(momentum, **how)), fit(), k=k, compiles=True)


@agreeing(of_kinds())
def test_learning_rate_replaced(model):
    """Between calls of `fit`, by a number, by a schedule, and a schedule by another."""
    losses = []
    for rate in (0.01, EXPONENTIAL, WARM_COSINE):
        losses += fit(epochs=1)(model)["loss"]
        model.optimizer.learning_rate = rate
    return losses + fit(epochs=1)(model)["loss"]


@agreeing(of_kinds())
def test_frozen_layer_stays_until_thawed(model):
    """Frozen and compiled again, a layer stays as it is; thawed, it trains."""
    fitted = [fit(epochs=1)(model)]
    for trainable in (False, True):
        before = model.layers[0].get_weights()[0]
        model.layers[0].trainable = trainable
        model.compile(momentum(), crossentropy())
        fitted.append(fit(epochs=1)(model))
        assert np.array_equal(model.layers[0].get_weights()[0], before) is not trainable
    return fitted


@pytest.mark.exhaustive("test_keras_trainer.py: test_loops_equal_those_of_keras")
@pytest.mark.filterwarnings("ignore:the operations of a step that is executed eagerly")
@pytest.mark.parametrize("how", [{"jit_compile": False}, {"run_eagerly": True}], ids=["not_compiled", "eager"])
def test_training_without_compilation(strategy, how):
    """For debugging, the same numbers. One short batch, for it is slow."""

    def act(model):
        return fit(X[:5], KIND[:5], epochs=1)(model), model.predict(X[:5], **EVALUATE)

    agree(strategy, of_kinds(**how), act)


REGULARIZERS = {
    "l1_and_l2": lambda: {"kernel_regularizer": keras.regularizers.L1(0.01), "bias_regularizer": "l2"},
    "orthogonal": lambda: {"kernel_regularizer": keras.regularizers.OrthogonalRegularizer(0.05)},
}


@pytest.mark.cover(["name"], {"l1_and_l2"})
@pytest.mark.parametrize("name", REGULARIZERS)
def test_regularizers_of_weights(strategy, name):
    """Counted once, not once for each replica."""
    agree(strategy, of_kinds(lambda: mlp(**REGULARIZERS[name]())), fit(), compiles=True)


class Small(layers.Layer):
    """Wants small inputs, and has a penalty on a weight of its own."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones", name="scale")

    def call(self, x):
        self.add_loss(0.1 * ops.mean(ops.square(x * self.scale)))
        self.add_loss(0.01 * ops.sum(ops.square(self.scale)))
        return x * self.scale


def with_losses():
    """A model with losses of its own and one of its activities."""
    dense = layers.Dense(6, activity_regularizer=keras.regularizers.L1L2(0.02, 0.05))
    return keras.Sequential([layers.Input((3,)), dense, Small(), layers.Dense(3)])


@pytest.mark.parametrize("alone", [False, True])
def test_losses_of_layers(strategy, alone):
    """Means over rows of batches that divide and penalties on weights, with targets or without."""
    how = {"loss": None, "metrics": None} if alone else {}
    agree(
        strategy,
        of_kinds(with_losses, **how),
        fit(EVEN[0], *() if alone else (KIND[:16],), batch_size=8),
        compiles=True,
    )


def test_custom_loop_between_two_fits(strategy):
    """A loop with a tape over the same rows is one epoch of `fit`."""
    model, theirs = made(of_kinds(), strategy), made(of_kinds())
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

    def step(batch):
        x, y = batch
        with phalanx.GradientTape() as tape:
            loss = phalanx.nn.compute_average_loss(loss_of(y, model(x, training=True)))
        variables = model.trainable_variables
        model.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    first = fit(epochs=1)(model)["loss"]
    for batch in strategy.experimental_distribute_dataset((X, KIND), batch_size=7):
        strategy.run(step, args=(batch,))
    last = fit(epochs=1)(model)["loss"]
    expected = fit()(theirs)["loss"]
    same(first + last, [expected[0], expected[2]])
    same(*map(state_of, (model, theirs)))


def rows_dropped(strategy, seed):
    """Returns the weights after one step whose gradient is the mean of what Dropout leaves of one row per replica."""
    keras.utils.set_random_seed(seed)
    with strategy.scope():
        kernel = layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        model = keras.Sequential([layers.Input((64,)), layers.Dropout(0.5), kernel])
        model.compile(keras.optimizers.SGD(1.0), lambda y_true, y_pred: -y_pred)
    model.fit(np.ones((2, 64)), np.ones((2, 1)), batch_size=2, verbose=0)
    return model.get_weights()[0][:, 0]


def test_dropout_differs_per_replica_and_repeats(strategy):
    """Replicas drop different units, the same ones again from the same seed."""
    weights = rows_dropped(strategy, 1)
    # 0 or 2 where both replicas drop or keep a unit, 1 where one of them does.
    assert set(weights) == {0, 1, 2}
    np.testing.assert_array_equal(rows_dropped(strategy, 1), weights)
    assert (rows_dropped(strategy, 2) != weights).any()


def flipped(strategy, seed):
    """Returns which of 64 images are flipped, the first 32 of them by the first replica."""

    class AlwaysFlips(layers.Layer):
        def __init__(self):
            super().__init__()
            self.flip = layers.RandomFlip("horizontal")

        def call(self, images):
            return self.flip(images, training=True)

    keras.utils.set_random_seed(seed)
    with strategy.scope():
        model = keras.Sequential([layers.Input((1, 2, 1)), AlwaysFlips()])
    images = np.tile(np.array([0.0, 1.0], "float32").reshape(1, 1, 2, 1), (64, 1, 1, 1))
    return model.predict(images, batch_size=64, verbose=0)[:, 0, 0, 0] == 1


def test_augmentation_differs_per_replica_and_repeats(strategy):
    """Replicas flip different images, the same ones again from the same seed."""
    flips = flipped(strategy, 1)
    assert (flips[:32] != flips[32:]).any()
    np.testing.assert_array_equal(flipped(strategy, 1), flips)
    assert (flipped(strategy, 2) != flips).any()


@pytest.mark.exhaustive("test_dropout_differs_per_replica_and_repeats")
def test_random_layers_in_fit(strategy):
    """A training with random layers repeats to the bit."""

    def weights(seed):
        keras.utils.set_random_seed(seed)
        inner = [layers.GaussianNoise(0.1), layers.Dense(6, activation="tanh"), layers.Dropout(0.3)]
        with strategy.scope():
            model = of_kinds(lambda: keras.Sequential([layers.Input((3,)), *inner, layers.Dense(3)]))()
        model.fit(X, KIND, **FIT, epochs=2)
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


@pytest.mark.cover(["name"], {"ScheduleFreeAdamW", "Muon"})
@pytest.mark.parametrize("name", NAMES)
def test_optimizers_equal_keras_with_their_state(strategy, name):
    """Every optimizer of Keras, with its state."""
    make = of_kinds(optimizer=lambda: getattr(keras.optimizers, name)(**OPTIMIZERS.get(name, {})))
    agree(strategy, make, fit(epochs=2), compiles=True)


def test_several_optimizers_train_one_model(strategy):
    """One for kernels and one for biases."""

    def several():
        chosen = {"kernel": keras.optimizers.Adam(0.01), "bias": momentum()}
        return keras.optimizers.MultiOptimizer(lambda variable: chosen[variable.name])

    agree(strategy, of_kinds(optimizer=several), fit(epochs=2), compiles=True)
