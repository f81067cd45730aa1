"""The recorded values of expressions and the list of names are those of the TensorFlow that is installed."""

import json

import numpy as np
import pytest
from tests.migrate.arguments import arguments
from tests.migrate.record import FOLDER, expressions, plain

tf = pytest.importorskip("tensorflow")

RECORDED = json.loads((FOLDER / "expressions.json").read_text())
OF_KERAS = [text for text in expressions() if "tf.keras" in text]


@pytest.mark.parametrize("text", [text for text in expressions() if text not in OF_KERAS])
def test_recorded_value_is_that_of_tensorflow(text):
    """Keras runs on JAX in this process, so its expressions are compared elsewhere."""
    value, recorded = plain(eval(text, {"tf": tf, **arguments()})), RECORDED[text]
    assert (value["shape"], value["kind"]) == (recorded["shape"], recorded["kind"])
    np.testing.assert_allclose(value["numbers"], recorded["numbers"], rtol=1e-4, atol=1e-5)
