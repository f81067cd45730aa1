"""`add_metrics`: an Estimator with further metrics."""

import keras
import numpy as np
from one_weight import X, Y, made, model_fn, rows
from refusals import refusals

import phalanx.estimator as estimator
from phalanx.errors import InvalidArgumentError

test_arguments_that_are_refused = refusals(
    InvalidArgumentError,
    (lambda e: estimator.add_metrics(3, lambda: {}), ["estimator=3", "must be an Estimator"]),
    (lambda e: estimator.add_metrics(e, 3), ["metric_fn=3", "not callable"]),
    (lambda e: estimator.add_metrics(e, lambda wrong: {}), ["the parameters ['wrong']", "def metric_fn"]),
    (lambda e: estimator.add_metrics(e, lambda: 3).evaluate(rows()), ["returns 3", "must return a dict"]),
    (lambda e: estimator.add_metrics(e, lambda: {"a": 3}).evaluate(rows()), ["{'a': 3}", "Keras metrics"]),
    call=lambda call: call(made("model")),
)


def test_metrics_are_added(tmp_path):
    """The function gets what it asks for; training and prediction are those of the first Estimator."""

    def fn(features, labels, mode, params):
        spec = model_fn(features, labels, mode)
        output = features["x"] * estimator.get_global_step().value * 0 + params["a"]
        return spec if mode != "eval" else estimator.EstimatorSpec(mode, {"y": output}, spec.loss)

    def metric_fn(features, labels, predictions, config):
        assert config.model_dir == str(tmp_path)
        metric = keras.metrics.Mean()
        metric.update_state(features["x"] + labels + predictions["y"])
        return {"sum": metric}

    def input_fn(params):
        assert params == {"a": 3}
        return [(X, Y)]

    first = made(tmp_path, fn, params={"a": 3})
    model = estimator.add_metrics(first, metric_fn)
    assert model.train(input_fn) is model
    found = model.evaluate(input_fn)
    np.testing.assert_allclose(found["sum"], (X["x"] + Y + 3).mean())
    assert set(found) - {"sum"} == set(first.evaluate(input_fn)) == {"loss", "global_step"}
    assert [row["output"] for row in model.predict(lambda: [X])] == [1.5, 3]
