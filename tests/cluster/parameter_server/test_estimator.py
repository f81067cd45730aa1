"""An Estimator under `ParameterServerStrategy`."""

import contextlib
import os
import signal

import jax
import keras
import numpy as np
import pytest
from typing_extensions import override

import phalanx
import phalanx.estimator as estimator
from phalanx.errors import InvalidArgumentError, ServerLostError
from phalanx.summary.events import scalars_in

ROWS, RATE = 16, 0.05
X = np.random.default_rng(0).normal(size=(160, 3)).astype("float32")
Y = X @ np.float32([[1], [-2], [3]])


def model_fn(features, labels, mode):
    """A linear model."""
    predictions = keras.layers.Dense(1, name="line")(features)
    if mode == estimator.ModeKeys.PREDICT:
        return estimator.EstimatorSpec(mode, predictions={"y": predictions})
    loss = keras.losses.MeanSquaredError()(labels, predictions)
    train_op = estimator.minimize(keras.optimizers.SGD(RATE), loss)
    return estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)


def endless():
    """Batches of every worker."""
    while True:
        for i in range(0, len(X), ROWS):
            yield X[i : i + ROWS], Y[i : i + ROWS]


def finite():
    """Ten batches."""
    return [(X[i : i + ROWS], Y[i : i + ROWS]) for i in range(0, len(X), ROWS)]


def test_scheduled_steps_learn_the_line(strategy, tmp_path):
    """Workers train, although one dies after its fifth batch; one device evaluates and predicts what NumPy computes of the weights."""
    flag = tmp_path / "died"

    def dying():
        for i, batch in enumerate(endless()):
            if i == 5 and not flag.exists():
                flag.touch()
                os._exit(1)
            yield batch

    config = estimator.RunConfig(train_distribute=strategy, save_checkpoints_steps=100)
    model = estimator.Estimator(model_fn, tmp_path / "model", config)
    model.train(dying, max_steps=300)
    assert flag.exists()
    assert model.get_variable_value("global_step") >= 300  # Steps that were scheduled already are made.
    kernel, bias = (model.get_variable_value(f"line/{name}") for name in ("kernel", "bias"))
    np.testing.assert_allclose(kernel, [[1], [-2], [3]], atol=1e-3)
    found = model.evaluate(finite)
    np.testing.assert_allclose(found["loss"], np.mean((X @ kernel + bias - Y) ** 2), rtol=1e-3, atol=1e-9)
    predicted = np.array([row["y"] for row in model.predict(lambda: [X])])
    np.testing.assert_allclose(predicted, X @ kernel + bias, rtol=1e-5, atol=1e-5)


def test_training_ends_with_the_data(strategy, tmp_path):
    """Each worker has ten batches. The training ends with those of the first worker that has no further one."""
    model = estimator.Estimator(model_fn, tmp_path, estimator.RunConfig(train_distribute=strategy))
    model.train(finite)
    assert 10 <= model.get_variable_value("global_step") <= 20


def test_synchronous_training_is_that_of_one_device(strategy_of, tmp_path):
    """With a staleness of 0, two workers with half of each batch train like one device with the whole."""

    def half(input_context):
        rows = ROWS // input_context.num_input_pipelines
        first = rows * input_context.input_pipeline_id
        return [(x[first : first + rows], y[first : first + rows]) for x, y in finite()]

    strategy = strategy_of(max_staleness=0)
    found = {}
    for name, input_fn, distribute in (("two", half, strategy), ("one", finite, None)):
        model = estimator.Estimator(model_fn, tmp_path / name, estimator.RunConfig(train_distribute=distribute))
        model.train(input_fn, hooks=[FirstWeights()])
        found[name] = [model.get_variable_value(f"line/{part}") for part in ("kernel", "bias")]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found["two"], found["one"])


class FirstWeights(estimator.SessionRunHook):
    """Starts every training from the same weights."""

    @override
    def after_create_session(self, session, coord):
        session.graph.find("line/kernel").assign([[0.1], [0.2], [0.3]])


def test_summaries_of_a_model_function(strategy, tmp_path):
    """Workers compute what a model function records, every so many steps."""

    def recording(features, labels, mode):
        phalanx.summary.scalar("mean", keras.ops.mean(features))
        return model_fn(features, labels, mode)

    config = estimator.RunConfig(train_distribute=strategy, save_summary_steps=10)
    estimator.Estimator(recording, tmp_path, config).train(endless, max_steps=40)
    means = {step: of["mean"] for step, of in scalars_in(f"{tmp_path}/events*").items() if "mean" in of}
    assert list(means) == [1, 11, 21, 31]
    of_batches = np.array([x.mean() for x, _ in finite()])
    assert all(np.min(np.abs(mean - of_batches)) < 1e-6 for mean in means.values())


def test_parameter_servers_do_not_evaluate(strategy):
    """The error names what evaluates instead."""
    with pytest.raises(
        InvalidArgumentError, match=r"(?s)eval_distribute=Parameter.*training steps only.*HINT: .*Mirrored"
    ):
        estimator.RunConfig(eval_distribute=strategy)


class Ends(estimator.SessionRunHook):
    """Ends a server, if it is given one, after step 50, and notes the first step."""

    def __init__(self, servers=()):
        self.servers, self.first = [*servers], None

    @override
    def after_run(self, run_context, run_values):
        run_context.session.settle()
        self.first = self.first or run_context.session.step
        if self.servers and run_context.session.step >= 50:
            os.kill(self.servers.pop(), signal.SIGKILL)


@pytest.mark.exhaustive("test_losses.py: test_a_server_is_lost_for_good")
def test_training_goes_on_after_the_loss_of_a_server(strategy, tmp_path):
    """The error names the loss. A new training continues from the last checkpoint."""
    # Here, because workers import this module for its datasets, and cannot import this one.
    from processes import servers_of

    def estimator_under(distribute):
        config = estimator.RunConfig(train_distribute=distribute, save_checkpoints_steps=20)
        return estimator.Estimator(model_fn, tmp_path, config)

    lost = phalanx.ParameterServerStrategy(workers=1, ps=1)
    with contextlib.closing(lost), pytest.raises(ServerLostError):
        estimator_under(lost).train(endless, hooks=[Ends(servers_of(lost))], max_steps=300)
    model, hook = estimator_under(strategy), Ends()
    model.train(endless, hooks=[hook], max_steps=300)
    assert 40 < hook.first < 60
    assert model.get_variable_value("global_step") >= 300
    np.testing.assert_allclose(model.get_variable_value("line/kernel"), [[1], [-2], [3]], atol=1e-3)
