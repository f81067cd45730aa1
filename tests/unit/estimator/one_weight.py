"""Small models whose numbers are known."""

import keras
import numpy as np

import phalanx.estimator as estimator

X, Y = {"x": np.array([1, 2], "float32")}, np.array([2, 4], "float32")
WEIGHT_AFTER = (1.0, 1.5, 1.75, 1.875)
"""By hand: the gradient of mean((w x - y)^2) at w is 5 (w - 2), and the learning rate 0.1."""


def model_fn(features, labels, mode):
    """One weight, which begins with 1 and approaches 2."""
    weight = keras.Variable(1.0, name="weight")
    output = features["x"] * weight.value
    if mode == estimator.ModeKeys.PREDICT:
        return estimator.EstimatorSpec(mode, predictions={"output": output})
    loss = keras.ops.mean((output - labels) ** 2)
    train_op = estimator.minimize(keras.optimizers.SGD(0.1), loss)
    return estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)


def rows(count=1):
    """An input function of so many batches of two rows."""
    return lambda: [(X, Y)] * count


def made(folder, fn=model_fn, params=None, warm_start_from=None, **options):
    """A quiet Estimator."""
    config = estimator.RunConfig(**{"save_summary_steps": None, "log_step_count_steps": None, **options})
    return estimator.Estimator(fn, str(folder), config, params, warm_start_from)


def saved(folder, name="model.ckpt"):
    """The steps of the checkpoints in a folder."""
    return sorted(int(path.stem.rpartition("-")[2]) for path in folder.glob(f"{name}-*.safetensors"))


class Fetch(estimator.SessionRunHook):
    """Fetches in each step, and notes the results."""

    def __init__(self, fetches):
        self.fetches, self.results = fetches, []

    def before_run(self, run_context):
        return estimator.SessionRunArgs(self.fetches)

    def after_run(self, run_context, run_values):
        self.results.append(run_values.results)
