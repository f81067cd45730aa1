"""Steps of the user's own, and of Keras's, on one replica's rows."""

import functools

import jax
import keras
import numpy as np
import pytest
from keras import layers, ops
from twins import (
    CLASSES,
    FIT,
    SHORT,
    X,
    Y,
    alone,
    compiled,
    crossentropy,
    replicas,
    same,
    same_fit,
    same_state,
    twins,
    under,
)

import phalanx
from phalanx.errors import InputError, TraceError

pytestmark = pytest.mark.slow


class Base(keras.Model):
    def __init__(self, penalty=None):
        super().__init__()
        self.hidden = layers.Dense(6, activation="tanh")
        self.out = layers.Dense(CLASSES, kernel_regularizer=penalty)

    def call(self, x, training=False):
        return self.out(self.hidden(x))


class Taped(Base):
    """Trains with a tape, as a TensorFlow user writes it."""

    def train_step(self, data):
        x, y = data
        with phalanx.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(x=x, y=y, y_pred=y_pred)
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred)
        return {m.name: m.result() for m in self.metrics}


class Stateless(Base):
    """Trains as Keras's guide on JAX writes it."""

    def train_step(self, state, data):
        trainable, rest, optimizer, metrics = state
        x, y = data
        grad_fn = jax.value_and_grad(self.compute_loss_and_updates, has_aux=True)
        (_, (loss, y_pred, rest, metrics)), grads = grad_fn(
            trainable, rest, metrics, x, y, None, training=True, optimizer_variables=optimizer
        )
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, grads, trainable)
        logs, metrics = self._update_metrics_variables(metrics, loss, x, y, y_pred, None)
        return logs, (trainable, rest, optimizer, metrics)


class Calling(Base):
    """Calls Keras's own step and adds to its logs."""

    def train_step(self, state, data):
        logs, state = super().train_step(state, data)
        return logs | {"double": 2 * logs["loss"]}, state


class Overriding(Base):
    """Has a loss and a metric of its own."""

    def __init__(self):
        super().__init__()
        self.largest = keras.metrics.Mean(name="largest")

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return super().compute_loss(x, y, y_pred, sample_weight, training) + 0.01 * ops.sum(ops.square(self.out.kernel))

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        self.largest.update_state(ops.max(y_pred, -1))
        return super().compute_metrics(x, y, y_pred, sample_weight)


def test_overridden_methods_equal_one_device():
    """Each means on three replicas what it means on one device; these batches divide."""
    same_fit(replicas(3), compiled(Overriding, metrics=["accuracy"]), X[:90], Y[:90], batch_size=15)


@pytest.mark.cover(["k"], {4})
@pytest.mark.parametrize("k", [1, 4])
def test_train_step_with_a_tape(k):
    """The same step as Keras's own, whether or not the batches divide. `compute_loss` within a tape counts regularizers once."""
    l2 = keras.regularizers.L2(0.1)
    metrics = [keras.metrics.SparseCategoricalAccuracy]
    ours = under(replicas(4), compiled(lambda: Taped(l2), metrics=metrics, steps_per_execution=k))
    theirs = alone(compiled(lambda: Base(l2)))
    for model in (ours, theirs):
        model.fit(X, Y, **FIT, epochs=2)
    same_state(ours, theirs)


@pytest.mark.cover(["count"], {4})
@pytest.mark.parametrize(("model", "count", "k"), [(Stateless, 1, 1), (Calling, 2, 1), (Stateless, 4, 4)])
def test_stateless_train_step(model, count, k):
    """Keras's own style on JAX gives Keras's own numbers, whether or not the batches divide."""
    make = compiled(model, metrics=["accuracy"], optimizer=lambda: keras.optimizers.Adam(0.05))
    ours, theirs = twins(replicas(count), make)
    ours.compile(ours.optimizer, crossentropy(), metrics=["accuracy"], steps_per_execution=k)
    got, expected = (m.fit(X, Y, **FIT, epochs=2).history for m in (ours, theirs))
    same(got, expected)
    same_state(ours, theirs)


def test_stateless_train_step_of_a_layer_with_state(strategy):
    """Statistics of a synchronized BatchNormalization leave out the padding; seeds of Dropout are counted.

    Gradients are aggregated before a loss scale looks at them.
    """

    class Normal(Stateless):
        def __init__(self):
            super().__init__()
            self.normal, self.dropout = layers.BatchNormalization(synchronized=True), layers.Dropout(0.0)

        def call(self, x, training=False):
            return super().call(self.dropout(self.normal(x, training=training), training=training))

    scaled = lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))  # noqa: E731
    ours, theirs = twins(strategy, compiled(Normal, optimizer=scaled))
    for model in (ours, theirs):
        model(X[:1])
    theirs.set_weights(ours.get_weights())
    same(*(m.fit(X, Y, **FIT, epochs=2).history for m in (ours, theirs)))
    same_state(ours, theirs)


def test_stateless_train_step_without_the_optimizer(strategy):
    """Weights that only a replica's own gradients have changed are refused, and so are those that an evaluation changes."""

    class Descending(Base):
        def train_step(self, state, data):
            return {}, ([v * 0.9 for v in state[0]], *state[1:])

        def test_step(self, state, data):
            return self.train_step(state, data)

    model = under(strategy, compiled(Descending))
    with pytest.raises(TraceError, match=r"train_step\(state, data\) of Descending.*\n?.*HINT: .*stateless_apply"):
        model.fit(X, Y, **FIT)
    with pytest.raises(TraceError, match=r"test_step\(state, data\) of Descending"):
        model.evaluate(X, Y, verbose=0)


class Evaluated(Base):
    """Evaluates as Keras's guide on JAX writes it, and predicts the class."""

    def test_step(self, state, data):
        trainable, rest, metrics = state
        x, y = data
        _, (loss, y_pred, rest, metrics) = self.compute_loss_and_updates(trainable, rest, metrics, x, y, None)
        logs, metrics = self._update_metrics_variables(metrics, loss, x, y, y_pred, None)
        return logs, (trainable, rest, metrics)

    def predict_step(self, state, data):
        outputs, rest = super().predict_step(state, data)
        return ops.argmax(outputs, -1), rest


@pytest.mark.cover(["count"], {4})
@pytest.mark.parametrize(("count", "k"), [(2, 1), (4, 4)])
def test_stateless_test_step(count, k):
    """It sees each row once, and outputs of a prediction come in order."""
    ours = under(replicas(count), compiled(Evaluated, metrics=["accuracy"], steps_per_execution=k))
    theirs = alone(compiled(Evaluated, metrics=["accuracy"]))
    same(*(m.evaluate(X, Y, batch_size=16, verbose=0) for m in (ours, theirs)))
    same(*(m.predict(X, batch_size=16, verbose=0) for m in (ours, theirs)))


def test_own_logs_are_averaged_over_replicas(strategy):
    """What a `train_step` returns beside metrics is the mean of the replicas', each by its rows: four and three at last.

    `train_step` may reduce over the replicas. Python numbers, bools too, are what they are.
    """

    class Logging(Base):
        def train_step(self, data):
            context = phalanx.get_replica_context()
            total = context.all_reduce("SUM", ops.sum(data[0]))
            return {"replica": 1.0 * context.replica_id_in_sync_group, "total": total, "first": True}

    model = under(strategy, compiled(Logging))
    same(model.fit(X[:SHORT], Y[:SHORT], **FIT).history["replica"], [3 / 7])
    logs = model.fit(X[:16], Y[:16], **FIT).history
    same(logs["total"], [X[:16].sum()])
    assert logs["first"] == [True]


class Scored(Base):
    """Computes a score from the results of two metrics: in `compute_metrics`, or in its steps."""

    def __init__(self):
        super().__init__()
        self.right, self.sure = keras.metrics.Sum(name="right"), keras.metrics.Mean(name="sure")

    def score(self, y, y_pred):
        is_right = ops.equal(ops.argmax(y_pred, -1), ops.cast(y, "int32"))
        self.right.update_state(ops.cast(is_right, "float32"))
        self.sure.update_state(ops.max(y_pred, -1))
        return {"score": self.right.result() / (1 + self.sure.result() ** 2)}

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        return super().compute_metrics(x, y, y_pred, sample_weight) | self.score(y, y_pred)


class ScoredInSteps(Scored):
    """Steps of its own."""

    def train_step(self, data):
        x, y = data
        with phalanx.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(x=x, y=y, y_pred=y_pred)
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return self.score(y, y_pred)

    def test_step(self, data):
        return self.score(data[1], self(data[0]))


def scores_of(model, count):
    """The scores after each batch of a training, of which the last is short, and that of an evaluation."""
    ours, scores = under(replicas(count), compiled(model, metrics=["accuracy"])), []
    note = keras.callbacks.LambdaCallback(on_train_batch_end=lambda _, logs: scores.append(logs["score"]))
    ours.fit(X[:11], Y[:11], batch_size=4, shuffle=False, verbose=0, callbacks=[note])
    scores.append(ours.evaluate(X[:11], Y[:11], batch_size=4, verbose=0, return_dict=True)["score"])
    return scores


@functools.cache
def scores_of_one_device():
    return scores_of(Scored, 1)


@pytest.mark.parametrize("model", [Scored, ScoredInSteps])
def test_what_is_computed_from_metrics_is_that_of_one_device(model):
    """From their results over all replicas, although the last batch has three rows for two replicas."""
    found = scores_of(model, 2)
    same(found, scores_of_one_device())
    assert len(set(map(float, found))) > 1


def test_a_log_of_ones_own_has_the_name_of_a_metric(strategy):
    """It counts where the step leaves that metric alone."""

    class Plain(Taped):
        def train_step(self, data):
            with phalanx.GradientTape() as tape:
                loss = ops.mean(self(data[0]) ** 2)
            variables = self.trainable_variables
            self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
            return {"loss": loss}

    model = under(strategy, compiled(Plain))
    wanted = np.mean(np.asarray(model(X[:8])) ** 2)
    assert model.train_on_batch(X[:8], Y[:8], return_dict=True)["loss"] == pytest.approx(wanted, rel=1e-5)


class Rows(keras.metrics.Metric):
    """Counts rows. Its result is its variable, as in many programs for tf.keras."""

    def __init__(self):
        super().__init__(name="rows")
        self.count = self.add_weight(initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.count.assign_add(float(y_true.shape[0]))

    def result(self):
        return self.count


def test_result_of_a_metric_is_its_variable(strategy):
    """Keras alone fails with "Triggering `__jax_array__()` during abstractification"."""
    with strategy.scope():
        model = compiled(metrics=[Rows()])()
    assert model.fit(X[:7], Y[:7], batch_size=4, verbose=0).history["rows"] == [7]
    assert model.evaluate(X[:7], Y[:7], verbose=0, return_dict=True)["rows"] == 7


def test_loss_as_a_function(strategy):
    def distance(y_true, y_pred):
        return ops.mean(ops.square(ops.one_hot(ops.cast(y_true, "int32"), CLASSES) - y_pred), axis=-1)

    same_fit(strategy, compiled(loss=distance))


def test_compute_loss_outside_a_step(strategy):
    ours, theirs = twins(strategy, compiled())
    losses = [float(m.compute_loss(X[:9], Y[:9], m(X[:9]))) for m in (ours, theirs)]
    same(losses[0], losses[1])
    same(losses[0], float(crossentropy()(Y[:9], ours(X[:9]))))


class Averaging(Base):
    """Trains with the loss of a custom loop, as scripts for tf.distribute do."""

    def train_step(self, data):
        x, y = data
        losses = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
        with phalanx.GradientTape() as tape:
            loss = phalanx.nn.compute_average_loss(losses(y, self(x, training=True)))
            loss += phalanx.nn.scale_regularization_loss(self.losses)
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return {"mean": loss}


@pytest.mark.cover(["count"], {4})
@pytest.mark.parametrize("count", [1, 4])
def test_compute_average_loss_in_train_step(count):
    """Losses and gradients count once, as those of Keras's own step."""
    ours, theirs = under(replicas(count), compiled(lambda: Averaging("l2"))), alone(compiled(lambda: Base("l2")))
    for model in (ours, theirs):
        model.fit(X, Y, **FIT, epochs=2)
    same_state(ours, theirs)


@pytest.mark.cover(["count"], {2})
@pytest.mark.parametrize("count", [1, 2])
def test_means_of_ones_own(count):
    """Where the replicas divide the batches, the short one too, `ops.mean` and flattened rows mean what they do in Keras."""

    class Own(Base):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            flat = keras.losses.MeanSquaredError()(ops.ravel(ops.one_hot(y, CLASSES)), ops.ravel(y_pred))
            return ops.mean(ops.square(y_pred)) + flat

    same_fit(replicas(count), compiled(Own), X[:100], Y[:100])


class Counting(Base):
    """Its loss needs all rows, and counts them in variables of every kind."""

    def __init__(self):
        super().__init__()
        counts = [
            ("auto", "sum"),
            ("auto", "mean"),
            ("auto", "only_first_replica"),
            ("on_read", "sum"),
            ("on_read", "mean"),
        ]
        self.counts = [
            keras.Variable(0.0, trainable=False, synchronization=s, aggregation=a) for s, a in counts for _ in range(2)
        ]

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        for added, assigned in zip(self.counts[::2], self.counts[1::2], strict=True):
            added.assign_add(ops.sum(x))
            assigned.assign(assigned + ops.sum(x))
        return ops.mean(ops.square(y_pred)) + ops.mean(ops.std(y_pred, axis=0))


@pytest.mark.cover(["count"], {2})
@pytest.mark.parametrize("count", [1, 2])
def test_a_loss_of_all_rows_counts_them_once(count):
    """Each replica computes it, and the sum over the replicas of what it adds would be twice as large."""
    ours, theirs = same_fit(replicas(count), compiled(Counting), X[:100], Y[:100])
    same(*([float(v) for v in model.counts] for model in (ours, theirs)))


@pytest.mark.filterwarnings("ignore:the operations of a step that is executed eagerly")
def test_loss_of_other_rows_than_those_of_the_batch(strategy):
    """The loss of concatenated rows is that of one device, unless the step is not compiled: then it has padding."""

    class Doubling(Base):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            return crossentropy()(ops.concatenate([y, y]), ops.concatenate([y_pred, y_pred]))

    same_fit(strategy, compiled(Doubling), X[:7], Y[:7])
    with pytest.raises(InputError, match=r"a Keras loss of 8 rows: this batch is padded to 4 rows"):
        under(strategy, compiled(Doubling, run_eagerly=True)).fit(X[:7], Y[:7], **FIT)
