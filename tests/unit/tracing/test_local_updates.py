"""Replicas that train on their own, against NumPy: what they synchronize and when, what is read outside, and what is refused."""

import jax
import keras
import numpy as np
import pytest

import phalanx
from phalanx.errors import AggregationError, InvalidArgumentError, VariableError
from phalanx.experimental import CommunicationOptions, DiLoCo, LocalSGD
from phalanx.forecast.hlo import Program

ROWS, WIDTH, REPLICAS = 24, 3, 2
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(ROWS, WIDTH)).astype("float32")
Y = (X @ [[1.0], [-2.0], [0.5]] + 0.1).astype("float32")
RATE, MOMENTUM = 0.05, 0.5
OUTER_RATE, OUTER_MOMENTUM = 0.7, 0.9


def strategy_with(local_updates, replicas=REPLICAS, **options):
    """A strategy over virtual devices."""
    return phalanx.MirroredStrategy([f"cpu:{i}" for i in range(replicas)], local_updates=local_updates, **options)


def linear(strategy, optimizer=None, **compiled):
    """A model with one layer, whose weights begin at zero."""
    with strategy.scope():
        layer = keras.layers.Dense(1, kernel_initializer="zeros")
        model = keras.Sequential([keras.Input((WIDTH,)), layer])
        model.compile(optimizer or keras.optimizers.SGD(RATE, momentum=MOMENTUM), "mse", **compiled)
    return model


def step_of(strategy, model):
    """A step of a custom loop, and the batches that it takes: halves of the rows in turn."""

    def replica(batch):
        x, y = batch
        with phalanx.GradientTape() as tape:
            loss = phalanx.nn.compute_average_loss(keras.ops.sum((model(x, training=True) - y) ** 2, -1))
        variables = model.trainable_variables
        model.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    def step(batch):
        return strategy.reduce("SUM", strategy.run(replica, args=(batch,)), axis=None)

    halves = [(X[: ROWS // 2], Y[: ROWS // 2]), (X[ROWS // 2 :], Y[ROWS // 2 :])]
    return phalanx.function(step), list(strategy.experimental_distribute_dataset(halves)) * 20


def trained(local_updates, steps, replicas=REPLICAS, make=lambda: None):
    """A model after some steps."""
    strategy = strategy_with(local_updates, replicas)
    model = linear(strategy, make())
    step, batches = step_of(strategy, model)
    for batch in batches[:steps]:
        step(batch)
    return strategy, model


class Replica:
    """A replica in NumPy: weights with the bias as the last, and momentum."""

    def __init__(self, rows):
        self.rows, self.weights, self.momentum = rows, np.zeros((WIDTH + 1, 1)), np.zeros((WIDTH + 1, 1))

    def gradient(self, step):
        """The gradient of the mean over the rows that this replica has in a step."""
        half = slice(0, ROWS // 2) if step % 2 == 0 else slice(ROWS // 2, ROWS)
        x, y = np.c_[X, np.ones(ROWS)][half][self.rows], Y[half][self.rows]
        return 2 / len(x) * x.T @ (x @ self.weights - y)

    def update(self, gradient):
        """One step of SGD with momentum."""
        self.momentum = MOMENTUM * self.momentum - RATE * gradient
        self.weights = self.weights + self.momentum


def replicas_of(count):
    """Replicas with equal parts of each half of the rows."""
    each = ROWS // 2 // count
    return [Replica(slice(i * each, (i + 1) * each)) for i in range(count)]


def mean_of(replicas, name):
    """The mean of an attribute."""
    return np.mean([getattr(r, name) for r in replicas], axis=0)


def weights_of(model):
    """Kernel and bias in one array."""
    return np.concatenate([model.get_weights()[0], model.get_weights()[1][None]])


def local_weights(strategy, model):
    """Kernel and bias of each replica."""
    parts = [strategy.experimental_local_results(v) for v in model.trainable_variables]
    return [np.concatenate([kernel, bias[None]]) for kernel, bias in zip(*parts, strict=True)]


def replicas_after(steps):
    """Replicas that have taken their mean after each third step."""
    replicas = replicas_of(REPLICAS)
    for step in range(steps):
        for each in replicas:
            each.update(each.gradient(step))
        if (step + 1) % 3 == 0:
            weights, momentum = mean_of(replicas, "weights"), mean_of(replicas, "momentum")
            for each in replicas:
                each.weights, each.momentum = weights, momentum
    return replicas


@pytest.mark.parametrize("steps", [2, 3, 7])
def test_local_sgd_takes_the_mean(steps):
    """Of weights and momentum, every third step. In between, the mean is what is read."""
    strategy, model = trained(LocalSGD(3), steps)
    replicas = replicas_after(steps)
    for found, each in zip(local_weights(strategy, model), replicas, strict=True):
        np.testing.assert_allclose(found, each.weights, atol=1e-6)
    np.testing.assert_allclose(weights_of(model), mean_of(replicas, "weights"), atol=1e-6)
    slot = model.optimizer.variables[2]
    np.testing.assert_allclose(slot.numpy(), mean_of(replicas, "momentum")[:WIDTH], atol=1e-6)


def outer_step(outer, change, velocity):
    """SGD with Nesterov momentum, as Keras defines it."""
    velocity = OUTER_MOMENTUM * velocity - OUTER_RATE * change
    return outer + OUTER_MOMENTUM * velocity - OUTER_RATE * change, velocity


@pytest.mark.parametrize(("count", "steps"), [(2, 3), (2, 8), (1, 4)])
def test_diloco_has_outer_steps(count, steps):
    """The mean change of the weights is the gradient of the outer optimizer; the outer weights are what is read."""
    strategy, model = trained(DiLoCo(every=2), steps, count)
    replicas, outer, velocity = replicas_of(count), np.zeros((WIDTH + 1, 1)), np.zeros((WIDTH + 1, 1))
    for step in range(steps):
        for each in replicas:
            each.update(each.gradient(step))
        if (step + 1) % 2 == 0:
            outer, velocity = outer_step(outer, outer - mean_of(replicas, "weights"), velocity)
            for each in replicas:
                each.weights = outer
    for found, each in zip(local_weights(strategy, model), replicas, strict=True):
        np.testing.assert_allclose(found, each.weights, atol=1e-5)
    np.testing.assert_allclose(weights_of(model), outer, atol=1e-5)


def test_fragments_are_synchronized_in_turn():
    """The kernel, which is larger, is the first fragment; the bias is the second."""
    strategy = strategy_with(DiLoCo(every=4, fragments=2))
    model = linear(strategy)
    step, batches = step_of(strategy, model)
    seen = [model.get_weights()]
    for batch in batches[:8]:
        step(batch)
        seen.append(model.get_weights())
    changes = [
        [not np.array_equal(a, b) for a, b in zip(*pair, strict=True)] for pair in zip(seen, seen[1:], strict=False)
    ]
    assert [i + 1 for i, (kernel, _) in enumerate(changes) if kernel] == [2, 6]
    assert [i + 1 for i, (_, bias) in enumerate(changes) if bias] == [4, 8]


def test_replicas_of_a_group_stay_equal():
    """They aggregate their gradients at every step, and the groups are the replicas of the algorithm."""
    strategy, model = trained(LocalSGD(3, replicas_per_group=2), 5, 4)
    replicas = replicas_of(4)
    for step in range(5):
        gradients = [each.gradient(step) for each in replicas]
        for i, each in enumerate(replicas):
            each.update(np.mean(gradients[i // 2 * 2 : i // 2 * 2 + 2], axis=0))
        if step == 2:
            weights, momentum = mean_of(replicas, "weights"), mean_of(replicas, "momentum")
            for each in replicas:
                each.weights, each.momentum = weights, momentum
    found = local_weights(strategy, model)
    assert [np.array_equal(found[0], x) for x in found] == [True, True, False, False]
    for x, each in zip(found, replicas, strict=True):
        np.testing.assert_allclose(x, each.weights, atol=1e-6)


LINEAR = [LocalSGD(1), DiLoCo(lambda: keras.optimizers.SGD(1.0), every=1), LocalSGD(1, replicas_per_group=2)]


@pytest.mark.parametrize("local_updates", LINEAR, ids=["LocalSGD", "DiLoCo", "group"])
def test_every_step_is_synchronous_training(local_updates):
    """With a linear optimizer: also in `fit`, on batches with padding."""
    losses = []
    for choice in (None, local_updates):
        model = linear(strategy_with(choice))
        run = model.fit(X, Y, batch_size=9, epochs=3, shuffle=False, verbose=0, validation_data=(X, Y))
        losses.append([*run.history["loss"], *run.history["val_loss"]])
    np.testing.assert_allclose(*losses, rtol=1e-5)


CHOICES = [LocalSGD(3), DiLoCo(every=4, fragments=2), DiLoCo(keras.optimizers.Adam(0.1), every=3)]


@pytest.mark.parametrize("local_updates", CHOICES, ids=["LocalSGD", "fragments", "Adam"])
def test_steps_in_one_program(local_updates):
    """Are those of several programs: the synchronization is a part of a step."""
    results = []
    for steps in (1, 5):
        model = linear(strategy_with(local_updates), steps_per_execution=steps)
        model.fit(X, Y, batch_size=4, epochs=2, shuffle=False, verbose=0)
        results.append(weights_of(model))
    np.testing.assert_allclose(*results, rtol=1e-5)


def test_several_updates_in_one_call():
    """`phalanx.scan` around the optimizer synchronizes inside its body."""
    strategy = strategy_with(LocalSGD(2))
    model = linear(strategy)
    variables = model.trainable_variables

    def body(carry, batch):
        x, y = batch
        loss_of = lambda: phalanx.nn.compute_average_loss(keras.ops.sum((model(x) - y) ** 2, -1))  # noqa: E731
        loss, gradients = phalanx.value_and_grad(loss_of, variables)()
        model.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return carry, loss

    x, y = X.reshape(2, REPLICAS, -1, WIDTH), Y.reshape(2, REPLICAS, -1, 1)

    def replica():
        i = phalanx.get_replica_context().replica_id_in_sync_group
        phalanx.scan(body, 0.0, (jax.numpy.asarray(x)[:, i], jax.numpy.asarray(y)[:, i]))

    strategy.run(replica)
    found = local_weights(strategy, model)
    np.testing.assert_array_equal(*found)
    _, other = trained(LocalSGD(2), 2)
    np.testing.assert_allclose(found[0], weights_of(other), rtol=1e-4)


def test_statistics_are_local_and_averaged():
    """BatchNormalization computes those of its replica. A replica without rows keeps what it had."""
    strategy = strategy_with(LocalSGD(2))
    with strategy.scope():
        layer = keras.layers.BatchNormalization(momentum=0.5)
        model = keras.Sequential([keras.Input((WIDTH,)), layer, keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(RATE))
    step, (batch, *_) = step_of(strategy, model)
    step(batch)
    own = [0.5 * X[rows].mean(0) for rows in (slice(0, 6), slice(6, 12))]
    found = strategy.experimental_local_results(layer.moving_mean)
    np.testing.assert_allclose(found, own, atol=1e-6)
    np.testing.assert_allclose(layer.moving_mean.numpy(), np.mean(own, axis=0), atol=1e-6)
    (short,) = strategy.experimental_distribute_dataset([(X[:1], Y[:1])])
    step(short)
    mean = np.mean([0.5 * own[0] + 0.5 * X[0], own[1]], axis=0)
    np.testing.assert_allclose(strategy.experimental_local_results(layer.moving_mean), [mean, mean], atol=1e-6)


@pytest.mark.parametrize("local_updates", CHOICES, ids=["LocalSGD", "fragments", "Adam"])
def test_evaluation_reads_what_is_read_outside(local_updates):
    """A plain model with the weights that are read evaluates and predicts the same."""
    _, model = trained(local_updates, 5)
    other = linear(phalanx.OneDeviceStrategy("cpu:0"))
    before = model.evaluate(X, Y, verbose=0)
    other.set_weights(model.get_weights())
    np.testing.assert_allclose(before, other.evaluate(X, Y, verbose=0), rtol=1e-5)
    np.testing.assert_allclose(model.predict(X, verbose=0), other.predict(X, verbose=0), rtol=1e-5)


@pytest.mark.parametrize("local_updates", CHOICES, ids=["LocalSGD", "fragments", "Adam"])
def test_evaluation_does_not_disturb(local_updates):
    """Nor do reads: training goes on with the replicas' own weights."""
    strategy, model = trained(local_updates, 5)
    _, undisturbed = trained(local_updates, 8)
    step, batches = step_of(strategy, model)
    for batch in batches[5:8]:
        model.evaluate(X, Y, verbose=0)
        weights_of(model)
        step(batch)
    np.testing.assert_allclose(weights_of(model), weights_of(undisturbed), rtol=1e-6)


@pytest.mark.parametrize("local_updates", CHOICES, ids=["LocalSGD", "fragments", "Adam"])
def test_reads_and_writes_in_a_function(local_updates):
    """Before and after a step in one `phalanx.function`, they are those outside."""
    strategy, model = trained(local_updates, 5)
    step, batches = step_of(strategy, model)
    kernel = model.layers[0].kernel
    before = kernel.numpy()

    @phalanx.function
    def read_step_read(batch):
        first = kernel.value * 1
        step(batch)
        return first, kernel.value * 1

    first, last = read_step_read(batches[5])
    np.testing.assert_allclose(first, before, rtol=1e-6)
    np.testing.assert_allclose(last, kernel.numpy(), rtol=1e-6)

    @phalanx.function
    def assign_and_step(batch):
        kernel.assign(keras.ops.ones((WIDTH, 1)) * 5)
        kernel.assign_add(keras.ops.ones((WIDTH, 1)))
        step(batch)

    assign_and_step(batches[6])
    other_strategy, other = trained(local_updates, 6)
    other_step, other_batches = step_of(other_strategy, other)
    other.layers[0].kernel.assign(np.full((WIDTH, 1), 6.0))
    other_step(other_batches[6])
    np.testing.assert_allclose(weights_of(model), weights_of(other), rtol=1e-5)
    np.testing.assert_allclose(local_weights(strategy, model), local_weights(other_strategy, other), rtol=1e-5)


def test_another_strategy_takes_what_is_read():
    """A model that replicas have trained alone goes on under strategies with as many replicas, more, and one."""
    _, model = trained(LocalSGD(3), 5)
    for strategy in (strategy_with(LocalSGD(3)), strategy_with(None, 3), phalanx.OneDeviceStrategy("cpu:0")):
        before = weights_of(model)
        with strategy.scope():
            model.compile(keras.optimizers.SGD(0.0), "mse")
        model.fit(X, Y, batch_size=8, epochs=1, verbose=0)
        np.testing.assert_allclose(weights_of(model), before, rtol=1e-6)

    _, model = trained(LocalSGD(3), 5)
    kernel = model.layers[0].kernel
    phalanx.function(lambda: kernel.assign(keras.ops.ones((WIDTH, 1))))()
    np.testing.assert_array_equal(kernel.numpy(), np.ones((WIDTH, 1)))


def test_outer_weights_after_local_sgd():
    """They begin with what is read then: the mean of replicas that have trained alone."""
    _, model = trained(LocalSGD(3), 5)
    strategy = strategy_with(DiLoCo(every=2))
    before = mean_of(replicas_after(5), "weights")
    with strategy.scope():
        model.compile(keras.optimizers.SGD(0.0), "mse")
    model.fit(X, Y, batch_size=8, epochs=1, verbose=0)
    np.testing.assert_allclose(weights_of(model), before, atol=1e-6)


def test_local_sgd_after_outer_weights():
    """Begins with them, and then reads as the mean of the replicas."""
    _, model = trained(DiLoCo(every=2), 5)
    before = weights_of(trained(DiLoCo(every=2), 5)[1])
    strategy = strategy_with(LocalSGD(8))
    with strategy.scope():
        model.compile(keras.optimizers.SGD(0.0), "mse")
    model.fit(X, Y, batch_size=8, epochs=1, verbose=0)
    np.testing.assert_allclose(weights_of(model), before, rtol=1e-6)
    model.optimizer.learning_rate = 0.1
    model.fit(X, Y, batch_size=8, epochs=1, verbose=0)
    assert not np.allclose(weights_of(model), before)
    np.testing.assert_allclose(weights_of(model), np.mean(local_weights(strategy, model), axis=0), rtol=1e-5)


def test_outer_weights_of_two_optimizers():
    """Are those of the first, so that each goes on from what the other has done."""
    strategy, model = trained(DiLoCo(every=2), 4)
    before = weights_of(model)
    first, second = model.optimizer, keras.optimizers.SGD(0.0)
    for optimizer in (second, first):
        model.optimizer = optimizer
        step, batches = step_of(strategy, model)
        step(batches[0])
        np.testing.assert_array_equal(weights_of(model), before)


@pytest.mark.parametrize("local_updates", [LocalSGD(3), DiLoCo(every=3)], ids=["LocalSGD", "DiLoCo"])
def test_constraints_hold_after_a_synchronization(local_updates):
    """Kernels of norm 1, whose mean has another norm; and so has an outer step."""
    strategy = strategy_with(local_updates)
    with strategy.scope():
        layer = keras.layers.Dense(4, kernel_initializer="ones", kernel_constraint=keras.constraints.UnitNorm())
        model = keras.Sequential([keras.Input((WIDTH,)), layer])
        model.compile(keras.optimizers.SGD(0.3), "mse")
    model.fit(X, np.tile(Y, 4) * [1, -1, 2, 0], batch_size=8, epochs=2, shuffle=False, verbose=0)
    np.testing.assert_allclose(np.linalg.norm(layer.kernel.numpy(), axis=0), 1.0, atol=1e-5)


def test_weights_are_written_by_optimizers_only():
    """An update by hand would never be synchronized."""
    strategy, model = trained(LocalSGD(3), 1)
    with pytest.raises(AggregationError, match="the variable is trainable"):
        strategy.run(lambda: model.layers[0].kernel.assign_sub(keras.ops.ones((WIDTH, 1))))


@pytest.mark.parametrize("local_updates", CHOICES, ids=["LocalSGD", "fragments", "Adam"])
def test_assigned_weights_are_those_of_all(local_updates):
    """Of all replicas, and of the outer weights: training begins anew from them."""
    strategy, model = trained(local_updates, 5)
    weights = [np.full((WIDTH, 1), 0.25, "float32"), np.zeros(1, "float32")]
    model.set_weights(weights)
    for found in local_weights(strategy, model):
        np.testing.assert_array_equal(found[:WIDTH], weights[0])
    step, batches = step_of(strategy, model)
    before = np.square(X @ weights[0] - Y).mean()
    for batch in batches[:12]:
        step(batch)
    assert model.evaluate(X, Y, verbose=0) < before


def test_accumulated_gradients_are_local():
    """An update is counted once per accumulation, and nothing is sent before."""
    make = lambda: keras.optimizers.SGD(RATE, momentum=MOMENTUM, gradient_accumulation_steps=2)  # noqa: E731
    strategy, model = trained(LocalSGD(3), 6, make=make)
    replicas = replicas_of(REPLICAS)
    for _ in range(3):
        for each in replicas:
            each.update((each.gradient(0) + each.gradient(1)) / 2)
    np.testing.assert_allclose(weights_of(model), mean_of(replicas, "weights"), atol=1e-6)
    np.testing.assert_array_equal(*local_weights(strategy, model))


@pytest.mark.parametrize(
    "local_updates", [*CHOICES, DiLoCo(every=4, compression="int8")], ids=["LocalSGD", "fragments", "Adam", "int8"]
)
def test_checkpoint_in_the_middle(local_updates, tmp_path):
    """A training goes on with the same bits, and on another number of replicas from the weights that are read."""
    strategy, model = trained(local_updates, 6)
    path = phalanx.train.Checkpoint(model=model, optimizer=model.optimizer).save(tmp_path / "saved")
    weights = weights_of(model)
    step, batches = step_of(strategy, model)
    expected = [float(step(batch)) for batch in batches[6:12]]
    for replicas in (REPLICAS, 3):
        strategy = strategy_with(local_updates, replicas)
        model = linear(strategy)
        status = phalanx.train.Checkpoint(model=model, optimizer=model.optimizer).restore(path)
        np.testing.assert_array_equal(weights_of(model), weights)
        step, batches = step_of(strategy, model)
        found = [float(step(batch)) for batch in batches[6:12]]
        status.assert_consumed()
        if replicas == REPLICAS:
            assert found == expected
        assert max(found) < 2 * max(expected)


def test_files_of_keras_have_what_is_read(tmp_path):
    """A saved model has the outer weights, and loads without Phalanx's strategies."""
    _, model = trained(DiLoCo(every=2), 5)
    model.save(tmp_path / "model.keras")
    np.testing.assert_array_equal(weights_of(keras.models.load_model(tmp_path / "model.keras")), weights_of(model))


def test_replicas_hold_weights_of_their_own():
    """Each device holds a whole one, also before it is read."""
    strategy, model = trained(LocalSGD(3), 1)
    held = strategy.held(model.layers[0].kernel)
    assert [(part.place, part.num_bytes) for part in held] == [("cpu:0", 4 * WIDTH), ("cpu:1", 4 * WIDTH)]


def test_training_without_a_synchronization():
    """The outer weights were not trained, and `fit` says so."""
    model = linear(strategy_with(DiLoCo(every=100)))
    with pytest.warns(
        phalanx.errors.SlipWarning, match=r"DiLoCo\(every=100\) has made 6 updates, so it has not synchronized"
    ):
        model.fit(X, Y, batch_size=8, epochs=2, verbose=0)


def sent_bytes(local_updates):
    """Bytes of the arrays that an MLP's step sums over the replicas, if all is due."""
    strategy = strategy_with(local_updates)
    with strategy.scope():
        layers = [keras.layers.Dense(width, activation="tanh") for width in (512, 512)]
        model = keras.Sequential([keras.Input((784,)), *layers, keras.layers.Dense(10)])
        model.compile(keras.optimizers.Adam())
    step, _ = step_of(strategy, model)
    (batch,) = strategy.experimental_distribute_dataset(
        [(np.zeros((64, 784), "float32"), np.zeros((64, 10), "float32"))]
    )
    program = Program(step.lower(batch).compile().as_text())
    # A ring sends an array of an all-reduce twice, and the arrays of the others once.
    return sum(c.num_bytes * (2 if c.kind == "all-reduce" else 1) for c in program.collectives)


def test_few_bytes_per_step():
    """DiLoCo sends the weights once in 100 steps, in parts if there are fragments; in between, only the loss is sent."""
    whole = sent_bytes(None)
    assert whole >= 2 * 4 * (784 * 512 + 512 * 512 + 512 * 10)
    assert sent_bytes(DiLoCo(every=100)) / 100 <= 0.011 * whole
    assert sent_bytes(DiLoCo(every=100, fragments=4)) / 100 <= 0.011 * whole
    assert sent_bytes(DiLoCo(every=100, compression="int8")) / 100 <= 0.003 * whole
    # The slots of Adam are two more arrays per weight.
    assert sent_bytes(LocalSGD(100)) / 100 <= 0.031 * whole


def train_foreign():
    """Trains a model that was made outside the scope."""
    strategy = strategy_with(LocalSGD(2))
    model = linear(phalanx.get_strategy())
    step, batches = step_of(strategy, model)
    step(batches[0])


def train_swapping():
    """Trains with a callback that assigns the averages of the weights for an evaluation, and then the weights that it has read."""
    strategy = strategy_with(DiLoCo(every=2))
    model = linear(strategy, keras.optimizers.SGD(RATE, use_ema=True))
    model.fit(X, Y, validation_data=(X, Y), verbose=0, callbacks=[keras.callbacks.SwapEMAWeights()])


def train_stateless():
    """Applies the optimizer by its stateless method in a custom loop."""
    strategy = strategy_with(LocalSGD(2))
    model = linear(strategy)
    variables = model.trainable_variables
    model.optimizer.build(variables)

    def replica():
        values = [v.value for v in variables]
        state = [v.value for v in model.optimizer.variables]
        for variable, value in zip(variables, model.optimizer.stateless_apply(state, values, values)[0], strict=True):
            variable.assign(value)

    strategy.run(replica)


def train_scaled():
    """Trains with a scaled loss."""
    trained(LocalSGD(2), 1, make=lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()))


BAD = {
    "every": (lambda: LocalSGD(0), r"every=0"),
    "group": (lambda: LocalSGD(8, replicas_per_group="two"), r"replicas_per_group='two'"),
    "fragments": (
        lambda: DiLoCo(every=10, fragments=4),
        r"DiLoCo\(every=10, fragments=4\): the fragments are .* must divide `every`.*\n.*every=12",
    ),
    "no fragments": (lambda: DiLoCo(fragments=0), r"fragments=0"),
    "compression": (lambda: DiLoCo(compression="int4"), r"compression='int4'"),
    "first argument": (
        lambda: DiLoCo(100),
        r"DiLoCo\(100\): the first argument is the outer optimizer.\nHINT: DiLoCo\(every=100",
    ),
    "stateless step": (train_stateless, r"optimizer.stateless_apply under a strategy with local_updates: it names no"),
    "swapped weights": (train_swapping, r"keras.callbacks.SwapEMAWeights under a strategy with DiLoCo: to put back"),
    "outer optimizer": (lambda: DiLoCo("sgd"), r"outer_optimizer='sgd': must be an? Optimizer"),
    "outer scale": (
        lambda: DiLoCo(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())),
        r"outer_optimizer=LossScaleOptimizer: outer gradients come from no loss",
    ),
    "function": (lambda: trained(DiLoCo(lambda: "sgd", every=1), 1), r"outer_optimizer='sgd': must be"),
    "no kind": (lambda: strategy_with(8), r"local_updates=8: must be a LocalSGD or a DiLoCo"),
    "uneven groups": (
        lambda: strategy_with(LocalSGD(8, replicas_per_group=2), 3),
        r"replicas_per_group=2 with 3 replicas: every group must have",
    ),
    "layout": (
        lambda: strategy_with(LocalSGD(8), layout=phalanx.fully_sharded()),
        r"local_updates=LocalSGD with a layout or a model axis: every replica must hold whole",
    ),
    "two ways": (
        lambda: strategy_with(DiLoCo(), cross_device_ops=phalanx.NcclAllReduce()),
        r"local_updates=DiLoCo with cross_device_ops=NcclAllReduce\(\)",
    ),
    "gradients": (
        lambda: strategy_with(LocalSGD(8), communication_options=CommunicationOptions(compression="int8")),
        r"local_updates=LocalSGD with communication_options that round or compress gradients: the replicas send no",
    ),
    "central storage": (
        lambda: phalanx.experimental.CentralStorageStrategy(local_updates=LocalSGD(8)),
        r"CentralStorageStrategy\(local_updates=LocalSGD\(every=8.*: one device holds the variables of all replicas",
    ),
    "parameter servers": (
        lambda: phalanx.ParameterServerStrategy(local_updates=LocalSGD(8)),
        r"ParameterServerStrategy\(local_updates=LocalSGD\(every=8.*: workers send each update to the servers",
    ),
    "scaled loss": (train_scaled, r"LossScaleOptimizer under a strategy with local_updates=LocalSGD: replicas whose"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_local_updates_are_refused(case):
    """With the reason."""
    make, message = BAD[case]
    with pytest.raises(InvalidArgumentError, match=message):
        make()


def test_variables_of_other_scopes_are_refused():
    """Replicas have no values of their own of them."""
    with pytest.raises(VariableError, match=r"under a strategy with local_updates=LocalSGD.*outside the scope"):
        train_foreign()
