"""The Estimator row of the guide's table: training, evaluation, prediction, export and restoration under every strategy."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import phalanx
import phalanx.estimator as estimator

ROWS, STEPS, RATE = 24, 20, 0.1
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(3 * ROWS, 6)).astype("float32")
Y = (X @ RANDOM.normal(size=(6, 1)) + 1).astype("float32")
NAMES = ("hidden/kernel", "hidden/bias", "output/kernel", "output/bias")


def model_fn(features, labels, mode):
    hidden = keras.layers.Dense(8, activation="tanh", name="hidden")(features)
    predictions = keras.layers.Dense(1, name="output")(hidden)
    if mode == estimator.ModeKeys.PREDICT:
        return estimator.EstimatorSpec(mode, predictions={"y": predictions})
    loss = keras.losses.MeanSquaredError()(labels, predictions)
    error = keras.metrics.MeanAbsoluteError()
    error.update_state(labels, predictions)
    train_op = estimator.minimize(keras.optimizers.SGD(RATE, momentum=0.9), loss)
    return estimator.EstimatorSpec(mode, loss=loss, train_op=train_op, eval_metric_ops={"error": error})


def forward(weights, x):
    kernel, bias, kernel2, bias2 = weights
    return jnp.tanh(x @ kernel + bias) @ kernel2 + bias2


@jax.jit
def by_hand(weights, moments, x, y):
    """One step on one device, in JAX."""
    loss, grads = jax.value_and_grad(lambda w: jnp.mean((forward(w, x) - y) ** 2))(weights)
    moments = [0.9 * m - RATE * g for m, g in zip(moments, grads, strict=True)]
    return loss, [w + m for w, m in zip(weights, moments, strict=True)], moments


class Losses(estimator.SessionRunHook):
    def __init__(self):
        self.losses = []

    def before_run(self, run_context):
        return estimator.SessionRunArgs("loss")

    def after_run(self, run_context, run_values):
        self.losses.append(float(run_values.results))


def batches_for(replicas, count):
    """So many global batches, each as one batch per replica."""

    def input_fn(input_context):
        each = input_context.get_per_replica_batch_size(ROWS)
        for step in range(count):
            start = ROWS * (step % 3)
            for replica in range(replicas):
                rows = slice(start + replica * each, start + (replica + 1) * each)
                yield X[rows], Y[rows]

    return input_fn


def made(strategy, folder):
    """An Estimator that trains and evaluates under the strategy."""
    config = estimator.RunConfig(
        train_distribute=strategy, eval_distribute=strategy, save_checkpoints_steps=10, tf_random_seed=1
    )
    return estimator.Estimator(model_fn, folder, config)


# The others differ from these in what reduces gradients, which law 1 has for all.
COVER = ["default", "one_device", "mirrored_x3", "central_x2", "tpu_x2_of_4", "mirrored_x2_of_2", "local_sgd_x2"]


@pytest.mark.cover(["strategy"], ["mirrored_x3"])
def test_estimator_equals_one_device(strategy, tmp_path):
    """Losses and weights of 20 steps, in two calls, evaluation, predictions and an export equal those of hand-written JAX."""
    replicas, hook = strategy.num_replicas_in_sync, Losses()
    made(strategy, tmp_path).train(batches_for(replicas, STEPS), hooks=[hook], steps=STEPS // 2)
    again = made(strategy, tmp_path)
    # The input begins again, so that the second call sees the batches from the first on.
    again.train(batches_for(replicas, STEPS), hooks=[hook], max_steps=STEPS)
    first = phalanx.train.load_checkpoint(tmp_path / "model.ckpt-0")
    weights = [first.get_tensor(name) for name in NAMES]
    moments, losses = [np.zeros_like(w) for w in weights], []
    for step in [*range(STEPS // 2)] * 2:
        rows = slice(ROWS * (step % 3), ROWS * (step % 3 + 1))
        loss, weights, moments = by_hand(weights, moments, X[rows], Y[rows])
        losses.append(float(loss))
    np.testing.assert_allclose(hook.losses, losses, rtol=1e-5, atol=1e-6)
    for name, weight in zip(NAMES, weights, strict=True):
        np.testing.assert_allclose(again.get_variable_value(name), weight, rtol=1e-5, atol=1e-6, err_msg=name)
    expected = np.asarray(forward(weights, X))
    found = again.evaluate(batches_for(replicas, 3))
    np.testing.assert_allclose(found["loss"], np.mean((expected - Y) ** 2), rtol=1e-5)
    np.testing.assert_allclose(found["error"], np.mean(np.abs(expected - Y)), rtol=1e-5)
    assert found["global_step"] == STEPS
    predicted = np.array([row["y"] for row in again.predict(lambda: [X[:40], X[40:]])])
    np.testing.assert_allclose(predicted, expected, rtol=1e-5, atol=1e-5)
    receiver_fn = lambda: estimator.export.ServingInputReceiver(X[:1])  # noqa: E731
    path = again.export_saved_model(tmp_path / "export", receiver_fn)
    np.testing.assert_allclose(estimator.load_saved_model(path).predict(X)["y"], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.cover(["strategy"], {"mirrored_x4"})
@pytest.mark.parametrize("strategy", ["mirrored_x2", "mirrored_x4", "central_x2"], indirect=True)
def test_replicas_without_rows_change_nothing(strategy, tmp_path):
    """If the batches do not fill the replicas, the last step and the metrics are those of the rows that there are."""
    batches = [(X[i : i + 8], Y[i : i + 8]) for i in range(0, 24, 8)]
    model = made(strategy, tmp_path)
    model.train(lambda: batches)
    first = phalanx.train.load_checkpoint(tmp_path / "model.ckpt-0")
    weights = [first.get_tensor(name) for name in NAMES]
    moments, size = [np.zeros_like(w) for w in weights], 8 * strategy.num_replicas_in_sync
    for start in range(0, 24, size):
        _, weights, moments = by_hand(
            weights, moments, X[start : min(start + size, 24)], Y[start : min(start + size, 24)]
        )
    for name, weight in zip(NAMES, weights, strict=True):
        np.testing.assert_allclose(model.get_variable_value(name), weight, rtol=1e-5, atol=1e-6, err_msg=name)
    found = model.evaluate(lambda: batches)
    expected = np.asarray(forward(weights, X[:24]))
    np.testing.assert_allclose(found["error"], np.mean(np.abs(expected - Y[:24])), rtol=1e-5)
