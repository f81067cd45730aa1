"""Trainings as plain data, how to draw them, and how to do one: under a strategy, in this process or in a worker; or in plain Keras.

The law of a drawn training: what adds up over rows is that of one device, and what does not is what each replica gives on its rows.
`Added` says both: in plain Keras it takes each replica's rows in turn.
"""

import contextlib

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from test_every_loss_and_metric import ARGUMENTS, every

import phalanx
from phalanx.errors import InputError

ROWS, WIDTH, CLASSES = 70, 3, 3
X = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype("float32")
CLASS = np.random.default_rng(1).integers(0, CLASSES, (ROWS, 1))
LABELS = {"classes": CLASS, "one hot": np.eye(CLASSES, dtype="float32")[CLASS[:, 0]]}
WEIGHTS = np.random.default_rng(2).uniform(0.5, 2, ROWS).astype("float32")
ops = keras.ops


class Penalty(keras.layers.Layer):
    """Adds a loss of its activations."""

    def call(self, x):
        self.add_loss(0.1 * ops.mean(ops.square(x)))
        return x


MODELS = {
    "mlp": lambda: [],
    # Statistics of the batch in the middle of the model, over all replicas.
    "normalized": lambda: [keras.layers.BatchNormalization(synchronized=True)],
    "penalized": lambda: [Penalty()],
    "folded": lambda: [keras.layers.Reshape((2, 2)), keras.layers.TimeDistributed(keras.layers.Dense(2)), FLATTEN()],
    "recurrent": lambda: [keras.layers.Reshape((2, 2)), keras.layers.Masking(0.1), keras.layers.SimpleRNN(4)],
}
"""The layers in the middle."""
FLATTEN = keras.layers.Flatten


def model_of(name):
    layers = [keras.layers.Dense(4, activation="tanh"), *MODELS[name]()]
    return keras.Sequential([keras.Input((WIDTH,)), *layers, keras.layers.Dense(CLASSES, activation="softmax")])


def one_hot(y):
    return y if y.shape[-1] == CLASSES else ops.one_hot(ops.reshape(ops.cast(y, "int32"), (-1,)), CLASSES)


DISTANCES = {
    "square": lambda y, p: ops.square(one_hot(y) - p),
    "smooth": lambda y, p: ops.logaddexp(one_hot(y) - p, p - one_hot(y)),
    "surprise": lambda y, p: -one_hot(y) * ops.log(p),
}
"""How far each output is from its label."""

ROW_FORMS = {
    "row": lambda d: ops.mean(d, axis=-1),
    "root": lambda d: ops.sqrt(ops.sum(d, axis=-1) + 0.1),
}
"""One value per row, of this row."""


def shares(values):
    """A softmax over the batch, of which Keras warns if the batch has one row."""
    return values / ops.sum(values)


FORMS = ROW_FORMS | {
    "softmin": lambda d: ops.logsumexp(ops.matmul(d, ops.transpose(d)), axis=-1),
    "mean": ops.mean,
    "sum": lambda d: ops.sum(d) / 8,
    "root of mean": lambda d: ops.sqrt(ops.mean(d) + 0.1),
    "mean of some": lambda d: (
        ops.sum(ops.where(d > 0.7, d, 0.0)) / ops.maximum(ops.sum(ops.cast(d > 0.7, d.dtype)), 1.0)
    ),
    "ratio": lambda d: ops.sum(d) / (1 + ops.sum(ops.square(d))),
    "hardest": lambda d: ops.mean(ops.sort(ops.mean(d, axis=-1))[ops.shape(d)[0] // 2 :]),
    "padded": lambda d: ops.mean(ops.pad(d, [[0, 1], [0, 0]])),
    "normalized": lambda d: ops.sum(shares(ops.exp(ops.sum(d, axis=-1))) * ops.mean(d, axis=-1)),
}
"""One value per row, of all rows, or one per batch."""


def function_of(form, distance):
    """A function that a user passes to `compile`, under a name of its own."""

    def fn(y, p):
        return FORMS[form](DISTANCES[distance](y, p))

    fn.__name__ = f"{form}_{distance}".replace(" ", "_")
    return fn


class Masked(keras.losses.Loss):
    """Leaves out rows of class 0."""

    def call(self, y, p):
        values = ops.mean(ops.square(one_hot(y) - p), axis=-1)
        keras.src.backend.set_keras_mask(values, one_hot(y)[:, 0] < 0.5)
        return values


ADDENDS = {
    "rows": lambda y, p, w: ops.shape(p)[0],
    "weights": lambda y, p, w: ops.sum(w),
    "moment": lambda y, p, w: ops.sum(w[:, None] * p**2),
    "hits": lambda y, p, w: ops.sum(w * (ops.argmax(p, -1) == ops.argmax(one_hot(y), -1))),
    "unweighted": lambda y, p, w: ops.sum(one_hot(y) * p),
    "ratio": lambda y, p, w: ops.sum(one_hot(y) * p) / ops.sum(p**2),
    "average": lambda y, p, w: ops.sum(w[:, None] * p**2) / ops.sum(w),
    "largest": lambda y, p, w: ops.max(p[:, 0]),
    "middle": lambda y, p, w: ops.sort(p[:, 0])[len(p) // 2],
    "first": lambda y, p, w: p[0, 0],
    "calls": lambda y, p, w: 1.0,
}
"""What a metric of a user adds to its state. The last of them do not add up over rows: in a loop, each replica has its own."""


LIMITS = {
    "largest": lambda state, y, p, w: ops.maximum(state, ops.max(p[:, 0])),
    "moving": lambda state, y, p, w: 0.9 * state + ops.std(w[:, None] * p),
    "sorted": lambda state, y, p, w: state + ops.sum(ops.sort(one_hot(y) * p, axis=0)[0]),
}


class Limit(keras.metrics.Metric):
    """Has another state after each batch, which is no sum."""

    def __init__(self, kind):
        super().__init__(name=f"limit_{kind}")
        self.after = LIMITS[kind]
        self.state = self.add_weight(name="state", initializer=keras.initializers.Constant(-2.0))

    def update_state(self, y, p, sample_weight=None):
        w = ops.ones(ops.shape(p)[:1]) if sample_weight is None else sample_weight
        self.state.assign(self.after(self.state, y, p, w))

    def result(self):
        return ops.copy(self.state)

    def reset_state(self):
        self.state.assign(-2.0)


class Added(keras.metrics.Metric):
    """Adds a number to its state; with `replicas`, one for the rows of each of them."""

    def __init__(self, addend, replicas=1):
        super().__init__(name=f"added_{addend}")
        self.addend, self.replicas = ADDENDS[addend], replicas
        self.total = self.add_weight(name="total", initializer="zeros")

    def update_state(self, y, p, sample_weight=None):
        w = ops.ones(ops.shape(p)[:1]) if sample_weight is None else sample_weight
        for part in parts_of(len(p), self.replicas):
            self.total.assign_add(self.addend(y[part], p[part], w[part]))

    def result(self):
        return ops.copy(self.total)


def parts_of(rows, replicas):
    """The rows of each replica that has some."""
    return [slice(x[0], x[-1] + 1) for x in np.array_split(np.arange(rows), replicas) if len(x)]


# Circle and CTC want other labels. The percentages of labels 0 are so large that they train nothing.
_LOSSES = {
    name: each
    for name, (each, _) in every(keras.losses, keras.losses.Loss, keras.losses.Loss).items()
    if name not in ("CTC", "Circle", "LossFunctionWrapper", "MeanAbsolutePercentageError")
}
_OTHER_METRICS = ("Accuracy", "IoU", "Mean", "MeanIoU", "MeanMetricWrapper", "Sum")
_METRICS = {
    name: each
    for name, (each, _) in every(keras.metrics, keras.metrics.Metric, keras.metrics.Metric).items()
    if name not in _OTHER_METRICS
}
# Outputs near one of two hundred thresholds may be above it on one device and below on two.
_FEW = {"num_thresholds": 6}
_THRESHOLDS = dict.fromkeys([name for name in _METRICS if name == "AUC" or "At" in name and name != "MeanAt"], _FEW)


def of_classes(name):
    return name.startswith("Sparse") or name == "CategoricalGeneralizedCrossEntropy"


KERAS_LOSSES = {
    "classes": [name for name in _LOSSES if of_classes(name)],
    "one hot": [name for name in _LOSSES if not of_classes(name)],
}
KERAS_METRICS = {
    "classes": [name for name in _METRICS if of_classes(name)],
    "one hot": [name for name in _METRICS if not of_classes(name)],
}
REDUCTIONS = ["sum_over_batch_size", "sum", "mean_with_sample_weight"]


def loss_of(kind, *which):
    if kind == "keras":
        return _LOSSES[which[0]](reduction=which[1])
    return Masked(reduction=which[0]) if kind == "masked" else function_of(*which)


def metric_of(replicas, kind, *which):
    if kind == "keras":
        (name,) = which
        return _METRICS[name](**ARGUMENTS.get(name, {}), **_THRESHOLDS.get(name, {}), name=name)
    if kind == "limit":
        return Limit(*which)
    return Added(which[0], replicas) if kind == "added" else function_of(*which)


def trainings(way, replicas=None):
    """The strategy of hypothesis that draws trainings: each a dict of plain data.

    Args:
      way: "fit" or "loop".
      replicas: draws the number of replicas. None for 1 to 5.
    """

    def of_labels(labels, weighted):
        # A weight of a row has no meaning for one number per batch, and makes R2Score divide by what should be 0.
        own = st.tuples(
            st.just("own"),
            st.sampled_from(sorted(ROW_FORMS if weighted else FORMS)),
            st.sampled_from(sorted(DISTANCES)),
        )
        of_rows = st.tuples(st.just("own"), st.sampled_from(sorted(ROW_FORMS)), st.sampled_from(sorted(DISTANCES)))
        losses, metrics = (
            [x for x in names[labels] if not (weighted and x in _OF_BATCHES)] for names in (KERAS_LOSSES, KERAS_METRICS)
        )
        # A loop has a weight for each row, and in Keras this metric takes one for each label only.
        metrics = [x for x in metrics if (way, x) != ("loop", "BinaryIoU")]
        reduction = st.sampled_from(REDUCTIONS)
        loss = st.one_of(
            st.tuples(st.just("keras"), st.sampled_from(losses), reduction),
            own,
            st.tuples(st.just("masked"), reduction),
        )
        metric = st.one_of(
            st.tuples(st.just("keras"), st.sampled_from(metrics)),
            own,
            st.tuples(st.just("added"), st.sampled_from(sorted(ADDENDS))),
        )
        of_fit = st.one_of(metric, st.tuples(st.just("limit"), st.sampled_from(sorted(LIMITS))))
        return st.fixed_dictionaries(
            {
                "way": st.just(way),
                "labels": st.just(labels),
                "weighted": st.just(weighted),
                # A penalty of activations is a mean over replicas in a loop.
                "model": st.sampled_from(sorted(MODELS.keys() - ({"penalized"} if way == "loop" else set()))),
                "loss": loss if way == "fit" else of_rows,
                "metrics": st.lists(
                    of_fit if way == "fit" else metric.filter(lambda x: x[0] != "own"),
                    unique=True,
                    min_size=1,
                    max_size=4,
                ),
                "alone": st.lists(st.sampled_from(sorted(FORMS)), unique=True, min_size=1, max_size=2)
                if way == "loop"
                else st.none(),
                "rows": st.integers(0, ROWS),
                "batch_size": st.integers(1, 40),
                "replicas": st.integers(1, 5) if replicas is None else replicas,
                "steps": st.sampled_from([1, 1, 3]),
                "accumulated": st.sampled_from([None, None, 2]) if way == "fit" else st.none(),
            }
        )

    drawn = st.tuples(st.sampled_from(sorted(LABELS)), st.booleans()).flatmap(lambda x: of_labels(*x))
    # One row alone is normalized to 0. All classes are equal then, and rounding decides which is among the best two.
    clear = drawn.filter(
        lambda x: x["model"] != "normalized" or 1 not in (x["batch_size"], x["rows"] % x["batch_size"])
    )
    return clear.filter(lambda x: x["rows"] / x["batch_size"] < 8)


_OF_BATCHES = ("Dice", "Tversky", "R2Score", "PearsonCorrelation", "ConcordanceCorrelation")


def optimizer_of(drawn, **options):
    """The optimizer of a training. A sum takes smaller steps, so that no softmax saturates: Keras clips its result then, and Phalanx uses the logits."""
    return keras.optimizers.SGD(0.005 if "sum" in drawn["loss"] else 0.1, **options)


def fit(strategy, drawn):
    """Fits, evaluates and predicts. Returns what the user sees.

    Args:
      strategy: the strategy. None for plain Keras.
      drawn: the training.
    """
    keras.utils.set_random_seed(3)
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        model = model_of(drawn["model"])
        metrics = [metric_of(1, *each) for each in drawn["metrics"]]
        optimizer = optimizer_of(drawn, gradient_accumulation_steps=drawn["accumulated"])
        model.compile(optimizer, loss_of(*drawn["loss"]), metrics=metrics, steps_per_execution=drawn["steps"])
    rows, batch_size = drawn["rows"], drawn["batch_size"]
    x, y = X[:rows], LABELS[drawn["labels"]][:rows]
    weights = WEIGHTS[:rows] if drawn["weighted"] else None
    history = model.fit(x, y, batch_size=batch_size, epochs=2, shuffle=False, sample_weight=weights, verbose=0).history
    some = rows // 2 + 1
    scores = model.evaluate(x[:some], y[:some], batch_size=ROWS, return_dict=True, verbose=0)
    return {
        **history,
        **{f"test {name}": score for name, score in scores.items()},
        "predictions": model.predict(x, batch_size=batch_size, verbose=0),
        "weights": model.get_weights(),
    }


def loop(strategy, drawn):
    """Trains by a custom loop. Returns losses, outputs, metrics and weights, and what each replica with rows computes alone.

    Args:
      strategy: the strategy.
      drawn: the training.
    """
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = model_of(drawn["model"])
        metrics = [metric_of(1, *each) for each in drawn["metrics"]]
        optimizer = optimizer_of(drawn)
    loss_fn, data = loss_of(*drawn["loss"]), data_of(drawn)

    def step(x, y, w):
        with phalanx.GradientTape() as tape:
            p = model(x, training=True)
            loss = phalanx.nn.compute_average_loss(loss_fn(y, p), sample_weight=w)
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        for metric in metrics:
            metric.update_state(y, p, sample_weight=w)
        values = {form: FORMS[form](DISTANCES["square"](y, p)) for form in drawn["alone"]}
        return loss, p, (phalanx.get_replica_context().replica_id_in_sync_group, values)

    losses, outputs, alone = [], [], {}
    batches = strategy.experimental_distribute_dataset(data, batch_size=drawn["batch_size"])
    for number, batch in enumerate(batches):
        loss, p, each = strategy.run(step, args=batch)
        losses.append(strategy.reduce("SUM", loss, axis=None))
        outputs.append(strategy.gather(p, axis=0))
        rows = map(len, strategy.experimental_local_results(p))
        locals_ = strategy.experimental_local_results(each)
        alone |= {(number, int(i)): values for (i, values), count in zip(locals_, rows, strict=True) if count}
    return arrays_of(losses, outputs, alone, metrics, model)


def loop_of_one_device(drawn):
    """The same in plain JAX and Keras."""
    keras.utils.set_random_seed(3)
    model = model_of(drawn["model"])
    metrics = [metric_of(drawn["replicas"], *each) for each in drawn["metrics"]]
    loss_fn, data, batch_size = loss_of(*drawn["loss"]), data_of(drawn), drawn["batch_size"]

    @jax.jit
    def step(trained, others, x, y, w):
        def loss_of_trained(trained):
            p, after = model.stateless_call(trained, others, x, training=True)
            return jnp.mean(w * loss_fn(y, p)), (p, after)

        (loss, (p, after)), gradients = jax.value_and_grad(loss_of_trained, has_aux=True)(trained)
        parts = parts_of(len(p), drawn["replicas"])
        alone = [{form: FORMS[form](DISTANCES["square"](y[i], p[i])) for form in drawn["alone"]} for i in parts]
        return loss, p, alone, [v - 0.1 * g for v, g in zip(trained, gradients, strict=True)], after

    losses, outputs, alone = [], [], {}
    for number, start in enumerate(range(0, drawn["rows"], batch_size)):
        x, y, w = (each[start : start + batch_size] for each in data)
        groups = (model.trainable_variables, model.non_trainable_variables)
        loss, p, each, *after = step(*([v.value for v in group] for group in groups), x, y, w)
        for variable, value in zip([v for group in groups for v in group], [x for y in after for x in y], strict=True):
            variable.assign(value)
        losses, outputs = [*losses, loss], [*outputs, p]
        alone |= {(number, i): values for i, values in enumerate(each)}
        for metric in metrics:
            metric.update_state(y, p, sample_weight=w)
    return arrays_of(losses, outputs, alone, metrics, model)


def data_of(drawn):
    """Rows, labels and weights."""
    weights = WEIGHTS if drawn["weighted"] else np.ones_like(WEIGHTS)
    return tuple(x[: drawn["rows"]] for x in (X, LABELS[drawn["labels"]], weights))


def arrays_of(losses, outputs, alone, metrics, model):
    """What a loop has given, so that it can be sent to another process."""
    # Some metrics of Keras have no result before the first batch.
    values = {metric.name: metric.result() for metric in metrics} if losses else {}
    found = {"losses": losses, "outputs": outputs, **values, "weights": model.get_weights(), "alone": alone}
    return jax.tree.map(np.asarray, found)


KERAS_WARNS = [
    pytest.mark.filterwarnings("ignore:You are passing weight as `float`"),
    pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64"),
    pytest.mark.filterwarnings("ignore:The states that the metric"),
]
"""Marks of the tests: Keras's IoU metrics count in integers, and say so if the rows have weights. In loops, what does not add up is warned of."""


def assert_law(drawn, call):
    """Asserts the law of a drawn training.

    Args:
      drawn: the training.
      call: calls one of the functions above with a strategy and the training.
    """
    if drawn["way"] == "loop":
        assert_same(call(loop), loop_of_one_device(drawn))
    elif drawn["rows"]:
        assert_same(call(fit), fit(None, drawn))
    else:
        with pytest.raises(InputError, match="data without rows"):
            call(fit)


def assert_same(found, expected):
    """Asserts that both nests have the same numbers."""
    assert list(found) == list(expected)
    for name, values in expected.items():
        for ours, theirs in zip(jax.tree.leaves(found[name]), jax.tree.leaves(values), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=5e-4, atol=2e-5, err_msg=name)
