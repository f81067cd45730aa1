"""A model function with a loss of its own, for a quantile, under MirroredStrategy."""

import argparse
import tempfile

import phalanx  # isort: skip

import keras
import numpy as np

import phalanx.estimator as estimator

QUANTILE = 0.9


def pinball(labels, logits):
    """Returns the losses of which the quantile is the minimum."""
    error = labels - logits
    return keras.ops.maximum(QUANTILE * error, (QUANTILE - 1) * error)


def model_fn(features, labels, mode, params):
    """Predicts a quantile of the labels."""
    net = features["x"]
    for units in params["hidden_units"]:
        net = keras.layers.Dense(units, activation="relu")(net)
    head = estimator.RegressionHead(loss_fn=pinball)
    logits = keras.layers.Dense(head.logits_dimension)(net)
    return head.create_estimator_spec(features, mode, logits, labels, optimizer=keras.optimizers.Adam(0.01))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=600)
    options = parser.parse_args()
    phalanx.set_virtual_cpu_devices(2)

    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, size=(8192, 1)).astype("float32")
    y = (x + rng.normal(size=x.shape) * (1 + x) / 2).astype("float32")

    def input_fn():
        while True:
            rows = rng.integers(len(x), size=64)  # per replica
            yield {"x": x[rows]}, y[rows]

    config = estimator.RunConfig(tempfile.mkdtemp(), train_distribute=phalanx.MirroredStrategy(["cpu:0", "cpu:1"]))
    model = estimator.Estimator(model_fn, config=config, params={"hidden_units": [32]})
    model.train(input_fn, max_steps=options.steps)
    predicted = np.array([row["predictions"] for row in model.predict(lambda: [{"x": x}])])
    print(f"{np.mean(y <= predicted):.3f} of the labels are below the predicted {QUANTILE} quantile")


if __name__ == "__main__":
    main()
