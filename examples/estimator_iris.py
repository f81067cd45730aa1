# SPDX-License-Identifier: Apache-2.0
"""Classifies irises with a ready-made Estimator: it trains, evaluates and predicts, in seconds.

  python examples/estimator_iris.py                 on one device
  python examples/estimator_iris.py --devices 2     the same training on two: virtual CPU devices, or GPUs

The data set is scikit-learn's 150 irises of three species. Each fifth is held out for the evaluation.
"""

import argparse
import tempfile
from collections.abc import Iterator
from typing import Any

import phalanx  # isort: skip  (before Keras, because it selects the JAX backend)

import numpy as np
from sklearn.datasets import load_iris

import phalanx.estimator as estimator
from phalanx import feature_column

NAMES = ("SepalLength", "SepalWidth", "PetalLength", "PetalWidth")


def batches(rows: Any, labels: Any, size: int, epochs: int = 1, seed: int | None = None) -> Iterator[Any]:
    """Yields batches of named features, in another order in each epoch if there is a seed."""
    rng = np.random.default_rng(seed)
    for _ in range(epochs):
        order = np.arange(len(rows)) if seed is None else rng.permutation(len(rows))
        for i in range(0, len(rows), size):
            at = order[i : i + size]
            yield dict(zip(NAMES, rows[at].T, strict=True)), labels[at]


def main() -> None:
    args = parse_arguments()
    phalanx.set_virtual_cpu_devices(args.devices)
    strategy = phalanx.MirroredStrategy() if args.devices > 1 else None

    iris = load_iris()
    rows, labels = iris.data.astype("float32"), iris.target.astype("int32")
    test = np.arange(len(rows)) % 5 == 0

    config = estimator.RunConfig(args.out or tempfile.mkdtemp(), train_distribute=strategy, tf_random_seed=1)
    classifier = estimator.DNNClassifier(
        feature_columns=[feature_column.numeric_column(name) for name in NAMES],
        hidden_units=[30, 10],
        n_classes=3,
        optimizer="Adam",
        config=config,
    )
    size = 32 // args.devices  # Batches are per replica.
    classifier.train(lambda: batches(rows[~test], labels[~test], size, 1000, seed=0), max_steps=args.steps)
    results = classifier.evaluate(lambda: batches(rows[test], labels[test], size))
    print(f"step {results['global_step']}: accuracy {results['accuracy']:.3f}, loss {results['loss']:.4f}")

    flowers = {
        "SepalLength": np.float32([5.1, 5.9, 6.9]),
        "SepalWidth": np.float32([3.3, 3.0, 3.1]),
        "PetalLength": np.float32([1.7, 4.2, 5.4]),
        "PetalWidth": np.float32([0.5, 1.5, 2.1]),
    }
    for predicted in classifier.predict(lambda: [flowers]):
        number = predicted["class_ids"][0]
        print(f"{iris.target_names[number]} ({100 * predicted['probabilities'][number]:.1f}%)")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600, help="(default: %(default)s)")
    parser.add_argument("--devices", type=int, default=1, help="CPU devices, if there is no GPU (default: %(default)s)")
    parser.add_argument("--out", help="folder of the model (default: a temporary one)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
