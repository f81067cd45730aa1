"""Law 1: N replicas on a global batch train like one device on the same batch, and the same way every time."""

import functools

import numpy as np
import pytest
from reference_training import MODELS, OPTIMIZERS, STEPS, Trajectory, batches, per_example, train_on_one_device
from strategy_table import ROWS, on

import phalanx

EVEN = (24,)
SHORT = (13,)
MIXED = (24, 13, 5)
"""On 2, 3, 4 and 8 replicas: rows that divide, rows that do not, and more replicas than rows."""
FULL_AND_SHORT = MIXED[:2]
"""For few replicas, which five rows would fill as thirteen do."""

OTHERS = [m for m in MODELS if m != "mlp"]


def train(strategy, model_name, optimizer_name, sizes, start, *, whole=False) -> Trajectory:
    """Trains as a user of tf.distribute would; `whole` puts run and reduce into one `phalanx.function`."""
    with strategy.scope():
        model, optimizer = MODELS[model_name](), OPTIMIZERS[optimizer_name]()
    model.set_weights(start)

    def replica_step(batch):
        x, y = batch
        with phalanx.GradientTape() as tape:
            loss = phalanx.nn.compute_average_loss(per_example(y, model(x, training=True)))
            loss += phalanx.nn.scale_regularization_loss(model.losses)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss, phalanx.Mirrored(phalanx.get_replica_context().all_reduce("SUM", gradients))

    def step(batch):
        loss, gradients = strategy.run(replica_step, args=(batch,))
        return strategy.reduce("SUM", loss, axis=None), gradients

    step = phalanx.function(step) if whole else step
    run = Trajectory(model.get_weights())
    for batch in strategy.experimental_distribute_dataset(batches(model, sizes)):
        loss, gradients = step(batch)
        run.losses.append(np.asarray(loss))
        run.gradients.append([np.asarray(g) for g in gradients.value])
    assert_equal_copies(strategy, [*model.variables, *optimizer.variables])
    run.weights = model.get_weights()
    return run


def assert_equal_copies(strategy, variables):
    """Every device on which a variable lives holds the same bits of it."""
    for variable in variables:
        copies = strategy.experimental_local_results(variable)
        assert len(copies) == (1 if strategy.storage is None else strategy.storage.num_replicas)
        assert len({np.asarray(c).tobytes() for c in copies}) == 1, variable.path


BETWEEN = {
    *{
        "default",
        "mirrored_x1",
        "mirrored_x2",
        "mirrored_x3",
        "mirrored_x4",
        "central_x1",
        "central_x4",
        "tpu_x4_of_1",
        "tpu_x4_of_2",
        "sharded_x2",
    },
    *{"mirrored_x2_packed", "mirrored_x2_one_device", "mirrored_x2_hierarchical", "compressed_x2", "mirrored_x2_of_2"},
}
"""Rows between two others that train every time: in the number of replicas, or in how they reduce. One compiled step has some of them,
and the transformer trains on the mesh."""


def assert_same_training(strategy, model_name, optimizer_name, sizes, **options) -> Trajectory:
    """Trains, and compares losses, gradients and weights with the reference."""
    wanted = train_on_one_device(model_name, optimizer_name, sizes)
    got = train(strategy, model_name, optimizer_name, sizes, wanted.start, **options)
    # The attention key bias has a true gradient of zero, and Adam divides noise by noise.
    atol = 2e-5 if (model_name, optimizer_name) == ("transformer", "adam") else 1e-6
    np.testing.assert_allclose(got.losses, wanted.losses, rtol=1e-5, atol=atol)
    for step, (g, w) in enumerate(zip(got.gradients, wanted.gradients, strict=True)):
        for a, b in zip(g, w, strict=True):
            # Float32 rounds the sums of large elements, which leaves errors of the same size in the small ones.
            size = max(1.0, float(np.abs(b).max(initial=0)))
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=atol * size, err_msg=f"gradients of step {step}")
    for a, b in zip(got.weights, wanted.weights, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=atol, err_msg="weights")
    return got


def train_mlp(row, train_it) -> Trajectory:
    """Trains an MLP on batches of which most do not divide."""
    strategy = ROWS[row]()
    sizes = MIXED if strategy.num_replicas_in_sync > 3 else FULL_AND_SHORT
    # The mean of replicas that train on their own is the same only if an update is linear in the gradient.
    return train_it(strategy, "mlp", "adam" if strategy.local_updates is None else "momentum", sizes)


@pytest.fixture(scope="module")
def trained():
    """A training on each row, compared with one device, which two tests share."""
    return functools.cache(lambda row: train_mlp(row, assert_same_training))


@pytest.mark.cover(["strategy"], ROWS.keys() - BETWEEN)
@pytest.mark.parametrize("strategy", ROWS)
def test_mlp_trains_like_one_device(trained, strategy):
    assert len(trained(strategy).losses) == STEPS


@pytest.mark.cover(["strategy"], {"mirrored_x8", "sharded_x4", "local_sgd_x2"})
@pytest.mark.parametrize("strategy", ROWS)
def test_mlp_trains_the_same_way_every_time(trained, strategy):
    """Two trainings from one start have the same bits."""
    first = trained(strategy)
    second = train_mlp(strategy, functools.partial(train, start=first.start))
    assert [x.tobytes() for x in first.losses] == [x.tobytes() for x in second.losses]
    assert [w.tobytes() for w in first.weights] == [w.tobytes() for w in second.weights]


COMMON = ("one_device", "mirrored_x2", "central_x2")
UNEVEN = ("mirrored_x3", "mirrored_x8", "local_sgd_x2", "weighted_x3")


@pytest.mark.cover(
    ("strategy", "model_name", "optimizer_name"),
    {("mirrored_x2", "cnn", "adam"), ("mirrored_x2", "lstm", "momentum")},  # The tests below have the others.
)
@pytest.mark.parametrize("model_name", OTHERS)
@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
@on(*COMMON)
def test_every_model_trains_like_one_device(strategy, model_name, optimizer_name):
    """Every model trains like on one device, with either optimizer."""
    assert_same_training(strategy, model_name, optimizer_name, EVEN)


@pytest.mark.cover(
    ("strategy", "model_name"),
    {(row, m) for i, row in enumerate(UNEVEN[:2]) for j, m in enumerate(OTHERS) if (i + j) % 4 == 1},
)
@pytest.mark.parametrize("model_name", OTHERS)
@on(*UNEVEN)
def test_every_model_on_short_batches(strategy, model_name):
    """Padding changes nothing for any model."""
    assert_same_training(strategy, model_name, "momentum", SHORT)


@pytest.mark.cover(["strategy"], {"default", "mirrored_x2", "sharded_x2", "local_sgd_x2"})
@on(
    "default",
    "one_device",
    "mirrored_x2",
    "mirrored_x8",
    "mirrored_x3_hierarchical",
    "tpu_x4_of_2",
    "sharded_x2",
    "local_sgd_x2",
    "weighted_x3",
)
def test_one_compiled_step(strategy):
    """`run` and `reduce` inside one `phalanx.function` train the same too."""
    assert_same_training(strategy, "mlp_l2", "momentum", SHORT, whole=True)


@pytest.mark.cover(["strategy"], {"mirrored_x2_of_2"})
@on("tpu_x2_of_4", "mirrored_x2_of_2", "sharded_x2")
def test_transformer_on_meshes(strategy):
    """With further axes, and with variables in parts. The replicas share the rows unevenly."""
    assert_same_training(strategy, "transformer", "adam", SHORT)


@on("default", "one_device", "mirrored_x2", "mirrored_x3", "central_x2")
def test_result_of_the_shape_of_a_padded_batch(strategy):
    """A value that is no row of the batch is never cut, though it is as long as the padded batch of one replica."""
    places = -(-5 // strategy.num_replicas_in_sync)
    (batch,) = strategy.experimental_distribute_dataset([np.ones((5, 2), "float32")])
    result = strategy.run(lambda x: x.sum() * 0 + np.arange(1.0, places + 1, dtype="float32"), args=(batch,))
    for local in strategy.experimental_local_results(result):
        assert local.shape == (places,)
    mean = strategy.reduce("MEAN", result, axis=None)
    np.testing.assert_array_equal(mean, np.arange(1.0, places + 1))
