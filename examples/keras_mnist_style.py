# SPDX-License-Identifier: Apache-2.0
"""Trains the convolutional network of Keras's MNIST example with `model.fit` on the replicas of a strategy.

  python examples/keras_mnist_style.py                          two replicas: two virtual CPU devices, or all GPUs
  python examples/keras_mnist_style.py --strategy one-device    the same training on one device
  python examples/keras_mnist_style.py --strategy none          the same training without Phalanx's strategies

The data set is scikit-learn's 1,797 images of 8 x 8 pixels. Everything except `with strategy.scope():` is plain Keras.
The program writes logs for TensorBoard (`tensorboard --logdir out/digits/logs`), the model, and a plot of its learning curve.
"""

import argparse
import contextlib
from pathlib import Path

import phalanx  # isort: skip  (before Keras, because it selects the JAX backend)

import jax
import keras
import matplotlib as mpl
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

mpl.use("agg")
import matplotlib.pyplot as plt

TEST_IMAGES = 297
CLASSES = 10


def main() -> None:
    args = parse_arguments()
    phalanx.set_virtual_cpu_devices(args.devices)
    keras.utils.set_random_seed(args.seed)
    (x_train, y_train), (x_test, y_test) = load_images(args.seed)

    with scope_of(args.strategy):
        model = make_model()
        model.compile(
            optimizer=keras.optimizers.Adam(args.learning_rate),
            loss="sparse_categorical_crossentropy",
            metrics=["accuracy"],
            steps_per_execution=args.steps_per_execution,
        )
    history = model.fit(
        x_train,
        y_train,
        batch_size=args.batch,
        epochs=args.epochs,
        validation_split=0.1,
        callbacks=[phalanx.keras.TensorBoard(args.out / "logs")],
    ).history
    loss, accuracy = model.evaluate(x_test, y_test, batch_size=args.batch, verbose=0)
    print(f"test loss {loss:.4f}   test accuracy {accuracy:.2%} of {len(y_test)} images")

    model.save(args.out / "digits.keras")
    plot(history, args.out / "digits.png")
    print(f"wrote {args.out / 'digits.keras'}, {args.out / 'digits.png'} and {args.out / 'logs'}")


def scope_of(name: str) -> contextlib.AbstractContextManager:
    """Returns the scope of the requested strategy."""
    if name == "mirrored":
        return phalanx.MirroredStrategy().scope()
    if name == "one-device":
        return phalanx.OneDeviceStrategy(jax.local_devices()[0]).scope()
    return contextlib.nullcontext()


def make_model() -> keras.Model:
    layers = keras.layers
    return keras.Sequential(
        [
            layers.Input((8, 8, 1)),
            layers.Conv2D(32, 3, activation="relu", padding="same"),
            layers.MaxPooling2D(2),
            layers.Conv2D(64, 3, activation="relu", padding="same"),
            layers.MaxPooling2D(2),
            layers.Flatten(),
            layers.Dropout(0.5),
            layers.Dense(CLASSES, activation="softmax"),
        ]
    )


def load_images(seed: int) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Returns `(images, labels)` for training, and for testing."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    x_train, x_test, y_train, y_test = train_test_split(
        images, labels.astype(np.int32), test_size=TEST_IMAGES, random_state=seed, stratify=labels
    )
    return (x_train, y_train), (x_test, y_test)


def plot(history: dict[str, list[float]], path: Path) -> None:
    """Plots loss and accuracy per epoch."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    for ax, name in zip(axes, ("loss", "accuracy"), strict=True):
        epochs = range(1, len(history[name]) + 1)
        ax.plot(epochs, history[name], label="training")
        ax.plot(epochs, history[f"val_{name}"], label="validation")
        ax.set_xlabel("epoch")
        ax.set_ylabel(name)
        ax.grid(alpha=0.3)
    axes[0].legend()
    figure.savefig(path, dpi=120)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", choices=("mirrored", "one-device", "none"), default="mirrored")
    parser.add_argument("--devices", type=int, default=2, help="CPU devices, if there is no GPU (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=15, help="(default: %(default)s)")
    parser.add_argument("--batch", type=int, default=128, help="images per global batch (default: %(default)s)")
    parser.add_argument("--steps-per-execution", type=int, default=1, help="(default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("out/digits"), help="(default: %(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
