"""A ready-made deep network classifies scikit-learn's irises: train, evaluate, predict."""

import argparse
import tempfile

import phalanx  # isort: skip

import numpy as np
from sklearn.datasets import load_iris

import phalanx.estimator as estimator
from phalanx import feature_column

NAMES = ("SepalLength", "SepalWidth", "PetalLength", "PetalWidth")


def batches(rows, labels, size, epochs=1, seed=None):
    """Yields batches of named features, in another order in each epoch if there is a seed."""
    rng = np.random.default_rng(seed)
    for _ in range(epochs):
        order = np.arange(len(rows)) if seed is None else rng.permutation(len(rows))
        for i in range(0, len(rows), size):
            at = order[i : i + size]
            yield dict(zip(NAMES, rows[at].T, strict=True)), labels[at]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--devices", type=int, default=1, help="train on so many CPU devices")
    parser.add_argument("--out", default=None, help="folder of the model; by default a temporary one")
    options = parser.parse_args()
    if options.devices > 1:
        phalanx.set_virtual_cpu_devices(options.devices)
    strategy = phalanx.MirroredStrategy() if options.devices > 1 else None

    iris = load_iris()
    rows, labels = iris.data.astype("float32"), iris.target.astype("int32")
    test = np.arange(len(rows)) % 5 == 0

    config = estimator.RunConfig(options.out or tempfile.mkdtemp(), train_distribute=strategy, tf_random_seed=1)
    classifier = estimator.DNNClassifier(
        feature_columns=[feature_column.numeric_column(name) for name in NAMES],
        hidden_units=[30, 10],
        n_classes=3,
        optimizer="Adam",
        config=config,
    )
    size = 32 // options.devices
    classifier.train(lambda: batches(rows[~test], labels[~test], size, 1000, seed=0), max_steps=options.steps)
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


if __name__ == "__main__":
    main()
