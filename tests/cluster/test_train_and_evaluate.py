"""`train_and_evaluate` in a cluster: workers that train, an evaluator that follows them, and processes that die."""

import numpy as np
import pytest
from launching import RUN, run, script

import phalanx
from phalanx.estimator import experimental

# All that holds if nobody dies holds if the evaluator does.
pytestmark = pytest.mark.cover(["ended"], {"evaluator", "worker"})

SCRIPT = """
import os, signal, sys
from pathlib import Path
import phalanx
import keras
import numpy as np
import phalanx.estimator as estimator
here, mode = Path(__file__).parent, sys.argv[1]
X = np.random.RandomState(0).normal(size=(64, 4)).astype("float32")
Y = X.sum(1, keepdims=True)
START = int(os.environ["PHALANX_RESTART"])

def model_fn(features, labels, mode):
    predictions = keras.layers.Dense(1)(features)
    if mode == estimator.ModeKeys.PREDICT:
        return estimator.EstimatorSpec(mode, predictions={"y": predictions})
    loss = keras.losses.MeanSquaredError()(labels, predictions)
    phalanx.summary.scalar("twice", 2 * loss)
    train_op = estimator.minimize(keras.optimizers.SGD(0.05), loss)
    return estimator.EstimatorSpec(mode, predictions={"y": predictions}, loss=loss, train_op=train_op)

def input_fn(input_context):
    start = input_context.input_pipeline_id
    while True:
        for i in range(0, 64, 8):
            yield X[i + start : i + 8 : 2], Y[i + start : i + 8 : 2]

config = estimator.RunConfig(here / "model", tf_random_seed=1, save_checkpoints_steps=10, save_summary_steps=10)
model = estimator.Estimator(model_fn, config=config)
task = config.task_type, config.task_id

class Dies(estimator.SessionRunHook):
    def after_run(self, run_context, run_values):
        step = run_context.session.step
        if mode == "worker" and task == ("worker", 1) and step == 25 and START == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if task[1] == 0:
            with open(here / "steps", "a") as f:
                f.write(f"{START} {step}\\n")

class Evaluates(estimator.SessionRunHook):
    def end(self, session):
        if mode == "evaluator" and START == 0 and not (here / "killed").exists():
            (here / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)

receiver_fn = lambda: estimator.export.ServingInputReceiver(X[:1])
estimator.train_and_evaluate(
    model,
    estimator.TrainSpec(input_fn, max_steps=40, hooks=[Dies()]),
    estimator.EvalSpec(
        lambda: [(X, Y)],
        hooks=[Evaluates()],
        exporters=estimator.FinalExporter("final", receiver_fn),
        start_delay_secs=0,
        throttle_secs=0,
    ),
)
print("ended", *task)
"""


def by_hand():
    """Weights of 40 steps over the global batches, and the loss of all rows, in NumPy."""
    x = np.random.RandomState(0).normal(size=(64, 4)).astype("float32")
    y = x.sum(1, keepdims=True)

    def trained(kernel, bias):
        for step in range(40):
            rows = slice(8 * (step % 8), 8 * (step % 8) + 8)
            error = x[rows] @ kernel + bias - y[rows]
            kernel, bias = kernel - 0.05 * 2 * x[rows].T @ error / 8, bias - 0.05 * 2 * error.mean(0)
        return kernel, bias, np.mean((x @ kernel + bias - y) ** 2)

    return trained


@pytest.fixture(scope="module", params=["calm", "evaluator", "worker"])
def ended(request, tmp_path_factory):
    """A training in which nobody dies, or the evaluator once, or a worker once: how, its folder, its exit code and what it printed."""
    folder = tmp_path_factory.mktemp(request.param)
    train = script(folder, SCRIPT)
    code, out, err = run(*RUN, 2, "--evaluator", "--max-restarts", 1, train, request.param)
    return request.param, folder, code, out + err


# What holds if nobody dies holds if the evaluator dies too.
COVERING = pytest.mark.cover(["ended"], {"evaluator", "worker"})


@COVERING
def test_all_processes_end_well(ended):
    """Both workers and the evaluator come to the end of the program."""
    *_, code, printed = ended
    assert code == 0, printed
    for task in ("worker 0", "worker 1", "evaluator 0"):
        assert f"[{task}] ended {task}\n" in printed


@COVERING
def test_trained_as_one_device(ended):
    """The weights are those of one device over the global batches; after a crash, the input begins again."""
    mode, folder, *_ = ended
    first = phalanx.train.load_checkpoint(folder / "model" / "model.ckpt-0")
    last = phalanx.train.load_checkpoint(folder / "model" / "model.ckpt-40")
    if mode == "worker":
        pytest.skip("the input began again, so that batches were seen twice")
    kernel, bias, _ = by_hand()(first.get_tensor("dense/kernel"), first.get_tensor("dense/bias"))
    np.testing.assert_allclose(last.get_tensor("dense/kernel"), kernel, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(last.get_tensor("dense/bias"), bias, rtol=1e-5, atol=1e-6)


@COVERING
def test_training_resumes_at_the_last_checkpoint(ended):
    """A group that is started again makes the steps after the last checkpoint, and no earlier one."""
    mode, folder, *_ = ended
    steps = [tuple(map(int, line.split())) for line in (folder / "steps").read_text().splitlines()]
    first, second = ([step for start, step in steps if start == n] for n in (0, 1))
    if mode == "worker":
        assert first[-1] in (24, 25)
        assert second == list(range(21, 41))
    else:
        assert (first, second) == (list(range(1, 41)), [])


@COVERING
def test_last_checkpoint_is_evaluated(ended):
    """The evaluator has evaluated the last step, whatever died before, and its loss is that of the checkpoint."""
    _, folder, _, printed = ended
    found = experimental.read_eval_metrics(str(folder / "model" / "eval"))
    assert max(found) == 40, printed
    last = phalanx.train.load_checkpoint(folder / "model" / "model.ckpt-40")
    x = np.random.RandomState(0).normal(size=(64, 4)).astype("float32")
    errors = x @ last.get_tensor("dense/kernel") + last.get_tensor("dense/bias") - x.sum(1, keepdims=True)
    np.testing.assert_allclose(found[40]["loss"], np.mean(errors**2), rtol=1e-4)
    (version,) = (folder / "model" / "export" / "final").iterdir()
    served = phalanx.estimator.load_saved_model(version).predict(x)["y"]
    np.testing.assert_allclose(served - x.sum(1, keepdims=True), errors, rtol=1e-4, atol=1e-5)


@COVERING
def test_chief_alone_writes_summaries(ended):
    """The training has one event file per start of the chief, with the summaries of the model function."""
    mode, folder, _, printed = ended
    files = list((folder / "model").glob("*tfevents*"))
    assert len(files) == (2 if mode == "worker" else 1), printed
    found = experimental.read_eval_metrics(str(folder / "model"))
    assert {"loss", "twice"} <= set(found[1])
    np.testing.assert_allclose(found[1]["twice"], 2 * found[1]["loss"], rtol=1e-6)
