"""Every loss and metric of Keras, and ones that users write, on replicas with different numbers of rows: that of all rows."""

import contextlib
import functools
import inspect

import jax
import keras
import numpy as np
import pytest

import phalanx
from phalanx._src.tracing import context

ROWS, CLASSES = 7, 3
RANDOM = np.random.default_rng(0)
SCORES = RANDOM.uniform(0.05, 0.95, (ROWS, CLASSES)).astype("float32")
PROBABILITIES = SCORES / SCORES.sum(1, keepdims=True)
CLASS = RANDOM.integers(0, CLASSES, ROWS)
ONE_HOT = np.eye(CLASSES, dtype="float32")[CLASS]
BINARY = RANDOM.integers(0, 2, (ROWS, CLASSES)).astype("float32")
IMAGES = np.broadcast_to(BINARY[:, None, :, None], (ROWS, 2, CLASSES, 1)).astype("float32")

ARGUMENTS = {
    "PrecisionAtRecall": {"recall": 0.5},
    "RecallAtPrecision": {"precision": 0.5},
    "SensitivityAtSpecificity": {"specificity": 0.5},
    "SpecificityAtSensitivity": {"sensitivity": 0.5},
    "IoU": {"num_classes": CLASSES, "target_class_ids": [0, 1]},
    "MeanIoU": {"num_classes": CLASSES},
    "OneHotIoU": {"num_classes": CLASSES, "target_class_ids": [0, 1]},
    "OneHotMeanIoU": {"num_classes": CLASSES},
    "FBetaScore": {"beta": 2.0},
    "MeanMetricWrapper": {"fn": keras.metrics.mean_squared_error},
    "TopKCategoricalAccuracy": {"k": 2},
    "SparseTopKCategoricalAccuracy": {"k": 2},
}
"""Arguments of those that need some."""

DATA = {
    "CTC": (RANDOM.integers(1, 4, (ROWS, 2)), np.log(RANDOM.uniform(0.1, 1, (ROWS, 6, 4))).astype("float32")),
    "Circle": (CLASS, SCORES),
    "CategoricalGeneralizedCrossEntropy": (CLASS, PROBABILITIES),
    "IoU": (CLASS, CLASS[::-1].copy()),
    "MeanIoU": (CLASS, CLASS[::-1].copy()),
    "Accuracy": (CLASS[:, None], CLASS[::-1, None].copy()),
    "Dice": (IMAGES, 0.8 * IMAGES[::-1] + 0.1),
    "Tversky": (IMAGES, 0.8 * IMAGES[::-1] + 0.1),
}
"""Labels and outputs of those that want others than the rest."""


def data_of(name):
    if name in DATA:
        return DATA[name]
    if name.startswith("Sparse"):
        return CLASS, PROBABILITIES
    return (ONE_HOT if name.startswith(("Categorical", "OneHot", "TopK", "F1", "FBeta")) else BINARY), PROBABILITIES


def every(module, kind, base):
    """All public classes of a module, with the arguments that they need."""
    classes = {name: each for name, each in vars(module).items() if inspect.isclass(each) and issubclass(each, kind)}
    return {name: (each, ARGUMENTS.get(name, {})) for name, each in classes.items() if each is not base}


def dice(y, p):
    return 1 - 2 * keras.ops.sum(y * p) / (keras.ops.sum(y) + keras.ops.sum(p))


class Ignoring(keras.losses.Loss):
    """Says itself which of its values count."""

    def call(self, y, p):
        values = keras.ops.mean(keras.ops.square(y - p), axis=-1)
        keras.src.backend.set_keras_mask(values, y[:, 0] > 0)
        return values


class Relative(keras.losses.MeanSquaredError):
    """Is derived from a loss of Keras, and compares each row with the others."""

    def call(self, y, p):
        values = super().call(y, p)
        return values**2 / keras.ops.mean(values)


class Weighted(keras.losses.Loss):
    """Gives rows the weights that are their first labels."""

    def __init__(self, fn, reduction="sum_over_batch_size"):
        super().__init__()
        self.loss = keras.src.losses.losses.LossFunctionWrapper(fn, reduction)

    def __call__(self, y, p):
        return self.loss(y, p, sample_weight=keras.ops.cast(y[:, 0], "float32"))


class OwnCall(keras.losses.Loss):
    """Replaces all that Keras does with a loss."""

    def __call__(self, y_true, y_pred, sample_weight=None):
        return keras.ops.sum(y_true * y_pred) / keras.ops.sum(keras.ops.square(y_pred))


LOSSES = every(keras.losses, keras.losses.Loss, keras.losses.Loss) | {
    "derived from Keras's": (Relative, {}),
    "columns of the batch": (lambda: keras.losses.CosineSimilarity(axis=0), {}),
    "classes over the batch": (lambda: keras.losses.CategoricalCrossentropy(axis=0), {}),
    "mean, weights": (lambda: Weighted(lambda y, p: keras.ops.mean(keras.ops.abs(y - p))), {}),
    "mean, sum of weights": (lambda: Weighted(lambda y, p: keras.ops.mean(keras.ops.abs(y - p)), "sum"), {}),
    "mean of the batch": (
        lambda: keras.src.losses.losses.LossFunctionWrapper(lambda y, p: keras.ops.mean(keras.ops.abs(y - p))),
        {},
    ),
    "sum of the batch": (
        lambda: keras.src.losses.losses.LossFunctionWrapper(lambda y, p: keras.ops.sum(keras.ops.abs(y - p))),
        {},
    ),
    "root of the batch": (
        lambda: keras.src.losses.losses.LossFunctionWrapper(lambda y, p: keras.ops.sqrt(keras.ops.mean((y - p) ** 2))),
        {},
    ),
    "dice of the batch": (lambda: keras.src.losses.losses.LossFunctionWrapper(dice), {}),
    "sum of Keras": (lambda: keras.losses.MeanSquaredError(reduction="sum"), {}),
    "own mask": (Ignoring, {}),
    "own call": (OwnCall, {}),
    "own mask, sum": (lambda: Ignoring(reduction="sum"), {}),
    "own mask, weights": (lambda: Ignoring(reduction="mean_with_sample_weight"), {}),
}


class Counting(keras.metrics.Metric):
    """Counts rows, and takes the largest, without weights."""

    def __init__(self):
        super().__init__(name="counting")
        self.rows = self.add_weight(name="rows", initializer="zeros")
        self.squares = self.add_weight(name="squares", initializer="zeros")

    def update_state(self, y, p):
        self.rows.assign_add(y.shape[0])
        self.squares.assign_add(keras.ops.sum(keras.ops.square(p)))

    def result(self):
        return self.squares / self.rows


class Updated(keras.metrics.Metric):
    """A state after each batch, which need not be a sum over rows.

    Args:
      after: returns the new state, given the one before, labels and outputs.
      first: the state before the first batch.
      shape: that of the state.
    """

    def __init__(self, after, first=0.0, shape=()):
        super().__init__(name="updated")
        self.after, self.first = after, first
        self.state = self.add_weight(shape=shape, initializer=keras.initializers.Constant(first), name="state")

    def update_state(self, y, p, sample_weight=None):
        self.state.assign(self.after(self.state, y, p))

    def result(self):
        return keras.ops.max(self.state)

    def reset_state(self):
        self.state.assign(keras.ops.full(self.state.shape, self.first))


class Centered(keras.metrics.MeanSquaredError):
    """Is derived from a metric of Keras, and subtracts the mean of the other rows."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        return super().update_state(y_true, y_pred - keras.ops.mean(y_pred, axis=0), sample_weight)


def counted(state, y, p):
    """How often each number of ones occurs, by an operation that is not known to keep rows apart."""
    ones = keras.ops.cast(keras.ops.sum(y, axis=1), "int32")
    return state + keras.ops.segment_sum(keras.ops.ones_like(p[:, 0]), ones, num_segments=CLASSES + 1)


UPDATES = {
    "largest": (lambda state, y, p: keras.ops.maximum(state, keras.ops.max(keras.ops.abs(y - p))),),
    "smallest": (lambda state, y, p: keras.ops.minimum(state, keras.ops.min(p)), 1e30),
    "calls": (lambda state, y, p: state + 1, 5.0),
    "sum of ratios": (lambda state, y, p: state + keras.ops.sum(y * p) / keras.ops.sum(p),),
    "moving average": (lambda state, y, p: 0.9 * state + 0.1 * keras.ops.mean(keras.ops.square(y - p)),),
    "last batch": (lambda state, y, p: keras.ops.sum(y * p),),
    "square of a sum": (lambda state, y, p: keras.ops.square(keras.ops.sqrt(state) + keras.ops.sum(p)),),
    "histogram": (counted, 0.0, (CLASSES + 1,)),
}
METRICS = every(keras.metrics, keras.metrics.Metric, keras.metrics.Metric) | {
    "derived from Keras's": (Centered, {}),
    "columns of the batch": (lambda: keras.metrics.CosineSimilarity(axis=0), {}),
    "correlations of columns": (lambda: keras.metrics.PearsonCorrelation(axis=0), {}),
    "counting": (Counting, {}),
    "sum of the batch": (lambda: keras.metrics.MeanMetricWrapper(lambda y, p: keras.ops.sum(y * p)), {}),
    "dice of the batch": (lambda: keras.metrics.MeanMetricWrapper(dice), {}),
    **{name: (functools.partial(Updated, *arguments), {}) for name, arguments in UPDATES.items()},
}


def arguments_of(name):
    """The arguments of `update_state`: `Mean` and `Sum` take values only."""
    y, p = data_of(name)
    return (p,) if name in ("Mean", "Sum") else (y, p)


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64", "ignore:invalid value encountered")
@pytest.mark.cover(["replicas"], [3])
@pytest.mark.parametrize("replicas", [2, 3, 8])
def test_losses_are_those_of_all_rows(replicas):
    """The weighted sum of what the replicas compute, as `fit` differentiates it."""
    losses = {name: make(**kwargs) for name, (make, kwargs) in LOSSES.items()}
    data = {name: data_of(name) for name in losses}
    on_one_device = jax.jit(lambda data: {name: loss(*data[name]) for name, loss in losses.items()})
    expected = {name: float(value) for name, value in on_one_device(data).items()}
    strategy = phalanx.MirroredStrategy([f"cpu:{i}" for i in range(replicas)])

    def replica(batch):
        with context.averaging():
            weight = phalanx.get_replica_context().weight
            return {name: loss(*batch[name]) * weight for name, loss in losses.items()}

    (batch,) = strategy.experimental_distribute_dataset(lambda: iter([data]))
    shares = strategy.run(replica, args=(batch,))
    found = {name: float(x) for name, x in strategy.reduce("SUM", shares, axis=None).items()}
    assert found == pytest.approx(expected, rel=1e-4, nan_ok=False)


def states_of(metrics):
    """The values of the variables of each metric."""
    return {name: [v.numpy() for v in metric.variables] for name, metric in metrics.items()}


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64")
@pytest.mark.cover(["replicas"], [3])
@pytest.mark.parametrize("replicas", [2, 3, 8])
def test_metrics_are_those_of_all_rows(replicas):
    """In `fit`, where a function of the batch is a mean over batches; after two batches."""
    make = lambda: {name: each(**kwargs) for name, (each, kwargs) in METRICS.items()}  # noqa: E731
    plain, data = make(), {name: arguments_of(name) for name in METRICS}
    for name in ("F1Score", "FBetaScore", "R2Score"):  # They make their variables when they see the first batch.
        plain[name].update_state(*data[name])
        plain[name].reset_state()

    @jax.jit
    def updated(states):
        return {name: metric.stateless_update_state(states[name], *data[name]) for name, metric in plain.items()}

    strategy = phalanx.MirroredStrategy([f"cpu:{i}" for i in range(replicas)])
    with strategy.scope():
        metrics = make()

    def replica(batch):
        with context.averaging():
            for name, metric in metrics.items():
                metric.update_state(*batch[name])

    for batch in strategy.experimental_distribute_dataset(lambda: iter([data, data])):
        strategy.run(replica, args=(batch,))
    # One program for all metrics: eager Keras compiles one for each operation.
    results = jax.jit(lambda states: {name: metric.stateless_result(states[name]) for name, metric in plain.items()})
    found, expected = results(states_of(metrics)), results(updated(updated(states_of(plain))))
    for name in METRICS:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-4, atol=1e-6, err_msg=name)


def mean_of_labelled(y, p):
    """The usual loss of fine-tuning: labels of -100 do not count."""
    real = keras.ops.cast(y != -100, "float32")
    each = keras.losses.sparse_categorical_crossentropy(keras.ops.maximum(y, 0), p, from_logits=True)
    return keras.ops.sum(each * real) / keras.ops.sum(real)


def share_of_labelled(y, p):
    """The same for one value per row, as a metric is."""
    real = keras.ops.cast(y != -100, "float32")
    return keras.ops.cast(keras.ops.argmax(p, axis=-1) == y, "float32") * real / keras.ops.mean(real)


@pytest.mark.cover(["count"], {3})
@pytest.mark.parametrize("count", [1, 2, 3])
def test_labels_that_no_sample_has(count):
    """Whether a function needs the rows of all replicas does not depend on values. One replica may have no label at all."""
    x = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
    results = []
    for scope in (phalanx.MirroredStrategy([f"cpu:{i}" for i in range(count)]).scope, contextlib.nullcontext):
        keras.utils.set_random_seed(0)
        with scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
            model.compile(keras.optimizers.SGD(0.1), mean_of_labelled, metrics=[share_of_labelled])
        history = model.fit(
            x, np.array([-100, -100, -100, 1, 0, 1, 2, 1]), batch_size=8, shuffle=False, verbose=0
        ).history
        few = model.evaluate(x, np.array([-100, -100, -100, -100, 0, 1, 2, 1]), batch_size=8, verbose=0)
        results.append([*history["loss"], *history["share_of_labelled"], *few, *np.ravel(model.get_weights()[0])])
    np.testing.assert_allclose(*results, rtol=1e-5, atol=1e-6)


@jax.custom_vjp
def centered_gradient(y, p):
    """An error per row. Its gradient is centered over the batch, as in losses that normalize what they send back."""
    return keras.ops.mean(keras.ops.square(y - p), axis=-1)


centered_gradient.defvjp(
    lambda y, p: (centered_gradient(y, p), p - y),
    lambda error, g: (None, g[:, None] * (error - keras.ops.mean(error, axis=0))),
)


def test_gradients_that_need_all_rows():
    """A loss gets all rows if the gradient that it defines depends on them, even if its values do not."""
    x = np.random.default_rng(0).normal(size=(16, 4)).astype("float32")
    results = []
    for scope in (phalanx.MirroredStrategy([f"cpu:{i}" for i in range(3)]).scope, contextlib.nullcontext):
        keras.utils.set_random_seed(0)
        with scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
            model.compile(keras.optimizers.SGD(0.1), centered_gradient)
        history = model.fit(x, np.sin(x[:, :2]), batch_size=8, epochs=2, shuffle=False, verbose=0).history
        results.append([*history["loss"], *np.ravel(model.get_weights()[0])])
    np.testing.assert_allclose(*results, rtol=1e-5, atol=1e-6)


OWN_LOSSES = {
    "sum": lambda x, y, each: keras.ops.sum(each) / 8,
    "ratio": lambda x, y, each: keras.ops.sum(each) / keras.ops.sum(keras.ops.abs(x)),
    "deviation": lambda x, y, each: keras.ops.std(each),
    "mean": lambda x, y, each: keras.ops.mean(each),
}


class OwnLoss(keras.Model):
    """Computes its loss itself: that of `compile`, a penalty, and one that may need all rows. It counts in a metric on the way."""

    def __init__(self, loss):
        super().__init__()
        self.dense = keras.layers.Dense(1, kernel_regularizer="l2")
        self.of_batch, self.total = loss, keras.metrics.Sum(name="total")

    def call(self, x):
        return self.dense(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        each = keras.ops.square(y - y_pred)[:, 0]
        self.total.update_state(keras.ops.abs(y - y_pred))
        return super().compute_loss(x, y, y_pred, sample_weight, training) + self.of_batch(x, y, each)


# One that is a mean over rows, and one that needs all rows.
@pytest.mark.cover(["name"], {"mean", "ratio"})
@pytest.mark.parametrize("name", OWN_LOSSES)
def test_losses_that_a_model_computes(name):
    """In `fit` and `evaluate`, with a short last batch."""
    x = np.random.default_rng(0).normal(size=(19, 3)).astype("float32")
    y = np.sin(x[:, :1])
    results = []
    for scope in (phalanx.MirroredStrategy([f"cpu:{i}" for i in range(3)]).scope, contextlib.nullcontext):
        keras.utils.set_random_seed(0)
        with scope():
            model = OwnLoss(OWN_LOSSES[name])
            model.compile(keras.optimizers.SGD(0.1), "mae")
        history = model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0).history
        scores = model.evaluate(x, y, batch_size=8, verbose=0, return_dict=True)
        results.append([*np.ravel([*history.values()]), *scores.values(), *np.ravel(model.dense.kernel)])
    np.testing.assert_allclose(*results, rtol=1e-5, atol=1e-6)


def fit_like_one_device(make, y):
    """Fits a model that computes its loss itself, on three replicas and in plain Keras."""
    x, results = np.random.default_rng(0).normal(size=(len(y), 4)).astype("float32"), []
    for scope in (phalanx.MirroredStrategy([f"cpu:{i}" for i in range(3)]).scope, contextlib.nullcontext):
        keras.utils.set_random_seed(0)
        with scope():
            model = make()
            model.compile(keras.optimizers.SGD(0.1))
        history = model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0).history
        results.append(np.concatenate([np.ravel(each) for each in (*history.values(), *model.get_weights())]))
    np.testing.assert_allclose(*results, rtol=1e-4, atol=1e-6)


class Assigning(keras.Model):
    """Its loss changes a variable: it adds to a queue, counts classes, moves centers or keeps a maximum."""

    def __init__(self, shape, loss):
        super().__init__()
        self.dense, self.loss_of = keras.layers.Dense(3), loss
        self.state = self.add_weight(shape=shape, initializer="ones", trainable=False)

    def call(self, x):
        return self.dense(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        each, state = self.loss_of(self.state.value, y, y_pred)
        self.state.assign(keras.ops.stop_gradient(state))
        return keras.ops.mean(each)


def against_queue(queue, y, p):
    return keras.ops.logsumexp(p @ keras.ops.transpose(queue), axis=1), keras.ops.concatenate([p, queue])[:16]


def by_counts(counts, y, p):
    each = keras.losses.sparse_categorical_crossentropy(y, p, from_logits=True)
    return keras.ops.take(1 / counts, y) * each, counts + keras.ops.sum(keras.ops.one_hot(y, 3), axis=0)


def to_centers(centers, y, p):
    classes, apart = keras.ops.one_hot(y, 3), p - keras.ops.take(centers, y, axis=0)
    moves = keras.ops.transpose(classes) @ apart / (1 + keras.ops.sum(classes, axis=0))[:, None]
    return keras.ops.sum(keras.ops.square(apart), axis=1), centers + 0.5 * moves


def by_maximum(largest, y, p):
    return keras.ops.sum(p, axis=1) / largest, keras.ops.maximum(largest, keras.ops.max(p))


ASSIGNING = {"queue": ((16, 3), against_queue), "counts": ((3,), by_counts), "centers": ((3, 3), to_centers)}
ASSIGNING["maximum"] = (), by_maximum


# One that adds up over rows, and one that does not.
@pytest.mark.cover(["name"], {"counts", "queue"})
@pytest.mark.parametrize("name", ASSIGNING)
def test_variables_that_a_loss_changes(name):
    """They have the values of one device, and so has what later batches compute from them."""
    fit_like_one_device(lambda: Assigning(*ASSIGNING[name]), np.arange(16) * 7 % 3)


class Autoencoder(keras.Model):
    """Keeps what its encoder returns, and its loss compares that with the labels row by row."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder, self.code = keras.layers.Dense(2), keras.layers.Dense(2), None

    def call(self, x):
        self.code = self.encoder(x)
        return self.decoder(self.code)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return keras.ops.mean(keras.ops.sum(square_of(y, y_pred) + keras.ops.square(self.code), axis=1))


def test_rows_that_a_loss_takes_from_the_model():
    """A replica has its own rows of them only, so the loss gets no rows of the others, and a warning says so."""
    with pytest.warns(phalanx.errors.SlipWarning, match="Autoencoder takes no other number of rows"):
        fit_like_one_device(Autoencoder, np.sin(np.arange(32.0).reshape(16, 2)))


def assert_like_one_device(layers, x, y, batch_size, **compiled):
    """Fits and evaluates on three replicas and in plain Keras."""
    results = []
    for scope in (phalanx.MirroredStrategy([f"cpu:{i}" for i in range(3)]).scope, contextlib.nullcontext):
        keras.utils.set_random_seed(0)
        with scope():
            model = keras.Sequential([keras.Input(x.shape[1:]), *layers()])
            model.compile(keras.optimizers.SGD(0.1), **{name: make() for name, make in compiled.items()})
        history = model.fit(x, y, batch_size=batch_size, epochs=2, shuffle=False, verbose=0).history
        scores = model.evaluate(x, y, batch_size=batch_size, verbose=0, return_dict=True)
        values = dict(sorted(history.items())).values(), dict(sorted(scores.items())).values(), model.get_weights()
        results.append(np.concatenate([np.ravel(value) for each in values for value in each]))
    np.testing.assert_allclose(*results, rtol=1e-4, atol=1e-6)


def square_of(y, p):
    return keras.ops.square(y - p)


FEW_OF_MANY = {
    "the first": (lambda y, p: keras.ops.mean(square_of(y[:16], p[:16])), 48, 60),
    "the largest": (lambda y, p: keras.ops.mean(keras.ops.top_k(square_of(y, p)[:, 0], 12)[0]), 48, 60),
    "two of a short batch": (lambda y, p: keras.ops.mean(keras.ops.top_k(square_of(y, p)[:, 0], 2)[0]), 8, 19),
    "half the number": (lambda y, p: keras.ops.sum(square_of(y, p)) / (y.shape[0] // 2), 20, 40),
}


@pytest.mark.cover(["name"], {"two of a short batch", "half the number"})
@pytest.mark.parametrize("name", FEW_OF_MANY)
def test_numbers_of_rows_that_decide(name):
    """A function may do with a batch what it does not do with the rows of a replica, as a loss and in a metric."""
    fn, batch_size, rows = FEW_OF_MANY[name]
    x = np.random.default_rng(0).normal(size=(rows, 4)).astype("float32")
    metrics = lambda: [Updated(lambda state, y, p: state + fn(y, p) * y.shape[0])]  # noqa: E731
    layers = lambda: [keras.layers.Dense(2)]  # noqa: E731
    assert_like_one_device(layers, x, np.sin(x[:, :2]), batch_size, loss=lambda: fn, metrics=metrics)


MASKED = {
    "mean": lambda y, p: keras.ops.mean(square_of(y, p)),
    "of all rows": lambda y, p: keras.ops.mean(square_of(y, p), axis=-1) / keras.ops.std(y - p),
}


@pytest.mark.cover(["name"], {"of all rows"})
@pytest.mark.parametrize("name", MASKED)
def test_masks_of_layers(name):
    """Rows that come from other replicas have their masks, and a replica may have nothing but masked steps."""
    x = np.random.default_rng(0).normal(size=(11, 5, 2)).astype("float32")
    x[np.arange(5) >= np.random.default_rng(1).integers(1, 6, (11, 1))] = 0
    x[-1] = 0
    metrics = lambda: [MASKED["of all rows"]]  # noqa: E731
    layers = lambda: [keras.layers.Masking(), keras.layers.SimpleRNN(2, return_sequences=True)]  # noqa: E731
    assert_like_one_device(layers, x, np.cos(x), 8, loss=lambda: MASKED[name], metrics=metrics)


def test_outputs_that_are_numbers():
    """Keras reduces the only dim, and counts each batch as one value. A function that returns one value per row counts rows."""
    x = np.random.default_rng(0).normal(size=(19, 4)).astype("float32")
    layers = lambda: [keras.layers.Dense(1), keras.layers.Reshape(())]  # noqa: E731
    metrics = lambda: ["mae", square_of, keras.metrics.MeanSquaredError(name="mse")]  # noqa: E731
    assert_like_one_device(layers, x, np.sin(x[:, 0]), 8, loss=lambda: "mse", metrics=metrics)
