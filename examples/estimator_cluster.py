# SPDX-License-Identifier: Apache-2.0
"""Trains an Estimator in several workers, and evaluates its checkpoints in one more process.

  phalanx run --workers 2 --evaluator examples/estimator_cluster.py     two workers and an evaluator on this machine
  python examples/estimator_cluster.py                                  this process trains and evaluates in turn

The data set is scikit-learn's 1,797 images of handwritten digits. All processes read and write the folder `--out`. A training
that is started again continues from its last checkpoint.
"""

import argparse
from collections.abc import Iterator
from typing import Any

import phalanx  # isort: skip  (before Keras, because it selects the JAX backend)

import keras
import numpy as np
from sklearn.datasets import load_digits

import phalanx.estimator as estimator

BATCH = 64  # rows per global batch


def model_fn(features: Any, labels: Any, mode: str) -> estimator.EstimatorSpec:
    """Classifies digits with two layers."""
    logits = keras.layers.Dense(10)(keras.layers.Dense(64, activation="relu")(features))
    if mode == estimator.ModeKeys.PREDICT:
        return estimator.EstimatorSpec(mode, predictions={"probabilities": keras.ops.softmax(logits)})
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)(labels, logits)
    accuracy = keras.metrics.SparseCategoricalAccuracy()
    accuracy.update_state(labels, logits)
    train_op = estimator.minimize(keras.optimizers.Adam(0.002), loss)
    return estimator.EstimatorSpec(mode, loss=loss, train_op=train_op, eval_metric_ops={"accuracy": accuracy})


def main() -> None:
    args = parse_arguments()
    digits = load_digits()
    x, y = (digits.data / 16).astype("float32"), digits.target.astype("int32")
    test = np.arange(len(x)) % 5 == 0

    def train_fn(input_context: phalanx.InputContext) -> Iterator[Any]:
        rng = np.random.default_rng(input_context.input_pipeline_id)
        while True:
            rows = rng.choice(np.flatnonzero(~test), input_context.get_per_replica_batch_size(BATCH))
            yield x[rows], y[rows]

    config = estimator.RunConfig(args.out, save_checkpoints_steps=100, tf_random_seed=1)
    model = estimator.Estimator(model_fn, config=config)
    estimator.train_and_evaluate(
        model,
        estimator.TrainSpec(train_fn, max_steps=args.steps),
        estimator.EvalSpec(lambda: [(x[test], y[test])], start_delay_secs=0, throttle_secs=0),
    )
    task = f"{config.task_type} {config.task_id}"
    if config.task_type == "evaluator" or config.num_worker_replicas == 1:
        for step, metrics in estimator.experimental.read_eval_metrics(model.eval_dir()).items():
            print(f"{task}: step {step}, accuracy {metrics['accuracy']:.3f}")
    else:
        print(f"{task}: trained to step {args.steps}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400, help="(default: %(default)s)")
    parser.add_argument("--out", default="out/estimator", help="where to save (default: %(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
