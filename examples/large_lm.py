# SPDX-License-Identifier: Apache-2.0
"""Trains a transformer in bfloat16, which may be larger than this machine. Predict first what it needs:

phalanx estimate --topology v5e:16,256 --topology v5p:256 examples/large_lm.py --width 2048 --blocks 24 --remat
phalanx estimate --topology v5p:16 examples/large_lm.py --preset 13b --blocks 4 --sharded --remat --rows 1 --length 2048
"""

import argparse

import phalanx

import keras  # isort: skip  (after phalanx, which chooses its backend)
import numpy as np

WORDS = 32_768
PRESETS = {
    "13b": {"width": 5120, "blocks": 40, "hidden": 13_824, "kv_heads": 40},
    "70b": {"width": 8192, "blocks": 80, "hidden": 28_672, "kv_heads": 8},
}
"""The shapes of Llama 2."""


class Places(keras.layers.Layer):
    """Adds a vector to each place of a row."""

    def build(self, shape: tuple[int | None, ...]) -> None:
        self.vectors = self.add_weight(shape=shape[1:], initializer="uniform")

    def call(self, x: keras.KerasTensor) -> keras.KerasTensor:
        return x + self.vectors


class Block(keras.layers.Layer):
    """Attention and dense layers, each added to its input. With `hidden`, a gate multiplies the outputs of the wide dense layer."""

    def __init__(self, width: int, hidden: int | None, kv_heads: int | None, *, remat: bool) -> None:
        super().__init__()
        heads = max(1, width // 128)
        self.remat = remat
        self.norms = [keras.layers.LayerNormalization() for _ in range(2)]
        self.attention = keras.layers.MultiHeadAttention(heads, width // heads)
        if kv_heads is not None:
            self.attention = keras.layers.GroupQueryAttention(width // heads, heads, kv_heads)
        self.hidden = hidden or 4 * width
        self.gate = keras.layers.Dense(self.hidden, activation="silu") if hidden else None
        self.expand = keras.layers.Dense(self.hidden, activation=None if hidden else "gelu")
        self.contract = keras.layers.Dense(width)

    def build(self, shape: tuple[int | None, ...]) -> None:
        for norm in self.norms:
            norm.build(shape)
        self.attention.build(shape, shape)
        for layer in filter(None, (self.gate, self.expand)):
            layer.build(shape)
        self.contract.build((*shape[:-1], self.hidden))

    def call(self, x: keras.KerasTensor) -> keras.KerasTensor:
        return (keras.remat(self.compute) if self.remat else self.compute)(x)

    def compute(self, x: keras.KerasTensor) -> keras.KerasTensor:
        h = self.norms[0](x)
        x = x + self.attention(h, h, use_causal_mask=True)
        h = self.norms[1](x)
        return x + self.contract(self.expand(h) * self.gate(h) if self.gate else self.expand(h))


def build(given: argparse.Namespace) -> keras.Model:
    words = keras.Input((given.length,), dtype="int32")
    x = Places()(keras.layers.Embedding(WORDS, given.width)(words))
    for _ in range(given.blocks):
        x = Block(given.width, given.hidden, given.kv_heads, remat=given.remat)(x)
    return keras.Model(words, keras.layers.Dense(WORDS, use_bias=False)(keras.layers.LayerNormalization()(x)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, help="shapes of a large model; --width and --blocks override it")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--length", type=int, default=512, help="number of words per row")
    parser.add_argument("--rows", type=int, default=8, help="number of rows of a batch on one replica")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--sharded", action="store_true", help="divide the variables over the replicas")
    parser.add_argument(
        "--remat",
        action="store_true",
        help="compute what a block computes again in the backward pass, instead of keeping it",
    )
    parser.set_defaults(**PRESETS.get(parser.parse_args().preset, {"hidden": None, "kv_heads": None}))
    given = parser.parse_args()

    keras.mixed_precision.set_dtype_policy("mixed_bfloat16")
    strategy = phalanx.MirroredStrategy(layout=phalanx.fully_sharded() if given.sharded else None)
    rows = given.rows * strategy.num_replicas_in_sync
    words = np.random.default_rng(0).integers(0, WORDS, (given.steps * rows, given.length + 1), "int32")
    with strategy.scope():
        model = build(given)
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    print(f"{model.count_params():,} parameters")
    model.fit(words[:, :-1], words[:, 1:], batch_size=rows)


if __name__ == "__main__":
    main()
