"""Compressed sums of gradients against NumPy: what arrives, what is kept for the next step, what is sent, and training with them."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import phalanx
from phalanx._src.collectives.codes import Int8, Rounded, coded_sum
from phalanx._src.collectives.compression import LargestSum, LowRankSum, compression_of
from phalanx._src.tools.estimate.hlo import HloProgram
from phalanx.errors import InvalidArgumentError
from phalanx.experimental import CommunicationOptions, PowerSGD, TopK

CHOICES = ["bfloat16", "int8", PowerSGD(2), TopK(0.05)]
REPLICAS = 4
SHAPES = [(40, 50), (3, 20, 30)]


def strategy_with(compression=None, replicas=REPLICAS, **options):
    devices = [f"cpu:{i}" for i in range(replicas)]
    options = CommunicationOptions(compression=compression, **options)
    return phalanx.MirroredStrategy(devices, communication_options=options)


def gradients(seed=0):
    """The gradients of all replicas, (replicas, ...) each."""
    random = np.random.default_rng(seed)
    return [random.normal(size=(REPLICAS, *shape)).astype("float32") for shape in SHAPES]


def on_each_replica(fn, *arrays):
    """Returns the results of `fn` on the rows of some arrays, one per replica, as NumPy arrays (replicas, ...)."""
    strategy = strategy_with()
    spec = jax.sharding.PartitionSpec(phalanx.REPLICA_AXIS)

    def replica(arrays):
        return jax.tree.map(lambda x: x[None], fn(*[x[0] for x in arrays]))

    mapped = jax.shard_map(replica, mesh=strategy.topology.mesh, in_specs=(spec,), out_specs=spec, check_vma=False)
    return jax.tree.map(np.asarray, jax.jit(mapped)(list(arrays)))


def hints_of(algorithm):
    """Hints as a program begins with them."""
    shapes = [algorithm.hint_shape(shape) for shape in SHAPES]
    return [np.random.default_rng(1).normal(size=s).astype("float32") for s in shapes if s is not None]


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_nothing_is_lost(choice):
    """What arrives, and what the replicas keep, add up to the sum; all replicas get the same bits."""
    algorithm = compression_of(CommunicationOptions(compression=choice))
    given = gradients()
    found = on_each_replica(
        lambda *own: algorithm.sum(list(own), [jnp.asarray(h) for h in hints_of(algorithm)]), *given
    )
    for x, total, unsent in zip(given, found.totals, found.unsent, strict=True):
        assert all((total[0] == other).all() for other in total[1:])
        np.testing.assert_allclose(total[0] + unsent.sum(0), x.sum(0, dtype="float64"), atol=2e-5)
        assert np.abs(unsent).max() > 0
    assert all((hint[0] == other).all() for hint in found.hints for other in hint[1:])


def test_int8_rounds_to_a_scale_per_block():
    """Against NumPy: the parts of each replica, and then their sums, in steps of 1/127 of the largest magnitude of 256 elements."""
    given = np.random.default_rng(0).normal(size=(REPLICAS, 5 * 256)).astype("float32")

    def rounded(rows):
        blocks = np.pad(rows, ((0, 0), (0, -rows.shape[1] % 256))).reshape(len(rows), -1, 256)
        scale = (np.abs(blocks).max(-1, keepdims=True) / np.float32(127)).astype("float32")
        return (np.round(blocks / np.where(scale > 0, scale, 1)) * scale).reshape(len(rows), -1)

    total, _ = on_each_replica(lambda x: coded_sum(Int8(), x), given)
    expected = rounded(rounded(np.pad(given, ((0, 0), (0, 3 * 256)))).sum(0, keepdims=True))[0, : 5 * 256]
    np.testing.assert_allclose(total[0], expected, rtol=1e-5, atol=np.abs(expected).max() / 127 * 1.01)
    assert np.mean(np.abs(total[0] - expected) < 1e-4) > 0.99
    np.testing.assert_allclose(total[0], given.sum(0), atol=0.1)


def test_int8_shows_numbers_that_are_not_finite():
    """Their block becomes NaN, and the others are right; zeros stay zeros."""
    x = np.zeros((1, 3 * 256), "float32")
    x[0, 0], x[0, 256:512] = np.inf, 2.0
    found = np.asarray(Int8().decode(Int8().encode(jnp.asarray(x)), "float32"))
    assert np.isnan(found[0, :256]).all()
    assert (found[0, 256:512] == 2).all()
    assert not found[0, 512:].any()


def test_bfloat16_is_that_of_the_wire():
    """The total is that of `wire_dtype`, and the rest is what its two roundings lost."""
    given = gradients()[0]
    total, unsent = on_each_replica(lambda x: coded_sum(Rounded("bfloat16"), x), given)
    once = given.astype(jnp.bfloat16).astype("float32")
    expected = once.sum(0).astype(jnp.bfloat16).astype("float32")
    np.testing.assert_allclose(total[0], expected, rtol=1e-2)
    np.testing.assert_allclose(unsent.sum(0), given.sum(0) - total[0], atol=1e-5)


def test_largest_elements_are_sent():
    """Of all arrays together; each replica has its own places."""
    given = gradients()
    found = on_each_replica(lambda *own: LargestSum(0.01).sum(list(own), []), *given)
    joined = np.concatenate([x.reshape(REPLICAS, -1) for x in given], axis=1)
    places = np.argsort(-np.abs(joined), axis=1)[:, : round(0.01 * joined.shape[1])]
    sent = np.zeros_like(joined)
    np.put_along_axis(sent, places, np.take_along_axis(joined, places, 1), 1)
    totals = np.concatenate([x[0].ravel() for x in found.totals])
    np.testing.assert_allclose(totals, sent.sum(0), atol=1e-5)


def test_low_rank_is_exact_for_matrices_of_that_rank():
    """Also of an array with three dims, whose last one makes the columns."""
    random = np.random.default_rng(0)
    left, right = random.normal(size=(60, 2)), random.normal(size=(REPLICAS, 2, 30))
    given = (left @ right).reshape(REPLICAS, 3, 20, 30).astype("float32")
    hint = random.normal(size=(30, 2)).astype("float32")
    found = on_each_replica(lambda x: LowRankSum(2).sum([x], [jnp.asarray(hint)]), given)
    np.testing.assert_allclose(found.totals[0][0], given.sum(0), atol=1e-4)
    assert not LowRankSum(2).takes((3000,))
    assert not LowRankSum(40).takes((40, 50))


X = np.random.default_rng(0).normal(size=(64, 64)).astype("float32")
Y = np.random.default_rng(1).integers(0, 10, 64)
CROSS_ENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")


def classifier(strategy, optimizer=lambda: keras.optimizers.SGD(0.1), **given):
    """A model with two kernels that are compressed, and biases that are not."""
    keras.utils.set_random_seed(0)
    with strategy.scope():
        hidden = keras.layers.Dense(128, activation="tanh")
        model = keras.Sequential([keras.Input((64,)), hidden, keras.layers.Dense(10)])
        model.compile(optimizer(), keras.losses.SparseCategoricalCrossentropy(from_logits=True), **given)
    return model


def step_of(strategy, model):
    """A training step of a custom loop, and its batches."""

    def replica(batch):
        with phalanx.GradientTape() as tape:
            loss = phalanx.nn.compute_average_loss(CROSS_ENTROPY(batch[1], model(batch[0])))
        variables = model.trainable_variables
        model.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    step = phalanx.function(lambda batch: strategy.reduce("SUM", strategy.run(replica, args=(batch,)), axis=None))
    return step, strategy.experimental_distribute_dataset((X, Y), batch_size=64)


def fit(model, steps):
    """The losses of a training by `fit`, with a batch per epoch."""
    return model.fit(X, Y, batch_size=64, epochs=steps, shuffle=False, verbose=0).history["loss"]


def trained(strategy, steps, *optimizer):
    return fit(classifier(strategy, *optimizer), steps)


@pytest.fixture(scope="module")
def whole():
    """The losses of 30 steps with whole gradients."""
    return trained(strategy_with(), 30)


@pytest.mark.cover(["tolerance", "choice"], [(1e-3, "int8"), (0.1, TopK(0.3))])
@pytest.mark.parametrize(
    ("choice", "tolerance"), [("bfloat16", 1e-3), ("int8", 1e-3), (PowerSGD(8), 0.1), (TopK(0.3), 0.1)], ids=str
)
def test_training_goes_like_that_with_whole_gradients(whole, choice, tolerance):
    """Because what was not sent comes later. Without error feedback, the compressions that drop most fall behind."""
    found = trained(strategy_with(choice), 30)
    assert abs(found[-1] - whole[-1]) < tolerance * whole[-1]
    if not isinstance(choice, str):
        assert trained(strategy_with(choice, error_feedback=False), 30)[-1] - whole[-1] > found[-1] - whole[-1]


def test_steps_before_the_start_send_whole_gradients(whole):
    found = trained(strategy_with(PowerSGD(2, start_step=4)), 8)
    np.testing.assert_allclose(found[:5], whole[:5], rtol=1e-6)
    assert abs(found[-1] - whole[7]) > 1e-4


def test_fit_and_loop_are_the_same():
    """And a program of several steps."""
    strategy = strategy_with(PowerSGD(4))
    step, batches = step_of(strategy, classifier(strategy))
    losses = [float(step(batch)) for _ in range(7) for batch in batches]
    np.testing.assert_allclose(trained(strategy_with(PowerSGD(4)), 6), losses[:6], rtol=1e-5)
    strategy = strategy_with(PowerSGD(4))
    model = classifier(strategy, steps_per_execution=3)
    model.fit(np.tile(X, (6, 1)), np.tile(Y, 6), batch_size=64, shuffle=False, verbose=0)
    step, batches = step_of(strategy, model)
    np.testing.assert_allclose([float(step(batch)) for batch in batches], losses[6:], rtol=1e-5)


@pytest.mark.cover(["choice"], ["int8", PowerSGD(2)])
@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_step_that_is_not_finite_leaves_nothing_behind(choice):
    """One bad row of one replica spoils one step. What the replicas keep stays as it was, so later steps are good again."""
    model, bad = classifier(strategy_with(choice)), X.copy()
    first, *_ = fit(model, 2)
    weights, kept = model.get_weights(), unsent_of(model)
    bad[0], bad[1] = np.nan, np.inf
    model.fit(bad, Y, batch_size=64, shuffle=False, verbose=0)
    assert any(np.isnan(x).any() for x in model.get_weights())
    for x, y in zip(unsent_of(model), kept, strict=True):
        np.testing.assert_array_equal(x, y)
    model.set_weights(weights)
    assert fit(model, 3)[-1] < first


def test_accumulated_gradients_are_compressed_once():
    """In the step that applies them. Steps before the start of a compression are updates, not batches."""
    make = lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=3)  # noqa: E731
    whole = trained(strategy_with(), 12, make)
    np.testing.assert_allclose(trained(strategy_with("int8"), 12, make), whole, rtol=1e-3)
    found = trained(strategy_with(PowerSGD(2, start_step=2)), 12, make)
    np.testing.assert_allclose(found[:9], whole[:9], rtol=1e-6)
    assert abs(found[9] - whole[9]) > 1e-6


def test_model_without_weights():
    """Has nothing to compress, which is not the fault of the rank."""
    with strategy_with(PowerSGD(2)).scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Activation("relu")])
        model.compile("sgd", "mse")
    assert model.fit(np.ones((8, 4)), np.zeros((8, 4)), verbose=0).history["loss"] == [1.0]


def test_checkpoint_keeps_what_was_not_sent(tmp_path):
    """A training goes on with the same bits, and the sum is kept on another number of replicas. Files of Keras do not have it."""

    def made(replicas):
        strategy = strategy_with(TopK(0.05), replicas)
        model = classifier(strategy, lambda: keras.optimizers.Adam(0.01))
        step, batches = step_of(strategy, model)
        checkpoint = phalanx.train.Checkpoint(model=model, optimizer=model.optimizer)
        return model, checkpoint, lambda count: [float(step(batch)) for batch in list(batches) * count]

    model, checkpoint, steps = made(REPLICAS)
    steps(3)
    path = checkpoint.save(tmp_path / "saved")
    assert all(x.any() for x in unsent_of(model))
    expected = steps(3)
    for replicas in (REPLICAS, 2):
        model, checkpoint, steps = made(replicas)
        status = checkpoint.restore(path)
        found = steps(1)
        status.assert_consumed()
        np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
        if replicas == REPLICAS:
            assert found + steps(2) == expected
    model.save(tmp_path / "model.keras")
    assert len(keras.models.load_model(tmp_path / "model.keras").optimizer.variables) == len(model.optimizer.variables)


def unsent_of(model):
    return [np.asarray(v.value) for v in vars(model.optimizer)["phalanx_kept"]["unsent"].values()]


def mlp_step(strategy):
    with strategy.scope():
        layers = [keras.layers.Dense(width, activation="tanh") for width in (512,)]
        model = keras.Sequential([keras.Input((784,)), *layers, keras.layers.Dense(10)])
        model.compile(keras.optimizers.SGD(0.1))
    step, _ = step_of(strategy, model)
    rows = (np.zeros((64, 784), "float32"), np.zeros(64, "int64"))
    batch = next(iter(strategy.experimental_distribute_dataset(rows, batch_size=64)))
    return HloProgram(step.lower(batch).compile().as_text()), model


def sent_bytes(program):
    """Bytes that a replica sends for the collectives of a program."""
    # A ring sends an array of an all-reduce twice, and the arrays of the others once.
    return sum(c.num_bytes * (2 if c.kind == "all-reduce" else 1) for c in program.collectives)


def test_fewer_bytes_are_sent():
    """In the collectives of the compiled step of an MLP. Without compression it is that of a strategy without options."""
    whole, _ = mlp_step(strategy_with())
    program, model = mlp_step(phalanx.MirroredStrategy([f"cpu:{i}" for i in range(REPLICAS)]))
    assert [c.num_bytes for c in program.collectives] == [c.num_bytes for c in whole.collectives]
    assert "phalanx_kept" not in vars(model.optimizer)
    assert sent_bytes(whole) >= 2 * 4 * (784 * 512 + 512 * 10)
    for choice, share in (("bfloat16", 0.51), ("int8", 0.27), (PowerSGD(2), 0.05), (TopK(0.01), 0.05)):
        assert sent_bytes(mlp_step(strategy_with(choice))[0]) <= share * sent_bytes(whole), choice


def test_one_replica_sends_nothing():
    """The losses are those without compression, and nothing is left for later."""
    model = classifier(strategy_with("int8", replicas=1))
    assert fit(model, 3) == trained(strategy_with(replicas=1), 3)
    assert not any(x.any() for x in unsent_of(model))


def test_integers_and_small_gradients_are_sent_whole():
    """A model without a gradient of 1,024 elements trains as without compression."""
    x, y = X[:, :4], X[:, :1]

    def losses(strategy):
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        return model.fit(x, y, batch_size=64, epochs=3, verbose=0).history["loss"]

    assert losses(strategy_with("int8")) == losses(strategy_with())


def fit_stateless():
    class Stateless(keras.Sequential):
        def train_step(self, state, data):
            trained, others, slots, metrics = state
            trained, slots = self.optimizer.stateless_apply(slots, trained, trained)
            return {}, (trained, others, slots, metrics)

    with strategy_with("int8").scope():
        model = Stateless([keras.Input((64,)), keras.layers.Dense(32)])
        model.compile("sgd")
    model.fit(X, Y, batch_size=64, verbose=0)


def scaled_sgd():
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())


INT8 = CommunicationOptions(compression="int8")
CHOICE = "must be bfloat16, int8, a PowerSGD, a TopK"


BAD = {
    "another name": (lambda: CommunicationOptions(compression="int4"), f"compression='int4': {CHOICE}"),
    "the class": (lambda: CommunicationOptions(compression=PowerSGD), r"HINT: compression=PowerSGD\(rank=2\)"),
    "a number": (lambda: CommunicationOptions(compression=8), f"compression=8: {CHOICE}"),
    "feedback": (lambda: CommunicationOptions(error_feedback="yes"), "error_feedback='yes'"),
    "no share": (lambda: TopK(0), "fraction=0: must be a number between 0 and 1"),
    "all": (lambda: TopK(1), "fraction=1: must be a number between 0 and 1"),
    "more than all": (lambda: TopK(1.5), "fraction=1.5: must be"),
    "no rank": (lambda: PowerSGD(0), "rank=0"),
    "negative step": (lambda: PowerSGD(2, -1), "start_step=-1"),
    "options": (
        lambda: phalanx.MirroredStrategy(2, communication_options="int8"),
        "communication_options='int8'",
    ),
    "two ways": (
        lambda: phalanx.MirroredStrategy(2, phalanx.NcclAllReduce(), communication_options=INT8),
        r"compression='int8'\) with cross_device_ops=NcclAllReduce\(\): both say how gradients are sent",
    ),
    "layout": (
        lambda: phalanx.MirroredStrategy(2, layout=phalanx.fully_sharded(), communication_options=INT8),
        "with a layout or a model axis: every replica must hold whole variables",
    ),
    "rank above all": (
        lambda: trained(strategy_with(PowerSGD(100)), 1),
        "PowerSGD of rank 100: no gradient of this step becomes shorter",
    ),
    "stateless step": (
        fit_stateless,
        "optimizer.stateless_apply under a strategy with compression: it names no variables",
    ),
    "scaled loss": (
        lambda: trained(strategy_with("int8"), 1, scaled_sgd),
        "LossScaleOptimizer under a strategy with compression",
    ),
}


@pytest.mark.parametrize(("make", "message"), BAD.values(), ids=BAD)
def test_what_cannot_be_compressed_is_refused(make, message):
    with pytest.raises(InvalidArgumentError, match=message):
        make()
