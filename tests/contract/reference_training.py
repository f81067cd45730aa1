"""Workloads, and how they train on one device in plain Keras and JAX: the reference of law 1, without Phalanx."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import keras
import numpy as np
from keras import layers

STEPS = 12
CLASSES = 3
L2 = 0.01

per_example = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")


@dataclass
class Trajectory:
    """What a training left behind, step by step."""

    start: list[np.ndarray]
    losses: list[np.ndarray] = field(default_factory=list)
    gradients: list[list[np.ndarray]] = field(default_factory=list)
    weights: list[np.ndarray] = field(default_factory=list)


def mlp() -> keras.Model:
    """Two dense layers."""
    return keras.Sequential([layers.Input((6,)), layers.Dense(8, activation="tanh"), layers.Dense(CLASSES)])


def mlp_l2() -> keras.Model:
    """Two dense layers with a penalty on the kernels."""
    dense = functools.partial(layers.Dense, kernel_regularizer=keras.regularizers.L2(L2))
    return keras.Sequential([layers.Input((6,)), dense(8, activation="tanh"), dense(CLASSES)])


def cnn() -> keras.Model:
    """One convolution."""
    parts = [layers.Conv2D(4, 3, activation="relu"), layers.MaxPooling2D(), layers.Flatten(), layers.Dense(CLASSES)]
    return keras.Sequential([layers.Input((8, 8, 1)), *parts])


def lstm() -> keras.Model:
    """One recurrent layer."""
    return keras.Sequential([layers.Input((5, 4)), layers.LSTM(6), layers.Dense(CLASSES)])


def transformer() -> keras.Model:
    """One encoder block without dropout."""
    tokens = keras.Input((6,), dtype="int32")
    h = layers.Embedding(10, 8)(tokens)
    h = layers.LayerNormalization()(h + layers.MultiHeadAttention(2, 4, dropout=0.0)(h, h))
    h = layers.LayerNormalization()(h + layers.Dense(8)(layers.Dense(16, activation="gelu")(h)))
    return keras.Model(tokens, layers.Dense(CLASSES)(layers.GlobalAveragePooling1D()(h)))


MODELS: dict[str, Callable[[], keras.Model]] = {f.__name__: f for f in (mlp, mlp_l2, cnn, lstm, transformer)}
OPTIMIZERS: dict[str, Callable[[], keras.optimizers.Optimizer]] = {
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.005),
}


def batches(model: keras.Model, sizes: tuple[int, ...]) -> list[tuple[np.ndarray, np.ndarray]]:
    """One batch of each size, cycled over the steps of a training."""
    rng = np.random.default_rng(7)
    shape = model.input_shape[1:]
    whole = "int" in model.inputs[0].dtype
    draw = lambda n: rng.integers(0, 10, (n, *shape), "int32") if whole else rng.normal(size=(n, *shape))  # noqa: E731
    made = [(draw(n), rng.integers(0, CLASSES, n, "int32")) for n in sizes]
    cycle = [(x.astype("int32" if whole else "float32"), y) for x, y in made]
    return [cycle[i % len(sizes)] for i in range(STEPS)]


def penalty(model: keras.Model, values: list[Any]) -> Any:
    """The L2 penalty on the kernels, written out."""
    kernels = [x for v, x in zip(model.trainable_variables, values, strict=True) if "kernel" in v.path]
    return L2 * sum((k**2).sum() for k in kernels)


@functools.cache
def train_on_one_device(model_name: str, optimizer_name: str, sizes: tuple[int, ...]) -> Trajectory:
    """Trains with `stateless_call`, `jax.value_and_grad` and `stateless_apply`, under one `jax.jit`."""
    keras.utils.set_random_seed(1)
    model, optimizer = MODELS[model_name](), OPTIMIZERS[optimizer_name]()
    optimizer.build(model.trainable_variables)

    def loss_of(trained, others, x, y):
        logits, _ = model.stateless_call(trained, others, x, training=True)
        loss = per_example(y, logits).mean()
        return loss + penalty(model, trained) if model_name == "mlp_l2" else loss

    @jax.jit
    def step(trained, others, state, x, y):
        loss, gradients = jax.value_and_grad(loss_of)(trained, others, x, y)
        trained, state = optimizer.stateless_apply(state, gradients, trained)
        return trained, state, loss, gradients

    trained, others, state = (
        [v.value for v in part]
        for part in (model.trainable_variables, model.non_trainable_variables, optimizer.variables)
    )
    run = Trajectory(model.get_weights())
    for x, y in batches(model, sizes):
        trained, state, loss, gradients = step(trained, others, state, x, y)
        run.losses.append(np.asarray(loss))
        run.gradients.append([np.asarray(g) for g in gradients])
    run.weights = [np.asarray(w) for w in trained]
    return run
