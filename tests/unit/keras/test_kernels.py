"""Poolings, convolutions, GELU and normalizations of Keras in steps for CPUs: the numbers of plain Keras, by other operations."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import phalanx
from phalanx._src.kernels.platforms import compiled_for
from phalanx.errors import InvalidArgumentError

L = keras.layers
X2 = np.random.default_rng(0).normal(size=(4, 9, 8, 4)).astype("float32")
X1, X3 = X2[:, :, 0], X2[:, :6, :, None, :].repeat(3, 3)

WINDOW, CONVOLUTION = "stablehlo.reduce_window", "stablehlo.convolution"
REPLACED = {
    "max": (lambda: L.MaxPooling2D(), X2, WINDOW),
    "max_overlapping": (lambda: L.MaxPooling2D(3, 2, "same"), X2, WINDOW),
    "max_1d": (lambda: L.MaxPooling1D(2), X1, WINDOW),
    "max_3d": (lambda: L.MaxPooling3D(2), X3, WINDOW),
    "max_channels_first": (lambda: L.MaxPooling2D(2, data_format="channels_first"), X2, WINDOW),
    "average": (lambda: L.AveragePooling2D(3, 2, "same"), X2, WINDOW),
    "depthwise": (lambda: L.DepthwiseConv2D(3, padding="same", depth_multiplier=2), X2, CONVOLUTION),
    "depthwise_1d": (lambda: L.DepthwiseConv1D(3, strides=2), X1, CONVOLUTION),
    "separable": (lambda: L.SeparableConv2D(5, 3, padding="same"), X2, CONVOLUTION),
    "pointwise": (lambda: L.Conv2D(5, 1, strides=2), X2, CONVOLUTION),
    "gelu": (lambda: L.Dense(5, activation="gelu"), X2, "chlo.erfc"),
}
"""Layers, their inputs, and an operation of XLA that their steps do not contain."""

OTHERS = {
    "convolution": (lambda: L.Conv2D(5, 3), X2),
    "convolution_with_strides": (lambda: L.Conv2D(5, 3, strides=2, padding="same"), X2),
    "convolution_1d_causal": (lambda: L.Conv1D(5, 3, padding="causal"), X1),
    "convolution_3d": (lambda: L.Conv3D(2, 2), X3),
    "transposed": (lambda: L.Conv2DTranspose(5, 3, strides=2, padding="same"), X2),
    "transposed_with_output_padding": (lambda: L.Conv2DTranspose(5, 3, strides=2, output_padding=1), X2),
    "transposed_1d": (lambda: L.Conv1DTranspose(3, 4, strides=3), X1),
    "groups": (lambda: L.Conv2D(6, 3, groups=2), X2),
    "dilated": (lambda: L.Conv2D(5, 3, dilation_rate=2), X2),
    "dilated_depthwise": (lambda: L.DepthwiseConv2D(2, dilation_rate=2), X2),
    "gelu_by_tanh": (lambda: L.Activation(lambda x: keras.activations.gelu(x, approximate=True)), X2),
    "large_window": (lambda: L.MaxPooling1D(300, 1, "same"), X1),
}
NORMALIZATIONS = {
    "layer_normalization": (lambda: L.LayerNormalization(), X2),
    "root_mean_square": (lambda: L.RMSNormalization(), X2),
}


def made(make, x):
    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.Input(x.shape[1:]), make()])


def of_plain_keras(make, x):
    """Result and gradients by the input and all weights, of Keras and JAX alone."""
    model = made(make, x)

    def loss(x, weights):
        y, _ = model.stateless_call(weights, [], x)
        return (y**3).sum(), y

    weights = [v.value for v in model.trainable_variables]
    (_, y), (of_input, of_weights) = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(jnp.asarray(x), weights)
    return y, of_input, of_weights


def step_of(strategy, make, x):
    """A step that returns the same, and does not add over replicas."""
    with strategy.scope():
        model = made(make, x)

    def step(x):
        with phalanx.GradientTape() as tape:
            tape.watch(x)
            y = model(x, training=True)
            loss = (y**3).sum()
        gradients = tape.gradient(loss, [x, *model.trainable_variables])
        return y, gradients[0], gradients[1:]

    return step


def text_of(strategy, step, x):
    return phalanx.function(lambda x: strategy.run(step, args=(x,))).lower(x).as_text()


@pytest.fixture
def strategy():
    return phalanx.OneDeviceStrategy("cpu:0")


# Each operation, and what could be taken for one that can be replaced.
COVER = {
    "max_overlapping",
    "average",
    "separable",
    "pointwise",
    "gelu",
    "transposed",
}


@pytest.mark.cover(["name"], COVER | NORMALIZATIONS.keys())
@pytest.mark.parametrize("name", [*REPLACED, *OTHERS, *NORMALIZATIONS])
def test_numbers_are_those_of_keras(strategy, name):
    """Results and gradients by inputs and weights.

    Programs for CPUs do without the slow operation. The option, and another platform, bring it back, and both give one program.
    The input of a normalization is stored once, and once for its gradient, so that no operation computes it again.
    """
    make, x, *operations = (REPLACED | OTHERS | NORMALIZATIONS)[name]
    step = step_of(strategy, make, x)
    found = strategy.run(step, args=(jnp.asarray(x),))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), found, of_plain_keras(make, x))
    if name in NORMALIZATIONS:
        assert text_of(strategy, step, x).count("stablehlo.optimization_barrier") == 2
        with compiled_for(("cuda",)):
            assert "stablehlo.optimization_barrier" not in text_of(strategy, step, x)
    for operation in operations:
        assert operation not in text_of(strategy, step, x)
        with compiled_for(("cpu", "cuda")):
            other = text_of(strategy, step, x)
        phalanx.keras.set_cpu_kernels(False)
        try:
            off = text_of(strategy, step, x)
        finally:
            phalanx.keras.set_cpu_kernels(True)
        assert operation in off
        assert off == other


def test_keras_outside_of_scopes():
    model = made(lambda: L.MaxPooling2D(), X2)
    assert "stablehlo.reduce_window" in jax.jit(lambda x: model(x)).lower(X2).as_text()


def test_sizes_of_zero_are_those_of_keras(strategy):
    """Strides of 0 are refused, and a convolution without outputs is empty."""
    x = jnp.ones((1, 4, 4, 1))
    with pytest.raises(TypeError, match="strides"):
        strategy.run(lambda: keras.ops.max_pool(x, 2, 0))
    empty = strategy.run(lambda: keras.ops.depthwise_conv(x, jnp.ones((2, 2, 1, 0))))
    assert strategy.experimental_local_results(empty)[0].shape == (1, 3, 3, 0)


def test_option_of_another_type():
    with pytest.raises(InvalidArgumentError, match="enabled='no'.*True or False"):
        phalanx.keras.set_cpu_kernels("no")
