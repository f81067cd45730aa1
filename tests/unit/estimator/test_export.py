"""`phalanx.estimator.export`: what an exported model receives."""

import jax
import numpy as np
from one_weight import X
from refusals import refusals

from phalanx.errors import InvalidArgumentError
from phalanx.estimator import export

test_receivers_that_are_refused = refusals(
    InvalidArgumentError,
    (lambda: export.ServingInputReceiver(3), ["features=3", "arrays with rows"]),
    (lambda: export.ServingInputReceiver({}), ["features={}", "arrays with rows"]),
    (lambda: export.ServingInputReceiver(X, None, 3), ["receiver_tensors_alternatives=3", "the features themselves"]),
    (lambda: export.ServingInputReceiver(X, 3), ["receiver_tensors=3", "the features themselves"]),
    (lambda: export.build_raw_serving_input_receiver_fn(3), ["features=3", "a dict of arrays"]),
    (lambda: export.build_raw_serving_input_receiver_fn({})(), ["features={}", "arrays with rows"]),
    (lambda: export.build_parsing_serving_input_receiver_fn(3), ["feature_spec=3", "shapes and dtypes"]),
    (lambda: export.build_parsing_serving_input_receiver_fn({"x": 3}), ["feature_spec={'x': 3}", "shapes and dtypes"]),
)


def test_receivers_from_arrays_and_specifications():
    """Features of one row, with the shapes and dtypes that were given."""
    assert export.ServingInputReceiver(X, X).receiver_tensors is X
    assert export.build_raw_serving_input_receiver_fn(X, 8)().features == X
    scalar = export.build_raw_serving_input_receiver_fn({"x": 3.0})().features
    assert scalar["x"].shape == (1,)
    spec = {"x": jax.ShapeDtypeStruct((4,), "float32"), "s": np.empty((), object)}
    features = export.build_parsing_serving_input_receiver_fn(spec)().features
    assert (features["x"].shape, features["x"].dtype, features["s"].tolist()) == ((1, 4), np.float32, [""])
