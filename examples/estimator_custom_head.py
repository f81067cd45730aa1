# SPDX-License-Identifier: Apache-2.0
"""Predicts a quantile with an Estimator whose head has a loss of its own, on two replicas.

  python examples/estimator_custom_head.py                 nine tenths of the labels are below the prediction
  python examples/estimator_custom_head.py --quantile 0.5  the median

The labels scatter more where the feature is larger, so the quantile is not parallel to the mean.
"""

import argparse
import tempfile
from collections.abc import Iterator
from typing import Any

import phalanx  # isort: skip  (before Keras, because it selects the JAX backend)

import keras
import numpy as np

import phalanx.estimator as estimator

BATCH = 64  # rows per replica


def model_fn(features: Any, labels: Any, mode: str, params: dict[str, Any]) -> estimator.EstimatorSpec:
    """Predicts a quantile of the labels."""

    def pinball(labels: Any, logits: Any) -> Any:
        """Returns losses whose mean is smallest at the quantile."""
        error = labels - logits
        return keras.ops.maximum(params["quantile"] * error, (params["quantile"] - 1) * error)

    net = features["x"]
    for units in params["hidden_units"]:
        net = keras.layers.Dense(units, activation="relu")(net)
    head = estimator.RegressionHead(loss_fn=pinball)
    logits = keras.layers.Dense(head.logits_dimension)(net)
    return head.create_estimator_spec(features, mode, logits, labels, optimizer=keras.optimizers.Adam(0.01))


def main() -> None:
    args = parse_arguments()
    phalanx.set_virtual_cpu_devices(2)

    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, size=(8192, 1)).astype("float32")
    y = (x + rng.normal(size=x.shape) * (1 + x) / 2).astype("float32")

    def input_fn() -> Iterator[Any]:
        while True:
            rows = rng.integers(len(x), size=BATCH)
            yield {"x": x[rows]}, y[rows]

    config = estimator.RunConfig(tempfile.mkdtemp(), train_distribute=phalanx.MirroredStrategy())
    model = estimator.Estimator(model_fn, config=config, params={"hidden_units": [32], "quantile": args.quantile})
    model.train(input_fn, max_steps=args.steps)
    predicted = np.array([row["predictions"] for row in model.predict(lambda: [{"x": x}])])
    print(f"{np.mean(y <= predicted):.3f} of the labels are below the predicted {args.quantile} quantile")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600, help="(default: %(default)s)")
    parser.add_argument("--quantile", type=float, default=0.9, help="(default: %(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
