"""The loop that runs steps, with hooks between them."""

import keras
import numpy as np
import pytest
from one_weight import WEIGHT_AFTER, Fetch, X, Y, made, model_fn, rows
from refusals import refused

import phalanx
import phalanx.estimator as estimator
from phalanx.errors import InputError, InvalidArgumentError
from phalanx.estimator.loop.graph import Graph
from phalanx.estimator.loop.loop import GraphSession, SynchronousSteps, run_loop
from phalanx.estimator.strategies import local_strategy


@pytest.fixture
def session():
    graph = Graph(lambda features, labels: model_fn(features, labels, "train"), "train", local_strategy(), 0)
    with graph.as_default():
        session = GraphSession(graph, SynchronousSteps(graph, iter([(X, Y)] * 3)))
        session.prepare()
        session.start()
        yield session


def test_loop_ends_with_the_data(session):
    """It yields what each step returns, and counts the steps. After a number of steps, the rest of the data stays."""
    losses = [[float(outputs[0]) for outputs in run_loop(session, [], most=most)] for most in (2, None)]
    assert [len(part) for part in losses] == [2, 1]
    np.testing.assert_allclose(sum(losses, []), [2.5 * (2 - w) ** 2 for w in WEIGHT_AFTER[:3]], rtol=1e-6)
    assert session.step == int(session.graph.global_step) == 3


def test_fetches_between_steps(session):
    """Variables and arrays from outside always have a value, and what a step computes only after one."""
    assert session.run({"a": "weight", "b": session.graph.global_step}) == {"a": 1, "b": 0}
    assert session.run([np.float32(3), 4]) == [3, 4]
    array = keras.ops.ones(2)
    assert session.run(array) is array
    with refused(InvalidArgumentError, ["fetches='loss'", "no step has run yet"]):
        session.run("loss")
    session.advance()
    np.testing.assert_allclose(session.run("loss:0"), 2.5)
    np.testing.assert_allclose(session.run(keras.Variable(5.0)), 5)
    session.wait()
    with refused(InvalidArgumentError, ["fetches='nothing'", "neither a variable", "estimator.identity"]):
        session.run("nothing")
    with refused(InvalidArgumentError, ["feed_dict=3"]):
        session.run("loss", feed_dict=3)


def test_hook_that_returns_something_else(tmp_path):
    """`before_run` returns `SessionRunArgs` or None."""

    class Wrong(estimator.SessionRunHook):
        def before_run(self, run_context):
            return "loss"

    with refused(InvalidArgumentError, ["Wrong.before_run, which returns 'loss'", "SessionRunArgs or None"]):
        made(tmp_path).train(rows(), [Wrong()])


def test_empty_dataset_is_an_error(tmp_path):
    """For a training and an evaluation with replicas. A prediction yields nothing."""
    strategy = phalanx.MirroredStrategy(["cpu:0", "cpu:1"])
    model = made(tmp_path, train_distribute=strategy, eval_distribute=strategy)
    for call in (model.train, model.evaluate):
        with refused(InputError, ["without a batch", "the dataset is empty"]):
            call(rows(0))
    assert list(model.predict(lambda: [])) == []


class Stop(Fetch):
    ended = False

    def after_run(self, run_context, run_values):
        run_context.request_stop()

    def end(self, session):
        self.ended = True


def test_hook_stops_the_loop(tmp_path):
    """After the step in which it asks; `end` is called. The metrics of an evaluation are those of the batches so far."""
    training, evaluation, model = Stop("loss"), Stop("loss"), made(tmp_path)
    losses = [model.evaluate(lambda: [(X, Y), (X, Y * 3)], hooks=hooks)["loss"] for hooks in ([evaluation], [])]
    assert losses == [2.5, 32.5]
    assert model.train(rows(5), [training]).get_variable_value("global_step") == 1
    assert (training.ended, evaluation.ended) == (True, True)


def test_error_of_a_hook_reaches_the_caller(tmp_path):
    """Hooks after it are not told that the training has ended."""

    class Fail(estimator.SessionRunHook):
        def after_run(self, run_context, run_values):
            raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        made(tmp_path).train(rows(3), [Fail()])
    assert made(tmp_path).train(rows(3)).get_variable_value("global_step") == 3
