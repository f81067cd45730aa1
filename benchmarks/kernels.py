# SPDX-License-Identifier: Apache-2.0
"""Poolings, convolutions and GELU of Keras with their gradients, by the kernels of Phalanx for CPUs and by XLA, on one device."""

from collections.abc import Callable
from typing import Any

from benchmarks import timing
from benchmarks.parent import call_in_child
from benchmarks.report import Report, all_rounds, verdict

_ROWS = 32
_CASES: dict[str, tuple[tuple[int, ...], Callable[[Any], Any]]] = {
    "max-pooling 2x2": ((26, 26, 32), lambda layers: layers.MaxPooling2D()),
    "max-pooling 3x3, stride 2": ((32, 32, 64), lambda layers: layers.MaxPooling2D(3, 2, "same")),
    "average-pooling 3x3, stride 2": ((32, 32, 64), lambda layers: layers.AveragePooling2D(3, 2, "same")),
    "depthwise convolution 3x3": ((32, 32, 16), lambda layers: layers.DepthwiseConv2D(3, padding="same")),
    "depthwise convolution 3x3, 2 outputs a channel": (
        (16, 16, 64),
        lambda layers: layers.DepthwiseConv2D(3, padding="same", depth_multiplier=2),
    ),
    "1x1 convolution to 32 channels": ((32, 32, 16), lambda layers: layers.Conv2D(32, 1)),
    "transposed convolution 3x3, stride 2, to 32 channels": (
        (8, 8, 64),
        lambda layers: layers.Conv2DTranspose(32, 3, strides=2, padding="same"),
    ),
    "convolution 3x3, stride 2, to 32 channels": (
        (32, 32, 16),
        lambda layers: layers.Conv2D(32, 3, strides=2, padding="same"),
    ),
    "GELU": ((32, 32, 64), lambda layers: layers.Activation("gelu")),
    "convolution 3x3 to 64 channels": ((13, 13, 32), lambda layers: layers.Conv2D(64, 3)),
}

_LOOP = "convolution 3x3 to 32 channels, in a loop of 4 steps"


def run(*, quick: bool) -> Report:
    """Measures each operation in a process of its own."""
    report = Report(
        "kernels",
        f"Keras layers with their gradients, {_ROWS} images, one CPU device (time by XLA / time by Phalanx)",
        ("layer", "image", "ms by XLA", "ms by Phalanx", "ratio", "target", "middle half", "all rounds"),
    )
    cells = [(name, shape, "measure") for name, (shape, _) in _CASES.items()]
    for name, shape, function in [*cells, (_LOOP, (28, 28, 16), "measure_loop")]:
        options = {"name": name} if function == "measure" else {"shape": shape}
        rounds = call_in_child(f"benchmarks.kernels:{function}", 300, devices=1, rounds=3 if quick else 11, **options)
        xla_s, ours_s = timing.medians(rounds)
        ratio = timing.median_ratio(rounds)
        row = [name, "x".join(map(str, shape)), f"{xla_s * 1e3:.2f}", f"{ours_s * 1e3:.2f}", ratio]
        row += [verdict(ratio, at_least=1.0), timing.middle_half(rounds), all_rounds(rounds)]
        report.add(row, name=name, ratio=ratio, rounds=rounds)
    return report


def measure(name: str, rounds: int) -> list[timing.Pair]:
    """In a child: pairs of seconds a step, by XLA and by Phalanx."""
    import jax
    import keras
    import numpy as np

    import phalanx

    shape, make = _CASES[name]
    strategy = phalanx.OneDeviceStrategy("cpu:0")
    rng = np.random.default_rng(0)
    with strategy.scope():
        layer = make(keras.layers)
        layer.build((_ROWS, *shape))
    x = jax.numpy.asarray(rng.normal(size=(_ROWS, *shape)).astype("float32"))
    weights = jax.numpy.asarray(rng.normal(size=layer.compute_output_shape(x.shape)).astype("float32"))

    def step_by(is_ours: bool) -> Callable[[], Any]:
        def step(x: Any, weights: Any) -> Any:
            with phalanx.GradientTape() as tape:
                tape.watch(x)
                y = layer(x)
                loss = (y * weights).sum()
            # A network reads the result in its next layer, so that it is in memory.
            return y, *tape.gradient(loss, [x, *layer.trainable_variables])

        phalanx.keras.set_cpu_kernels(is_ours)
        strategy.run(step, args=(x, weights))
        return lambda: strategy.run(step, args=(x, weights))

    steps = step_by(False), step_by(True)
    for theirs, ours in zip(*(step() for step in steps), strict=True):
        np.testing.assert_allclose(theirs, ours, rtol=1e-3, atol=1e-3)
    counts = [timing.steps_for(step, jax.block_until_ready, 0.1) for step in steps]
    timers = [
        lambda step=step, count=count: timing.seconds_a_step(step, jax.block_until_ready, count)
        for step, count in zip(steps, counts, strict=True)
    ]
    return timing.interleaved(*timers, rounds)


def measure_loop(shape: tuple[int, ...], rounds: int) -> list[timing.Pair]:
    """In a child: the same for a convolution in a loop, whose kernel follows its gradient. A step is one turn."""
    import jax
    import numpy as np

    import phalanx

    strategy = phalanx.OneDeviceStrategy("cpu:0")
    rng = np.random.default_rng(0)
    x, kernel = (
        jax.numpy.asarray(rng.normal(size=size), "float32") for size in ((_ROWS, *shape), (3, 3, shape[-1], 32))
    )

    def loss(kernel: Any) -> Any:
        y = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return (y * y).mean()

    def turns(kernel: Any, number: Any) -> Any:
        return jax.lax.fori_loop(0, number, lambda _, k: k - 0.1 * jax.grad(loss)(k), kernel)

    number = jax.numpy.int32(4)
    by_xla, by_phalanx = jax.jit(turns), phalanx.function(lambda *args: strategy.run(turns, args=args))
    np.testing.assert_allclose(by_xla(kernel, number), by_phalanx(kernel, number), rtol=1e-4, atol=1e-6)
    timers = [
        lambda fn=fn: timing.seconds_a_step(lambda: fn(kernel, number), jax.block_until_ready, 3) / 4
        for fn in (by_xla, by_phalanx)
    ]
    return timing.interleaved(*timers, rounds)
