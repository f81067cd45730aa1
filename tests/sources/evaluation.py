"""An evaluation whose result is known: a softmax regression with fixed weights, on 250 rows in seven batches, the last one short."""

from typing import NamedTuple

import keras
import numpy as np

import phalanx

ROWS, FEATURES, CLASSES = 250, 6, 5
BATCH = 36

_random = np.random.default_rng(11)
X = _random.normal(size=(ROWS, FEATURES)).astype("float32")
KERNEL = _random.normal(size=(FEATURES, CLASSES)).astype("float32")
BIAS = _random.normal(size=CLASSES).astype("float32")
# A noisy teacher, so that the accuracy is neither 1 nor that of a guess.
Y = (X @ KERNEL + BIAS + 2 * _random.normal(size=(ROWS, CLASSES))).argmax(axis=1).astype("int32")


class Result(NamedTuple):
    loss: float
    accuracy: float
    rows: int


def expected() -> Result:
    """Returns the result on all rows at once, in float64 and by NumPy alone."""
    logits = X.astype("float64") @ KERNEL.astype("float64") + BIAS
    largest = logits.max(axis=1)
    losses = np.log(np.exp(logits - largest[:, None]).sum(axis=1)) + largest - logits[np.arange(ROWS), Y]
    return Result(losses.mean(), (logits.argmax(axis=1) == Y).mean(), ROWS)


class Evaluation:
    """The same evaluation under a strategy. It may be run on several datasets, with one compiled step."""

    def __init__(self, strategy: phalanx.Strategy) -> None:
        self._strategy = strategy
        self._weights = strategy.replicate((KERNEL, BIAS))
        self._row_losses = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
        with strategy.scope():
            self._accuracy = keras.metrics.SparseCategoricalAccuracy()

    def run(self, dataset: phalanx.DistributedDataset) -> Result:
        """Evaluates batches `(features, labels)`, or `{"x": features, "y": labels}`."""
        self._accuracy.reset_state()
        losses = [self._strategy.run(self._step, args=(self._weights, batch)) for batch in dataset]
        total = sum(float(self._strategy.reduce("SUM", each, axis=0)) for each in losses)
        return Result(total / ROWS, float(self._accuracy.result()), int(self._accuracy.count.numpy()))

    def _step(self, weights, batch):
        features, labels = (batch["x"], batch["y"]) if isinstance(batch, dict) else batch
        logits = features @ weights[0] + weights[1]
        self._accuracy.update_state(labels, logits)
        return self._row_losses(labels, logits)
