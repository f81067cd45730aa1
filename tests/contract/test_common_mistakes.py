# SPDX-License-Identifier: Apache-2.0
"""What newcomers write first, and the line that they are told to write instead."""

import keras
import numpy as np
import pytest

import phalanx
from phalanx.errors import AggregationError, ContextError, InputError, InvalidArgumentError, TraceError


@pytest.fixture
def strategy():
    return phalanx.MirroredStrategy(["cpu:0", "cpu:1"])


def short_batch(strategy):
    """Five rows of four on two replicas: one row of padding."""
    return next(iter(strategy.experimental_distribute_dataset([np.arange(20, dtype="float32").reshape(5, 4)])))


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: 1.0 if phalanx.get_replica_context().replica_id_in_sync_group == 0 else 2.0,
        lambda x: float(keras.ops.sum(x)),
        lambda x: np.asarray(x),
        lambda x: list(range(x)),
    ],
    ids=["if", "float", "numpy", "range"],
)
def test_asking_for_a_value(strategy, fn):
    """A traced array has no value; the error says what has."""
    with pytest.raises(TraceError, match=r"the value of an array .*\nHINT: jnp.where"):
        strategy.run(fn, args=(3,))


def test_a_layer_made_in_the_step(strategy):
    """Its variables are new in each trace, also when the error passes through Keras."""
    with pytest.raises(TraceError, match="creates or uses another variable"):
        strategy.run(lambda x: keras.layers.Dense(2)(x), args=(np.ones((2, 3), "float32"),))


@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "mean"])
def test_a_loss_that_is_a_mean(strategy, reduction):
    """Gradients are summed over the replicas, so such a loss would count twice."""
    loss = keras.losses.MeanSquaredError(reduction=reduction)
    with pytest.raises(InvalidArgumentError, match=r'is a mean over one replica.*\nHINT: reduction="none"'):
        strategy.run(lambda x: loss(x, x), args=(np.ones((2, 3), "float32"),))
    assert float(phalanx.get_strategy().run(lambda x: loss(x, x + 1), args=(np.ones((2, 3), "float32"),))) == 1


def test_a_merge_function_that_closes_over_a_value(strategy):
    """Replicas never diverge: the first one's value is stored on all."""
    with strategy.scope():
        v = keras.Variable(1.0)

    def step():
        own = phalanx.get_replica_context().replica_id_in_sync_group + 5.0
        phalanx.get_replica_context().merge_call(lambda _: v.assign(v + own))

    strategy.run(step)
    assert [float(s.data) for s in v.value.addressable_shards] == [6, 6]


def test_the_remedy_for_a_refused_write(strategy):
    """The line of the hint works as it is printed."""
    with strategy.scope():
        variable = keras.Variable(1.0)

    def step():
        context = phalanx.get_replica_context()
        value = context.replica_id_in_sync_group * 2.0
        context.merge_call(lambda strategy, x: variable.assign(strategy.reduce("MEAN", x, axis=None)), args=(value,))

    strategy.run(step)
    assert float(variable.value) == 1


@pytest.mark.filterwarnings("ignore:the operations of a step that is executed eagerly")
def test_metrics_of_flattened_rows(strategy):
    """In a step that is not compiled, the mask of a short batch does not fit them, and padding is not counted silently."""
    with strategy.scope():
        mean = keras.metrics.Mean()
    step = lambda x: mean.update_state(keras.ops.reshape(x, (-1,)))  # noqa: E731
    with pytest.raises(InputError, match=r"padded to 3 rows, .*\nHINT: arrays whose dim 0"):
        strategy.run(step, args=(short_batch(strategy),), options=phalanx.RunOptions(eager=True))


@pytest.mark.parametrize("data", [(np.ones((4, 2)), np.ones(4)), {"x": np.ones((4, 2))}])
def test_a_forgotten_batch_size(strategy, data):
    """A tuple of arrays is no iterable of batches."""
    with pytest.raises(InputError, match=r"one pytree of all rows.*\nHINT: pass batch_size=64"):
        strategy.experimental_distribute_dataset(data)


@pytest.mark.parametrize("use", [float, int, lambda r: r + 1, lambda r: 2 * r, lambda r: r / 2])
def test_a_forgotten_reduce(strategy, use):
    """The result of run has one component a replica."""
    with pytest.raises(ContextError, match=r"a PerReplica used as an array.*\n?HINT: float\(strategy.reduce"):
        use(strategy.run(lambda x: x, args=(1.0,)))


def test_cross_device_ops_by_name():
    with pytest.raises(InvalidArgumentError, match="cross_device_ops='nccl': must be CrossDeviceOps"):
        phalanx.MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops="nccl")


def test_function_with_empty_parentheses():
    @phalanx.function()
    def step(x):
        return x + 1

    assert float(step(1.0)) == 2


class WithTape(keras.Sequential):
    """A step as tf.keras has it."""

    def train_step(self, data):
        x, y = data[:2]
        with phalanx.GradientTape() as tape:
            loss = keras.ops.mean((self(x) - y) ** 2)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


class WithLoop(WithTape):
    """One who calls that step from a loop of the user's own."""

    def make_train_function(self, force=False):
        """Returns no step at all."""
        self.train_function = lambda state, iterator: ({"loss": len(list(iterator))}, state)


@pytest.mark.parametrize("method", ["fit", "train_on_batch"])
def test_a_step_with_a_tape_outside_the_scope(strategy, method):
    """Keras cannot run it; the model is as it was, in Keras and in a scope."""
    x = np.ones((4, 2), "float32")
    model = WithTape([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    found = rf"{method} of a WithTape outside all scopes: .* train_step\(state, data\).\nHINT: with strategy.scope"
    with pytest.raises(ContextError, match=found):
        getattr(model, method)(x, x[:, :1])
    before = model.predict(x, verbose=0)
    with strategy.scope():
        getattr(model, method)(x, x[:, :1])
        assert (model.predict(x, verbose=0) != before).all()


def test_a_step_that_keras_does_not_call():
    """The user's own loop does."""
    model = WithLoop([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x = np.ones((4, 2), "float32")
    assert model.fit(x, x[:, :1], batch_size=2, verbose=0).history["loss"]


def trained(strategy):
    with strategy.scope():
        return keras.Variable([1.0, 2.0]), keras.optimizers.SGD(0.5)


PAIRS = {
    "swapped": lambda g, v: (zip([v], [g], strict=True),),
    "no_zip": lambda g, v: (([g], [v]),),
    "gradients_alone": lambda g, v: ([g],),
    "two_arguments": lambda g, v: ([g], [v]),
}


@pytest.mark.parametrize("pairs", PAIRS.values(), ids=PAIRS)
def test_pairs_of_apply_gradients(strategy, pairs):
    """Refused before the optimizer is built, which is good for the right ones afterwards."""
    v, optimizer = trained(strategy)

    def step(given):
        optimizer.apply_gradients(*given(keras.ops.ones(2), v))

    with pytest.raises(InvalidArgumentError, match=r"SGD.apply_gradients of .*\nHINT: .*zip\(gradients, variables\)"):
        strategy.run(lambda: step(pairs))
    strategy.run(lambda: step(lambda g, v: ([(g, v)],)))
    np.testing.assert_array_equal(v.numpy(), [0.0, 1.0])


def test_a_loss_after_the_tape(strategy):
    """No gradient for any variable; the error says where the loss belongs."""
    v, optimizer = trained(strategy)

    def step():
        with phalanx.GradientTape() as tape:
            y = v * 1.0
        loss = keras.ops.sum(y * y)
        optimizer.apply_gradients([(tape.gradient(loss, v), v)])

    with pytest.raises(InvalidArgumentError, match=r"no gradients for any variable.*\nHINT: with phalanx.GradientTape"):
        strategy.run(step)


def test_a_target_network(strategy):
    """It follows other weights, which are equal on all replicas. Rows of a batch are not; the error names the line that averages them."""
    with strategy.scope():
        online, target = (keras.layers.Dense(2) for _ in range(2))
        online.build((None, 3))
        target.build((None, 3))
    wanted = 0.9 * target.kernel.numpy() + 0.1 * online.kernel.numpy()

    def follow(scale):
        for copy, weight in zip(target.weights, online.weights, strict=True):
            copy.assign(0.9 * copy + 0.1 * weight * scale)

    scales = strategy.experimental_distribute_values_from_function(lambda _: np.float32(1))
    with pytest.raises(AggregationError, match=r"HINT: .*variable.trainable = False if no optimizer trains it"):
        strategy.run(follow, args=(scales,))
    strategy.run(follow, args=(1.0,))
    np.testing.assert_allclose(target.kernel.numpy(), wanted, rtol=1e-6)
