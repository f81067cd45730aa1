"""What Keras's trainer is fed with, on two replicas: kinds of data, nests, weights, and data that it refuses.

Every test compares a model of the strategy with its twin in Keras's hands, or with NumPy. Not held, and why:

- Datasets of tf.data and torch need libraries that are optional: their tests are in `tests/sources`.
- PyDataset with `use_multiprocessing`: Keras itself leaves it out with JAX.
- Adapters that divide rows among processes: the strategy does that.
"""

import collections
import functools

import grain
import jax.experimental.sparse
import jax.numpy as jnp
import keras
import numpy as np
import pytest
import scipy.sparse
from keras import layers
from keras_twins import (
    EVALUATE,
    FIT,
    KIND,
    RANDOM,
    WEIGHTS,
    Calls,
    X,
    Y,
    agree,
    agreeing,
    classes,
    compiled,
    history,
    linear,
    made,
    same,
    state_of,
    two_outputs,
)
from strategy_table import on

# Keras's own trainer warns where a generator ends, in some versions.
pytestmark = [on("mirrored_x2"), pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")]

CLASS_WEIGHTS = {0: 0.5, 2: 3.0}
QUIET = {"shuffle": False, "verbose": 0}


class Batches(keras.utils.PyDataset):
    """Three batches, the last one short; it counts its epochs."""

    def __init__(self, targets=Y, **kwargs):
        super().__init__(**kwargs)
        self._targets, self.epochs = targets, 0

    def __len__(self):
        return 3

    def __getitem__(self, index):
        rows = slice(8 * index, min(8 * index + 8, 21))
        return X[rows], self._targets[rows]

    def on_epoch_end(self):
        self.epochs += 1


class Endless(Batches):
    """The same batches over and over."""

    num_batches = None
    __len__ = None

    def __getitem__(self, index):
        return super().__getitem__(index % 3)


def some(*sizes, rows=(X, Y)):
    """Yields batches of these sizes, once."""
    first = 0
    for size in sizes:
        yield tuple(a[first : first + size] for a in rows)
        first += size


class Records:
    """Rows for Grain."""

    def __len__(self):
        return 21

    def __getitem__(self, index):
        return X[index], Y[index]


def loader():
    """Grain's DataLoader."""
    sampler = grain.samplers.SequentialSampler(21, grain.sharding.NoSharding())
    return grain.DataLoader(
        data_source=Records(), sampler=sampler, operations=[grain.transforms.Batch(8)], worker_count=0
    )


KINDS = {
    "numpy": lambda _: (X, Y),
    "jax": lambda _: (jnp.asarray(X), jnp.asarray(Y)),
    "float64": lambda _: (X.astype("float64"), Y.astype("float64")),
    "py_dataset": lambda _: (Batches(),),
    "workers": lambda _: (Batches(workers=2, max_queue_size=3),),
    "generator": lambda _: (some(8, 8, 5),),
    "grain_map": lambda _: (grain.MapDataset.source(Records()).batch(8),),
    "grain_iter": lambda _: (grain.MapDataset.source(Records()).to_iter_dataset().batch(8),),
    "grain_loader": lambda _: (loader(),),
    "distributed": lambda strategy: (strategy.experimental_distribute_dataset(list(some(8, 8, 5))),),
}


@functools.cache
def trained_alone():
    """Returns what arrays make of a model in Keras's hands."""
    model = made(compiled())
    return model.fit(X, Y, **FIT).history, state_of(model)


@pytest.mark.cover(["kind"], {"numpy", "float64", "workers", "generator", "grain_map", "distributed"})
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_data(strategy, kind):
    """Each kind trains the model that arrays train in Keras's hands."""
    model, data = made(compiled(), strategy), KINDS[kind](strategy)
    fitted = model.fit(*data, **FIT if len(data) == 2 else QUIET).history
    same((fitted, state_of(model)), trained_alone())


@agreeing(compiled())
def test_epochs_of_a_dataset_of_batches(model):
    """It is read again in each epoch and told of its end; that of validation is read to its end."""
    data, calls = Batches(), Calls()
    given = {"validation_data": Batches(workers=2), "callbacks": [calls]}
    fitted = model.fit(data, **QUIET, epochs=3, **given).history
    assert data.epochs >= 3
    return fitted, calls.of("on_test_batch_end"), model.evaluate(data, verbose=0)


@agreeing(classes())
def test_dataset_without_an_end(model):
    """So many steps an epoch, with weights of classes too."""
    data = Endless(KIND)
    return model.fit(data, **QUIET, epochs=2, steps_per_epoch=4, class_weight=CLASS_WEIGHTS).history


def test_class_weights_of_a_dataset_of_batches(strategy):
    """Each row has the weight of its class, a class without one has 1; with workers Keras begins with the second batch."""
    ours, theirs = made(classes(), strategy), made(classes())
    fitted = ours.fit(Batches(KIND, workers=2), **QUIET, class_weight=CLASS_WEIGHTS).history
    same(fitted, theirs.fit(X, KIND, **FIT, class_weight=CLASS_WEIGHTS).history)
    same(ours.get_weights(), theirs.get_weights())


@pytest.mark.parametrize("bad", [{"sample_weight": WEIGHTS, "class_weight": CLASS_WEIGHTS}, {"class_weight": {"a": 1}}])
def test_class_weights_that_are_refused(strategy, bad):
    """With sample weights too, or not of a class: what Keras says."""
    message = said(lambda: made(classes()).fit(X, KIND, **FIT, **bad))
    assert said(lambda: made(classes(), strategy).fit(X, KIND, **FIT, **bad)) == message


def said(call):
    """Returns the message of the error that a call raises, None where it raises none."""
    try:
        call()
    except Exception as error:
        return type(error), str(error)
    return None


def test_class_weights_of_several_outputs(strategy):
    """Keras allows them for one output alone."""
    with pytest.raises(ValueError, match="single output"):
        made(compiled(two_outputs, loss=["mse", "mse"]), strategy).fit(X, [Y, X], **FIT, class_weight=CLASS_WEIGHTS)


@pytest.mark.cover(["k"], {4})
@pytest.mark.parametrize("k", [1, 4])
def test_generator_of_growing_batches(strategy, k):
    """A later batch may be larger than the first; Keras cannot stack them where four are one execution."""
    agree(strategy, compiled(), lambda m: m.fit(some(2, 4, 10), **QUIET).history, k=k)


@pytest.mark.parametrize("k", [1, 3])
def test_predict_keeps_the_order_of_uneven_batches(strategy, k):
    """Every row once, in order, whether batches can be grouped or not."""
    rows = np.arange(17, dtype="float32")
    identity = lambda: keras.Sequential([layers.Input(()), layers.Identity()])  # noqa: E731
    model = made(compiled(identity, steps_per_execution=k), strategy)
    same(model.predict(some(2, 2, 2, 3, 4, 2, 2, rows=(rows,)), verbose=0), rows)


def test_generator_that_ends(strategy):
    """One that ends with the first of two epochs: a warning says so."""
    model = made(compiled(), strategy)
    with pytest.warns(UserWarning, match="ended|ran out"):
        model.fit(some(8, 8, 5), **QUIET, epochs=2, steps_per_epoch=3)


def pooled():
    """A model of sequences of any length."""
    return keras.Sequential([layers.Input((None, 3)), layers.GlobalAveragePooling1D(), layers.Dense(2)])


SEQUENCES = [RANDOM.rand(rows, steps, 3).astype("float32") for rows, steps in ((4, 5), (4, 2), (3, 7))]


@agreeing(compiled(pooled))
def test_batches_of_different_lengths(model):
    """Sequences are as long as the longest of their batch."""
    predicted = model.predict(((x,) for x in SEQUENCES), verbose=0)
    batches = ((x, Y[4 * i : 4 * i + len(x)]) for i, x in enumerate(SEQUENCES))
    return predicted, model.fit(batches, **QUIET).history


SPARSE = {"scipy": scipy.sparse.csr_matrix, "jax": jax.experimental.sparse.BCOO.fromdense}


@pytest.mark.cover(["kind"], {"scipy"})
@pytest.mark.parametrize("kind", SPARSE)
def test_sparse_batches_train_from_a_generator(strategy, kind):
    """Matrices of SciPy and JAX, as a generator yields them."""

    def batches(*targets):
        return ((SPARSE[kind](X[i : i + 4]), *(y[i : i + 4] for y in targets)) for i in (0, 4, 8))

    agree(strategy, compiled(), lambda m: [m.fit(batches(Y), **QUIET).history, m.predict(batches(), verbose=0)])


class Adding(keras.Model):
    """Adds its inputs, whatever nest they are in."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(2)

    def call(self, inputs):
        return self.dense(sum(keras.tree.flatten(inputs)))


Pair = collections.namedtuple("Pair", ["first", "second"])


OUTPUTS = {
    "list": lambda a, b: [a, b],
    "tuple": lambda a, b: (a, b),
    "dict": lambda a, b: {"second": b, "first": a},
    "nested": lambda a, b: {"a": [a], "b": {"c": b}},
    "namedtuple": Pair,
}


@pytest.mark.parametrize("nest", OUTPUTS.values(), ids=OUTPUTS)
def test_nests_of_predictions(strategy, nest):
    """Outputs come in the nest in which the model returns them."""

    class Twice(keras.Model):
        def call(self, x):
            return nest(x, 2 * x)

    ours, theirs = (made(Twice, s) for s in (strategy, None))
    ours.steps_per_execution = 2
    predicted, expected = ours.predict(X, **EVALUATE), theirs.predict(X, **EVALUATE)
    same(predicted, expected)
    assert type(predicted) is type(expected)


def test_predictions_of_several_rows_for_each_row(strategy):
    class Flat(keras.Model):
        def call(self, x):
            return keras.ops.reshape(x, (-1, 1))

    same(made(Flat, strategy).predict(X, **EVALUATE), X.reshape(-1, 1))


def test_predictions_of_a_batch_beside_rows(strategy):
    """An output with a row per replica does not shorten the others."""
    with strategy.scope():
        x = keras.Input((2,))
        model = keras.Model(x, [keras.ops.mean(x, axis=0, keepdims=True), x])
    rows = np.arange(14, dtype="float32").reshape(7, 2)
    np.testing.assert_array_equal(model.predict(rows, batch_size=4, verbose=0)[1], rows)


def test_predict_of_one_row(strategy):
    """Of fewer rows than replicas, and of none on a batch."""
    model = made(linear, strategy)
    same(model.predict(X[:1], **EVALUATE), made(linear).predict(X[:1], **EVALUATE))
    assert model.predict_on_batch(X[:0]).shape == (0, 2)


@pytest.mark.parametrize("kind", ["float16", "bool"])
def test_dtypes_of_predictions(strategy, kind):
    class Cast(keras.Model):
        def call(self, x):
            return keras.ops.cast(x, kind)

    ours, theirs = (made(Cast, s).predict(X, **EVALUATE) for s in (strategy, None))
    assert ours.dtype == theirs.dtype
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.cover(["names"], {("a", "b")})
@pytest.mark.parametrize("names", [(), ("a", "b")], ids=["list", "dict"])
def test_sample_weights_of_each_output(strategy, names):
    """A list of weights for a list of outputs, a dict for a dict."""

    def nest(*values):
        return dict(zip(names, values, strict=True)) if names else list(values)

    losses, metrics = {"loss": nest("mse", "mae")}, {"weighted_metrics": nest(["mae"], ["mse"])}
    act = history(X, nest(Y, X), sample_weight=nest(WEIGHTS, 1 - WEIGHTS))
    agree(strategy, compiled(lambda: two_outputs(*names), **losses, **metrics), act)


def on_batch(model):
    nest = {"a": X, "b": (X, X)}
    return model.predict_on_batch(nest), model.train_on_batch(nest, Y), model.test_on_batch(nest, Y)


WEIGHTED = compiled(metrics=["mae"], weighted_metrics=["mse"])
# What makes a model, and what is done with it.
FORMS = {
    "classes_in_a_column": (classes(), history(X, KIND[:, None], class_weight=CLASS_WEIGHTS)),
    "weights_in_a_column": (WEIGHTED, history(X, Y, sample_weight=WEIGHTS[:, None])),
    "weights_of_bool": (WEIGHTED, history(X, Y, sample_weight=WEIGHTS > 0.5)),
    "rows_of_bytes": (compiled(), history((4 * X).astype("uint8"), Y)),
    "last_rows_for_validation": (
        compiled(),
        history(jnp.asarray(X), jnp.asarray(Y), validation_split=1 / 3, shuffle=True, epochs=2),
    ),
    "generator": (compiled(), lambda m: m.fit(some(8, 8, 5), **QUIET).history),
    "generator_of_shrinking_batches": (compiled(), lambda m: m.fit(some(8, 2), **QUIET).history),
    "generator_with_weights": (WEIGHTED, lambda m: m.fit(some(8, 8, 5, rows=(X, Y, WEIGHTS)), **QUIET).history),
    "tuple": (compiled(Adding), history((X, 2 * X), Y)),
    "nested": (compiled(Adding), history({"a": (X, {"c": 3 * X}), "b": [2 * X]}, Y)),
    "namedtuple": (compiled(Adding), history(Pair(X, 2 * X), Y)),
    "nest_on_a_batch": (compiled(Adding), on_batch),
    "predict_of_a_nest_before_anything_else": (Adding, lambda m: m.predict((X, {"b": X}), **EVALUATE)),
}


# One of each kind: targets, weights, validation, generators, nests.
COVER = ["classes_in_a_column", "weights_of_bool", "last_rows_for_validation", "generator_with_weights", "nested"]


@pytest.mark.cover(["make", "act"], [FORMS[name] for name in [*COVER, "nest_on_a_batch"]])
@pytest.mark.parametrize(("make", "act"), FORMS.values(), ids=FORMS)
def test_forms_of_data(strategy, make, act):
    agree(strategy, make, act)


REFUSED = {
    "rows": ((X, Y[:-1]), {}),
    "rows_of_weights": ((X, Y), {"sample_weight": WEIGHTS[:-2]}),
    "type": (("words",), {}),
    "targets_of_a_dataset": ((Batches(), Y), {}),
    "weights_of_a_dataset": ((Batches(),), {"sample_weight": WEIGHTS}),
    "targets_of_a_generator": ((some(8), Y), {}),
    "weights_of_a_generator": ((some(8),), {"sample_weight": WEIGHTS}),
    "split_of_a_dataset": ((Batches(),), {"validation_split": 0.2}),
    "empty_generator": ((some(),), {}),
    "lists_of_numbers": ((X.tolist(), Y), {}),
    "fewer_numbers": ((X[:, :2], Y), FIT),
    "more_targets": ((X, X), FIT),
    "more_dims": ((X[None], Y[None]), FIT),
}


@pytest.mark.parametrize(("args", "kwargs"), REFUSED.values(), ids=REFUSED)
def test_data_that_is_refused(strategy, args, kwargs):
    """With the error and the words of Keras."""
    theirs = said(lambda: made(compiled()).fit(*args, **QUIET | kwargs))
    ours = said(lambda: made(compiled(), strategy).fit(*args, **QUIET | kwargs))
    assert (ours[0], ours[1][:40]) == (theirs[0], theirs[1][:40])


@pytest.mark.parametrize(("method", "workers"), [("fit", 2), ("evaluate", 1), ("predict", 2)])
def test_an_error_of_the_dataset(strategy, method, workers):
    """It reaches the caller as it is."""

    class Failing(Batches):
        def __getitem__(self, index):
            if index == 2:
                raise RuntimeError("no such row")
            x, y = super().__getitem__(index)
            return (x,) if method == "predict" else (x, y)

    with pytest.raises(RuntimeError, match="no such row"):
        getattr(made(compiled(), strategy), method)(Failing(workers=workers), verbose=0)


def test_weights_survive_data_that_ends_in_an_error(strategy):
    """What was learned before an error of the generator stays, and the model trains on."""

    def failing():
        yield from some(8, 8)
        raise RuntimeError("no such row")

    def act(model):
        with pytest.raises(RuntimeError, match="no such row"):
            model.fit(failing(), **QUIET)
        return model.fit(X[:16], Y[:16], **FIT).history

    agree(strategy, compiled(linear), act)
