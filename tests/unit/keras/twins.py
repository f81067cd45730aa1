"""The same model twice: on the replicas of a strategy, and in the hands of Keras's own trainer on one device."""

import keras
import numpy as np

import phalanx

ROWS, SHORT, BATCH, CLASSES = 112, 103, 16, 3
RANDOM = np.random.RandomState(7)
X = RANDOM.rand(ROWS, 5).astype("float32")
Y = X[:, :CLASSES].argmax(1)
WEIGHTS = RANDOM.rand(ROWS).astype("float32")
# Seven batches. Of the first SHORT rows, the last one has seven rows: both twins compile a second program for it, so that only
# tests of such batches take them.
FIT = {"batch_size": BATCH, "shuffle": False, "verbose": 0}


def crossentropy():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def mlp():
    layers = keras.layers
    return keras.Sequential([layers.Input((5,)), layers.Dense(6, activation="tanh"), layers.Dense(CLASSES)])


METRICS = ("metrics", "weighted_metrics")


def compiled(model=mlp, **given):
    """Returns a function that makes a model and compiles it."""

    def make():
        made, arguments = model(), dict(given)
        loss = arguments.pop("loss", None) or crossentropy()
        optimizer = arguments.pop("optimizer", lambda: keras.optimizers.SGD(0.5, momentum=0.9))()
        for key in METRICS:
            given_metrics = arguments.pop(key, [])
            arguments[key] = [m if isinstance(m, (str, dict, keras.metrics.Metric)) else m() for m in given_metrics]
        made.compile(optimizer, loss, **arguments)
        return made

    return make


def replicas(count):
    return phalanx.MirroredStrategy([f"cpu:{i}" for i in range(count)])


def alone(make):
    """The model, for Keras's own trainer."""
    keras.utils.set_random_seed(1)
    return make()


def under(strategy, make):
    """The same model with the same weights, under a strategy."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        return make()


def twins(strategy, make):
    return under(strategy, make), alone(make)


def same(ours, theirs, rtol=1e-4, atol=1e-5):
    """Asserts that two nests of numbers are equal, with the same names in the same order."""
    keras.tree.assert_same_structure(ours, theirs)
    for a, b in zip(keras.tree.flatten(ours), keras.tree.flatten(theirs), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=rtol, atol=atol)


def state(model):
    return [np.asarray(v) for v in [*model.variables, *model.optimizer.variables]]


def same_state(ours, theirs, **tolerance):
    def numbers(model):
        seeds = {id(v) for v in model.variables if "seed" in v.path}
        return [v.numpy() for v in [*model.variables, *model.optimizer.variables] if id(v) not in seeds]

    same(numbers(ours), numbers(theirs), **tolerance)


def same_fit(strategy, make, *args, **kwargs):
    """Asserts that `fit` does the same to both; returns them."""
    ours, theirs = twins(strategy, make)
    histories = []
    for model in (ours, theirs):
        keras.utils.set_random_seed(2)
        histories.append(model.fit(*(args or (X, Y)), **FIT | {"epochs": 2} | kwargs).history)
    same(*histories)
    same_state(ours, theirs)
    return ours, theirs


class Raising(keras.callbacks.Callback):
    """Raises after a step of `kind`, and remembers the state of the model then."""

    def __init__(self, kind, at, error=ZeroDivisionError):
        super().__init__()
        self._at, self._error, self.state = at, error, None
        setattr(self, f"on_{kind}_batch_end", self._raise)

    def _raise(self, batch, logs=None):
        if batch == self._at:
            self.state = state(self.model)
            raise self._error


def failing_after(count, error=ZeroDivisionError):
    for i in range(count):
        yield X[i * 4 : i * 4 + 4], Y[i * 4 : i * 4 + 4]
    raise error
