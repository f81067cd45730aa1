"""Steps of the user's own, and of Keras's, on one replica's rows."""

import jax
import keras
import numpy as np
import pytest
from keras import layers, ops
from twins import (
    CLASSES,
    FIT,
    X,
    Y,
    alone,
    compiled,
    crossentropy,
    mlp,
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
    """Two layers."""

    def __init__(self, penalty=None):
        super().__init__()
        self.hidden = layers.Dense(6, activation="tanh")
        self.out = layers.Dense(CLASSES, kernel_regularizer=penalty)

    def call(self, x, training=False):
        """Logits."""
        return self.out(self.hidden(x))


class Taped(Base):
    """Trains with a tape, as a TensorFlow user writes it."""

    def train_step(self, data):
        """One step."""
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
        """One step."""
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
        """One step."""
        logs, state = super().train_step(state, data)
        return logs | {"double": 2 * logs["loss"]}, state


class Penalized(Base):
    """Has a loss of its own."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        """Keras's loss and a penalty."""
        return super().compute_loss(x, y, y_pred, sample_weight, training) + 0.01 * ops.sum(ops.square(self.out.kernel))


class Measured(Base):
    """Has a metric of its own."""

    def __init__(self):
        super().__init__()
        self.largest = keras.metrics.Mean(name="largest")

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        """Keras's metrics and the mean largest output."""
        self.largest.update_state(ops.max(y_pred, -1))
        return super().compute_metrics(x, y, y_pred, sample_weight)


class Evaluated(Base):
    """Evaluates as Keras's guide on JAX writes it."""

    def test_step(self, state, data):
        """One step."""
        trainable, rest, metrics = state
        x, y = data
        _, (loss, y_pred, rest, metrics) = self.compute_loss_and_updates(trainable, rest, metrics, x, y, None)
        logs, metrics = self._update_metrics_variables(metrics, loss, x, y, y_pred, None)
        return logs, (trainable, rest, metrics)


class Predicting(Base):
    """Predicts the class."""

    def predict_step(self, state, data):
        """One step."""
        outputs, rest = super().predict_step(state, data)
        return ops.argmax(outputs, -1), rest


@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("rows", [96, 103])
def test_train_step_with_a_tape(k, rows):
    """The same step as Keras's own, whether or not the batches divide."""
    ours = under(replicas(3), compiled(Taped, metrics=[keras.metrics.SparseCategoricalAccuracy], steps_per_execution=k))
    theirs = alone(compiled(Base))
    ours.fit(X[:rows], Y[:rows], **FIT, epochs=2)
    theirs.fit(X[:rows], Y[:rows], **FIT, epochs=2)
    same_state(ours, theirs)


@pytest.mark.parametrize("model", [Stateless, Calling])
@pytest.mark.parametrize(("count", "k"), [(1, 1), (2, 1), (3, 4)])
def test_stateless_train_step(model, count, k):
    """Keras's own style on JAX gives Keras's own numbers, whether or not the batches divide."""
    make = compiled(model, metrics=["accuracy"], optimizer=lambda: keras.optimizers.Adam(0.05))
    ours, theirs = twins(replicas(count), make)
    ours.compile(ours.optimizer, crossentropy(), metrics=["accuracy"], steps_per_execution=k)
    got, expected = (m.fit(X, Y, **FIT, epochs=2).history for m in (ours, theirs))
    # What is no metric is the mean of what the replicas return, and not all have as many rows.
    same(got.pop("double", []), expected.pop("double", []), rtol=1e-2)
    same(got, expected)
    same_state(ours, theirs)


def test_stateless_train_step_of_a_layer_with_state(strategy):
    """Statistics of a synchronized BatchNormalization leave out the padding; seeds of Dropout are counted."""

    class Normal(Stateless):
        def __init__(self):
            super().__init__()
            self.normal, self.dropout = layers.BatchNormalization(synchronized=True), layers.Dropout(0.0)

        def call(self, x, training=False):
            return super().call(self.dropout(self.normal(x, training=training), training=training))

    with strategy.scope():
        ours = compiled(Normal)()
    theirs = compiled(Normal)()
    for model in (ours, theirs):
        model(X[:1])
    theirs.set_weights(ours.get_weights())
    same(*(m.fit(X, Y, **FIT, epochs=2).history for m in (ours, theirs)))
    same_state(ours, theirs)


def test_stateless_train_step_with_loss_scaling(strategy):
    """The gradients are aggregated before they are looked at."""
    same_fit(
        strategy, compiled(Stateless, optimizer=lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)))
    )


def test_stateless_train_step_without_the_optimizer(strategy):
    """Weights that only a replica's own gradients have changed are refused."""

    class Descending(Base):
        def train_step(self, state, data):
            return {}, ([v * 0.9 for v in state[0]], *state[1:])

    with pytest.raises(TraceError, match=r"train_step\(state, data\) of Descending.*\n?.*HINT: .*stateless_apply"):
        under(strategy, compiled(Descending)).fit(X, Y, **FIT)


def test_stateless_test_step_that_trains(strategy):
    """So are weights that an evaluation changes."""

    class Training(Base):
        def test_step(self, state, data):
            return {}, ([v * 0.9 for v in state[0]], *state[1:])

    with pytest.raises(TraceError, match=r"test_step\(state, data\) of Training"):
        under(strategy, compiled(Training)).evaluate(X, Y, verbose=0)


@pytest.mark.parametrize("count", [2, 3])
def test_stateless_test_step(count):
    """It sees each row once."""
    ours, theirs = twins(replicas(count), compiled(Evaluated, metrics=["accuracy"]))
    same(*(m.evaluate(X, Y, batch_size=16, verbose=0) for m in (ours, theirs)))


@pytest.mark.parametrize("k", [1, 4])
def test_stateless_predict_step(k):
    """Its outputs come in order."""
    ours, theirs = under(replicas(3), compiled(Predicting, steps_per_execution=k)), alone(compiled(Predicting))
    same(*(m.predict(X, batch_size=16, verbose=0) for m in (ours, theirs)))


@pytest.mark.parametrize("model", [Penalized, Measured])
def test_overridden_methods_equal_one_device(model):
    """Each means on three replicas what it means on one device; these batches divide."""
    same_fit(replicas(3), compiled(model, metrics=["accuracy"]), X[:90], Y[:90], batch_size=15)


def test_own_logs_are_averaged_over_replicas(strategy):
    """What a `train_step` returns beside metrics is the mean of the replicas', each by its rows: four and three at last."""

    class Logging(Base):
        def train_step(self, data):
            context = phalanx.get_replica_context()
            return {"replica": 1.0 * context.replica_id_in_sync_group}

    history = under(strategy, compiled(Logging)).fit(X, Y, **FIT).history
    same(history["replica"], [3 / 7])


def test_a_log_of_ones_own_has_the_name_of_a_metric(strategy):
    """It counts where the step leaves that metric alone."""

    class Plain(Taped):
        def train_step(self, data):
            with phalanx.GradientTape() as tape:
                loss = ops.mean(self(data[0]) ** 2)
            variables = self.trainable_variables
            self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
            return {"loss": loss}

    with strategy.scope():
        model = Plain()
        model(X[:8])
        model.compile("sgd")
        wanted = np.mean(np.asarray(model(X[:8])) ** 2)
    assert model.train_on_batch(X[:8], Y[:8], return_dict=True)["loss"] == pytest.approx(wanted, rel=1e-5)


def test_replica_context_in_train_step(strategy):
    """`train_step` may reduce over the replicas."""

    class Reducing(Base):
        def train_step(self, data):
            total = phalanx.get_replica_context().all_reduce("SUM", ops.sum(data[0]))
            return {"total": total}

    history = under(strategy, compiled(Reducing)).fit(X[:16], Y[:16], **FIT).history
    same(history["total"], [X[:16].sum()])


def test_tape_sees_the_losses_of_layers(strategy):
    """`compute_loss` within a tape counts regularizers once."""

    l2 = keras.regularizers.L2(0.1)
    ours, theirs = under(strategy, compiled(lambda: Taped(l2))), alone(compiled(lambda: Base(l2)))
    for model in (ours, theirs):
        model.fit(X[:96], Y[:96], **FIT)
    same(ours.get_weights(), theirs.get_weights())


def test_loss_as_a_function(strategy):
    """A loss that is a function of one's own is averaged over the rows."""

    def distance(y_true, y_pred):
        return ops.mean(ops.square(ops.one_hot(ops.cast(y_true, "int32"), CLASSES) - y_pred), axis=-1)

    def make():
        model = mlp()
        model.compile(keras.optimizers.SGD(0.1), distance)
        return model

    ours, theirs = twins(strategy, make)
    same(*(m.fit(X, np.squeeze(Y), **FIT).history for m in (ours, theirs)))
    same_state(ours, theirs)


def test_compute_loss_outside_a_step(strategy):
    """A model under a strategy still computes with arrays outside its steps."""
    ours, theirs = twins(strategy, compiled())
    losses = [float(m.compute_loss(X[:9], Y[:9], m(X[:9]))) for m in (ours, theirs)]
    same(losses[0], losses[1])
    same(losses[0], float(crossentropy()(Y[:9], ours(X[:9]))))


class Averaging(Base):
    """Trains with the loss of a custom loop, as scripts for tf.distribute do."""

    def train_step(self, data):
        """One step."""
        x, y = data
        losses = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
        with phalanx.GradientTape() as tape:
            loss = phalanx.nn.compute_average_loss(losses(y, self(x, training=True)))
            loss += phalanx.nn.scale_regularization_loss(self.losses)
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return {"mean": loss}


@pytest.mark.parametrize("count", [1, 2, 3])
def test_compute_average_loss_in_train_step(count):
    """Losses and gradients count once, as those of Keras's own step."""
    make = lambda model: compiled(lambda: model("l2"))  # noqa: E731
    ours, theirs = under(replicas(count), make(Averaging)), alone(make(Base))
    ours.fit(X, Y, **FIT, epochs=2)
    theirs.fit(X, Y, **FIT, epochs=2)
    same_state(ours, theirs)


@pytest.mark.parametrize("count", [1, 2])
def test_means_of_ones_own(count):
    """Where the replicas divide the batches, the short one too, `ops.mean` and flattened rows mean what they do in Keras."""

    class Own(Base):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            flat = keras.losses.MeanSquaredError()(ops.ravel(ops.one_hot(y, CLASSES)), ops.ravel(y_pred))
            return ops.mean(ops.square(y_pred)) + flat

    same_fit(replicas(count), compiled(Own), X[:100], Y[:100])


def test_loss_of_other_rows_than_those_of_a_padded_batch(strategy):
    """The error says what does not fit."""

    class Doubling(Base):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            return crossentropy()(ops.concatenate([y, y]), ops.concatenate([y_pred, y_pred]))

    with pytest.raises(InputError, match=r"a Keras loss of 8 rows: this batch is padded to 4 rows"):
        under(strategy, compiled(Doubling)).fit(X[:7], Y[:7], **FIT)
