"""The calls of TensorFlow's guide to distributed training, with the imports changed."""

import contextlib

import jax
import keras
import numpy as np
import pytest

import phalanx
from phalanx import ReduceOp

DEVICES = ["cpu:0", "cpu:1"]

# What the guide for TensorFlow 2.3 prints: 20 steps of the custom loop over the dataset, then 10 with an iterator.
GUIDE_LOSSES = [
    *(0.80679005, 0.8006732, 0.7946168, 0.78862023, 0.782683, 0.77680445, 0.77098423, 0.7652217, 0.7595164, 0.75386775),
    *(0.7482752, 0.74273825, 0.7372565, 0.7318293, 0.7264561, 0.7211364, 0.71586984, 0.7106557, 0.7054935, 0.7003829),
    *(0.69532317, 0.690314, 0.68535477, 0.680445, 0.67558426, 0.67077184, 0.66600746, 0.66129065, 0.6566208, 0.6519975),
]


def ones(batch_size, batches):
    """The dataset of the guide: rows of one feature and one label, both 1."""
    return [(np.ones((batch_size, 1), "float32"), np.ones((batch_size, 1), "float32"))] * batches


@pytest.fixture
def mirrored_strategy():
    """Two replicas."""
    return phalanx.MirroredStrategy(devices=DEVICES)


def test_mirrored_takes_all_devices():
    """Without arguments every device of the machine is a replica."""
    assert phalanx.MirroredStrategy().num_replicas_in_sync == jax.local_device_count()


@pytest.mark.parametrize(
    "ops",
    [phalanx.HierarchicalCopyAllReduce(), phalanx.ReductionToOneDevice(), phalanx.NcclAllReduce()],
    ids=lambda o: type(o).__name__,
)
def test_mirrored_overrides_cross_device_ops(ops):
    """Every member of the family may be given."""
    mirrored_strategy = phalanx.MirroredStrategy(devices=DEVICES, cross_device_ops=ops)
    total = mirrored_strategy.run(lambda: phalanx.get_replica_context().all_reduce("SUM", 1.0))
    assert [float(x) for x in total.values] == [2.0, 2.0]


def test_default_strategy_is_a_singleton():
    """Outside all scopes there is one strategy, always the same."""
    default_strategy = phalanx.get_strategy()
    assert default_strategy is phalanx.get_strategy()
    assert not phalanx.has_strategy()


def test_default_strategy_runs_by_calling():
    """`run` calls the function, `reduce` returns the value."""
    strategy = phalanx.get_strategy()
    assert strategy.run(lambda: "called") == "called"
    assert strategy.reduce("SUM", 1.0, axis=None) == 1.0


@pytest.mark.parametrize("make", [phalanx.MirroredStrategy, phalanx.get_strategy], ids=["mirrored", "default"])
def test_scope_without_conditions(make):
    """The same lines make a variable with and without a strategy."""
    strategy = make()
    with strategy.scope():
        v = keras.Variable(1.0)
        assert phalanx.get_strategy() is strategy
    assert v.numpy() == 1.0


def test_one_device_places_variables_and_functions():
    """Variables of the scope and results of `run` are on the named device."""
    strategy = phalanx.OneDeviceStrategy(device="/cpu:3")
    with strategy.scope():
        v = keras.Variable(1.0)
    result = strategy.run(lambda x: x * v, args=(np.ones(2, "float32"),))
    assert [d.id for d in v.value.devices()] == [3]
    assert [d.id for d in result.devices()] == [3]


def test_one_device_prefetches_its_input():
    """Distributed batches lie on the device already."""
    strategy = phalanx.OneDeviceStrategy(device="cpu:3")
    (batch,) = strategy.experimental_distribute_dataset(ones(4, 1))
    assert {d.id for x in batch for d in x.devices()} == {3}


@pytest.mark.parametrize("where", ["outside", "in_scope"])
def test_fit_under_mirrored(mirrored_strategy, where):
    """compile and fit run on a dataset and on arrays, and lower the loss."""
    with mirrored_strategy.scope():
        model = keras.Sequential(
            [keras.Input((1,)), keras.layers.Dense(1, kernel_regularizer=keras.regularizers.L2(1e-4))]
        )
        model.compile(loss="mse", optimizer="sgd")
    inputs, targets = np.ones((100, 1)), np.ones((100, 1))
    with mirrored_strategy.scope() if where == "in_scope" else contextlib.nullcontext():
        dataset = (batch for batch in ones(10, 20))
        losses = model.fit(dataset, epochs=2, steps_per_epoch=10, shuffle=False, verbose=0).history["loss"]
        losses += model.fit(inputs, targets, epochs=2, batch_size=10, verbose=0).history["loss"]
    assert losses == sorted(losses, reverse=True)
    assert len(set(losses)) == 4


def test_batch_size_from_number_of_replicas(mirrored_strategy):
    """The global batch size grows with the replicas, and each replica gets its share."""
    global_batch_size = 5 * mirrored_strategy.num_replicas_in_sync
    learning_rate = {5: 0.1, 10: 0.15, 20: 0.175}[global_batch_size]
    (features, _) = next(iter(mirrored_strategy.experimental_distribute_dataset(ones(global_batch_size, 1))))
    assert [v.shape for v in features.values] == [(5, 1), (5, 1)]
    assert learning_rate == 0.15


def custom_loop(strategy, first_loss, l2=0.0):
    """The guide's model, which starts where its loss on a row of ones is `first_loss`, and its distributed step."""
    regularizer = keras.regularizers.L2(l2) if l2 else None
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_regularizer=regularizer)])
        optimizer = keras.optimizers.SGD()
    model.set_weights([np.float32([[-np.log(np.expm1(first_loss))]]), np.zeros(1, "float32")])
    loss_object = keras.losses.BinaryCrossentropy(from_logits=True, reduction="none")

    def train_step(inputs):
        features, labels = inputs
        with phalanx.GradientTape() as tape:
            predictions = model(features, training=True)
            per_example_loss = loss_object(labels, predictions)
            loss = phalanx.nn.compute_average_loss(per_example_loss)
            if model.losses:
                loss += phalanx.nn.scale_regularization_loss(sum(model.losses))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @phalanx.function
    def distributed_train_step(dist_inputs):
        per_replica_losses = strategy.run(train_step, args=(dist_inputs,))
        return strategy.reduce(ReduceOp.SUM, per_replica_losses, axis=None)

    return model, distributed_train_step


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_custom_loop_prints_the_losses_of_the_guide(replicas):
    """30 steps from the guide's first loss: for each batch of the dataset, then with an iterator."""
    strategy = phalanx.MirroredStrategy([f"cpu:{i}" for i in range(replicas)])
    _, distributed_train_step = custom_loop(strategy, GUIDE_LOSSES[0])
    dist_dataset = strategy.experimental_distribute_dataset(ones(5, 20))
    losses = [distributed_train_step(dist_inputs) for dist_inputs in dist_dataset]
    iterator = iter(dist_dataset)
    for _ in range(10):
        losses.append(distributed_train_step(next(iterator)))
    np.testing.assert_allclose(np.array(losses), GUIDE_LOSSES, rtol=0, atol=2e-6)


@pytest.mark.parametrize("l2", [0.0, 1e-4, 0.5])
def test_custom_loop_equals_numpy(mirrored_strategy, l2):
    """Regularized logistic regression with SGD 0.01 on random rows, short batch included, again in NumPy."""
    random = np.random.default_rng(1)
    x = random.normal(size=(37, 1)).astype("float32")
    y = (random.random((37, 1)) < 0.5).astype("float32")
    batches = [(x[i : i + 8], y[i : i + 8]) for i in range(0, 37, 8)]
    model, distributed_train_step = custom_loop(mirrored_strategy, 0.5, l2)
    w, b = (v.numpy().astype("float64").item() for v in model.trainable_variables)
    for dist_inputs, (x, y) in zip(mirrored_strategy.experimental_distribute_dataset(batches), batches, strict=True):
        logits = x * w + b
        expected = np.mean(np.logaddexp(0, logits) - y * logits) + l2 * w**2
        error = 1 / (1 + np.exp(-logits)) - y
        w, b = w - 0.01 * (np.mean(error * x) + 2 * l2 * w), b - 0.01 * np.mean(error)
        np.testing.assert_allclose(distributed_train_step(dist_inputs), expected, rtol=1e-5)
    np.testing.assert_allclose([v.numpy().item() for v in model.trainable_variables], [w, b], rtol=1e-5)


def test_local_results_hold_one_loss_a_replica(mirrored_strategy):
    """What `run` returns can be taken apart instead of reduced."""
    dist_dataset = mirrored_strategy.experimental_distribute_dataset(ones(4, 1))
    per_replica = mirrored_strategy.run(lambda batch: batch[0].sum(), args=(next(iter(dist_dataset)),))
    assert [float(v) for v in mirrored_strategy.experimental_local_results(per_replica)] == [2.0, 2.0]
