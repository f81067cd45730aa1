# SPDX-License-Identifier: Apache-2.0
"""Classifies handwritten digits with the custom training loop of the tf.distribute guide, in seconds.

  python examples/digits.py                          two replicas: two virtual CPU devices, or all GPUs
  python examples/digits.py --strategy one-device    the same training on one device

The data set is scikit-learn's 1,797 images of 8 x 8 pixels. The batch size divides neither the number of training images nor
the number of test images. Still, every image counts exactly once: each replica computes the rows of a batch that it has.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import phalanx  # isort: skip  (before Keras, because it selects the JAX backend)

import jax
import keras
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

TEST_IMAGES = 297
STRATEGIES: dict[str, Callable[[], phalanx.Strategy]] = {
    "mirrored": phalanx.MirroredStrategy,
    "one-device": lambda: phalanx.OneDeviceStrategy(jax.local_devices()[0]),
    "default": phalanx.get_strategy,
}


def main() -> None:
    args = parse_arguments()
    phalanx.set_virtual_cpu_devices(args.devices)
    keras.utils.set_random_seed(args.seed)
    strategy = STRATEGIES[args.strategy]()
    print(f"{args.strategy}: {strategy.num_replicas_in_sync} replicas, global batch {args.batch}")

    # Variables that are created in the scope are mirrored on all replicas.
    with strategy.scope():
        model = make_model()
        optimizer = keras.optimizers.Adam(args.learning_rate)
        accuracy = keras.metrics.SparseCategoricalAccuracy()
    train_step = make_train_step(strategy, model, optimizer)
    test_step = make_test_step(strategy, model, accuracy)

    train, test = load_images(args.seed)
    dist_test = strategy.experimental_distribute_dataset(test, batch_size=args.batch)
    rng = np.random.default_rng(args.seed)
    for epoch in range(args.epochs):
        start = time.perf_counter()
        dist_train = strategy.experimental_distribute_dataset(shuffle(train, rng), batch_size=args.batch)
        loss = np.mean([float(train_step(dist_inputs)) for dist_inputs in dist_train])

        accuracy.reset_state()
        for dist_inputs in dist_test:
            test_step(dist_inputs)
        print(
            f"epoch {epoch + 1:2d}   loss {loss:.4f}   "
            f"test accuracy {float(accuracy.result()):.2%} of {int(accuracy.count.value)} images   "
            f"{time.perf_counter() - start:.2f} s"
        )


def make_train_step(strategy: phalanx.Strategy, model: keras.Model, optimizer: keras.Optimizer) -> Callable[[Any], Any]:
    """Returns a function that trains on one global batch and returns its mean loss."""
    # One loss per example. `compute_average_loss` below averages them over the global batch.
    loss_object = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

    def train_step(inputs):
        images, labels = inputs
        with phalanx.GradientTape() as tape:
            predictions = model(images, training=True)
            loss = phalanx.nn.compute_average_loss(loss_object(labels, predictions))
            if model.losses:
                loss += phalanx.nn.scale_regularization_loss(model.losses)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @phalanx.function
    def distributed_train_step(dist_inputs):
        per_replica_losses = strategy.run(train_step, args=(dist_inputs,))
        return strategy.reduce(phalanx.ReduceOp.SUM, per_replica_losses, axis=None)

    return distributed_train_step


def make_test_step(strategy: phalanx.Strategy, model: keras.Model, accuracy: keras.Metric) -> Callable[[Any], None]:
    """Returns a function that updates the accuracy with one global batch."""

    def test_step(inputs):
        images, labels = inputs
        accuracy.update_state(labels, model(images, training=False))

    @phalanx.function
    def distributed_test_step(dist_inputs):
        strategy.run(test_step, args=(dist_inputs,))

    return distributed_test_step


def make_model() -> keras.Model:
    return keras.Sequential(
        [
            keras.layers.Input((64,)),
            keras.layers.Dense(128, activation="relu", kernel_regularizer=keras.regularizers.L2(1e-4)),
            keras.layers.Dense(10),
        ]
    )


def load_images(seed: int) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Returns `(images, labels)` for training, and for testing."""
    images, labels = load_digits(return_X_y=True)
    images, labels = (images / 16).astype(np.float32), labels.astype(np.int32)
    train_images, test_images, train_labels, test_labels = train_test_split(
        images, labels, test_size=TEST_IMAGES, random_state=seed, stratify=labels
    )
    return (train_images, train_labels), (test_images, test_labels)


def shuffle(data: tuple[np.ndarray, np.ndarray], rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    images, labels = data
    order = rng.permutation(len(labels))
    return images[order], labels[order]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", choices=STRATEGIES, default="mirrored")
    parser.add_argument("--devices", type=int, default=2, help="CPU devices, if there is no GPU (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=10, help="(default: %(default)s)")
    parser.add_argument("--batch", type=int, default=64, help="images per global batch (default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
