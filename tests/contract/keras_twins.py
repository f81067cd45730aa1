"""A model on the replicas of a strategy and its twin, with the same weights, in the hands of Keras's own trainer."""

import functools
import inspect

import keras
import numpy as np
from keras import layers

RANDOM = np.random.RandomState(3)
X = RANDOM.rand(21, 3).astype("float32")
# Two numbers per row, and the class of a row.
Y = (X @ RANDOM.rand(3, 2)).astype("float32")
KIND = X.argmax(1)
WEIGHTS = RANDOM.rand(21).astype("float32")
# Rows of a mean of the user's own: no batch of them is padded.
EVEN = X[:16], Y[:16]
# Three batches, the last one of five rows.
FIT = {"batch_size": 8, "shuffle": False, "verbose": 0}
EVALUATE = {"batch_size": 8, "verbose": 0}
# Three batches of seven rows, which two replicas share unevenly: half as many programs, where a short batch shows nothing more.
SEVENS = FIT | {"batch_size": 7}
SEVENS_TESTED = EVALUATE | {"batch_size": 7}


def linear():
    """The smallest model of `X`, not compiled."""
    return keras.Sequential([layers.Input((3,)), layers.Dense(2, name="out")])


def sgd():
    """A large step, so that a wrong gradient shows."""
    return keras.optimizers.SGD(0.3, momentum=0.5)


def crossentropy():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def compiled(model=linear, optimizer=sgd, **given):
    """Returns what makes a model and compiles it.

    The optimizer, and each class in a list of metrics, is called for each model.
    """

    def make():
        lists = {
            key: [metric() if isinstance(metric, (type, functools.partial)) else metric for metric in given[key]]
            for key in {"metrics", "weighted_metrics"} & given.keys()
            if isinstance(given[key], list)
        }
        made = model()
        made.compile(**{"loss": "mse"} | given | lists, optimizer=optimizer() if callable(optimizer) else optimizer)
        return made

    return make


def classes(**given):
    """Returns what makes a model of `KIND`."""
    return compiled(lambda: keras.Sequential([layers.Input((3,)), layers.Dense(3)]), loss=crossentropy(), **given)


def two_outputs(*names):
    """Two outputs: in a list, or in a dict with these names. The names of their layers are others."""
    x = layers.Input((3,))
    outputs = [layers.Dense(2, name="two")(x), layers.Dense(3, name="three")(x)]
    return keras.Model(x, dict(zip(names, outputs, strict=True)) if names else outputs)


def made(make, strategy=None):
    """Returns the model with the weights that both twins have."""
    keras.utils.set_random_seed(1)
    if strategy is not None:
        with strategy.scope():
            return make()
    model = make()
    # Step by step, tests share their compiled operations: a twin takes a tenth of the time.
    model.jit_compile = False
    return model


def agree(strategy, make, act, *, k=1, state=True, compiles=False, **tolerance):
    """Asserts that `act(model)` returns the same of both twins and leaves them in the same state; returns them.

    The model of the strategy takes `k` steps per execution. `compiles` is for twins whose layers add losses: Keras tells these by
    their ids, which are used again from step to step, so that it misses one now and then if it runs step by step. And for twins
    with operations that few tests share: each of these would be a program.
    """
    models = made(make, strategy), made(make)
    models[0].steps_per_execution = k
    models[1].jit_compile = compiles
    results = []
    for model in models:
        keras.utils.set_random_seed(2)
        results.append(act(model))
    same(*results, **tolerance)
    if state:
        same(*map(state_of, models), **tolerance)
    return models


def agreeing(make, **options):
    """Makes a test of a function of a model, which may take fixtures too: it returns the same for both twins."""

    def decorate(act):
        def test(strategy, **fixtures):
            agree(strategy, make, lambda model: act(model, **fixtures), **options)

        model, *others = inspect.signature(act).parameters.values()
        test.__signature__ = inspect.Signature([model.replace(name="strategy"), *others])
        test.__name__, test.__qualname__, test.__module__ = act.__name__, act.__qualname__, act.__module__
        test.__doc__ = act.__doc__
        return test

    return decorate


def state_of(model):
    """Returns the values of its variables and of the optimizer's. Seeds count differently on replicas."""
    variables = [*model.variables, *(model.optimizer.variables if model.compiled else [])]
    return [v.numpy() for v in variables if "seed" not in v.path]


def same(ours, theirs, rtol=1e-4, atol=1e-6):
    """Asserts that two nests are equal: numbers nearly, everything else exactly, names in the same order."""
    keras.tree.assert_same_structure(ours, theirs)
    for a, b in zip(keras.tree.flatten(ours), keras.tree.flatten(theirs), strict=True):
        if isinstance(b, (str, bool, type(None))):
            assert a == b
        else:
            np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=rtol, atol=atol)


def history(*args, **kwargs):
    """Returns an act: `fit` on batches of seven rows, whose history it returns."""
    args = args or (X, Y)
    return lambda model: model.fit(*args, **SEVENS | kwargs).history


def everything(x, y, **kwargs):
    """Returns an act: two epochs of `fit`, `evaluate` both ways, `predict`."""

    def act(model):
        fitted = model.fit(x, y, **FIT, epochs=2, **kwargs).history
        tested = [model.evaluate(x, y, **EVALUATE, return_dict=d) for d in (False, True)]
        return fitted, tested, model.predict(x, **EVALUATE)

    return act


class Calls(keras.callbacks.Callback):
    """Writes down every call of a callback: its name, the number that it was given and the names of its logs."""

    def __init__(self):
        super().__init__()
        self.all, self.logs = [], []
        for what in ("train", "test", "predict", "train_batch", "test_batch", "predict_batch", "epoch"):
            for name in (f"on_{what}_begin", f"on_{what}_end"):
                setattr(self, name, self._noting(name))

    def _noting(self, name):
        def note(*args, logs=None):
            *number, given = (*args, logs) if logs is not None else args
            self.all.append((name, *number, *sorted(given or {})))
            if "outputs" not in (given or {}):
                self.logs.append({k: float(v) for k, v in (given or {}).items()})

        return note

    def of(self, *names):
        """Returns the calls of some names."""
        return [call for call in self.all if call[0] in names]
