"""The graph of a mode: variables by name, and the program of a step."""

import jax.numpy as jnp
import keras
import numpy as np
from one_weight import WEIGHT_AFTER, Fetch, X, Y, made, model_fn, rows
from refusals import refusals, refused

import phalanx.estimator as estimator
from phalanx.errors import ContextError, InvalidArgumentError, TraceError, VariableError
from phalanx.estimator.loop.graph import Graph
from phalanx.estimator.strategies import local_strategy


def graph_of(fn, mode="train", seed=0):
    return Graph(lambda features, labels: fn(features, labels, mode), mode, local_strategy(), seed)


test_model_functions_that_are_refused = refusals(
    InvalidArgumentError,
    (lambda features, labels, mode: 3, ["a model_fn that returns 3", "must return an EstimatorSpec"]),
    (
        lambda features, labels, mode: estimator.EstimatorSpec("eval", loss=jnp.float32(1)),
        ["EstimatorSpec(mode='eval')", "called with mode='train'"],
    ),
    call=lambda fn: graph_of(fn).prepare((X, Y)),
)


def test_variables_have_their_names():
    """They exist after `prepare`, are reused, and are found with TensorFlow's output numbers too."""
    graph = graph_of(model_fn)
    with refused(ContextError, ["the graph of an Estimator", "not called yet"]):
        graph.trace  # noqa: B018
    graph.prepare((X, Y))
    weight = graph.find("weight:0")
    assert graph.variables["weight"] is weight
    assert graph.find("nothing") is None
    assert [v is weight for v in graph.trainable_variables] == [True]
    for step in (1, 2):
        with graph.strategy.scope():
            graph.program((X, Y))
        np.testing.assert_allclose(float(weight.value), WEIGHT_AFTER[step], rtol=1e-6)
        assert int(graph.global_step) == step


def test_seed_gives_the_same_values():
    """Initializers and random layers of two graphs draw the same numbers, if the seed is the same."""

    def random_fn(features, labels, mode):
        x = keras.layers.Dense(4)(features["x"][:, None])
        return estimator.EstimatorSpec(mode, loss=keras.ops.mean(keras.layers.Dropout(0.5)(x, training=True)))

    losses = []
    for seed in (1, 1, 2):
        graph = graph_of(random_fn, "eval", seed)
        graph.prepare((X, None))
        with graph.strategy.scope():
            losses.append(float(graph.program((X, None))[0]))
    assert losses[0] == losses[1] != losses[2]


def test_other_shape_of_a_known_variable():
    def dense_fn(features, labels, mode):
        return estimator.EstimatorSpec(mode, loss=keras.layers.Dense(1, name="output")(features).mean())

    graph = graph_of(dense_fn, "eval")
    graph.prepare((np.ones((2, 3), "float32"), None))
    with refused(VariableError, ["'output/kernel' of shape (4, 1)", "has the shape (3, 1)"]):
        graph.prepare((np.ones((2, 4), "float32"), None))


def test_calls_outside_a_model_function():
    """Names, gradients and updates belong to a graph; the number of steps may be new."""
    with refused(ContextError, ["estimator.identity outside a model function"]):
        estimator.identity(1.0, "one")
    with refused(ContextError, ["estimator.minimize outside a model function"]):
        estimator.minimize(keras.optimizers.SGD(), jnp.float32(1))
    graph = graph_of(model_fn)
    with refused(ContextError, ["gradients outside a model function"]):
        graph.tape  # noqa: B018
    assert estimator.get_global_step() is None
    with graph.as_default():
        assert estimator.get_global_step() is estimator.get_or_create_global_step() is graph.global_step
    assert int(estimator.get_or_create_global_step()) == 0


def test_model_function_that_counts_itself(tmp_path):
    """If the model function changes the number of steps, the Estimator does not."""

    def counting_fn(features, labels, mode):
        step = estimator.get_global_step()
        weight = keras.Variable(1.0, name="weight")
        update = [lambda: step.assign_add(2), lambda: weight.assign_add(1)]
        return estimator.EstimatorSpec(mode, loss=weight.value * 1, train_op=update)

    model = made(tmp_path, counting_fn).train(rows(9), max_steps=6)
    assert model.get_variable_value("global_step") == 6
    assert model.get_variable_value("weight") == 4


def test_updates_outside_of_a_training_are_undone(tmp_path):
    """A model function may change weights and the step in each mode, but only a training keeps that.

    Of a value and its update as a metric, the mean over all batches is returned.
    """

    def eager_fn(features, labels, mode):
        step, weight = estimator.get_global_step(), keras.Variable(1.0, name="weight")
        predictions = {"before": weight.value * features["x"]}
        update = [weight.assign_add(1), step.assign_add(1)]
        metrics = {"a/b": (features["x"].mean(), None)}
        return estimator.EstimatorSpec(mode, predictions, weight.value * 1, update, metrics)

    model = made(tmp_path, eager_fn).train(rows(2))
    assert model.get_variable_value("weight") == 3
    data = [({"x": np.float32([value])}, Y[:1]) for value in (1, 2, 6)]
    found = model.evaluate(lambda: data)
    assert (found["global_step"], found["a/b"]) == (2, 3)
    assert [float(row["before"]) for row in model.predict(rows(2))] == [3, 6, 3, 6]


def test_named_arrays_and_variables_are_fetched(tmp_path):
    """A hook gets arrays by their names, `"loss"`, variables, and numbers as they are."""

    def named_fn(features, labels, mode):
        estimator.identity(features["x"] * 2, "twice")
        assert estimator.identity(3, None) == 3
        return model_fn(features, labels, mode)

    hook = Fetch(["loss", {"a": "twice:0", "b": "weight", "c": 7, "d": None}])
    made(tmp_path, named_fn).train(rows(2), [hook])
    loss, named = hook.results[1]
    np.testing.assert_allclose(loss, 2.5 * 0.5**2)
    np.testing.assert_array_equal(named["a"], X["x"] * 2)
    np.testing.assert_allclose(named["b"], WEIGHT_AFTER[2])
    assert (named["c"], named["d"]) == (7, None)


def test_hooks_hold_arrays_of_the_model_function(tmp_path, caplog):
    """A ready-made hook that is created with arrays fetches their values."""

    def hooked_fn(features, labels, mode):
        spec, twice = model_fn(features, labels, mode), features["x"] * 2
        hooks = [
            estimator.FinalOpsHook({"twice": twice}),
            estimator.LoggingTensorHook({"twice": twice, "loss": spec.loss}, every_n_iter=1),
            estimator.NanTensorHook(spec.loss),
        ]
        return estimator.EstimatorSpec(mode, loss=spec.loss, train_op=spec.train_op, training_hooks=hooks)

    caplog.set_level("INFO", "phalanx")
    model = made(tmp_path, hooked_fn).train(rows(1))
    hook = model._graphs["train"].spec.training_hooks[0]
    np.testing.assert_array_equal(hook.final_ops_values["twice"], X["x"] * 2)
    assert "loss = 2.5, twice = [2. 4.]" in caplog.messages


def test_hooks_that_hold_other_arrays(tmp_path):
    """If a batch of another size gives hooks other arrays, it is an error instead of a wrong value."""

    def changing_fn(features, labels, mode):
        held = [features["x"]] * (features["x"].shape[0] == 3)
        spec = model_fn(features, labels, mode)
        return estimator.EstimatorSpec(mode, loss=spec.loss, evaluation_hooks=[estimator.FinalOpsHook(held)])

    data = [(X, Y), ({"x": np.ones(3, "float32")}, np.ones(3, "float32"))]
    with refused(TraceError, ["whose hooks hold 1 arrays", "they held 0 arrays"]):
        made(tmp_path, changing_fn).evaluate(lambda: data)
